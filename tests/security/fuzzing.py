"""Fuzzing of a controller: requests of the right shape with senseless content, and bytes that are none.

Made from the descriptors, so that a new method or field is part of it by itself. Each request follows from the seed and
its number. ``scripts/fuzz`` runs it against a controller of its own; the suite runs a short part.
"""
# ruff: noqa: T201 - a program that prints a report

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from callboard.controller.server import SERVICES
from callboard.security.caller_roles import ROLES, Role
from callboard.security.grants import grant
from callboard.security.tokens import TOKEN_NAME, controller_token
from callboard.v1 import agent_pb2, job_pb2, scheduler_pb2, scheduler_pb2_grpc
from callboard.wire.errors import parse_error
from tests.controller.support import job, pool
from tests.support.fake_agent import FakeAgent

METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

STRANGER, OWNER = "stranger", "owner"

CALLERS = (STRANGER, *sorted(Role), OWNER)
"""Those who may change nothing come first: agents and owners leave things behind that change by themselves."""

HARMLESS = (STRANGER, Role.VIEWER, Role.TRAINER)
"""Callers who can change nothing: the trainer is a member of no pool."""

ORDER = (*HARMLESS, *(each for each in CALLERS if each not in HARMLESS))

TEXTS = (
    "",
    "a",
    "jobs/a",
    "pools/a",
    "nodes/n",
    "jobs/" + "x" * 300,
    "\u0000",
    "é/…",
    "-1",
    "../..",
    "a.b:C",
    "0-3:0-7",
    "1.1.1.1:1",
    "[",
    "1e999",
    "package:" + "0" * 64,
    "x" * 70_000,
)

NUMBERS = (0, 1, -1, 2, 7, 1000, 2**31 - 1, -(2**31))

LARGE = (*NUMBERS, 2**63 - 1, -(2**63), 10**12)

DEFECTS = frozenset({"UNKNOWN", "INTERNAL"})

WROTE_TOO_LATE = "Internal error from Core"
"""What grpc.aio's client makes of a message to a stream that the controller has ended, in place of its status."""

AT_ONCE = 16

VALID: Mapping[str, Sequence[Message]] = {
    "Session": (agent_pb2.SessionRequest(hello=FakeAgent("", "n", instance="fuzz").hello),),
    "SubmitJob": (job_pb2.SubmitJobRequest(spec=job("a")), job_pb2.SubmitJobRequest(spec=job("a", gpu=1000))),
    "CreatePool": (pool("a"),),
}
"""Requests that are taken; with one field changed they come further than what is senseless throughout."""


def senseless(chance: random.Random, descriptor: Any, depth: int = 0) -> Message:
    """A message of this type with senseless content."""
    message: Any = GetMessageClass(descriptor)()
    for each in descriptor.fields:
        if chance.random() >= 0.4 + 0.12 * depth:
            _fill(chance, message, each, depth)
    return message  # type: ignore[no-any-return]


def _fill(chance: random.Random, message: Any, field: Any, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(chance, getattr(message, field.name), field.message_type, depth)
    elif field.message_type is not None:
        if depth < 5:
            for _ in range(chance.choice((1, 1, 3)) if field.is_repeated else 1):
                inner = senseless(chance, field.message_type, depth + 1)
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(inner)
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(chance, field) for _ in range(chance.choice((1, 2, 5))))
    else:
        setattr(message, field.name, _value(chance, field))


def _fill_map(chance: random.Random, target: Any, entry: Any, depth: int) -> None:
    key, inner = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if inner.message_type is not None:
        if depth < 5:
            target[_value(chance, key)].CopyFrom(senseless(chance, inner.message_type, depth + 1))
    else:
        target[_value(chance, key)] = _value(chance, inner)


def _value(chance: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return chance.randbytes(5) if field.type == FieldDescriptor.TYPE_BYTES else chance.choice(TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1e300 if kind == FieldDescriptor.CPPTYPE_DOUBLE else 1e30, float("nan")))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 99))
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return chance.choice((0, 1, 2**32 - 1))
    return chance.choice(LARGE if kind == FieldDescriptor.CPPTYPE_INT64 else NUMBERS)


def changed(chance: random.Random, message: Message) -> Message:
    """A copy of a message, senseless in one place."""
    copy = type(message)()
    copy.CopyFrom(message)
    target: Any = copy
    while True:
        inside = [
            value
            for known, held in target.ListFields()
            if known.message_type is not None and not known.message_type.GetOptions().map_entry
            for value in (held if known.is_repeated else [held])
        ]
        if not inside or chance.random() < 0.25:
            break
        target = chance.choice(inside)
    chosen = chance.choice(target.DESCRIPTOR.fields) if target.DESCRIPTOR.fields else None
    if chosen is not None:
        target.ClearField(chosen.name)
        if chance.random() < 0.8:
            _fill(chance, target, chosen, 3)
    return copy


def request(chance: random.Random, method: Any) -> bytes:
    """One request to a method."""
    kind = chance.random()
    if kind < 0.1:
        return chance.randbytes(chance.choice((1, 10, 200)))
    valid = VALID.get(method.name, ())
    message = changed(chance, chance.choice(valid)) if valid and kind < 0.5 else senseless(chance, method.input_type)
    data = message.SerializeToString()
    if kind > 0.95:  # cut off, or with a byte of another value
        at = chance.randrange(len(data) + 1)
        return data[:at] if chance.random() < 0.5 else data[:at] + chance.randbytes(1) + data[at + 1 :]
    return data


def requests(chance: random.Random, method: Any) -> list[bytes]:
    """What is sent in one call: for a stream also messages after one that is taken."""
    if not method.client_streaming:
        return [request(chance, method)]
    first = [chance.choice(VALID[method.name]).SerializeToString()] if method.name in VALID else []
    return (first if chance.random() < 0.5 else []) + [request(chance, method) for _ in range(chance.choice((1, 3)))]


