"""A person at a terminal: a program that runs in one, what it shows, and keys."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Mapping


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self._master = master
        self._seen = b""
        self._changed = asyncio.Event()
        self._closed = False
        asyncio.get_running_loop().add_reader(master, self._read)

    @classmethod
    async def start(
        cls, *command: str, cwd: object, rows: int = 30, columns: int = 100, env: Mapping[str, str] | None = None
    ) -> Terminal:
        """Starts a program in one of this size."""
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = await asyncio.create_subprocess_exec(
            *("setsid", "--ctty", *command),
            cwd=str(cwd),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **(env or {})},
        )
        os.close(slave)
        return cls(process, master)

    def type(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._master, keys)

    async def resize(self, rows: int, columns: int) -> None:
        """Its window is drawn larger or smaller."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def until(self, part: bytes) -> bytes:
        """What it showed, up to and with this part; later calls go on behind it."""
        while part not in self._seen:
            assert not self._closed, self._seen
            self._changed.clear()
            await self._changed.wait()
        before, _, self._seen = self._seen.partition(part)
        return before + part

    async def ended(self) -> tuple[int, bytes]:
        """Its exit code, and what it showed last."""
        code = await self.process.wait()
        while not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return code, self._seen

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has it open any more
            data = b""
        self._seen += data
        self._changed.set()
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            self._closed = True
