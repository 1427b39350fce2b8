"""The address that this node's Ray services listen on.

On one machine every node needs a loopback address of its own: Ray silently replaces 127.0.0.1 by the address of an
interface (m), and tells nodes apart by address. An address is taken by a name that ends with the process.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

import psutil

from callboard.agents.files.run_dir import Started
from callboard.agents.options import AgentOptions, split_address
from callboard.security.tls import is_loopback

_FIRST, _LAST = 10, 250
"""127.0.0.10 … 127.0.0.250: clear of the addresses that people use by hand."""


class NoAddress(Exception):
    """No address is free for this node."""


class NodeAddress:
    """The address of this node while its agent lives."""

    def __init__(self, options: AgentOptions, earlier: str = "") -> None:
        """Take an address: the one asked for, a loopback one of our own, or the one that reaches the cluster.

        Args:
            earlier: the loopback address of an earlier agent's Ray node, taken again if it is free.

        Raises:
            NoAddress: this host doesn't have the address that was asked for, every loopback address is taken, or the
                cluster's host can't be resolved.
        """
        self._claim: socket.socket | None = None
        host, port = split_address(options.ray_address or options.controller.partition(",")[0])
        if options.node_ip:
            self.ip = _own(options.node_ip)
        elif is_loopback(host):
            self.ip, self._claim = _take_loopback(earlier)
        else:
            self.ip = _local_end(host, port)

    def close(self) -> None:
        """Give it up."""
        if self._claim is not None:
            self._claim.close()


def _own(ip: str) -> str:
    """The address, which must be this host's: Ray would wait for ever for a node that nobody can reach (PG-13)."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError as error:
        raise NoAddress(f"node_ip: this host has no address {ip}; it has {', '.join(host_addresses())}") from error
    return ip


def host_addresses() -> list[str]:
    """The addresses that a node of this host may have, as people would write them."""
    found = [
        each.address
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
        # Addresses of one link need its name, and loopback is told as a whole.
        and "%" not in each.address
        and not is_loopback(each.address)
    ]
    return [*sorted(found), "127.0.0.2 … 127.255.255.254"]


def earlier_ip(recorded: Iterable[Started]) -> str:
    """Address of the Ray node that an earlier agent recorded; empty: none."""
    return next((str(each.facts.get("node_ip", "")) for each in recorded if each.role == "ray"), "")


def _take_loopback(earlier: str) -> tuple[str, socket.socket]:
    own = [f"127.0.0.{number}" for number in range(_FIRST, _LAST + 1)]
    for ip in [*(each for each in own if each == earlier), *own]:
        # An abstract name: no file to leave behind, and like loopback itself it belongs to the network namespace.
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0callboard/address/{ip}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return ip, claim
    raise NoAddress(f"127.0.0.{_FIRST} … 127.0.0.{_LAST} are all taken by other agents")


def _local_end(host: str, port: int) -> str:
    """The address of the interface that leads there; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise NoAddress(f"no way to {host}: {error}") from error
