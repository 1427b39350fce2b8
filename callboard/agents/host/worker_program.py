"""A command as the work of a worker: any program, unmodified (docs/programs.md).

`Program` is a class like those of users: the generic host builds it, its `run()` is the entry method and ends with the
command, so output, restarts, checkpoints, the stop ladder and the proof of death are those of every worker. The stop
signal reaches the command without it: the agent sends that to everything below the host. Standard library only.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callboard.agents.host.worker_output import FILES
from callboard.agents.host.worker_process import MAX_CHECKPOINT_BYTES, ProgramFailed, make_scratch, signal_name

if TYPE_CHECKING:
    from callboard.agents.host.worker_host import WorkerContext

CHECKPOINT_VARIABLE = "CALLBOARD_CHECKPOINT_DIR"

_MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""Of files that may become a checkpoint: packing more would take a stop's time, and can't fit."""

_NOT_FOUND, CANNOT_RUN = 127, 126
"""Exit codes of a shell for a command that can't be started."""

_NOT_RUN = {
    125: "what its runtime says is the end of stderr; correct the image's name, or have the node pull it",
    CANNOT_RUN: "the image has that file, but it is no program for it",
    _NOT_FOUND: "the image doesn't have that program; write the path that it has there",
}
"""Exit codes of podman for an image that isn't there or a program that can't be started in it, and what helps."""

_RELAY = Path(__file__).with_name("worker_exec.py")
"""Run by its path, without site and what is imported with it: that takes a third of the time."""

_BEGIN_S = 10.0
"""Between a worker's being ready and the start of its command: a moment."""

_SHOWN_CHARACTERS = 200
_SIGNALLED = 128


