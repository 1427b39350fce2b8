"""The relay of a program that runs in a worker's environment: between its terminal or pipes and whoever asked for it.

Runs as a program of its own, `python -I -S worker_exec.py` with its plan on standard input, below the worker's process,
so that neither code of the user nor its GIL holds it up, and so that the program ends with the worker. It has two uses:

- *exec*: a program beside the worker's own work. Its relay has one connection, and ends the program when that closes.
- *held*: the worker's own command with a terminal. Its relay keeps what the command prints in the worker's output, and
  takes connections as people come and go; the command goes on without any.

A connection carries frames: a letter, four bytes of length, the content. Bounded in both directions: who doesn't read
holds back the program of an exec, and is let go by a held one. Standard library only, and nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct(">cI")

STARTED, STDOUT, STDERR, END = b"S", b"O", b"E", b"X"
"""Frames from the relay. Of END the content is {"exit_code", "reason"}; nothing follows it."""

DATA, CLOSE, SIZE, SIGNAL = b"D", b"C", b"W", b"K"
"""Frames to the relay: for standard input, its end, [rows, columns], the number of a signal."""

PIECE_BYTES = 64 * 1024
"""In one frame."""

_AHEAD_BYTES = 2 * PIECE_BYTES
"""Of output that waits for an exec's connection, and of input that waits for the program."""

_BEHIND_BYTES = 1 << 20
"""Of output that waits for a held one's connection: one that is further behind is let go."""

_SHOWN_AGAIN_BYTES = 64 * 1024
"""Of a held one's output, shown to whoever comes."""

_POLITE_S = 2.0
"""Between the signal and the kill, for a program whose connection closed or whose worker is being stopped."""

_SETTLE_S = 5.0
"""For processes that were killed to be gone, and for the last output to be taken."""

_STOPS = tuple(
    number
    for number in signal.valid_signals()
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGPIPE, signal.SIGWINCH)
    and number < signal.SIGRTMIN
    and number not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
)
"""Signals that a stop of the worker may send to everything below it."""

_PR_SET_CHILD_SUBREAPER = 36
_POLLRDHUP = 0x2000


