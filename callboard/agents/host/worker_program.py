"""A command as the work of a worker: any program, unmodified (docs/programs.md).

`Program` is a class like those of users: the generic host builds it, its `run()` is the entry method and ends with the
command, so output, restarts, checkpoints, the stop ladder and the proof of death are those of every worker. The stop
signal reaches the command without it: the agent sends that to everything below the host. Standard library only.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from callboard.agents.host.worker_output import FILES
from callboard.agents.host.worker_process import MAX_CHECKPOINT_BYTES, ProgramFailed, signal_name

if TYPE_CHECKING:
    from callboard.agents.host.worker_host import WorkerContext

CHECKPOINT_VARIABLE = "CALLBOARD_CHECKPOINT_DIR"

_MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""Of files that may become a checkpoint: packing more would take a stop's time, and can't fit."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a command that can't be started."""

_SHOWN_CHARACTERS = 200
_SIGNALLED = 128


class Program:
    """Runs one command below this process and ends as it does."""

    def __init__(self, command: list[str]) -> None:
        """
        Args:
            command: the program and its arguments.

        Raises:
            ProgramFailed: it can't be started here.
        """
        self._command = command
        self._environment = _environment()
        self._executable = _found(command[0], self._environment.get("PATH", os.defpath))
        self._folder = Path()

    def setup(self, context: WorkerContext) -> None:
        """Say to the command what only the worker knows."""
        self._folder = Path(context.output) / FILES if context.output else Path(tempfile.mkdtemp(prefix="callboard-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._environment[CHECKPOINT_VARIABLE] = str(self._folder)
        # What `torchrun` takes for options that its command line leaves out.
        launcher = {
            "PET_NNODES": str(context.world_size),
            "PET_NODE_RANK": str(context.rank),
            "PET_NPROC_PER_NODE": str(len(context.devices) or ""),
            "PET_MASTER_ADDR": self._environment.get("MASTER_ADDR", ""),
            "PET_MASTER_PORT": self._environment.get("MASTER_PORT", ""),
        }
        for name, value in launcher.items():
            if value:
                self._environment.setdefault(name, value)

    def restore(self, state: bytes | str) -> None:
        """Put the files of an earlier attempt where the command left them."""
        if isinstance(state, str):
            (self._folder / "uri").write_text(state)
            return
        with tarfile.open(fileobj=io.BytesIO(state)) as archive:
            archive.extractall(self._folder, filter="data")

    def checkpoint(self) -> bytes | None:
        """The files that the command left in its folder, if any."""
        found = [path for path in sorted(self._folder.rglob("*")) if path.is_file()]
        if not found:
            return None
        size = sum(path.stat().st_size for path in found)
        packed = io.BytesIO()
        if size <= _MAX_UNPACKED_BYTES:
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                for path in found:
                    archive.add(path, path.relative_to(self._folder))
        if not packed.tell() or packed.tell() > MAX_CHECKPOINT_BYTES:
            raise ValueError(
                f"the files in {CHECKPOINT_VARIABLE} are {size} bytes, and packed more than {MAX_CHECKPOINT_BYTES}; "
                "write the state to storage that all nodes share, and only its path to a file there"
            )
        return packed.getvalue()

    def run(self) -> None:
        """Run the command to its end.

        Raises:
            ProgramFailed: it ended with another exit code than 0.
        """
        child = self._started(self._command, self._executable)
        _, code = first_end({child.pid})
        self._check(code)

    def _started(self, command: list[str], executable: str) -> subprocess.Popen[bytes]:
        try:
            # A session of its own: what it sends to its process group must not reach the host.
            return subprocess.Popen(
                command, executable=executable, env=self._environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                what = f"{executable} is neither a program for this machine nor a script that begins with #!"
                remedy = "name what runs it: command: [bash, FILE]"
            else:
                what, remedy = f"{executable} can't be started: {error.strerror}", "correct the command"
            raise ProgramFailed(f"{what}; {remedy}", _NOT_EXECUTABLE) from None

    def _check(self, code: int) -> None:
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code} ({signal_name(-code)})"
            shown = shlex.join(self._command)
            if len(shown) > _SHOWN_CHARACTERS:
                shown = f"{shown[:_SHOWN_CHARACTERS]}…"
            raise ProgramFailed(f"`{shown}` {how}", code if code > 0 else _SIGNALLED - code)


def first_end(pids: set[int]) -> tuple[int, int]:
    """Which of these children ended first, and its exit code, negative for a signal. Orphans of theirs come to this
    process, a subreaper: their ends are taken, too."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid in pids:
            return pid, os.waitstatus_to_exitcode(status)


def _environment() -> dict[str, str]:
    """The environment of the command: the worker's, without what Ray told its worker process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # `python` is the worker's, as it is for actors, and what a program prints is seen at once.
    own = str(Path(sys.executable).parent)
    variables["PATH"] = os.pathsep.join((own, variables.get("PATH", os.defpath)))
    variables.setdefault("PYTHONUNBUFFERED", "1")
    return variables


def _found(name: str, path: str) -> str:
    """The file that a command names.

    Raises:
        ProgramFailed: there is none, or it can't be executed.
    """
    found = shutil.which(name, path=path)
    if found is None:
        file = Path(name)
        if "/" in name and file.is_file():
            raise ProgramFailed(
                f"{name} is not executable; run `chmod +x {name}`, or name what runs it: command: [bash, {name}]",
                _NOT_EXECUTABLE,
            )
        where = f"in {Path.cwd()}" if "/" in name else f"in {path}"
        raise ProgramFailed(
            f"the command {name} was not found; this node looked {where}. Write its full path, add its directory with "
            "env: {PATH: …}, or install it on the node",
            _NOT_FOUND,
        )
    with open(found, "rb") as file_of_it:  # noqa: PTH123
        first = file_of_it.readline(256)
    words = first[2:].decode(errors="replace").rstrip("\n").split(" ")
    words = [word for word in words if word]
    if first.startswith(b"#!") and words and not Path(words[0].rstrip("\r")).is_file():
        raise ProgramFailed(
            f"{found} asks in its first line for the interpreter {words[0]}, which is not on this node; correct that "
            f"line, or name another: command: [python, {name}]",
            _NOT_EXECUTABLE,
        )
    if first.startswith(b"#!") and first.rstrip(b"\n").endswith(b"\r"):
        raise ProgramFailed(
            f"the first line of {found} ends with a carriage return, which becomes part of the interpreter's name; "
            "save the file with Unix line ends (`sed -i 's/\\r$//'`)",
            _NOT_EXECUTABLE,
        )
    return found