class Program:
    """Runs one command below this process and ends as it does."""

    forwards = False
    """Whether the signal of a stop is sent to the command's process group, and not to all that is below it."""

    def __init__(self, command: list[str], within: Sequence[str] = (), *, tty: bool = False) -> None:
        """
        Args:
            within: what runs it in a container; empty: it runs here.
            tty: it gets a terminal, which people take over by `attach`.

        Raises:
            ProgramFailed: it can't be started here.
        """
        self._command = command
        self._environment = _environment()
        self._within = list(within)
        self._executable = within[0] if within else _found(command[0], self._environment.get("PATH", os.defpath))
        self._folder = self._scratch = Path()
        self._terminal: socket.socket | None = None
        """Where connections to its terminal go, once it runs with one."""
        self._tty = tty
        self._begun = threading.Event()
        self._beside: list[subprocess.Popen[bytes]] = []

    def setup(self, context: WorkerContext) -> None:
        """Say to the command what only the worker knows."""
        self._folder = Path(context.output) / FILES if context.output else Path(tempfile.mkdtemp(prefix="callboard-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tty = self._tty and context.rank == 0
        self._environment[CHECKPOINT_VARIABLE] = str(self._folder)
        # What `torchrun` takes for options that its command line leaves out.
        launcher = {
            "PET_NNODES": str(context.world_size),
            "PET_NODE_RANK": str(context.rank),
            "PET_NPROC_PER_NODE": str(len(context.devices) or ""),
            "PET_MASTER_ADDR": self._environment.get("MASTER_ADDR", ""),
            "PET_MASTER_PORT": self._environment.get("MASTER_PORT", ""),
        }
        # `torchrun` leaves what it notes of its processes in the node's temporary folder, for good.
        marker = self._environment.get("CALLBOARD_WORKER", "")
        if marker and not self._within:
            self._scratch = make_scratch(marker)
            launcher["PET_LOG_DIR"] = str(self._scratch / "torchelastic")
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
        found = [path for path in sorted(self._folder.rglob("*")) if path.is_symlink() or path.is_file()]
        if not found:
            return None
        size = sum(path.lstat().st_size for path in found)
        packed = io.BytesIO()
        if size <= _MAX_UNPACKED_BYTES:
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                for path in found:
                    self._pack(path, archive)
        if not packed.tell() or packed.tell() > MAX_CHECKPOINT_BYTES:
            raise ValueError(
                f"the files in {CHECKPOINT_VARIABLE} are {size} bytes, and packed more than {MAX_CHECKPOINT_BYTES}; "
                "write the state to storage that all nodes share, and only its path to a file there"
            )
        return packed.getvalue()

    def _pack(self, path: Path, archive: tarfile.TarFile) -> None:
        """Add a file, or a link such as `latest` by what it leads to in the folder, which is another next time.

        Raises:
            ValueError: a link leads out of the folder.
        """
        entry = archive.gettarinfo(path, str(path.relative_to(self._folder)))
        if entry.issym():
            target = Path(os.path.normpath(path.parent / entry.linkname))
            if not target.is_relative_to(self._folder):
                raise ValueError(
                    f"{entry.name} in {CHECKPOINT_VARIABLE} is a link to {entry.linkname}, which does not travel with "
                    "it; write that path to a file there"
                )
            entry.linkname = os.path.relpath(target, path.parent)
        if entry.isreg():
            with path.open("rb") as file:
                archive.addfile(entry, file)
        else:
            archive.addfile(entry)

    def run(self) -> None:
        """Run the command to its end.

        Raises:
            ProgramFailed: it ended with another exit code than 0.
        """
        child = self._started(self._within or self._command, self._executable, tty=self._tty)
        _, code = first_end({child.pid})
        self._check(code)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of the command."""
        return self._environment

    def attach(self, connection: socket.socket) -> None:
        """Hand the command's terminal to whoever is at the other end.

        Raises:
            ProgramFailed: it has none, or none yet.
        """
        if not self._tty:
            why = "the command was started without a terminal; `callboard run -it` gives it one"
            raise ProgramFailed(why, CANNOT_RUN)
        if not self._begun.wait(_BEGIN_S) or self._terminal is None:
            raise ProgramFailed("the command has not been started yet; try again", CANNOT_RUN)
        try:
            socket.send_fds(self._terminal, [b"+"], [connection.fileno()])
        except OSError as error:
            raise ProgramFailed(f"the command has ended: {error.strerror}", CANNOT_RUN) from error

    def accompany(self, relay: subprocess.Popen[bytes]) -> None:
        """A program runs beside the command."""
        self._beside = [relay, *(each for each in self._beside if each.poll() is None)]

    def _started(self, command: list[str], executable: str, *, tty: bool = False) -> subprocess.Popen[bytes]:
        if tty:
            self._terminal, control = socket.socketpair()
            plan = {"control": control.fileno(), "forwards": self.forwards, "terminal": True, "rows": 24, "columns": 80}
            with control:
                relay = _relay(command, executable, plan, self._environment, control)
            self._begun.set()
            return relay
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
            raise ProgramFailed(f"{what}; {remedy}", CANNOT_RUN) from None

    def _check(self, code: int) -> None:
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code} ({signal_name(-code)})"
            if self._within and code in _NOT_RUN:
                how = f"could not be run in its container (exit code {code}): {_NOT_RUN[code]}"
            whole = shlex.join(self._command)
            shown = whole.partition("\n")[0][:_SHOWN_CHARACTERS]  # a reason is one line
            if shown != whole:
                shown = f"{shown}…"
            raise ProgramFailed(f"`{shown}` {how}", code if code > 0 else _SIGNALLED - code)


def execute(program: Program | None, folder: str, name: str, asked: Mapping[str, Any]) -> None:
    """Run a program beside the worker's own work, or take over its terminal; see `WorkerHost.execute`.

    Args:
        program: the command that is the worker's work; None: it has another.

    Raises:
        ProgramFailed: it can't be run.
    """
    environment = dict(_environment() if program is None else program.environment)
    executable = ""
    if not asked["attach"]:
        executable = _found(asked["command"][0], environment.get("PATH", os.defpath))
    elif program is None:
        raise ProgramFailed("the worker is an actor, which has no terminal; name a program to run", CANNOT_RUN)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            # By way of the folder's descriptor: paths of sockets hold 107 bytes.
            connection.connect(f"/proc/self/fd/{directory}/{name}")
            if asked["attach"]:
                assert program is not None
                program.attach(connection)
                return
            if asked["terminal"] and asked["terminal_type"]:
                environment["TERM"] = asked["terminal_type"]
            plan = {key: asked[key] for key in ("terminal", "rows", "columns")}
            plan["connection"] = connection.fileno()
            child = _relay(asked["command"], executable, plan, environment, connection)
            if program is not None:
                program.accompany(child)
    except OSError as error:
        raise ProgramFailed(f"the program can't be connected with its node's agent: {error}", CANNOT_RUN) from error
    finally:
        os.close(directory)
    threading.Thread(target=child.wait, name="callboard-exec", daemon=True).start()


def _relay(
    command: list[str],
    executable: str,
    plan: Mapping[str, Any],
    environment: Mapping[str, str],
    given: socket.socket,
) -> subprocess.Popen[bytes]:
    relay = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_RELAY)],
        env=environment,
        stdin=subprocess.PIPE,
        pass_fds=(given.fileno(),),
        start_new_session=True,
    )
    assert relay.stdin is not None
    with relay.stdin as plan_of_it:  # not an argument, which may be 128 KiB long
        plan_of_it.write(json.dumps({"command": command, "executable": executable, **plan}).encode())
    return relay


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
    # `python` is the worker's, as it is for actors, or that of its environment; what a program prints is seen at once.
    path = variables.get("PATH", os.defpath)
    environments = [variables[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in variables]
    if path.split(os.pathsep)[0] not in [f"{each}/bin" for each in environments]:
        variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))
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
        if "/" in name and file.is_dir():
            raise ProgramFailed(f"{name} is a directory; name the program in it", CANNOT_RUN)
        if "/" in name and file.is_file():
            raise ProgramFailed(
                f"{name} is not executable; run `chmod +x {name}`, or name what runs it: command: [bash, {name}]",
                CANNOT_RUN,
            )
        where = f"in {Path.cwd()}" if "/" in name else f"in {path}"
        remedy = "Write its full path, add its directory with env: {PATH: …}, or install it on the node"
        if "/" in name and not name.startswith("/"):
            remedy = "Send its folder along (working_dir), or write its full path"
        raise ProgramFailed(f"the command {name} was not found; this node looked {where}. {remedy}", _NOT_FOUND)
    with open(found, "rb") as file_of_it:  # noqa: PTH123
        first = file_of_it.readline(256)
    words = first[2:].decode(errors="replace").rstrip("\n").split(" ")
    words = [word for word in words if word]
    if first.startswith(b"#!") and words and not Path(words[0].rstrip("\r")).is_file():
        raise ProgramFailed(
            f"{found} asks in its first line for the interpreter {words[0]}, which is not on this node; correct that "
            f"line, or name another: command: [python, {name}]",
            CANNOT_RUN,
        )
    if first.startswith(b"#!") and first.rstrip(b"\n").endswith(b"\r"):
        raise ProgramFailed(
            f"the first line of {found} ends with a carriage return, which becomes part of the interpreter's name; "
            "save the file with Unix line ends (`sed -i 's/\\r$//'`)",
            CANNOT_RUN,
        )
    return found
