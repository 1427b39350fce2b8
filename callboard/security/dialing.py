"""Channels to a controller: by TLS where its certificate is known, and with the caller's token in every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from callboard.security.places import TLS_VARIABLES
from callboard.security.tls import TlsParts
from callboard.security.tokens import BadToken, find_tls, find_token, is_loopback_address

AUTHORIZATION = "authorization"
"""The metadata key, as OAuth and Prometheus use it: "Bearer <token>"."""

SCHEME = "Bearer "

CLOSE_S = 30.0
"""How long calls of a channel may go on that was replaced because a certificate was."""

LOOK_EVERY_S = 1.0
"""How often a channel that does not connect looks for another certificate."""

FindTls = Callable[[], TlsParts | None]


class Channel(grpc.aio.Channel):
    """A channel whose calls carry a token. Token and certificate are looked up once and kept; :meth:`renew` looks
    again.

    No interceptor: those of grpc.aio put a task of their own around every call.
    """

    def __init__(
        self, address: str, options: Sequence[tuple[str, Any]], find: Callable[[], str], find_tls: FindTls
    ) -> None:
        """
        Args:
            address: "host:port".
            options: of gRPC.
            find: looks for the token; empty: none is known.
            find_tls: looks for what to connect with by TLS; None: without.

        Raises:
            BadToken: a file can't be used.
        """
        self._address = address
        self._options = list(options)
        self._find = find
        self._find_tls = find_tls
        self._token = ""
        self._tls = find_tls()
        self._inner = self._dialed()
        self._closing: set[asyncio.Task[None]] = set()

    def renew(self) -> bool:
        """Looks for token and certificate again; whether one is another now."""
        before, self._token = self._token, self._find()
        return self.renew_certificate() or self._token != before

    def renew_certificate(self) -> bool:
        """Looks for the certificate again; whether it is another now."""
        try:
            tls = self._find_tls()
        except BadToken:
            return False  # it is being replaced just now, or is broken; the one there was may still do
        if tls == self._tls:
            return False
        self._tls, old = tls, self._inner
        self._inner = self._dialed()
        closing = asyncio.ensure_future(old.close(CLOSE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return True

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries.

        Raises:
            BadToken: it would be readable on the way.
        """
        if not self._token:
            self._token = self._find()
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
        """As of grpc.aio; and meanwhile a certificate may be replaced: one that has ended never connects."""
        while self._tls is not None:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._inner.channel_ready()
            except TimeoutError:
                self.renew_certificate()
            else:
                return
        await self._inner.channel_ready()


def open_channel(
    address: str, options: Sequence[tuple[str, Any]] = (), *, find: Callable[[], str] | None = None
) -> Channel:
    """A channel to the controller at ``address``.

    Args:
        address: "host:port".
        options: of gRPC.
        find: looks for the token; None: :func:`callboard.security.tokens.find_token`.
    """
    return Channel(address, options, find or (lambda: find_token(address)), lambda: find_tls(address))
