"""The agent's side of its Ray driver, which may die or get stuck at any time.

A request waits for a connected driver, goes to it, and raises `DriverLost` when that one ends first; whoever asked
knows whether asking again is harmless. The driver is replaced when it dies or doesn't answer a ping.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.host.framing import Json, PeerGone, RemoteError, Requests
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import cancelled, within
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.processes import ProcessId, identify

_log = structlog.get_logger(__name__)

_CONNECT_S = 30.0
"""For import ray (0.7 s) and ray.init (0.05 s when the node is up) on a machine that starts many."""

_PING_EVERY_S, _PING_WITHIN_S = 5.0, 15.0
"""The driver's loop runs no user code and no blocking call; a pause of this length is a driver that is stuck."""

_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 8.0
"""Between attempts at another driver: each costs the import of Ray."""

_GONE_S = 10.0
"""For a killed driver to be gone. One that can't be killed, as it waits for a disk or a GPU, must keep neither its node
in Ray nor an agent that leaves."""


class DriverLost(Exception):
    """The driver ended, or there was none in time; the request may or may not have been carried out."""


@dataclass(frozen=True)
class Connection:
    """What the driver found out about the cluster it is in."""

    ray_node_id: str
    gcs_address: str
    session: str
    node_ip: str


class DriverProgram(Protocol):
    """A driver that runs."""

    process: ProcessId

    async def ask(self, method: str, argument: Json = None) -> Json:
        """One request.

        Raises:
            PeerGone: it ended.
            RemoteError: its own error.
        """

    def close(self) -> None:
        """Hang up, which ends it."""

    def reap(self) -> None:
        """Its process is gone."""


StartDriver: TypeAlias = Callable[[Mapping[str, str]], Awaitable[DriverProgram]]
"""Starts a driver with an environment."""


class DriverClient:
    """Keeps one driver connected to one Ray node."""

    def __init__(self, run_dir: RunDir, processes: Processes, start: StartDriver) -> None:
        self._run_dir = run_dir
        self._processes = processes
        self._begin = start
        self._driver: DriverProgram | None = None
        self._kept: DriverProgram | None = None
        """The driver that nobody has ended yet."""
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.connection: Connection | None = None

    async def connect(self, address: str, node_ip: str, environment: Mapping[str, str]) -> Connection:
        """Bring a driver up beside the node at `node_ip`, and keep one there.

        Raises:
            DriverLost: it could not be connected.
        """
        driver = await self._start(address, node_ip, environment)
        self._keeper = asyncio.create_task(self._keep(driver, address, node_ip, environment))
        assert self.connection is not None
        return self.connection

    async def disconnect(self) -> None:
        self.connection = None
        if self._keeper is not None:
            await cancelled([self._keeper])
            self._keeper = None
        if self._kept is not None:
            await self._end(self._kept)  # its keeper was cancelled before it began
        # Whoever waits for a driver learns that there will be none: the next one is another Ray node's.
        self._connected.set()
        self._connected.clear()

    async def ask(self, method: str, argument: Json, *, within_s: float | None) -> Json:
        """One request.

        Args:
            within_s: seconds for a driver to be there and to answer; None: without limit.

        Raises:
            DriverLost: no driver, or it ended, or no answer in time.
            RemoteError: the driver's own error.
        """
        try:
            return await within(self._ask(method, argument), within_s)
        except TimeoutError as error:
            raise DriverLost(f"no answer of the Ray driver to {method} in {within_s:g} s") from error

    async def _ask(self, method: str, argument: Json) -> Json:
        if self.connection is not None:
            await self._connected.wait()
        if self.connection is None:
            raise DriverLost("this node is in no Ray cluster")
        driver = self._driver
        assert driver is not None
        try:
            return await driver.ask(method, argument)
        except PeerGone as error:
            if driver is self._driver:
                # Its keeper notices a moment later; who asks again must wait for the next one.
                self._connected.clear()
            raise DriverLost(f"the Ray driver ended during {method}") from error

    async def _start(self, address: str, node_ip: str, environment: Mapping[str, str]) -> DriverProgram:
        driver = await self._begin(environment)
        self._run_dir.put(Started("driver", driver.process, str(driver.process.pid)))
        log = _log_of(self._run_dir)
        place = {"address": address, "node_ip": node_ip}
        try:
            self.connection = Connection(**await within(driver.ask("connect", place), _CONNECT_S))
        except BaseException as error:
            await self._end(driver)
            if isinstance(error, TimeoutError):
                raise DriverLost(f"the Ray driver did not connect in {_CONNECT_S:g} s; see {log}") from error
            if isinstance(error, (PeerGone, RemoteError)):
                raise DriverLost(f"the Ray driver could not connect: {error}; see {log}") from error
            raise
        self._driver = self._kept = driver
        self._connected.set()
        return driver

    async def _keep(self, driver: DriverProgram, address: str, node_ip: str, environment: Mapping[str, str]) -> None:
        while True:
            try:
                why = await self._until_useless(driver)
            finally:
                self._connected.clear()
                await self._end(driver)
            _log.warning("ray_driver_replaced", why=why)
            backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
            while not self._connected.is_set():
                try:
                    driver = await self._start(address, node_ip, environment)
                except DriverLost as error:
                    _log.warning("ray_driver_not_connected", why=str(error))
                    await asyncio.sleep(backoff.next_s())

    async def _until_useless(self, driver: DriverProgram) -> str:
        gone = asyncio.ensure_future(self._processes.exited(driver.process))
        ping: asyncio.Future[Json] | None = None
        try:
            while True:
                await asyncio.wait([gone], timeout=_PING_EVERY_S)
                if gone.done():
                    return "it ended"
                ping = asyncio.ensure_future(driver.ask("ping"))
                await asyncio.wait([ping, gone], timeout=_PING_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
                answered = ping.done() and ping.exception() is None
                ping.cancel()
                if not answered:
                    return "it ended" if gone.done() else "it is stuck"
        finally:
            gone.cancel()
            if ping is not None:
                ping.cancel()  # Else nobody would hear how it ended.

    async def _end(self, driver: DriverProgram) -> None:
        if driver is self._kept:
            self._kept = None
        driver.close()
        self._processes.send_signal(driver.process, signal.SIGKILL)
        try:
            async with asyncio.timeout(_GONE_S):
                await self._processes.exited(driver.process)
        except TimeoutError:
            _log.error("ray_driver_left_behind", pid=driver.process.pid)
            return  # its record stays: whoever takes over ends it
        driver.reap()
        self._run_dir.drop("driver", str(driver.process.pid))


class _Child:
    """A driver in a child process."""

    def __init__(self, child: subprocess.Popen[bytes], process: ProcessId, requests: Requests) -> None:
        self.process = process
        self._child = child
        self._requests = requests
        self.ask = requests.ask
        self.close = requests.close

    def reap(self) -> None:
        self._child.wait()


async def start_driver(run_dir: RunDir, environment: Mapping[str, str]) -> DriverProgram:
    """Start a driver of this machine; it ends with its socket."""
    ours, theirs = socket.socketpair()
    with theirs, _log_of(run_dir).open("ab") as output:
        # From the loop's thread: vfork and exec take a millisecond or two.
        child = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-P", "-m", "callboard.agents.ray.ray_driver", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    process = identify(child.pid)
    assert process is not None, "an unreaped child keeps its entry in the process table"
    return _Child(child, process, await Requests.over(ours))


def _log_of(run_dir: RunDir) -> Path:
    return run_dir.logs / "driver.log"
