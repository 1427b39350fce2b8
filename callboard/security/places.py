"""Places of this account: the run directory, private files, and how to tell that neither was tampered with."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

NO_CONTEXT = "none"
"""Stands for no context of those that this account logged in to, in the variable and for `callboard context use`."""

CERTS_NAME = "certs"
"""Directory below the state directory where the controller looks for certificates."""

MAX_SECRET_BYTES = 64 << 10
"""Above any token, key or certificate chain; a larger file is another kind of file."""

TLS_VARIABLES = {"ca": "CALLBOARD_TLS_CA", "cert": "CALLBOARD_TLS_CERT", "key": "CALLBOARD_TLS_KEY"}
"""Variables that name the files with which a program connects."""


class UnsafeRunDirectory(Exception):
    """The run directory could be written by somebody else."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path = path
        self.why = why


class UnsafeFile(Exception):
    """A file with a secret can't be used: it is missing, or others can read it.

    Attributes:
        why: what is wrong and what to do, as sentences.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


def run_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's clusters keep their records: the first that is set of CALLBOARD_RUN_DIR,
    XDG_RUNTIME_DIR/callboard, /tmp/callboard-<uid>."""
    if stated := environ.get("CALLBOARD_RUN_DIR"):
        return Path(stated).absolute()
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "callboard"
    return account_directory()


def account_directory() -> Path:
    """The directory of this account that no variable moves: programs whose environments differ both find it."""
    return Path(f"/tmp/callboard-{os.getuid()}")  # noqa: S108 - owner and mode are checked by `make_private`.


def make_private(path: Path) -> None:
    """Makes ``path`` with mode 0700.

    Raises:
        UnsafeRunDirectory: it exists and belongs to somebody else, or others may write to it.
    """
    with suppress(FileExistsError):  # what is there is judged below
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeRunDirectory(path, "is not a directory")
    if found.st_uid != os.getuid():
        raise UnsafeRunDirectory(path, f"belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        raise UnsafeRunDirectory(path, "can be written by others")


def write_private(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Writes a file that only this account can read; a reader sees the old one or the new one, nothing between.

    Args:
        durable: it is on disk then, which takes a while.

    Raises:
        OSError: it can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        if durable:
            os.fsync(descriptor)
    temporary.replace(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other programs from changing a file, as long as the block runs."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Held(Exception):
    """Another program has a lock.

    Attributes:
        holder: who it says it is.
    """

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is held by {holder}")
        self.holder = holder


def take_lock(path: Path, who: str) -> int:
    """Takes the lock that a file is; it ends with this process, however that ends.

    Args:
        who: written into the file, for others' messages.

    Returns:
        A descriptor; to close it gives the lock back.

    Raises:
        Held: another program has it.
        FileNotFoundError: its directory is not there, or the file was removed meanwhile: such a lock keeps nobody out.
        OSError: the file can't be made or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise Held(path, holder or "unknown") from error
        raise
    if not os.fstat(descriptor).st_nlink:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, who.encode(), 0)
    return descriptor


def read_private(path: Path, *, most_bytes: int = MAX_SECRET_BYTES) -> str:
    """What a file with a secret holds, without surrounding white space.

    Raises:
        UnsafeFile: it can't be read, is no plain file, or others can read or write it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnsafeFile(path, f"can't be read ({error.strerror}).") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFile(path, "is not a plain file.")
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o077:
            raise UnsafeFile(path, "others can read it or put another in its place. Run `chmod 600` on it.")
        data = _read_all(descriptor, most_bytes + 1)
    except OSError as error:
        raise UnsafeFile(path, f"can't be read ({error.strerror}).") from error
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise UnsafeFile(path, f"holds more than {most_bytes} bytes.")
    try:
        return data.decode().strip()
    except UnicodeDecodeError as error:
        raise UnsafeFile(path, "is not text.") from error


def _read_all(descriptor: int, most_bytes: int) -> bytes:
    data = b""
    while len(data) < most_bytes and (chunk := os.read(descriptor, most_bytes - len(data))):
        data += chunk
    return data
