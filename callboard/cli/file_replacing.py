"""Replacing a user's file so that no moment shows half of it and the old one is kept.

The new text goes to a temporary file beside it, onto the disk, and takes its place in one step.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

BACKUP_SUFFIX = ".bak"


def replace_file(path: Path, text: str) -> Path:
    """Replaces a file; returns where the old one was kept: beside it, with :data:`BACKUP_SUFFIX` added.

    A symbolic link stays one: what it leads to is replaced. Its permissions stay too.

    Raises:
        OSError: the file or its folder can't be written.
    """
    path = path.resolve()
    backup = path.with_name(path.name + BACKUP_SUFFIX)
    _put(backup, path.read_bytes(), path.stat().st_mode)
    _put(path, text.encode(), path.stat().st_mode)
    return backup


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that must not be there yet.

    Raises:
        OSError: it is there (FileExistsError), or can't be written.
    """
    with path.open("xb") as file:
        file.write(content)


def _put(path: Path, content: bytes, mode: int) -> None:
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode & 0o7777)
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise
