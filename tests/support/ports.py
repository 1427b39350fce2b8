"""A port to come back to: one that is still free when a server that was killed starts again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_MANY = 12_000


def steady_port(host: str = "127.0.0.1") -> int:
    """A free port below those that the kernel gives to whoever connects or asks for any: while a server is away, one of
    these may be another program's, for as long as a connection of it lasts."""
    lowest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = random.SystemRandom().randrange(lowest - _MANY, lowest)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
