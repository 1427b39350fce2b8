"""Packages of code, each one file that travels: the same files always give the same bytes, and so the same name.

What git ignores stays at home, and what `.callboardignore` names, in every folder of the tree.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import subprocess
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.code import code_of

MAX_FILES = 50_000
MAX_BYTES = 1 << 30
"""Of the files before they are packed."""

REQUIREMENTS = "callboard-requirements.txt"
"""Name under which a requirements file travels: others of any name may be beside it."""

_FILES_OF_REQUIREMENTS = ("-r", "--requirement", "-c", "--constraint")
_NAMED_FILE = re.compile(
    r"\s*(?:(?P<option>-r|--requirement|-c|--constraint|-f|--find-links|-e|--editable)[ =]?\s*(?P<file>[^\s#]+)"
    r"|(?P<path>(?:file:)?[\w./-]+(?:\[[^]]*\])?)\s*(?:$|;|#))"
)
"""A line of a requirements file that names another file or folder."""

_NEVER = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


def pack(directory: Path, into: IO[bytes], field: str = "working_dir") -> str:
    """Writes the package of a directory; returns its name.

    Raises:
        InvalidInput: it is none, too large, or holds a link that leads out of it.
    """
    return _written(_tree(directory, field), into, directory, field)


def pack_module(path: Path, into: IO[bytes], field: str) -> str:
    """Writes the package of a module: a directory under its own name, or a single file; returns its name.

    Raises:
        InvalidInput: as `pack`; or nobody could import it.
    """
    name = _real(path).name
    if not path.is_dir() and (not path.is_file() or path.suffix != ".py"):
        what = "is neither a directory nor a .py file" if path.exists() else "is not there"
        raise InvalidInput([Fault(field, f"{path} {what}; wheels and archives belong in env: {{requirements: …}}")])
    if not name.removesuffix(".py").isidentifier():
        raise InvalidInput([Fault(field, f"`import {name.removesuffix('.py')}` is impossible; rename {path}")])
    members = [(name, path)] if path.is_file() else ((f"{name}/{each}", file) for each, file in _tree(path, field))
    return _written(members, into, path, field)


def _some(directory: Path, members: Iterable[str], field: str) -> dict[str, Path]:
    """Some files and whole directories of a directory."""
    found: dict[str, Path] = {}
    for member in members:
        path = directory / member
        if path.is_dir():
            prefix = "" if member == "." else f"{member}/"
            found |= {f"{prefix}{name}": file for name, file in _tree(path, field)}
        else:
            found[member] = path
    return found


def pack_requirements(file: Path, into: IO[bytes], field: str) -> str:
    """Writes the package of a requirements file, with the files beside it that it names; returns its name.

    Raises:
        InvalidInput: as `pack`; or it names a file that isn't there or isn't beside it.
    """
    found: dict[str, None] = {}
    _require(file.parent, file.name, found, field, within=())
    files = _some(file.parent, found, field)
    files[REQUIREMENTS] = files.pop(file.name)
    return _written(sorted(files.items()), into, file, field)


def _require(folder: Path, name: str, found: dict[str, None], field: str, within: tuple[str, ...]) -> None:
    """Notes a requirements file and what it names: other such files, local packages, folders of wheels.

    Args:
        within: the files that name it, the first one first.
    """
    file = folder / name
    within = (*within, name)
    found[name] = None
    for line in _text(file, field).replace("\\\n", " ").splitlines():
        said = _NAMED_FILE.match(line)
        if said is None:
            continue
        other = (said["file"] or said["path"]).removeprefix("file:").partition("[")[0].strip("\"'")
        if not other or "://" in other or "$" in other or ("/" not in other and said["path"]):
            continue
        # pip reads -r from the file that says it, paths from where it runs: here both are one folder.
        inner = os.path.normpath(os.path.join(os.path.dirname(name), other) if said["file"] else other)  # noqa: PTH118, PTH120
        if inner.startswith(("..", "/")) or not (folder / inner).exists():
            where = "is not below its folder" if inner.startswith(("..", "/")) else "isn't there"
            raise InvalidInput([Fault(field, f"{file} names {other}, which {where}, so it can't travel")])
        if said["option"] in _FILES_OF_REQUIREMENTS:
            if inner in within:
                way = " → ".join((*within[within.index(inner) :], inner))
                raise InvalidInput([Fault(field, f"{folder / inner} includes itself ({way}); remove one of the lines")])
            if inner not in found:
                _require(folder, inner, found, field, within)
        else:
            found[inner] = None


def pack_project(file: Path, into: IO[bytes], field: str) -> str:
    """Writes the package of a ``pyproject.toml`` with its ``uv.lock`` and the paths that it names to uv; returns its
    name.

    Raises:
        InvalidInput: as `pack`; or it is no TOML with a project in it.
    """
    if file.is_dir():
        file /= "pyproject.toml"
    try:
        read = tomllib.loads(_text(file, field))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput([Fault(field, f"{file}: {error}")]) from error
    if file.name != "pyproject.toml" or not isinstance(read.get("project"), dict):
        raise InvalidInput([Fault(field, f"{file} is not a pyproject.toml with a [project]")])
    members = [name for name in ("pyproject.toml", "uv.lock") if (file.parent / name).is_file()]
    settings = read.get("tool", {}).get("uv", {})
    paths = [source.get("path") for source in settings.get("sources", {}).values() if isinstance(source, dict)]
    for path in (*settings.get("find-links", ()), *paths):
        if isinstance(path, str) and "://" not in path:
            inner = os.path.normpath(path)
            if inner.startswith(("..", "/")) or not (file.parent / inner).exists():
                raise InvalidInput(
                    [Fault(field, f"{file} names {path}, which isn't below its folder: it can't travel")]
                )
            members.append(inner)
    return _written(sorted(_some(file.parent, members, field).items()), into, file, field)


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput([Fault(field, f"{file} can't be read: {why}")]) from error


Packer = Callable[[Path, IO[bytes], str], str]

_ENVIRONMENTS: Mapping[str, Packer] = MappingProxyType({"requirements": pack_requirements, "uv": pack_project})


def travelling(component: Mapping[str, Any], place: str) -> Iterator[tuple[str, tuple[Packer, str]]]:
    """What a component names that isn't a package yet: its field, how it is packed, and its path."""
    for keys, value in code_of(component):
        yield place + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys), (_packer(keys), value)


