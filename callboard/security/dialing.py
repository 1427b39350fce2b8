"""Channels to a controller that show it the caller's token with every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from callboard.security.tokens import find_token

AUTHORIZATION = "authorization"
"""The metadata key, as OAuth and Prometheus use it: "Bearer <token>"."""

SCHEME = "Bearer "


class Channel(grpc.aio.Channel):
    """A channel whose calls carry a token. It is looked up with the first call and kept; :meth:`renew` looks again.

    No interceptor: those of grpc.aio put a task of their own around every call.
    """

    def __init__(self, inner: grpc.aio.Channel, find: Callable[[], str]) -> None:
        """
        Args:
            inner: the channel itself.
            find: looks for the token; empty: none is known.
        """
        self._inner = inner
        self._find = find
        self._token = ""

    def renew(self) -> bool:
        """Looks for the token again; whether it is another one now."""
        before, self._token = self._token, self._find()
        return self._token != before

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        if not self._token:
            self._token = self._find()
        return ((AUTHORIZATION, SCHEME + self._token),) if self._token else ()

    def unary_unary(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown(self._inner.unary_unary(*arguments, **more))

    def unary_stream(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown(self._inner.unary_stream(*arguments, **more))

    def stream_unary(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown(self._inner.stream_unary(*arguments, **more))

    def stream_stream(self, *arguments: Any, **more: Any) -> Any:
        """As of grpc.aio."""
        return self._shown(self._inner.stream_stream(*arguments, **more))

    def _shown(self, call: Any) -> Any:
        def authorized(*arguments: Any, metadata: Sequence[tuple[str, Any]] | None = None, **more: Any) -> Any:
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
        """As of grpc.aio."""
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
    return Channel(grpc.aio.insecure_channel(address, options=list(options)), find or (lambda: find_token(address)))
