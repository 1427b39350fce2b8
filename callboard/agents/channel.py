"""The channel to the controller, and which of its answers are final."""

from __future__ import annotations

import grpc

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


def channel_options(*, http_proxy: bool) -> list[tuple[str, int]]:
    """Options of the agent's channel; the keepalive matches the minimum the controller sets."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", int(http_proxy)),
        # A channel a session: what one learned of a dead controller must not delay the next.
        ("grpc.use_local_subchannel_pool", 1),
    ]
