"""Requests of the right shape with senseless content: each is answered or refused in words, and none is a defect.

Made from the descriptors, so that a new method or field is part of it by itself. Longer runs:
``CALLBOARD_FUZZ=100000 pytest tests/security/test_fuzz.py``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from callboard.controller.server import SERVICES
from callboard.security import access as access_module
from callboard.security.dialing import open_channel
from callboard.security.grants import grant
from callboard.security.roles import Role
from callboard.wire.errors import parse_error
from tests.controller.support import options_for, running

REQUESTS = int(os.environ.get("CALLBOARD_FUZZ", "400"))

METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

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
)

NUMBERS = (0, 1, -1, 2, 7, 1000, 2**31 - 1, -(2**31))

LARGE = (*NUMBERS, 2**63 - 1, -(2**63), 10**12)

DEFECTS = {"UNKNOWN", "INTERNAL"}


def senseless(chance: random.Random, descriptor: Any, depth: int = 0) -> Message:
    """A message of this type with senseless content."""
    message: Any = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.4 + 0.12 * depth:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fill_map(chance, getattr(message, field.name), field.message_type, depth)
        elif field.message_type is not None:
            if depth < 5:
                for _ in range(chance.choice((1, 1, 3)) if field.is_repeated else 1):
                    inner = senseless(chance, field.message_type, depth + 1)
                    target = getattr(message, field.name)
                    (target.add() if field.is_repeated else target).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).extend(value(chance, field) for _ in range(chance.choice((1, 2, 5))))
        else:
            setattr(message, field.name, value(chance, field))
    return message  # type: ignore[no-any-return]


def fill_map(chance: random.Random, target: Any, entry: Any, depth: int) -> None:
    key, inner = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if inner.message_type is not None:
        if depth < 5:
            target[value(chance, key)].CopyFrom(senseless(chance, inner.message_type, depth + 1))
    else:
        target[value(chance, key)] = value(chance, inner)


def value(chance: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return (
            bytes(chance.choices(range(256), k=5)) if field.type == FieldDescriptor.TYPE_BYTES else chance.choice(TEXTS)
        )
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1e300 if kind == FieldDescriptor.CPPTYPE_DOUBLE else 1e30, float("nan")))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 99))
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return chance.choice((0, 1, 2**32 - 1))
    return chance.choice(LARGE if kind == FieldDescriptor.CPPTYPE_INT64 else NUMBERS)


async def code_of(channel: Any, path: str, method: Any, data: bytes, metadata: Any = ()) -> tuple[str, str]:
    """How the call ended; a stream that was still open after a moment is closed."""
    try:
        if method.client_streaming:
            await channel.stream_stream(path)(iter([data]), timeout=2, metadata=metadata).read()
        elif method.server_streaming:
            await channel.unary_stream(path)(data, timeout=0.3, metadata=metadata).read()
        else:
            await channel.unary_unary(path)(data, timeout=20, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        known = parse_error(error)
        return known.code, known.message
    return "OK", ""


@pytest.mark.timeout(0 if REQUESTS > 1000 else 120)
async def test_senseless_requests_are_refused_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    async with running(options_for(tmp_path)) as controller, open_channel(controller.address) as channel:
        for number in range(REQUESTS):
            path, method = METHODS[number % len(METHODS)]
            message = senseless(chance, method.input_type)
            data = message.SerializeToString()
            if chance.random() < 0.1:
                data = bytes(chance.choices(range(256), k=chance.choice((1, 10, 200))))
            code, said = await code_of(channel, path, method, data)
            assert code not in DEFECTS, (seed, path, code, said, message)
        assert (await code_of(channel, *METHODS[-1], b""))[0] not in DEFECTS, "it serves on"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timeout(120)
async def test_senseless_requests_of_strangers_and_viewers_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
    chance = random.Random(7)
    async with running(options_for(tmp_path)) as controller:
        token = grant(controller.options.state_dir, "eve", Role.VIEWER)
        before = controller.driver.state.meta.revision
        async with grpc.aio.insecure_channel(controller.address) as channel:
            for path, method in METHODS:
                for metadata in ((), (("authorization", f"Bearer {token}"),)):
                    data = senseless(chance, method.input_type).SerializeToString()
                    code, said = await code_of(channel, path, method, data, metadata)
                    assert code not in DEFECTS, (path, code, said)
                    assert metadata or code == "UNAUTHENTICATED"
        assert controller.driver.state.meta.revision == before