class Frames:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def of(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The frames that are whole now.

        Raises:
            ValueError: one is too long.
        """
        self._held += data
        while len(self._held) >= HEADER.size:
            kind, size = HEADER.unpack_from(self._held)
            if size > PIECE_BYTES:
                raise ValueError(f"a frame of {size} bytes; at most {PIECE_BYTES}")
            if len(self._held) < HEADER.size + size:
                return
            content = bytes(self._held[HEADER.size : HEADER.size + size])
            del self._held[: HEADER.size + size]
            yield kind, content


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(content)) + content


class _Parting:
    """A connection that is told the end and nothing else: it is given the rest, then read until the other side closes,
    too. A socket that closes over unread input resets its connection, and what was sent last is lost with it."""

    def __init__(self, connection: socket.socket, rest: bytes) -> None:
        self.connection = connection
        self._rest = bytearray(rest)
        self._until = time.monotonic() + _SETTLE_S
        connection.setblocking(False)
        self._close_if_told()

    @property
    def wanted(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._rest else 0)

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def step(self, events: int) -> bool:
        """Whether it is over, and closed."""
        over = self.left_s == 0
        try:
            if events & select.POLLOUT and self._rest:
                del self._rest[: self.connection.send(self._rest)]
                self._close_if_told()
            if events & ~select.POLLOUT:
                over = not self.connection.recv(PIECE_BYTES) or over
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if over:
            self.connection.close()
        return over

    def _close_if_told(self) -> None:
        if not self._rest:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)


class Relay:
    """One program and its connections."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """
        Args:
            plan: {"command", "executable", "terminal", "rows", "columns"}; of an exec "connection", a descriptor; of a
                held one "control", where connections come from, and "forwards", whether the signal of a stop is passed
                on because nobody else sends it to the program.
        """
        self._connection: socket.socket | None = None
        self._parting: list[_Parting] = []
        self._frames = Frames()
        self._to_client = bytearray()
        self._to_child = bytearray()
        self._recent: deque[bytes] = deque()
        self._held = "control" in plan
        self._terminal: bool = plan["terminal"]
        self._forwards = bool(plan.get("forwards"))
        self._control = socket.socket(fileno=plan["control"]) if self._held else None
        self._closes_input = False
        self._ending_by: float | None = None
        """When the program is killed, once it is to end."""
        self._why = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in _STOPS:
            # A function and no SIG_IGN, which the program would inherit.
            signal.signal(number, self._signalled)
        child, self._input, self._outputs = self._start(plan)
        self._child, self._exited = child, os.pidfd_open(child.pid)
        if not self._held:
            self._connect(socket.socket(fileno=plan["connection"]))

    def run(self) -> int:
        """Relay until the program has ended and all is told; returns its exit code, negative for a signal."""
        while not self._step():
            pass
        assert self._child is not None, "started by the constructor"
        code = self._child.wait()
        self._end_rest()
        self._drain()
        shown = code if code >= 0 else 128 - code
        self._send(END, json.dumps({"exit_code": shown, "reason": self._why}).encode())
        self._flush()
        self._part()
        return code

    def _start(self, plan: dict[str, Any]) -> tuple[subprocess.Popen[bytes], int, dict[int, bytes]]:
        command, executable = plan["command"], plan["executable"]
        if not plan["terminal"]:
            child = subprocess.Popen(
                command,
                executable=executable,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None
            outputs = {os.dup(child.stdout.fileno()): STDOUT, os.dup(child.stderr.fileno()): STDERR}
            given = os.dup(child.stdin.fileno())
            for file in (child.stdin, child.stdout, child.stderr):
                file.close()
        else:
            given, slave = os.openpty()
            self._resize(given, plan["rows"], plan["columns"])
            child = subprocess.Popen(
                command,
                executable=executable,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no other thread is here
            )
            os.close(slave)
            outputs = {given: STDOUT}
        for descriptor in (given, *outputs):
            os.set_blocking(descriptor, False)
        return child, given, outputs

    @staticmethod
    def _resize(terminal: int, rows: int, columns: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # ---- one look at everything ----

    def _step(self) -> bool:
        """Wait for something and do what it asks; whether the program has ended."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._exited, select.POLLIN)
        wanted: dict[int, int] = {}
        if self._held or len(self._to_client) < _AHEAD_BYTES:
            wanted |= dict.fromkeys(self._outputs, select.POLLIN)
        if self._to_child and self._input >= 0:
            wanted[self._input] = wanted.get(self._input, 0) | select.POLLOUT
        if self._connection is not None:
            events = _POLLRDHUP | (select.POLLIN if len(self._to_child) < _AHEAD_BYTES else 0)
            wanted[self._connection.fileno()] = events | (select.POLLOUT if self._to_client else 0)
        if self._control is not None:
            wanted[self._control.fileno()] = select.POLLIN
        wanted |= {each.connection.fileno(): each.wanted for each in self._parting}
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        left = [each.left_s for each in self._parting]
        left += [] if self._ending_by is None else [self._ending_by - time.monotonic()]
        happened = dict(poller.poll(max(0, int(min(left) * 1000)) if left else None))
        if self._ending_by is not None and time.monotonic() >= self._ending_by:
            self._signal(signal.SIGKILL)
            self._ending_by = time.monotonic() + _SETTLE_S
        if self._wake in happened:
            os.read(self._wake, 4096)
        for descriptor in [each for each in self._outputs if happened.get(each, 0) & ~select.POLLOUT]:
            self._read_output(descriptor)
        if happened.get(self._input, 0) & (select.POLLOUT | select.POLLERR):
            self._write_input()
        if self._connection is not None and (events := happened.get(self._connection.fileno(), 0)):
            self._serve(events)
        self._step_parting(happened)
        if self._control is not None and self._control.fileno() in happened:
            self._take_connection()
        return self._exited in happened

    def _read_output(self, descriptor: int) -> bool:
        """Whether something was there."""
        try:
            data = os.read(descriptor, PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the terminal open any more
            data = b""
        if not data:
            del self._outputs[descriptor]
            if descriptor != self._input:
                os.close(descriptor)
            return False
        if self._held:
            self._keep(data)
        self._send(self._outputs[descriptor], data)
        return True

    def _keep(self, data: bytes) -> None:
        left = memoryview(data.replace(b"\r\n", b"\n"))  # a terminal's ends of lines are not a file's
        while left:
            left = left[os.write(1, left) :]
        self._recent.append(data)
        while sum(map(len, self._recent)) > _SHOWN_AGAIN_BYTES:
            self._recent.popleft()

    def _write_input(self) -> None:
        try:
            written = os.write(self._input, self._to_child)
        except BlockingIOError:
            return
        except OSError:  # it closed its standard input, or its terminal
            self._to_child.clear()
            self._closes_input = True
        else:
            del self._to_child[:written]
        self._close_input()

    def _close_input(self) -> None:
        if self._closes_input and not self._to_child and self._input >= 0 and not self._terminal:
            os.close(self._input)
            self._input = -1

    # ---- connections ----

    def _connect(self, connection: socket.socket) -> None:
        if self._connection is not None:
            self._send(END, json.dumps({"exit_code": 0, "reason": "another terminal took over"}).encode())
        if self._connection is not None:  # one that was too far behind is let go by now
            self._parting.append(_Parting(self._connection, bytes(self._to_client)))
        connection.setblocking(False)
        self._connection, self._frames = connection, Frames()
        self._to_client = bytearray(frame(STARTED) + b"".join(frame(STDOUT, each) for each in self._recent))

    def _disconnect(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(OSError):
            self._connection.send(self._to_client)
        self._connection.close()
        self._connection = None
        self._to_client.clear()
        if not self._held:
            self._end("whoever asked for it is gone")

    def _take_connection(self) -> None:
        assert self._control is not None
        _, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
        if descriptors:
            self._connect(socket.socket(fileno=descriptors[0]))
        else:  # its worker's process is gone
            self._control.close()
            self._control = None

    def _serve(self, events: int) -> None:
        assert self._connection is not None
        try:
            if events & select.POLLOUT and self._to_client:
                del self._to_client[: self._connection.send(self._to_client)]
            if events & select.POLLIN:
                data = self._connection.recv(PIECE_BYTES)
                for kind, content in self._frames.of(data):
                    self._heed(kind, content)
                if not data:
                    self._disconnect()
            elif events & (_POLLRDHUP | select.POLLHUP | select.POLLERR):
                self._disconnect()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._disconnect()

    def _heed(self, kind: bytes, content: bytes) -> None:
        if kind == DATA and self._input >= 0 and not self._closes_input:
            self._to_child += content
        elif kind == CLOSE and self._terminal:
            self._to_child += b"\x04"
        elif kind == CLOSE:
            self._closes_input = True
            self._close_input()
        elif kind == SIZE and self._terminal:
            rows, columns = json.loads(content)
            self._resize(self._input, rows, columns)
        elif kind == SIGNAL:
            self._signal(int(content))

    def _send(self, kind: bytes, content: bytes) -> None:
        if self._connection is None:
            return
        self._to_client += frame(kind, content)
        if self._held and len(self._to_client) > _BEHIND_BYTES:
            self._disconnect()

    # ---- the end ----

    def _signalled(self, number: int, _: object) -> None:
        """The worker is being stopped. A held program has its own time to end; an exec must not delay that."""
        if not self._held:
            self._end("its worker is being stopped")
        elif self._forwards:
            self._signal(number)

    def _end(self, why: str) -> None:
        if self._ending_by is None:
            self._why, self._ending_by = why, time.monotonic() + _POLITE_S
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, number)

    def _end_rest(self) -> None:
        """Kill what the program of an exec left behind: this process, a subreaper, is the parent of orphans. What a
        held command leaves is ended with its worker."""
        until = time.monotonic() + _SETTLE_S
        while not self._held and (left := below(os.getpid())) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    def _drain(self) -> None:
        """Take what was printed last."""
        until = time.monotonic() + _SETTLE_S
        for descriptor in list(self._outputs):
            while descriptor in self._outputs and self._read_output(descriptor) and time.monotonic() < until:
                if not self._held and len(self._to_client) > _AHEAD_BYTES:
                    self._flush()

    def _flush(self) -> None:
        """Have the connection take everything, however long that takes; not once the program is to end."""
        until = time.monotonic() + _SETTLE_S
        while self._connection is not None and self._to_client:
            self._connection.settimeout(_POLITE_S / 10)
            try:
                del self._to_client[: self._connection.send(self._to_client)]
            except TimeoutError:
                if not (self._held or self._ending_by is not None) or time.monotonic() < until:
                    continue
                self._to_client.clear()
            except OSError:
                self._connection.close()
                self._connection = None

    def _part(self) -> None:
        """Wait until whoever was told the end has it."""
        if self._connection is not None:
            self._parting.append(_Parting(self._connection, b""))
        while self._parting:
            poller = select.poll()
            for each in self._parting:
                poller.register(each.connection, each.wanted)
            happened = dict(poller.poll(max(1, int(min(each.left_s for each in self._parting) * 1000))))
            self._step_parting(happened)

    def _step_parting(self, happened: dict[int, int]) -> None:
        self._parting = [each for each in self._parting if not each.step(happened.get(each.connection.fileno(), 0))]


def below(root: int) -> list[int]:
    """Living processes below one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double this program's start
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        queue += children.get(queue[0], ())
        found += children.get(queue.pop(0), ())
    return found


def main() -> None:
    """Relay, and end as the program did."""
    plan = json.load(sys.stdin)
    if "control" not in plan:
        import ctypes  # noqa: PLC0415 - nothing else here needs it

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    code = Relay(plan).run()
    if code < 0:
        import resource  # noqa: PLC0415 - likewise

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
