"""Workers as plain child processes: for tests, for laptops, and as the reference of what a worker may expect."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from pathlib import Path

from callboard.agents.framing import Json, PeerGone, RemoteError, Requests
from callboard.agents.process_tree import ProcessId, identify
from callboard.agents.runtime import BookedGroup, GroupBooking, HostError, Launch


class ProcessRuntime:
    """Hosts each worker in a child process of the agent; placement groups exist only in our ledger."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    async def launch(self, launch: Launch) -> HostedProcess:
        """Start the process. It leads its own session, so its group is known even when it is dead."""
        try:
            child, ours = self._spawn(launch)
        except OSError as error:
            raise HostError(f"cannot start {launch.interpreter}: {error.strerror}") from error
        process = identify(child.pid)
        assert process is not None, "an unreaped child keeps its entry in the process table"
        return HostedProcess(child, process, await Requests.over(ours))

    def _spawn(self, launch: Launch) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """From the loop's thread: vfork and exec take a millisecond or two."""
        log = self._logs / (re.sub(r"[^A-Za-z0-9_.-]", "-", launch.name) + ".log")
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                child = subprocess.Popen(
                    [launch.interpreter, "-P", "-m", "callboard.agents.worker_main", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=dict(launch.variables),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return child, ours

    def abandon(self, launch: Launch) -> None:
        """Nothing to hurry: `launch` doesn't wait for the process."""

    async def book(self, group: GroupBooking) -> BookedGroup:  # noqa: ARG002 - nothing to book
        """Nothing to book outside the ledger."""
        return BookedGroup()

    async def unbook(self, group_id: str, attempt: int, ray_id: str) -> None:
        """Nothing was booked."""

    async def close(self) -> None:
        """Nothing runs besides the workers."""


class HostedProcess:
    """A worker host in a child process."""

    actor_name = ""

    def __init__(self, child: subprocess.Popen[bytes], process: ProcessId, requests: Requests) -> None:
        self._child = child
        self._requests = requests
        self.process = process

    async def control(self, method: str, argument: Json = None) -> Json:
        """Ask the host; see `Hosted`."""
        try:
            return await self._requests.ask(method, argument)
        except PeerGone as error:
            raise HostError(str(error)) from error
        except RemoteError as error:
            raise HostError(f"{error.kind}: {error.message}") from error

    def exit_message(self) -> str:
        """From the exit status."""
        code = self._child.wait()
        if code >= 0:
            return f"exit code {code}"
        return f"killed by signal {-code} ({signal.Signals(-code).name})"

    def release(self) -> None:
        """Reap the child and close its socket."""
        self._child.wait()
        self._requests.close()
