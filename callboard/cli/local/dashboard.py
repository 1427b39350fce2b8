"""Ray's dashboard: only a Ray head that is started with it installed (`ray[default]`) can show it.

Ray itself, told to show one that it can't, ends its head; told a port that is taken, it waits for it for a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

_NEEDS = (
    *("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus", "opentelemetry.proto"),
    *("prometheus_client", "pydantic"),
)
"""What Ray looks for before it starts its dashboard (`ray.dashboard.optional_deps`)."""


def usable_port(port: int | None, *, starts_head: bool, tell: Callable[[str], None]) -> int | None:
    """The port of the dashboard that can be shown; None: there is none.

    Args:
        port: the one asked for; None: none is.
        starts_head: whether a head of Ray is started.
        tell: told in one sentence why there is none although one was asked for.
    """
    if port is None:
        return None
    if not starts_head:
        tell("There is no dashboard: no head of Ray is started here, and only that has one.")
        return None
    if not has_dashboard():
        tell("There is no dashboard: it is not installed. scripts/setup head or pip install 'ray[default]' brings it.")
        return None
    return port


def has_dashboard() -> bool:
    """Whether Ray's dashboard is installed (`ray[default]`)."""
    return all(_is_installed(name) for name in _NEEDS)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
