"""Who reads the page: cookies, one-time links, and which requests are the page's own.

A browser logs in with a token once and keeps a cookie: the token, sealed, so that whoever reads the cookie can use it
here and nowhere else, until it ends. The token is looked up anew with every request, so that one that was revoked ends
its cookies, and a new token of the owner ends all. Nothing is kept here for a cookie; one outlives a restart.

A link of ``callboard page`` carries a code instead that counts once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping

from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.security.access import Access
from callboard.security.caller_roles import ANYBODY, Identity, Role
from callboard.security.dialing import AUTHORIZATION, SCHEME
from callboard.wire.refusals import LimitReached, NotAllowed, NotAuthenticated

LASTS_S = 12 * 3600
"""How long a login lasts: a working day."""

CODE_LASTS_S = 120.0
MOST_CODES = 100

ATTEMPTS_S = 5.0
"""Logins a second, of all browsers together; four times as many at once. Tokens can't be guessed; this spares work."""

LONGEST_TOKEN = 2_600
"""Longest token that fits a cookie of 4 KiB, sealed and written in base64."""

PEOPLE = frozenset({None, Role.OPERATOR, Role.TRAINER, Role.VIEWER})
"""Roles that the page is for; None: the owner."""

Metadata = list[tuple[str, str]]


class Logins:
    """The logins of one controller's page."""

    def __init__(
        self,
        access: Access,
        *,
        is_open: bool,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            access: knows who has which token.
            is_open: whether everybody may read, without a token.
            now_s: a clock that never goes back.
            wall_s: seconds since 1970.
        """
        self._access = access
        self._guest = access.guest_token() if is_open else ""
        self._now_s = now_s
        self._wall_s = wall_s
        self._sealed_by: tuple[str, Seal] = ("", Seal(b"\0" * 32))
        self._codes: dict[str, tuple[str, float]] = {}
        self._left, self._reckoned_s = 4 * ATTEMPTS_S, now_s()

    def metadata(self, cookie: str) -> Metadata:
        """What a request with this cookie shows to the guard; nothing: nobody is logged in, and the guard says so."""
        token = self._token_of(cookie) or self._guest
        return [(AUTHORIZATION, SCHEME + token)] if token else []

    def who(self, cookie: str) -> Identity:
        """Who reads the page.

        Raises:
            NotAuthenticated: nobody who is known.
        """
        return self._access.identify(self.metadata(cookie))

    def log_in(self, token: str) -> tuple[str, Identity]:
        """The cookie of whoever has a token, and who that is.

        Raises:
            NotAuthenticated: nobody has it.
            NotAllowed: it is no person's.
            LimitReached: too many try.
        """
        self._count_attempt()
        who = self._person(token)
        if who is ANYBODY:
            return "", who
        plain = json.dumps({"token": token, "until": self._wall_s() + LASTS_S})
        return base64.urlsafe_b64encode(self._seal().close(plain)).decode(), who

    def new_code(self, token: str) -> str:
        """A code that logs in whoever has a token, once and soon.

        Raises:
            NotAuthenticated: nobody has it.
            NotAllowed: it is no person's.
            LimitReached: too many codes wait.
        """
        self._person(token)
        now_s = self._now_s()
        self._codes = {code: held for code, held in self._codes.items() if held[1] > now_s}
        if len(self._codes) >= MOST_CODES:
            raise LimitReached(f"{MOST_CODES} links wait to be opened already; open one, or wait {CODE_LASTS_S:.0f} s")
        code = secrets.token_urlsafe(32)
        self._codes[hashlib.sha256(code.encode()).hexdigest()] = (token, now_s + CODE_LASTS_S)
        return code

    def redeem(self, code: str) -> tuple[str, Identity]:
        """The cookie for a code, which counts no more.

        Raises:
            NotAuthenticated: it was used, is too old or never was.
            LimitReached: too many try.
        """
        held = self._codes.pop(hashlib.sha256(code.encode()).hexdigest(), None)
        if held is None or held[1] <= self._now_s():
            self._count_attempt()
            raise NotAuthenticated(
                "the link was used already or is too old: it works once, within two minutes. Make a new one with "
                "`callboard page`"
            )
        return self.log_in(held[0])

    def _person(self, token: str) -> Identity:
        who = self._access.identify([(AUTHORIZATION, SCHEME + token)] if token else [])
        if who.role not in PEOPLE:
            raise NotAllowed(
                f"{who.name} has the role {who.role}, and the page is for people; log in with another token"
            )
        if len(token) > LONGEST_TOKEN:
            raise NotAllowed(f"the token has {len(token)} characters; those of the page have {LONGEST_TOKEN} at most")
        return who

    def _token_of(self, cookie: str) -> str:
        """The token in a cookie; empty: it is none of ours, or has ended."""
        if not cookie or not self._access.token:
            return ""
        try:
            plain = json.loads(self._seal().open(base64.urlsafe_b64decode(cookie.encode())))
        except (Unsealable, binascii.Error, ValueError):
            return ""
        return str(plain["token"]) if plain["until"] > self._wall_s() else ""

    def _seal(self) -> Seal:
        """Made from the owner's token, so that a new one ends every login."""
        token = self._access.token
        if self._sealed_by[0] != token:
            key = hashlib.blake2b(token.encode(), digest_size=32, person=b"callboard.page").digest()
            self._sealed_by = (token, Seal(key))
        return self._sealed_by[1]

    def _count_attempt(self) -> None:
        now_s = self._now_s()
        self._left = min(4 * ATTEMPTS_S, self._left + (now_s - self._reckoned_s) * ATTEMPTS_S)
        self._reckoned_s = now_s
        if self._left < 1:
            raise LimitReached("too many logins at once; try again in a few seconds")
        self._left -= 1


class Hosts:
    """Names by which the page may be called. A foreign site whose name was made to lead here is none of them."""

    def __init__(self, named: tuple[str, ...] = ()) -> None:
        """
        Args:
            named: further names than addresses, localhost and this machine's own.
        """
        own = {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._names = frozenset({"localhost", *own, *(name.lower() for name in named)})

    def knows(self, host_header: str) -> bool:
        """Whether a Host header names us."""
        host = host_header.rsplit(":", 1)[0] if not host_header.endswith("]") else host_header
        if host.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True


OWN_HEADER = "x-callboard-page"
"""Header of every request of the page that changes something: no other site's page may send it."""


def is_foreign(headers: Mapping[str, str], *, changes: bool) -> str:
    """Why a request can't be the page's own; empty: it is, or comes from a program.

    Args:
        changes: whether it may change something.
    """
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "the request comes from another site"
    origin = headers.get("origin", "")
    if origin and origin.partition("://")[2] != headers.get("host", ""):
        return f"the request comes from {origin[:200]}"
    if changes and not headers.get(OWN_HEADER):
        return f"the request lacks the header {OWN_HEADER}"
    return ""
