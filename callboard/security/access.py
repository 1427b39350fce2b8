"""Access: who makes a call, as its metadata and its certificate show.

The controller's own token stands for the account that started it (the owner), which may do everything; a token of a
grant stands for its client, and so does a certificate of the controller's authority. A token comes before a
certificate. Tokens are compared in constant time or by their hashes. Files that change are read again
within :data:`LOOK_EVERY_S`, so that a rotation or a revocation needs no restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from callboard.model.log import structlog
from callboard.security.caller_roles import ANYBODY, GUEST, OWNER, Identity, Role
from callboard.security.dialing import AUTHORIZATION, SCHEME
from callboard.security.grants import GRANTS_NAME, Grant, read_grants
from callboard.security.issued import ISSUED_NAME, LOCAL, maker_of, read_issued
from callboard.security.places import UnsafeFile
from callboard.security.signed_tokens import SignedTokenRules, SignedTokens, looks_signed
from callboard.security.tls import certified, version
from callboard.security.tokens import MAX_TOKEN_CHARS, TOKEN_NAME, controller_token, fingerprint, new_token, same
from callboard.wire.refusals import NotAuthenticated

_log = structlog.get_logger(__name__)

Credentials = tuple[tuple[str, str], ...]
"""Metadata of a call that says who calls."""

LOOK_EVERY_S = 1.0
"""How often a changed file is noticed; until then the old tokens count."""

REMEDY = (
    "On the controller's machine, call it from the account that started it and the token is found; elsewhere, log in "
    "with `callboard login`, or name a private file with a token in CALLBOARD_TOKEN_FILE"
)

FIGURES = frozenset({Role.OPERATOR, Role.VIEWER})
"""Roles that may read the figures, which name jobs of every pool."""


class Access:
    """Tells who makes a call."""

    def __init__(
        self,
        state_dir: Path,
        *,
        insecure: bool,
        certs: Path | None = None,
        jwt: SignedTokenRules | None = None,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            state_dir: where the controller's token and its grants lie.
            insecure: everybody is let in, with or without a token.
            certs: directory of the authority, with the list of what it took back; None: there is none.
            jwt: which signed tokens count; None: none do.
            now_s: a clock that never goes back.
            wall_s: seconds since 1970.
        """
        self._state_dir = state_dir
        self._insecure = insecure
        self._certs = certs
        self._jwt = jwt
        self._signed: SignedTokens | None = None
        self._revoked: frozenset[str] = frozenset()
        self._now_s = now_s
        self._wall_s = wall_s
        self._looked_s = now_s()
        self._seen: list[tuple[int, int] | None] = []
        self._grants: dict[str, Grant] = {}
        self.trouble = ""
        """Why a changed file is not used; empty: it is."""
        self._guest_token = ""
        self.token = ""
        """The owner's token; empty until :meth:`open`, and with --insecure."""

    def open(self) -> None:
        """Reads the tokens; makes the owner's when there is none.

        Raises:
            UnsafeFile: others can read a file, or it is broken.
            OSError: the token can't be made.
        """
        if not self._insecure:
            self._signed = SignedTokens(self._jwt) if self._jwt is not None else None
            self._read()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None, certificate: bytes = b"") -> Identity:
        """Who shows this metadata and this certificate, which gRPC has verified; empty: none.

        Raises:
            NotAuthenticated: nobody who is known.
        """
        if self._insecure:
            return ANYBODY
        shown = _bearer(metadata or ())
        certified = self._certified(certificate) if certificate else None
        if not shown and certified is not None:
            return certified
        if not shown:
            raise NotAuthenticated(
                f"the call carries no token, and this controller asks every caller for one. {REMEDY}"
            )
        if self._signed is not None and looks_signed(shown):
            self._look()
            return self._signed.identify(shown, self._wall_s())
        if (known := self._known(shown)) is None:
            raise NotAuthenticated(f"the token of the call is not valid here, or is no longer valid. {REMEDY}")
        return known

    def look_again(self) -> None:
        """A token was made just now: it counts at once."""
        self._looked_s = -LOOK_EVERY_S

    def guest_token(self) -> str:
        """A token of this process alone for whoever reads a page that is open to everybody."""
        self._guest_token = self._guest_token or new_token()
        return self._guest_token

    def may_read_figures(self, token: str) -> bool:
        """Whether the figures for Prometheus are for the bearer of a token."""
        if self._insecure:
            return True
        try:
            known = self.identify([(AUTHORIZATION, SCHEME + token)] if token else [])
        except NotAuthenticated:
            return False
        return known.role is None or known.role in FIGURES

    def _known(self, token: str) -> Identity | None:
        self._look()
        if (known := self._among_known(token)) is None:
            # It may have been made since the last look.
            self.look_again()
            if self._look():
                known = self._among_known(token)
        return known

    def _among_known(self, token: str) -> Identity | None:
        if len(token) > MAX_TOKEN_CHARS or not self.token:
            return None
        if same(token, self.token):
            return OWNER
        if self._guest_token and same(token, self._guest_token):
            return GUEST
        if not self._grants:
            return None
        found = self._grants.get(fingerprint(token))
        if found is None or found.is_over(self._wall_s() * 1000):
            return None
        return Identity(found.name, found.role, found.node)

    def _certified(self, certificate: bytes) -> Identity | None:
        """Who a certificate is; None: somebody who has to show a token besides.

        Raises:
            NotAuthenticated: it was taken back, or it ended while the connection is open.
        """
        self._look()
        found = certified(certificate)
        if found is None:
            return None
        if found.serial in self._revoked or self._wall_s() >= found.expires_s:
            what, verb = "has expired", "`callboard certs renew`"
            if found.serial in self._revoked:
                what, verb = "was revoked", maker_of(found.identity.role)
            raise NotAuthenticated(
                f"the certificate of {found.identity.name} {what}. Ask the person who runs the controller for a new "
                f"one ({verb})"
            )
        return None if found.identity.name == LOCAL else found.identity

    def _look(self) -> bool:
        """Takes what changed, and says whether it did; keeps what it has while a file can't be used."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        seen = self._versions()
        if seen == self._seen or seen[0] is None:
            return False
        try:
            self._read()
        except (OSError, UnsafeFile) as error:
            if str(error) != self.trouble:
                _log.error("tokens_not_read", why=str(error), remedy="mend the file; until then the old tokens count")
            self.trouble = str(error)
            return False
        return True

    def _read(self) -> None:
        token, grants = controller_token(self._state_dir), read_grants(self._state_dir)
        issued = read_issued(self._certs) if self._certs is not None else []
        self._revoked = frozenset(each.serial for each in issued if each.revoked_ms)
        self.token, self._grants = token, {each.sha256: each for each in grants}
        if self._signed is not None:
            self._signed.read()
        self._seen, self.trouble = self._versions(), ""

    def _versions(self) -> list[tuple[int, int] | None]:
        paths = [self._state_dir / name for name in (TOKEN_NAME, GRANTS_NAME)]
        paths += [self._certs / ISSUED_NAME] if self._certs is not None else []
        paths += [self._signed.key_file] if self._signed is not None else []
        return [version(path) for path in paths]


def bearer_of(header: str) -> str:
    """The token in the value of an Authorization header; empty: there is none."""
    return header[len(SCHEME) :].strip() if header[: len(SCHEME)].lower() == SCHEME.lower() else ""


def credentials_in(metadata: Iterable[tuple[str, str | bytes]]) -> Credentials:
    """What of a call's metadata says who calls, for :meth:`Access.identify`; the rest needn't be kept."""
    shown = next((value for key, value in metadata if key == AUTHORIZATION and isinstance(value, str)), None)
    return () if shown is None else ((AUTHORIZATION, shown),)


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    return next((bearer_of(value) for _, value in credentials_in(metadata)), "")
