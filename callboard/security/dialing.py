"""Channels to a controller: by TLS where its certificate is known, and with the caller's token in every call.

A cluster may have several controllers of which one leads, "a:7700,b:7700": a channel goes to one of them, and to
another one when that is gone or says who leads. All channels of a process that state the same addresses go to the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from callboard.security.places import TLS_VARIABLES
from callboard.security.tls import TlsFiles, TlsParts
from callboard.security.tokens import BadToken, find_tls, find_token, is_loopback_address
from callboard.wire.errors import FailedCall, parse_error
from callboard.wire.refusals import CallError, ErrorReason

AUTHORIZATION = "authorization"
"""The metadata key, as OAuth and Prometheus use it: "Bearer <token>"."""

SCHEME = "Bearer "

CLOSE_S = 30.0
"""How long calls of a channel may go on that was replaced because a certificate was."""

LOOK_EVERY_S = 1.0
"""How often a channel that does not connect looks for another certificate."""

FindTls = Callable[[str], TlsParts | None]
FindToken = Callable[[str], str]


_PATIENCE_S = 1.0
"""How long one of several controllers may take to be reached before another one is tried."""

KEEPALIVE: tuple[tuple[str, int], ...] = (
    # Shorter than the 40 s a cut link went unnoticed; the server's minimum is set to match (docs/agents.md).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of a channel that lasts."""

_SEVERAL_OPTIONS = MappingProxyType(
    {
        "grpc.keepalive_time_ms": 2_000,
        "grpc.keepalive_timeout_ms": 2_000,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.ping_timeout_ms": 2_000,
    }
)
"""Where another controller may lead by now, one that is silent is noticed within 4 s."""


class Whereabouts:
    """Which of the controllers of a cluster leads, as far as this process knows.

    Attributes:
        stated: all, as they were stated.
        current: the one to go to; one that another controller named need not be among them.
    """

    def __init__(self, stated: str) -> None:
        """
        Args:
            stated: "host:port", or several with commas between them.
        """
        self.stated = tuple(stated.split(","))
        self.current = self.stated[0]

    def leads(self, address: str) -> None:
        """Somebody said who leads."""
        self.current = address

    def failed(self, address: str) -> None:
        """One is not there, or doesn't lead: the next that was stated, unless others know better by now."""
        if address == self.current:
            after = self.stated.index(address) + 1 if address in self.stated else 0
            self.current = self.stated[after % len(self.stated)]


@lru_cache(maxsize=64)
def whereabouts(stated: str) -> Whereabouts:
    """What this process knows of a cluster."""
    return Whereabouts(stated)