async def code_of(channel: Any, path: str, method: Any, sent: Sequence[bytes], token: str) -> tuple[str, str]:
    """How a call ended; a stream that still sends after a moment is left."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(iter(sent), timeout=30, metadata=metadata)
            while await stream.read() is not grpc.aio.EOF:
                pass
        elif method.server_streaming:
            await channel.unary_stream(path)(sent[0], timeout=0.3 if token else 30, metadata=metadata).read()
        else:
            await channel.unary_unary(path)(sent[0], timeout=30, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.details() == WROTE_TOO_LATE:
            return "CUT", ""
        known = parse_error(error)
        return known.code, known.message
    return "OK", ""


@dataclass
class Found:
    """What a run found."""

    codes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


async def fuzz(address: str, tokens: Mapping[str, str], *, seed: int, numbers: Iterator[int], who: str) -> Found:
    """Makes the calls of these numbers as one caller.

    Args:
        address: of the controller.
        tokens: of every caller.
        seed: of chance.
        numbers: of the requests.
        who: makes them.
    """
    found = Found({who: Counter()})
    token = tokens.get(who, "")
    allowed = [each for each in METHODS if who in ROLES[each[0]]] or METHODS

    async def one_by_one(channel: grpc.aio.Channel) -> None:
        for number in numbers:
            chance = random.Random(f"{seed}/{number}")
            path, method = chance.choice(allowed if number % 2 else METHODS)
            code, said = await code_of(channel, path, method, requests(chance, method), token)
            found.codes[who][code] += 1
            where = f"seed {seed}, request {number}, {who}, {path}: {code} {said}"
            if code in DEFECTS or (who == STRANGER and code not in ("UNAUTHENTICATED", "CUT")):
                found.wrong.append(where)
            if number % 500 == 0:
                await _raw(address, chance)

    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_by_one(channel))
    return found


async def _raw(address: str, chance: random.Random) -> None:
    """Bytes that are not even HTTP/2."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(chance.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n")))
        writer.write(chance.randbytes(2_000))
        writer.write_eof()
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
    except OSError:
        pass  # it hung up, which is right
    finally:
        writer.close()


async def revision_of(address: str, token: str) -> int:
    """The revision of the controller's state: every change raises it."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        metadata = (("authorization", f"Bearer {token}"),)
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        answer = await stub.GetStats(scheduler_pb2.GetStatsRequest(), metadata=metadata)
        return int(answer.stats.revision)


def tokens_for(state_dir: Path) -> dict[str, str]:
    """A token of every caller, made in the state directory of a controller."""
    made: dict[str, str] = {role: grant(state_dir, f"{role}-of-the-test", role) for role in Role}
    return {**made, OWNER: controller_token(state_dir)}


class _Process:
    """A controller in a process of its own, whose memory and log are its own."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory / "state"
        self.state_dir.mkdir(mode=0o700)
        self._log = directory / "log"
        limits = (
            "client_requests_s=1000000",
            "client_streams=1000",
            "client_refusals_s=1000000",
            "events_in_memory=1000",
            "ended_jobs=100",
        )
        command = [sys.executable, "-m", "callboard.cli", "controller", "--listen=127.0.0.1:0", "--metrics=none"]
        command += [f"--state-dir={self.state_dir}", f"--run-dir={directory}", "--log-format=json"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *(f"--limit={limit}" for limit in limits)],
                stderr=log,
                env=os.environ | {"CALLBOARD_RUN_DIR": str(directory)},
            )

    async def address(self) -> str:
        record = self.state_dir.parent / "controller.json"
        async with asyncio.timeout(60):
            while not record.exists() or not (self.state_dir / TOKEN_NAME).exists():
                assert self._process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.05)
        return str(json.loads(record.read_text())["address"])

    def memory_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def end(self) -> str:
        """Ends it and returns its log."""
        self._process.terminate()
        code = self._process.wait(30)
        said = self._log.read_text()
        return said if code == 0 else f"{said}\nTraceback: it ended with {code}"


async def _main(total: int, seed: int) -> int:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        process = _Process(Path(directory))
        try:
            address = await process.address()
            tokens = tokens_for(process.state_dir)
            print(f"seed {seed}: {total} requests to {len(METHODS)} methods, {AT_ONCE} at once")
            per_caller = -(-total // len(ORDER))
            for place, who in enumerate(ORDER):
                before = await revision_of(address, tokens[OWNER])
                memory = [process.memory_bytes()]
                whole: Counter[str] = Counter()
                for part in range(4):
                    first = (place * 4 + part) * per_caller // 4
                    numbers = iter(range(first, (place * 4 + part + 1) * per_caller // 4))
                    found = await fuzz(address, tokens, seed=seed, numbers=numbers, who=who)
                    whole += found.codes[who]
                    wrong += found.wrong
                    memory.append(process.memory_bytes())
                mib = " ".join(f"{each / 2**20:.0f}" for each in memory)
                print(f"{who:9} memory {mib} MiB; {dict(whole.most_common())}", flush=True)
                if who in HARMLESS and before != await revision_of(address, tokens[OWNER]):
                    wrong.append(f"the {who} changed the state")
        finally:
            said = process.end()
    wrong += [line for line in said.splitlines() if "Traceback" in line or "a defect" in line][:5]
    print(f"log: {said.count(chr(10))} lines, {len(said) >> 10} KiB")
    print("\n".join([f"{len(wrong)} wrong", *wrong[:20]]) if wrong else "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    sys.exit(asyncio.run(_main(given.requests, given.seed)))