def _packer(keys: tuple[str | int, ...]) -> Packer:
    if keys[0] == "working_dir":
        return pack
    return pack_module if keys[0] == "py_modules" else _ENVIRONMENTS[str(keys[1])]


def _tree(directory: Path, field: str) -> Iterator[tuple[str, Path]]:
    if not directory.is_dir():
        remedy = f"a relative path begins at {Path.cwd()}"
        if directory.exists():
            remedy = f"name the folder that it is in, {directory.parent}"
        raise InvalidInput([Fault(field, f"{directory} is not a directory; {remedy}")])
    root = _real(directory)
    for name in sorted(_files(directory)):
        path = directory / name
        if path.is_symlink() and (not _real(path).is_relative_to(root) or path.readlink().is_absolute()):
            raise InvalidInput([Fault(field, f"{path} is a link that leads out of {directory}")])
        yield name, path


def _real(path: Path) -> Path:
    """Where a path leads; of links that lead to each other it is one of them, where ``Path.resolve`` may raise."""
    return Path(os.path.realpath(path))


def _written(members: Iterable[tuple[str, Path]], into: IO[bytes], source: Path, field: str) -> str:
    size, count = 0, 0
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=into, mtime=0, compresslevel=5) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in members:
            try:
                size += _add(archive, name, path)
            except OSError as error:
                raise InvalidInput([Fault(field, f"{path} can't be packed: {error.strerror or error}")]) from error
            count += 1
            if size > MAX_BYTES or count > MAX_FILES:
                most = f"at most {MAX_FILES} files of {MAX_BYTES >> 20} MiB together travel"
                raise InvalidInput([Fault(field, f"{source} has more; {most}. Name data in .callboardignore")])
    into.seek(0)
    return f"package:{hashlib.file_digest(into, 'sha256').hexdigest()}"  # type: ignore[arg-type]


def _add(archive: tarfile.TarFile, name: str, path: Path) -> int:
    """Adds a file or a link, without what differs from one machine to the next; returns its size."""
    entry = tarfile.TarInfo(name)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        archive.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            entry.size = os.fstat(file.fileno()).st_size
            archive.addfile(entry, file)
    return entry.size


