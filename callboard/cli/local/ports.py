"""Ports that are taken, and by whom on our own addresses."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
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
