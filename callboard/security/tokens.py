"""The token of a controller: how it is made and kept, and how programs of the same account find it.

The token lies in the controller's state directory (mode 0600) and stays the same when the controller restarts. As long
as a controller runs, it also registers address and token in the account's run directory, under a lock that ends with
its process: a registration whose lock is free is left over from a crash and is not believed, so that no token is sent
to whoever listens at that port now.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from callboard.security.contexts import CONTEXT_VARIABLE, context_for
from callboard.security.places import (
    NO_CONTEXT,
    TLS_VARIABLES,
    UnsafeFile,
    UnsafeRunDirectory,
    account_directory,
    make_private,
    read_private,
    run_directory,
    write_private,
)
from callboard.security.tls import TlsFiles, TlsParts, is_loopback

TOKEN_NAME = "token"  # noqa: S105 - a file's name
TOKEN_VARIABLE = "CALLBOARD_TOKEN"  # noqa: S105 - a variable's name
TOKEN_FILE_VARIABLE = "CALLBOARD_TOKEN_FILE"  # noqa: S105 - a variable's name

REGISTRY = ".tokens"
"""Directory of registrations. The dot keeps it apart from the directories of clusters, whose names have none."""

MAX_TOKEN_CHARS = 4096
"""Above any signed token; what is longer is not one, and gRPC cuts off headers at 8 KiB."""

MAX_REGISTRATION_BYTES = 64 << 10

_SENDABLE = re.compile(rf"[\x21-\x7e]{{16,{MAX_TOKEN_CHARS}}}")


class BadToken(Exception):
    """A token that was stated can't be used."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{source}: {why}")
        self.source = source
        self.why = why


def new_token() -> str:
    """A token nobody can guess: 256 bits."""
    return f"cb_{secrets.token_urlsafe(32)}"


def fingerprint(token: str) -> str:
    """What is kept of a token where the token itself must not be. Tokens of 256 bits need no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def same(one: str, other: str) -> bool:
    """Whether two tokens are equal, in a time that says nothing about where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def controller_token(state_dir: Path) -> str:
    """The token of the controller whose state is there; made when there is none.

    Raises:
        UnsafeFile: others can read it, or it is no token.
        OSError: it can't be made.
    """
    path = state_dir / TOKEN_NAME
    if not path.exists():
        write_private(path, new_token() + "\n")
    return _checked(read_private(path), path)


def read_token(path: Path) -> str:
    """The token in a file that somebody named.

    Raises:
        BadToken: it can't be read, others can read it, or it holds no token.
    """
    try:
        return _checked(read_private(path), path)
    except UnsafeFile as error:
        raise BadToken(str(path), error.why) from error


def find_token(
    address: str,
    token_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    stated_tls: TlsFiles | None = None,
) -> str:
    """The token for the controller at ``address``: that of the file, of CALLBOARD_TOKEN_FILE, of CALLBOARD_TOKEN, of
    the context in use if it is of this address, or the one that a controller of this account registered for it; empty:
    none is known. A certificate that a program states (``stated_tls``) says who it is, unless it names a file, too.

    Raises:
        BadToken: the one that is stated can't be used.
    """
    if stated_tls is not None and stated_tls.cert is not None and token_file is None:
        return ""
    named = token_file or (Path(environ[TOKEN_FILE_VARIABLE]) if environ.get(TOKEN_FILE_VARIABLE) else None)
    if named is not None:
        return read_token(named)
    if stated := environ.get(TOKEN_VARIABLE, "").strip():
        if not _SENDABLE.fullmatch(stated):
            raise BadToken(TOKEN_VARIABLE, "is not a token. Unset it, or set it to the text of a token.")
        return stated
    context = context_for(address, environ)
    if context is not None and context.token_file is not None:
        return read_token(context.token_file)
    tls = TlsFiles.stated(environ) or (context.tls if context is not None else None)
    if tls is not None and tls.cert is not None:
        return ""  # the certificate says who it is: a token that is found besides must not say something else
    return registered_token(address, environ)


def registered_token(address: str, environ: Mapping[str, str] = os.environ) -> str:
    """The token that a running controller of this account registered for ``address``; empty: there is none."""
    return str(_registration(address, environ).get("token", ""))


