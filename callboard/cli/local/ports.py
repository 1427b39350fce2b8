"""Ports that are taken, and by whom on our own addresses; and that of Ray's dashboard, which only a Ray head that is
started with it installed (`ray[default]`) can show."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens on ``host:port``, or on every address with that port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connection is in TIME_WAIT is not taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise
    return False


def listening_in(network: str) -> list[str]:
    """ "host:port" of every listening socket of this machine on an address of ``network`` ("127.0.3.0/24")."""
    wanted = ipaddress.IPv4Network(network)
    return sorted(f"{host}:{port}" for host, port, _ in _listening() if host in wanted)


def listeners(address: str) -> list[int]:
    """Pids of this user's processes that listen on ``address`` ("host:port"); empty when they are another user's."""
    sockets = {f"socket:[{inode}]" for host, port, inode in _listening() if f"{host}:{port}" == address}
    return sorted(
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _holds(entry, sockets)
    )


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(str(descriptor.readlink()) in sockets for descriptor in (process / "fd").iterdir())
    except OSError:
        return False  # Somebody else's, or gone.


def _listening() -> Iterator[tuple[ipaddress.IPv4Address, int, int]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == _LISTENING:
                host, port = local.split(":")
                # The last four bytes of an address in IPv6 are the mapped address in IPv4; bytes are swapped.
                yield ipaddress.IPv4Address(bytes.fromhex(host[-8:])[::-1]), int(port, 16), int(inode)


_NEEDS = (
    *("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus", "opentelemetry.proto"),
    *("prometheus_client", "pydantic"),
)
"""What Ray looks for before it starts its dashboard (`ray.dashboard.optional_deps`). Told to show one that it can't, it
ends its head; told a port that is taken, it waits for it for a minute."""


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
