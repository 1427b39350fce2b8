"""Workers as plain child processes: for tests, for laptops, and as the reference of what a worker may expect.

Each listens on a socket in the node's run directory, so that the next agent reaches it when this one is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
import subprocess
from pathlib import Path

from callboard.agents.host import worker_container
from callboard.agents.host.framing import Json, PeerGone, RemoteError, Requests
from callboard.agents.host.worker_output import STDERR, STDOUT
from callboard.agents.runtime import BookedGroup, FoundGroup, GroupBooking, Hosted, HostError, Launch
from callboard.agents.worker.verdict import how_it_ended
from callboard.security.processes import ProcessId, identify


class ProcessRuntime:
    """Hosts each worker in a child process of the agent; placement groups exist only in our ledger."""

    def __init__(self, *, logs: Path, sockets: Path, successor_s: float) -> None:
        """
        Args:
            logs: folder for what processes write before they have a job.
            sockets: folder for their sockets, ours alone.
            successor_s: seconds that a worker lives on without an agent.
        """
        self._logs = logs
        self._sockets = sockets
        self._successor_s = successor_s
        # Paths of sockets hold 107 bytes; by way of the folder's descriptor every folder is short.
        self._folder = os.open(sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def launch(self, launch: Launch) -> HostedProcess:
        """Start the process. It leads its own session, so its group is known even when it is dead."""
        # Worker names are unique on the node, and longer than a file name may be.
        address = hashlib.sha256(launch.name.encode()).hexdigest()[:32]
        with self._listen(address) as listener:
            try:
                child = self._spawn(launch, listener.fileno())
            except OSError as error:
                raise HostError(f"cannot start {launch.interpreter}: {error.strerror}") from error
            process = identify(child.pid)
            assert process is not None, "an unreaped child keeps its entry in the process table"
            # While our own end listens too: a child that dies at once is told by its exit, not by this.
            requests = await self._connect(address)
        return HostedProcess(address, process, requests, self, child)

    async def attach(self, address: str, process: ProcessId) -> HostedProcess:
        """Connect to its socket."""
        try:
            requests = await self._connect(address)
        except OSError as error:
            raise HostError(f"process {process.pid} can't be reached: {error.strerror}") from error
        return HostedProcess(address, process, requests, self, None)

    def forget(self, address: str) -> None:
        """Remove the socket of a process that is gone."""
        (self._sockets / address).unlink(missing_ok=True)

    async def _connect(self, address: str) -> Requests:
        return Requests(*await asyncio.open_unix_connection(self._path(address)))

    def _path(self, address: str) -> str:
        return f"/proc/self/fd/{self._folder}/{address}"

    def _listen(self, address: str) -> socket.socket:
        self.forget(address)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path(address))
        listener.listen()
        return listener

    def _spawn(self, launch: Launch, descriptor: int) -> subprocess.Popen[bytes]:
        """From the loop's thread: vfork and exec take a millisecond or two."""
        runs = ["-P", "-m", "callboard.agents.host.worker_main", str(descriptor), str(self._successor_s)]
        if launch.within:
            outside = [worker_container.__file__, "outside", str(descriptor)]
            runs = ["-I", "-S", *outside, *launch.within, "worker", str(self._successor_s)]
        # A spare is nobody's yet, and writes next to nothing.
        common = self._logs / "spares.log"
        folder = Path(launch.output)
        out, err = (folder / STDOUT, folder / STDERR) if launch.output else (common, common)
        with out.open("ab") as stdout, err.open("ab") as stderr:
            return subprocess.Popen(
                [launch.interpreter, *runs],
                pass_fds=(descriptor,),
                env=dict(launch.variables),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def abandon(self, launch: Launch) -> None:
        """Nothing to hurry: `launch` doesn't wait for the process."""

    async def book(self, group: GroupBooking) -> BookedGroup:  # noqa: ARG002 - nothing to book
        """Nothing to book outside the ledger."""
        return BookedGroup()

    async def found(self) -> list[FoundGroup]:
        """Nothing is booked outside the ledger."""
        return []

    async def unbook(self, group_id: str, attempt: int, ray_id: str) -> None:
        """Nothing was booked."""

    async def listed(self) -> Json:
        """Plain processes are listed nowhere but here."""
        return {}

    async def object_stores(self) -> Json:
        """Plain processes share no objects."""
        return []

    async def oom_of(self, hosted: Hosted) -> str:  # noqa: ARG002 - plain processes are ended by the kernel alone
        """Nobody but the kernel ends a plain process."""
        return ""

    async def close(self) -> None:
        """Nothing runs besides the workers."""
        os.close(self._folder)


class HostedProcess:
    """A worker host in a child process, of this agent or of an earlier one."""

    actor_name = ""

    def __init__(
        self,
        address: str,
        process: ProcessId,
        requests: Requests,
        runtime: ProcessRuntime,
        child: subprocess.Popen[bytes] | None,
    ) -> None:
        self.address = address
        self.process = process
        self._requests = requests
        self._runtime = runtime
        self._child = child
        self.peak_bytes = 0

    async def control(self, method: str, argument: Json = None) -> Json:
        """Ask the host; see `Hosted`."""
        try:
            return await self._requests.ask(method, argument)
        except PeerGone as error:
            raise HostError(str(error)) from error
        except RemoteError as error:
            raise HostError(f"{error.kind}: {error.message}") from error

    def _reaped(self, child: subprocess.Popen[bytes]) -> int:
        """The exit code of a child that is gone, with what it held at most."""
        if child.returncode is None:
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            # A child counts from the moment it is made, as a copy of this process: what is less than that says nothing.
            if usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
                self.peak_bytes = usage.ru_maxrss * 1024
        return child.returncode

    def exit_message(self) -> str:
        """From the exit status, which only the parent learns."""
        if self._child is None:
            return f"process {self.process.pid} ended"
        return how_it_ended(self._reaped(self._child))

    def release(self) -> None:
        if self._child is not None:
            self._child.wait()
        self._requests.close()
        self._runtime.forget(self.address)
