"""When does a file grow? The kernel says so: inotify, by way of libc, which Python's library doesn't wrap."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_IN_MODIFY = 0x00000002
_IN_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_BUFFER_BYTES = 64 * 1024


class FileChanges:
    """Wakes whoever waits when one of the files was written to."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Watches from now on.

        Raises:
            OSError: a file is gone, or the user watches as many as are allowed.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(_IN_NONBLOCK_CLOEXEC))
        self._changed = asyncio.Event()
        for file in files:
            self._checked(self._libc.inotify_add_watch(self._descriptor, os.fsencode(file), _IN_MODIFY))

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    async def wait(self) -> None:
        """Returns when something was written since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _read(self) -> None:
        os.read(self._descriptor, _BUFFER_BYTES)
        self._changed.set()

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
