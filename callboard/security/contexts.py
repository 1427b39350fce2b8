"""Contexts: controllers that this account logged in to, with the credentials for each.

They lie in the user's configuration (``$XDG_CONFIG_HOME/callboard``, else ``~/.config/callboard``): ``contexts.json``
holds their addresses and which one is used, a private directory of each its token and certificate.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

from callboard.model.frozen import dataclass
from callboard.model.names import is_name
from callboard.security.places import NO_CONTEXT, UnsafeFile, locked, make_private, read_private, write_private
from callboard.security.tls import TlsFiles, TlsParts

CONTEXT_VARIABLE = "CALLBOARD_CONTEXT"
_FILE = "contexts.json"


class BadContext(Exception):
    """A context can't be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Context:
    """One controller.

    Attributes:
        name: unique.
        address: "host:port".
    """

    name: str
    address: str
    folder: Path

    @property
    def token_file(self) -> Path | None:
        """The file with its token, if it has one."""
        return path if (path := self.folder / "token").exists() else None

    @property
    def tls(self) -> TlsFiles | None:
        """What to connect with, if it is reached by TLS."""
        found = [path if path.exists() else None for path in self._pems()]
        return TlsFiles(*found) if any(found) else None

    def _pems(self) -> list[Path]:
        return [self.folder / name for name in ("ca.pem", "cert.pem", "cert.key")]

    def keep(self, token: str, tls: TlsParts | None) -> None:
        """Writes its credentials.

        Raises:
            UnsafeRunDirectory, OSError: they can't be kept.
        """
        make_private(self.folder)
        parts = (tls.ca, tls.cert, tls.key) if tls is not None else (b"", b"", b"")
        kept = {self.folder / "token": token, **dict(zip(self._pems(), (each.decode() for each in parts), strict=True))}
        for path, text in kept.items():
            if text:
                write_private(path, text.strip() + "\n")
            else:
                path.unlink(missing_ok=True)


@dataclass
class Contexts:
    """All of an account.

    Attributes:
        current: name of the one that is used; empty: none.
    """

    known: dict[str, Context] = field(default_factory=dict)
    current: str = ""


def config_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's configuration of callboard; None: nobody says where it is."""
    if stated := environ.get("XDG_CONFIG_HOME"):
        return Path(stated) / "callboard"
    home = environ.get("HOME")
    return Path(home) / ".config" / "callboard" if home else None


def read_contexts(environ: Mapping[str, str] = os.environ) -> Contexts:
    """All contexts.

    Raises:
        BadContext: the file can't be used.
    """
    base = config_directory(environ)
    if base is None or not (base / _FILE).exists():
        return Contexts()
    try:
        plain = json.loads(read_private(base / _FILE, most_bytes=1 << 20))
        known = {name: Context(name, str(address), base / name) for name, address in plain["contexts"].items()}
        return Contexts(known, str(plain["current"]))
    except UnsafeFile as error:
        raise BadContext(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadContext(f"{base / _FILE} is broken ({error}); remove it and log in again") from error


def current_context(environ: Mapping[str, str] = os.environ) -> Context | None:
    """The context that is used: the one that CALLBOARD_CONTEXT names, else that of `callboard context use`.

    Raises:
        BadContext: there is none of that name.
    """
    stated = environ.get(CONTEXT_VARIABLE, "")
    if stated == NO_CONTEXT:
        return None
    contexts = read_contexts(environ)
    name = stated or contexts.current
    if name and name not in contexts.known:
        raise BadContext(f"there is no context {name}; `callboard context list` shows those there are")
    return contexts.known.get(name)


def context_for(address: str, environ: Mapping[str, str] = os.environ) -> Context | None:
    """The context that is used, if it is of the controller at ``address``, or that is one of its several."""
    try:
        found = current_context(environ)
    except BadContext:
        return None  # whoever asks where the controller is hears of it
    return found if found is not None and address in (found.address, *found.address.split(",")) else None


def log_in(
    name: str, address: str, token: str, tls: TlsParts | None, environ: Mapping[str, str] = os.environ
) -> Context:
    """Keeps a context with its credentials, and uses it from now on.

    Raises:
        BadContext: the name can't be one.
        UnsafeRunDirectory, OSError: it can't be kept.
    """
    if not is_name(name) or name == NO_CONTEXT:
        raise BadContext(f"{name!r} can't be the name of a context; take letters, digits, '.', '_' and '-'")
    with _changing(environ) as (base, contexts):
        made = contexts.known[name] = Context(name, address, base / name)
        made.keep(token, tls)
        contexts.current = name
    return made


def use(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Uses a context from now on; "none": none.

    Raises:
        BadContext: there is none of that name.
    """
    with _changing(environ) as (_, contexts):
        if name != NO_CONTEXT and name not in contexts.known:
            raise BadContext(f"there is no context {name}; `callboard context list` shows those there are")
        contexts.current = "" if name == NO_CONTEXT else name


def remove(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Forgets a context and its credentials.

    Raises:
        BadContext: there is none of that name.
    """
    with _changing(environ) as (_, contexts):
        if (gone := contexts.known.pop(name, None)) is None:
            raise BadContext(f"there is no context {name}; `callboard context list` shows those there are")
        shutil.rmtree(gone.folder, ignore_errors=True)
        contexts.current = "" if contexts.current == name else contexts.current


@contextmanager
def _changing(environ: Mapping[str, str]) -> Iterator[tuple[Path, Contexts]]:
    """The contexts, written back at the end; one program at a time."""
    base = config_directory(environ)
    if base is None:
        raise BadContext("neither XDG_CONFIG_HOME nor HOME is set, so there is no place for contexts; set one")
    make_private(base)
    with locked(base / _FILE):
        contexts = read_contexts(environ)
        yield base, contexts
        addresses = {name: each.address for name, each in sorted(contexts.known.items())}
        write_private(base / _FILE, json.dumps({"current": contexts.current, "contexts": addresses}, indent=1) + "\n")