class Channel(grpc.aio.Channel):
    """A channel whose calls carry a token. Token and certificate are looked up once and kept; :meth:`renew` looks
    again.

    No interceptor: those of grpc.aio put a task of their own around every call.
    """

    def __init__(
        self, where: Whereabouts, options: Sequence[tuple[str, Any]], find: FindToken, find_tls: FindTls
    ) -> None:
        """
        Args:
            find: looks for the token for an address; empty: none is known.
            find_tls: looks for what to connect with by TLS; None: without.

        Raises:
            BadToken: a file can't be used.
        """
        self._where = where
        self._address = where.current
        several = _SEVERAL_OPTIONS if len(where.stated) > 1 else {}
        self._options = list({**dict(options), **several}.items())
        self._find = find
        self._find_tls = find_tls
        self._token: str | None = None
        """Empty: none is known; None: it was not looked for yet."""
        self._tls = find_tls(self._address)
        self._inner = self._dialed()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return self._address

    def renew(self) -> bool:
        """Looks for token and certificate again; whether one is another now."""
        before, self._token = self._token or "", self._find(self._address)
        return self.renew_certificate() or self._token != before

    def renew_certificate(self) -> bool:
        """Looks for the certificate again; whether it is another now."""
        try:
            tls = self._find_tls(self._address)
        except BadToken:
            return False  # it is being replaced just now, or is broken; the one there was may still do
        if tls == self._tls:
            return False
        self._dial_again(tls)
        return True

    def moved(self, failed: FailedCall | None = None) -> bool:
        """Goes to another controller after a call failed, as far as its error says which; whether it does.

        Args:
            failed: how it failed; None: nothing could be reached.
        """
        said = parse_error(failed) if failed is not None else CallError("UNAVAILABLE")
        if said.reason is ErrorReason.NOT_LEADER:
            certified = self._tls is not None and self._tls.cert
            for_tokens = "" if certified else said.metadata.get("leader_tokens_at", "")
            if leader := for_tokens or said.metadata.get("leader", ""):
                # One that was found meanwhile counts more than what a standby says of before.
                if self._where.current == self._address:
                    self._where.leads(leader)
            else:
                self._where.failed(self._address)
        else:
            self._where.failed(self._address)
        return self._go()

    def _go(self) -> bool:
        """Connects to where the leader is by now."""
        if self._where.current == self._address:
            return False
        self._address = self._where.current
        self._token = None
        try:
            tls = self._find_tls(self._address)
        except BadToken:
            tls = self._tls
        self._dial_again(tls)
        return True

    def _dial_again(self, tls: TlsParts | None) -> None:
        self._tls, old = tls, self._inner
        self._inner = self._dialed()
        closing = asyncio.ensure_future(old.close(CLOSE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries.

        Raises:
            BadToken: it would be readable on the way.
        """
        if self._token is None:
            self._token = self._find(self._address)
        if not self._token:
            return ()
        if self._tls is None and not is_loopback_address(self._address):
            raise BadToken(
                "the token",
                f"would be readable on the way to {self._address}. Name the file of the controller's authority in "
                f"{TLS_VARIABLES['ca']}; or unset the token, if the controller runs with --insecure.",
            )
        return ((AUTHORIZATION, SCHEME + self._token),)

    def unary_unary(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown("unary_unary", *arguments, **more)

    def unary_stream(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown("unary_stream", *arguments, **more)

    def stream_unary(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown("stream_unary", *arguments, **more)

    def stream_stream(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown("stream_stream", *arguments, **more)

    def _dialed(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._tls.channel_credentials(), options=self._options)

    def _shown(self, kind: str, *made_of: Any, **made_with: Any) -> Any:
        inner, call = self._inner, getattr(self._inner, kind)(*made_of, **made_with)

        def authorized(*arguments: Any, metadata: Sequence[tuple[str, Any]] | None = None, **more: Any) -> Any:
            nonlocal inner, call
            self._go()
            if inner is not self._inner:
                inner, call = self._inner, getattr(self._inner, kind)(*made_of, **made_with)
            return call(*arguments, metadata=(*(metadata or ()), *self.metadata()), **more)

        return authorized

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        """As of grpc.aio."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of grpc.aio."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of grpc.aio."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of grpc.aio; and meanwhile a certificate may be replaced: one that has ended never connects. Of several
        controllers: once one of them is reached."""
        several = len(self._where.stated) > 1
        while several or self._tls is not None:
            inner = self._inner
            try:
                async with asyncio.timeout(_PATIENCE_S if several else LOOK_EVERY_S):
                    await inner.channel_ready()
            except grpc.aio.UsageError:
                if inner is self._inner:
                    raise  # its owner closed it
                # Another call went on to another controller meanwhile, and closed what was waited for.
            except TimeoutError:
                if not (several and self.moved()):
                    self.renew_certificate()
            else:
                return
        await self._inner.channel_ready()


def open_channel(
    address: str,
    options: Sequence[tuple[str, Any]] = (),
    *,
    find: FindToken | None = None,
    tls: TlsFiles | None = None,
) -> Channel:
    """A channel to the controller at ``address``.

    Args:
        address: "host:port", or those of several controllers of which one leads, with commas between them.
        find: looks for the token for an address; None: :func:`callboard.security.tokens.find_token`.
        tls: files to connect with; None: :func:`callboard.security.tokens.find_tls` finds them.
    """
    where = whereabouts(address)

    def find_stated_token(at: str) -> str:
        # All controllers of a cluster know the same tokens.
        look = find or partial(find_token, stated_tls=tls)
        return next(filter(None, map(look, (at, address, *where.stated))), "")

    def find_stated_tls(at: str) -> TlsParts | None:
        return next(filter(None, (find_tls(each, stated=tls) for each in (at, address, *where.stated))), None)

    return Channel(where, options, find_stated_token, find_stated_tls)