def _files(directory: Path) -> Iterator[str]:
    """Paths of the files that travel, from the directory."""
    listed = _by_git(directory)
    # What the repository around it ignores as a whole was named on purpose.
    names: Iterable[str] = listed or _by_walking(directory, (".gitignore", ".callboardignore"))
    ignored = _Ignored(directory, ".callboardignore")
    for name in names:
        parts = name.rstrip("/").split("/")
        path = directory / name
        if _NEVER & set(parts) or ignored.has(parts) or not os.path.lexists(path):
            continue
        if path.is_dir() and not path.is_symlink():
            # A repository inside this one.
            yield from (f"{'/'.join(parts)}/{inner}" for inner in _files(path))
        else:
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


def _by_walking(directory: Path, ignore_files: Sequence[str]) -> Iterator[str]:
    rules = [_Ignored(directory, name) for name in ignore_files]
    for folder, folders, files in os.walk(directory):
        here = Path(folder).relative_to(directory).parts
        links = [each for each in folders if os.path.islink(os.path.join(folder, each))]  # noqa: PTH114, PTH118
        folders[:] = [
            each
            for each in folders
            if each not in _NEVER
            and each not in links
            and not any(rule.names([*here, each], is_folder=True) for rule in rules)
        ]
        for name in (*files, *links):
            if not any(rule.names([*here, name], is_folder=False) for rule in rules):
                yield "/".join((*here, name))


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line of a file such as `.gitignore`."""

    pattern: re.Pattern[str]
    """Of a path from the folder of that file."""
    keeps: bool
    folders_only: bool


class _Ignored:
    """What files of one name say in the folders of a tree, in the language of `.gitignore`."""

    def __init__(self, root: Path, file_name: str) -> None:
        @cache
        def rules_in(folder: str) -> list[_Rule]:
            try:
                text = (root / folder / file_name).read_text(encoding="utf-8", errors="surrogateescape")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return []
            return [rule for line in text.splitlines() if (rule := _rule(line)) is not None]

        self._rules_in = rules_in

    def has(self, parts: Sequence[str]) -> bool:
        """Whether a file is ignored, by its own name or with a folder that it is in."""
        last = len(parts)
        return any(self.names(parts[:depth], is_folder=depth < last) for depth in range(1, last + 1))

    def names(self, parts: Sequence[str], *, is_folder: bool) -> bool:
        """Whether a path itself is ignored, given that the folder that it is in isn't: the last rule decides."""
        for depth in reversed(range(len(parts))):
            path = "/".join(parts[depth:])
            for rule in reversed(self._rules_in("/".join(parts[:depth]))):
                if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(path):
                    return not rule.keeps
        return False


_GLOB = re.compile(
    r"(?P<any>\*\*/)|(?P<below>/\*\*$)|(?P<many>\*+)|(?P<one>\?)|(?P<set>\[[!^]?\]?[^]]*\])|(?P<open>\[)|\\?(?P<as_is>.)"
)


def _rule(line: str) -> _Rule | None:
    text = re.sub(r"(?<!\\) +$", "", line)
    if not text or text.startswith("#"):
        return None
    keeps, text = text.startswith("!"), text.removeprefix("!")
    folders_only, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.removeprefix("/")
    pattern = "".join(map(_as_regex, _GLOB.finditer(text)))
    try:
        return _Rule(re.compile(pattern if anchored else f"(?:.*/)?{pattern}", re.DOTALL), keeps, folders_only)
    except re.error:
        return None  # as git: a set that isn't one matches nothing


def _as_regex(part: re.Match[str]) -> str:
    match part.lastgroup:
        case "any":
            return "(?:.*/)?"
        case "below":
            return "/.+"
        case "many":
            return "[^/]*"
        case "one":
            return "[^/]"
        case "open":
            return "["
        case "set":
            inside = part["set"][1:-1]
            body = re.sub(r"([][&~|^\\])", r"\\\1", inside[inside[:1] in ("!", "^") :])
            return f"(?!/)[{'^' if inside[:1] in ('!', '^') else ''}{body}]"
        case _:
            return re.escape(part["as_is"])
