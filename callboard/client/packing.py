"""A directory of code as one file that travels: the same files always give the same bytes, and so the same name.

What git ignores stays at home where the directory is in a git repository, and everywhere what `.callboardignore` names.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from callboard.model.faults import Fault, InvalidInput

MAX_FILES = 50_000
MAX_BYTES = 1 << 30
"""Of the files before they are packed."""

_NEVER = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


def pack(directory: Path, into: IO[bytes], field: str = "working_dir") -> str:
    """Writes the package of a directory; returns its name.

    Raises:
        InvalidInput: it is none, too large, or holds a link that leads out of it.
    """
    if not directory.is_dir():
        raise InvalidInput([Fault(field, f"{directory} is no directory")])
    size, count = 0, 0
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=into, mtime=0, compresslevel=5) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(_files(directory)):
            path = directory / name
            if path.is_symlink():
                target = path.resolve()
                if not target.is_relative_to(directory.resolve()) or path.readlink().is_absolute():
                    raise InvalidInput([Fault(field, f"{path} is a link that leads out of {directory}")])
            entry = archive.gettarinfo(path, name)
            if not (entry.isreg() or entry.issym()):
                continue
            size, count = size + entry.size, count + 1
            if size > MAX_BYTES or count > MAX_FILES:
                most = f"at most {MAX_FILES} files of {MAX_BYTES >> 20} MiB together travel"
                raise InvalidInput([Fault(field, f"{directory} has more; {most}. Name data in .callboardignore")])
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            entry.type = tarfile.SYMTYPE if path.is_symlink() else tarfile.REGTYPE  # a hard link is a file
            if path.is_symlink():
                archive.addfile(entry)
            else:
                with path.open("rb") as file:
                    archive.addfile(entry, file)
    into.seek(0)
    return f"package:{hashlib.file_digest(into, 'sha256').hexdigest()}"  # type: ignore[arg-type]


def _files(directory: Path) -> Iterator[str]:
    """Paths of the files that travel, from the directory."""
    ignored = _patterns(directory / ".callboardignore")
    listed = _by_git(directory)
    for name in listed if listed is not None else _by_walking(directory):
        parts = name.split("/")
        if not _NEVER & set(parts) and not _is_ignored(parts, ignored) and (directory / name).exists():
            yield name


def _by_git(directory: Path) -> list[str] | None:
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


def _by_walking(directory: Path) -> Iterator[str]:
    ignored = _patterns(directory / ".gitignore")
    for folder, folders, files in os.walk(directory):
        here = Path(folder).relative_to(directory).parts
        folders[:] = [each for each in folders if each not in _NEVER and not _is_ignored([*here, each], ignored)]
        links = [each for each in folders if (Path(folder) / each).is_symlink()]
        for name in (*files, *links):
            if not _is_ignored([*here, name], ignored):
                yield "/".join((*here, name))


def _patterns(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _is_ignored(parts: list[str], patterns: list[str]) -> bool:
    """As `.gitignore` says it: the last pattern that matches the path, or a folder of it, counts."""
    ignored = False
    for pattern in patterns:
        keeps, body = pattern.startswith("!"), pattern.lstrip("!").rstrip("/")
        anchored = "/" in body
        whole = body.lstrip("/")
        for depth in range(1, len(parts) + 1):
            shown = "/".join(parts[:depth]) if anchored else parts[depth - 1]
            if fnmatch(shown, whole):
                ignored = not keeps
                break
    return ignored
