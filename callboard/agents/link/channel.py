"""The channel to the controller, and which of its answers are final."""

from __future__ import annotations

from pathlib import Path

import grpc

from callboard.security.dialing import Channel, open_channel
from callboard.security.tokens import find_token

REFUSALS = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Statuses that say "not you" or "not so": asking again changes nothing."""


def controller_channel(controller: str, *, token_file: str = "", http_proxy: bool) -> Channel:
    """A channel to the controller; the keepalive matches the minimum the controller sets.

    Args:
        controller: "host:port".
        token_file: file with the token that the agent shows; empty: it is found as by every program of this account.
        http_proxy: go through the proxy that the environment names.
    """
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", int(http_proxy)),
        # A channel a session: what one learned of a dead controller must not delay the next.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    stated = Path(token_file) if token_file else None
    return open_channel(controller, options, find=lambda: find_token(controller, stated))
