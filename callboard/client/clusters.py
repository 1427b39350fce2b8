"""The clusters that run on this machine, their processes, and the controller that a client means.

Each cluster has one directory, under one run directory per user:

`<run directory>/<name>/cluster.json` names the controller's address and the processes that
make up the cluster. Whoever starts a cluster writes the record and removes it; everybody else only
reads it, and believes a record only as long as its controller runs (pid and start time, NJ-05).

The controller is the one named, else CALLBOARD_CONTROLLER, else the only one running here. Two that run here are an
error that lists them: a command that reaches the wrong cluster is worse than one that reaches none (MU-07).

A cluster may also belong to one program: it starts with a client and ends with it. Such a one is a `callboard up` in a
process of its own, which ends when its standard input does: when the client is closed, and also when the program exits
or is killed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import secrets
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from callboard.client.errors import ClusterFailed, NoController, SeveralControllers
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown_text
from callboard.security.contexts import current_context
from callboard.security.places import run_directory, write_private
from callboard.security.processes import ProcessId

RECORD_NAME = "cluster.json"
CONTROLLER_ROLE = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProcess:
    """One program of a cluster.

    Attributes:
        role: "controller", "agent node-0", or "up" for the program that watches over them.
        process: which process it is.
    """

    role: str
    process: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """One cluster of this machine, as its `cluster.json` describes it.

    Attributes:
        name: name of the cluster.
        controller: address of its controller, "host:port".
        directory: where its files are.
        processes: its programs, the controller first.
        block: which block of loopback addresses its nodes use; see `callboard.cli.local.plan`.
        ray_token_path: file with the token of its Ray; empty: Ray runs without one.
    """

    name: str
    controller: str
    directory: Path
    processes: tuple[ClusterProcess, ...] = ()
    block: int = 0
    ray_token_path: str = ""

    def is_running(self) -> bool:
        """Whether its controller still runs."""
        return any(entry.process.is_running() for entry in self.processes if entry.role == CONTROLLER_ROLE)

    def with_process(self, role: str, process: ProcessId) -> ClusterRecord:
        """The record with one more program."""
        return replace(self, processes=(*self.processes, ClusterProcess(role=role, process=process)))


def cluster_directory(name: str, base: Path) -> Path:
    """Where the cluster ``name`` keeps its files."""
    return base / name


def write_record(record: ClusterRecord) -> None:
    """Writes the record of a cluster; a reader sees the old one or the new one, nothing between."""
    plain = asdict(record) | {"directory": str(record.directory)}
    write_private(record.directory / RECORD_NAME, json.dumps(plain, indent=2) + "\n", durable=False)


def read_record(directory: Path) -> ClusterRecord | None:
    """The record in ``directory``; None when there is none (yet, or any more)."""
    try:
        plain = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    processes = tuple(
        ClusterProcess(role=entry["role"], process=ProcessId(**entry["process"])) for entry in plain.pop("processes")
    )
    return ClusterRecord(**(plain | {"directory": directory, "processes": processes}))


def recorded_clusters(base: Path) -> list[ClusterRecord]:
    """Every cluster with a record below ``base``, by name, whether it runs or not."""
    if not base.is_dir():
        return []
    records = (read_record(directory) for directory in sorted(base.iterdir()))
    return [record for record in records if record is not None]


def running_clusters(base: Path) -> list[ClusterRecord]:
    """Every cluster below ``base`` whose controller runs, by name."""
    return [record for record in recorded_clusters(base) if record.is_running()]


DEFAULT_PORT = 7700
ADDRESS_VARIABLE = "CALLBOARD_CONTROLLER"


@dataclass(frozen=True, slots=True)
class Target:
    """A controller and how it was found.

    Attributes:
        address: "host:port".
        source: where the address comes from, for people.
        cluster: its record, when it runs on this machine and is registered.
    """

    address: str
    source: str
    cluster: ClusterRecord | None = None


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[\w.-]+")


def find_controller(address: str | None = None, environ: Mapping[str, str] = os.environ) -> Target:
    """The controller that is meant.

    Args:
        address: "host:port" or "host" (port 7700), or several with commas between them, as the caller stated it.
        environ: the environment to look at.

    Raises:
        BadContext: the context that is stated does not exist.
        InvalidInput: what is stated is no address.
        NoController: none is stated and none runs on this machine.
        SeveralControllers: none is stated and several run on this machine.
    """
    base = run_directory(environ)
    here = running_clusters(base)
    stated, source = address, "as stated"
    if not stated:
        stated, source = environ.get(ADDRESS_VARIABLE), f"from {ADDRESS_VARIABLE}"
    if not stated and (context := current_context(environ)) is not None:
        stated, source = context.address, f"context {context.name}"
    if stated:
        full = with_port(stated)
        match = next((record for record in here if record.controller in full.split(",")), None)
        return Target(full, source, match)
    if not here:
        ended = tuple((each.name, each.controller, str(each.directory)) for each in recorded_clusters(base))
        raise NoController(run_directory=str(base), ended=ended)
    if len(here) > 1:
        raise SeveralControllers(tuple((record.name, record.controller) for record in here))
    return Target(here[0].controller, f"cluster {here[0].name} on this machine", here[0])


def with_port(address: str) -> str:
    """``address``, or each of several with commas between them, with the default port where it names none.

    Raises:
        InvalidInput: one is no address, such as a URL.
    """
    stated = [each.strip() for each in address.split(",") if each.strip()]
    return ",".join(map(_with_port, stated or [address]))


def _with_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if _is_ipv6(address):
        host, port = f"[{address}]", str(DEFAULT_PORT)
    elif not colon or address.endswith("]"):
        host, port = address, str(DEFAULT_PORT)
    if not _HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= 65535:
        why = f"{shown_text(address)} is not the address of a controller; write HOST:PORT, such as 10.0.0.1:7700"
        raise InvalidInput([Fault("controller", why)])
    return f"{host}:{port}"


def _is_ipv6(text: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv6Address)
    except ValueError:
        return False


_KEPT_LINES = 40
"""Of what the cluster says on stderr: its last lines tell why it ended."""


class LocalCluster:
    """A running cluster.

    Attributes:
        name: its name, for `callboard` commands such as `down`.
        controller: address of its controller, "host:port".
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.controller = ""
        self._process = process
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, options: dict[str, object]) -> LocalCluster:
        """Starts a cluster and waits until it takes jobs.

        Args:
            options: of `callboard up`: ``{"agents": 2}`` is ``--agents 2``. None and "" leave an option out.

        Raises:
            ClusterFailed: it did not start; the error says why.
        """
        name = f"program-{secrets.token_hex(4)}"
        stated = [
            f"--{option.replace('_', '-')}={value}" for option, value in options.items() if value not in (None, "")
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "callboard.cli", "up", "--owned", "--name", name, "--port", "0", *stated),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the program; the cluster ends when the program lets go of it.
        )
        cluster = cls(name, process)
        try:
            assert process.stdout is not None, "it was asked for"
            ready = await process.stdout.readline()
        except BaseException:
            await cluster.stop()
            raise
        if not ready:
            await cluster.stop()
            raise ClusterFailed("\n".join(cluster._said) or f"callboard up ended with {process.returncode}")
        cluster.controller = json.loads(ready)["controller"]
        return cluster

    async def stop(self) -> None:
        """Ends everything of the cluster; returns when nothing of it is left."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        assert self._process.stderr is not None, "it was asked for"
        async for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())
