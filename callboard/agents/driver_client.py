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
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from callboard.agents.framing import Json, PeerGone, RemoteError, Requests
from callboard.agents.pid_watch import exited
from callboard.agents.process_tree import ProcessId, identify, send_signal
from callboard.agents.run_dir import RunDir, Started
from callboard.model.backoff import Backoff

_log = structlog.get_logger(__name__)

_CONNECT_S = 30.0
"""For import ray (0.7 s) and ray.init (0.05 s when the node is up) on a machine that starts many."""

_PING_EVERY_S, _PING_WITHIN_S = 5.0, 15.0
"""The driver's loop runs no user code and no blocking call; a pause of this length is a driver that is stuck."""

_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 8.0
"""Between attempts at another driver: each costs the import of Ray."""


class DriverLost(Exception):
    """The driver ended, or there was none in time; the request may or may not have been carried out."""


@dataclass(frozen=True)
class Connection:
    """What the driver found out about the cluster it is in."""

    ray_node_id: str
    gcs_address: str
    session: str
    node_ip: str


class DriverClient:
    """Keeps one driver connected to one Ray node."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._requests: Requests | None = None
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.connection: Connection | None = None

    async def connect(self, address: str, node_ip: str, environment: Mapping[str, str]) -> Connection:
        """Bring a driver up beside the node at `node_ip`, and keep one there.

        Raises:
            DriverLost: it could not be connected.
        """
        process = await self._start(address, node_ip, environment)
        self._keeper = asyncio.create_task(self._keep(process, address, node_ip, environment))
        assert self.connection is not None
        return self.connection

    async def disconnect(self) -> None:
        """End the driver."""
        self.connection = None
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None

    async def ask(self, method: str, argument: Json, *, within_s: float | None) -> Json:
        """One request.

        Args:
            method: a method of the driver.
            argument: its arguments.
            within_s: seconds for a driver to be there and to answer; None: without limit.

        Raises:
            DriverLost: no driver, or it ended, or no answer in time.
            RemoteError: the driver's own error.
        """
        asked = asyncio.create_task(self._ask(method, argument))
        try:
            await asyncio.wait([asked], timeout=within_s)
            if not asked.done():
                raise DriverLost(f"no answer of the Ray driver to {method} in {within_s:g} s")
            return asked.result()
        finally:
            asked.cancel()

    async def _ask(self, method: str, argument: Json) -> Json:
        if self.connection is None:
            raise DriverLost("this node is in no Ray cluster")
        await self._connected.wait()
        requests = self._requests
        assert requests is not None
        try:
            return await requests.ask(method, argument)
        except PeerGone as error:
            if requests is self._requests:
                # Its keeper notices a moment later; who asks again must wait for the next one.
                self._connected.clear()
            raise DriverLost(f"the Ray driver ended during {method}") from error

    async def _start(self, address: str, node_ip: str, environment: Mapping[str, str]) -> ProcessId:
        ours, theirs = socket.socketpair()
        log = self._run_dir.logs / "driver.log"
        with theirs, log.open("ab") as output:
            # From the loop's thread: vfork and exec take a millisecond or two.
            child = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-P", "-m", "callboard.agents.driver", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        process = identify(child.pid)
        assert process is not None, "an unreaped child keeps its entry in the process table"
        self._run_dir.put(Started("driver", process, str(process.pid)))
        requests = await Requests.over(ours)
        connecting = asyncio.create_task(requests.ask("connect", {"address": address, "node_ip": node_ip}))
        try:
            await asyncio.wait([connecting], timeout=_CONNECT_S)
            connection = Connection(**connecting.result()) if connecting.done() else None
        except BaseException as error:
            await self._end(child, process, requests)
            if isinstance(error, (PeerGone, RemoteError)):
                raise DriverLost(f"the Ray driver could not connect: {error}; see {log}") from error
            raise
        finally:
            connecting.cancel()
        if connection is None:
            await self._end(child, process, requests)
            raise DriverLost(f"the Ray driver did not connect in {_CONNECT_S:g} s; see {log}")
        self.connection = connection
        self._requests = requests
        self._connected.set()
        self._child = child
        return process

    async def _keep(self, process: ProcessId, address: str, node_ip: str, environment: Mapping[str, str]) -> None:
        while True:
            requests = self._requests
            assert requests is not None
            try:
                why = await self._until_useless(process, requests)
            finally:
                self._connected.clear()
                await self._end(self._child, process, requests)
            _log.warning("ray_driver_replaced", why=why)
            backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
            while not self._connected.is_set():
                try:
                    process = await self._start(address, node_ip, environment)
                except DriverLost as error:
                    _log.warning("ray_driver_not_connected", why=str(error))
                    await asyncio.sleep(backoff.next_s())

    async def _until_useless(self, process: ProcessId, requests: Requests) -> str:
        gone = asyncio.create_task(exited(process))
        try:
            while True:
                await asyncio.wait([gone], timeout=_PING_EVERY_S)
                if gone.done():
                    return "it ended"
                ping = asyncio.create_task(requests.ask("ping"))
                await asyncio.wait([ping, gone], timeout=_PING_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
                answered = ping.done() and ping.exception() is None
                ping.cancel()
                if not answered:
                    return "it ended" if gone.done() else "it is stuck"
        finally:
            gone.cancel()

    async def _end(self, child: subprocess.Popen[bytes], process: ProcessId, requests: Requests) -> None:
        requests.close()
        send_signal(process, signal.SIGKILL)
        await exited(process)
        child.wait()
        self._run_dir.drop("driver", str(process.pid))