def _registration(address: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a running controller registered; empty: none did."""
    for registry in _registries(environ):
        for name in _names(address):
            if said := _registered(registry / name):
                return said
    return {}


def find_tls(
    address: str, environ: Mapping[str, str] = os.environ, *, stated: TlsFiles | None = None
) -> TlsParts | None:
    """What to connect to the controller at ``address`` with: the files ``stated``, those that CALLBOARD_TLS_CA, _CERT
    and _KEY name, those of the context in use if it is of this address, or those that a controller of this account
    registered; None: without TLS.

    Raises:
        BadToken: a file can't be used.
    """
    files = stated or TlsFiles.stated(environ)
    if files is None and (context := context_for(address, environ)) is not None:
        files = context.tls
    if files is None:
        said = _registration(address, environ).get("tls")
        files = TlsFiles(*(Path(each) for each in said)) if isinstance(said, list) and len(said) == 3 else None
    try:
        return files.read() if files is not None else None
    except UnsafeFile as error:
        raise BadToken(str(error.path), error.why) from error


@lru_cache(maxsize=64)
def is_loopback_address(address: str) -> bool:
    """Whether what is sent to "host:port" stays on this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))


def forget_stated_token() -> None:
    """Takes token, certificate and context out of the environment: they are another controller's. A new controller
    makes its own, which all that is started with it finds."""
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, *TLS_VARIABLES.values()):
        os.environ.pop(variable, None)
    os.environ[CONTEXT_VARIABLE] = NO_CONTEXT


class Registration:
    """Address and token of a running controller, where programs of the same account look for them."""

    def __init__(
        self, address: str, token: str, environ: Mapping[str, str] = os.environ, *, tls: TlsFiles | None = None
    ) -> None:
        """Registers it, with what to connect with.

        Attributes:
            refused: directories that can't be used, with the reason; the others are.
        """
        self._held: list[tuple[Path, int]] = []
        self.token = token
        self.refused: list[str] = []
        for registry in _registries(environ):
            try:
                for name in _names(address):
                    plain = {"address": address, "token": token, "tls": [str(path) for path in tls] if tls else None}
                    self._held.append((registry / name, _register(registry / name, plain)))
            except (OSError, UnsafeRunDirectory) as error:
                self.refused.append(str(error))

    def close(self) -> None:
        """Takes it back."""
        for path, descriptor in self._held:
            try:
                ours = os.fstat(descriptor).st_ino == path.stat().st_ino
            except OSError:
                ours = False  # removed by somebody else, or replaced by a controller that came later
            if ours:
                path.unlink(missing_ok=True)
            os.close(descriptor)
            tidy(path.parent.parent)
        self._held.clear()


def tidy(base: Path) -> None:
    """Removes registrations below ``base`` whose controllers are gone, and the directories if they are empty now."""
    registry = base / REGISTRY
    with suppress(OSError):  # gone, or not empty: another controller's
        for path in registry.iterdir():
            if not path.name.startswith(".") and _is_left_over(path):
                path.unlink(missing_ok=True)
        registry.rmdir()
        base.rmdir()


def _checked(text: str, path: Path) -> str:
    if not _SENDABLE.fullmatch(text):
        raise UnsafeFile(path, "does not hold a token: one line of at least 16 characters, without spaces.")
    return text


def _registries(environ: Mapping[str, str]) -> list[Path]:
    return list(dict.fromkeys((run_directory(environ) / REGISTRY, account_directory() / REGISTRY)))


def _names(address: str) -> list[str]:
    """Files that stand for an address. What listens everywhere is found by its loopback addresses; localhost is
    either of them."""
    host, _, port = address.rpartition(":")
    both = ["127.0.0.1", "[::1]"]
    hosts = {"0.0.0.0": both, "[::]": both, "localhost": both}.get(host, [host])  # noqa: S104 - to be recognised
    return [f"{each.replace('/', '_')}:{port}" for each in hosts]


def _register(path: Path, plain: Mapping[str, Any]) -> int:
    """Makes the directory and puts a registration there."""
    while True:
        make_private(path.parent.parent)
        make_private(path.parent)
        # The last other controller removes the directory when it stops, at any time.
        with suppress(FileNotFoundError):
            return _write_locked(path, plain)


def _is_left_over(path: Path) -> bool:
    """Whether the controller of a registration is gone: its lock is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_locked(path: Path, plain: Mapping[str, Any]) -> int:
    """Puts a registration there, locked as long as the descriptor is open."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, json.dumps(plain).encode() + b"\n")
    temporary.replace(path)
    return descriptor


def _registered(path: Path) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            return {}
        if _is_free(descriptor):
            return {}  # its controller is gone; somebody else may listen there
        said: dict[str, Any] = json.loads(os.read(descriptor, MAX_REGISTRATION_BYTES))
        _checked(str(said["token"]), path)
    except (OSError, ValueError, KeyError, TypeError, UnsafeFile):
        return {}
    else:
        return said
    finally:
        os.close(descriptor)
