"""Access: who makes a call, as its metadata shows.

The controller's own token stands for the account that started it (the owner), which may do everything. Tokens are
compared in constant time, and a token file that changes is read again within :data:`LOOK_EVERY_S`, so that a rotation
needs no restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from callboard.security.dialing import AUTHORIZATION, SCHEME
from callboard.security.places import UnsafeFile
from callboard.security.tokens import MAX_TOKEN_CHARS, TOKEN_NAME, controller_token, same
from callboard.wire.refusals import NotAuthenticated

LOOK_EVERY_S = 1.0
"""How often a changed token file is noticed; until then the old token counts."""

REMEDY = (
    "On the controller's machine, call it from the account that started it and the token is found; elsewhere, name a "
    "private file with a token in CALLBOARD_TOKEN_FILE"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a call.

    Attributes:
        name: for the audit log.
    """

    name: str


ANYBODY = Identity("anybody")
"""Every caller of a controller that runs with --insecure."""

OWNER = Identity("owner")
"""The account that started the controller."""

_caller: ContextVar[Identity] = ContextVar("callboard_caller", default=OWNER)


def caller() -> Identity:
    """Who makes the call that this task handles; what the controller does by itself is done by its owner."""
    return _caller.get()


def handle_for(identity: Identity) -> None:
    """Says who makes the call that this task handles."""
    _caller.set(identity)


class Access:
    """Tells who makes a call."""

    def __init__(self, state_dir: Path, *, insecure: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            state_dir: where the controller's token lies.
            insecure: everybody is let in, with or without a token.
            now_s: a clock that never goes back.
        """
        self._path = state_dir / TOKEN_NAME
        self._insecure = insecure
        self._now_s = now_s
        self._looked_s = now_s()
        self._seen: tuple[int, int] | None = None
        self.trouble = ""
        """Why a changed token file is not used; empty: it is."""
        self.token = ""
        """The owner's token; empty until :meth:`open`, and with --insecure."""

    def open(self) -> None:
        """Reads the owner's token, or makes it.

        Raises:
            UnsafeFile: others can read it, or it is no token.
            OSError: it can't be made.
        """
        if not self._insecure:
            self.token = controller_token(self._path.parent)
            self._seen = _version(self._path)

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
        """Who shows this metadata.

        Raises:
            NotAuthenticated: nobody who is known.
        """
        if self._insecure:
            return ANYBODY
        shown = _bearer(metadata or ())
        if not shown:
            raise NotAuthenticated(
                f"the call carries no token, and this controller asks every caller for one. {REMEDY}"
            )
        if not self.admits(shown):
            raise NotAuthenticated(f"the token of the call is not valid here, or no longer. {REMEDY}")
        return OWNER

    def admits(self, token: str) -> bool:
        """Whether a token is the owner's."""
        if self._insecure:
            return True
        self._look()
        return bool(self.token) and len(token) <= MAX_TOKEN_CHARS and same(token, self.token)

    def _look(self) -> None:
        """Takes a rotated token; keeps the one it has while the file can't be used."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        seen = _version(self._path)
        if seen in (None, self._seen):
            return
        try:
            self.token, self._seen, self.trouble = controller_token(self._path.parent), seen, ""
        except (OSError, UnsafeFile) as error:
            self.trouble = str(error)


def bearer_of(header: str) -> str:
    """The token in the value of an Authorization header; empty: there is none."""
    return header[len(SCHEME) :].strip() if header[: len(SCHEME)].lower() == SCHEME.lower() else ""


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == AUTHORIZATION and isinstance(value, str):
            return bearer_of(value)
    return ""


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns)
