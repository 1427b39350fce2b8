"""This machine's Ray node: started, watched and ended.

`ray start --block` in a process group of its own, with its own temp dir and ports. The facts behind each choice were
measured on Ray 2.60 (docs/agents.md): parallel starts that share a temp dir crash on socket names; a SIGTERM drains
for up to 30 s unless told not to; the default health settings take 15 s to notice a killed node, ours one.
It is ended by recorded pids, never by `ray stop`, which would end other people's clusters (NJ-05).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from callboard.agents.ray.ray_command import MONITOR_SETTINGS, RayNodeSpec, check_ports, ray_start
from callboard.agents.ray.ray_faults import RayNodeError, os_error, start_error
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import answer_within
from callboard.model.log import structlog
from callboard.security.processes import PROC, ProcessId, identify

_log = structlog.get_logger(__name__)

START_S = 60.0
"""For `ray start`: 4 to 6 s on two cores, several times that when many start at once."""

_POLITE_S = 3.0
"""For a SIGTERM to end everything; 0.2 s without draining (m)."""

_KILL_S = 5.0

_KEPT_LINES = 100
"""Of the output, in memory: the causes are in a traceback that the last lines are the end of."""

_STARTED = "Ray runtime started"
"""What `ray start` prints when the node is registered and answering."""

_VITAL = ("raylet", "gcs_server")
"""Processes without which the node is lost; the others Ray replaces or ends with these."""


StartRayNode: TypeAlias = Callable[[RayNodeSpec], Awaitable["RayNode"]]
"""Starts this machine's part as it is specified."""


class RayNode:
    """The running part of this machine."""

    def __init__(
        self,
        process: ProcessId,
        processes: Processes,
        *,
        leader: subprocess.Popen[bytes] | None = None,
        output: _Output | None = None,
    ) -> None:
        self.process = process
        """The process that leads the node's group."""
        self.vital: dict[ProcessId, str] = {}
        """Processes without which the node is lost, with their names."""
        self._leader = leader
        self._output = output
        self._processes = processes

    @classmethod
    async def start(cls, spec: RayNodeSpec, processes: Processes) -> RayNode:
        """Start the node and wait until it answers.

        Raises:
            PortTaken: a port that was asked for is in use.
            RayNodeError: `ray start` failed or took too long; nothing of it is left.
        """
        check_ports(spec)
        try:
            spec.temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            # From the loop's thread: vfork and exec take a millisecond or two.
            leader = subprocess.Popen(  # noqa: ASYNC220
                ray_start(spec),
                env={**spec.environment, **MONITOR_SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise os_error(f"ray start can't run ({error.filename or spec.temp_dir})", error) from error
        process = identify(leader.pid)
        assert process is not None, "an unreaped child keeps its entry in the process table"
        output = _Output(leader, spec.log)
        node = cls(process, processes, leader=leader, output=output)
        try:
            started = await answer_within(output.wait_for(_STARTED), START_S)
            if started:
                await node._learn_vital()
                return node
        except BaseException:
            await node.stop()
            raise
        await node.stop()
        why = "failed" if started is not None else f"did not finish in {START_S:g} s"
        raise start_error(f"ray start {why}", output.lines())

    @classmethod
    def adopt(cls, process: ProcessId, vital: Mapping[ProcessId, str], processes: Processes) -> RayNode | None:
        """The node that an earlier agent started; None unless all of it lives.

        Its output goes nowhere from now on: `ray start --block` has said what it had to say.
        """
        if not all(processes.is_living(each) for each in (process, *vital)):
            return None
        node = cls(process, processes)
        node.vital = dict(vital)
        return node

    async def wait_lost(self) -> str:
        """Return when the node has ended by itself: what ended, as one sentence."""
        watched = {**self.vital, self.process: "ray"}
        watches = {asyncio.create_task(self._processes.exited(process)): name for process, name in watched.items()}
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            # What died first says most: a raylet ends the others with it.
            name = min(watches[task] for task in done)
            return f"{name} ended"
        finally:
            for watch in watches:
                watch.cancel()

    async def stop(self) -> None:
        """End the node: politely, so that the cluster knows it left, then by recorded pids."""
        if self._processes.send_signal(self.process, signal.SIGTERM):
            self._processes.send_signal(self.process, signal.SIGCONT)  # one that somebody stopped could not answer
            await answer_within(self._processes.exited(self.process), _POLITE_S)
        end = await self._processes.end_marked((self.process, *self.vital), budget_s=_KILL_S)
        if self._output is not None:
            self._output.close()
        if end.gone:
            if self._leader is not None:
                self._leader.wait()
        else:
            _log.error("ray_node_left_behind", pids=[each.pid for each in end.left])

    async def _learn_vital(self) -> None:
        trees = await self._processes.trees([self.process])
        for process in trees[self.process]:
            name = _name(process)
            if name in _VITAL:
                self.vital[process] = name
        if "raylet" not in self.vital.values():
            raise RayNodeError("ray start reported success, but there is no raylet")


class _Output:
    """What `ray start` prints: kept in a file, and its end in memory."""

    def __init__(self, leader: subprocess.Popen[bytes], log: Path) -> None:
        assert leader.stdout is not None
        self._pipe = leader.stdout
        self._log = log
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._copying: asyncio.Task[None] | None = None

    async def wait_for(self, text: str) -> bool:
        """Whether the text came before the end of the output; copying goes on behind."""
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._copying = asyncio.create_task(self._copy(text, found))
        return await found

    def close(self) -> None:
        if self._copying is not None:
            self._copying.cancel()

    def lines(self) -> list[str]:
        return list(self._last)

    async def _copy(self, text: str, found: asyncio.Future[bool]) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._pipe)
        try:
            with self._log.open("ab") as log:
                async for line in reader:
                    log.write(line)
                    log.flush()
                    self._last.append(line.decode(errors="replace").strip())
                    if text in self._last[-1] and not found.done():
                        found.set_result(True)
        finally:
            transport.close()
            if not found.done():
                found.set_result(False)


def _name(process: ProcessId) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return (PROC / str(process.pid) / "comm").read_text().strip()
    return ""
