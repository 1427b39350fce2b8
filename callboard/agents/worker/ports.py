"""The TCP ports of this machine that workers were given: for their rendezvous, and as many as they ask for.

A port is given when nobody listens there, and to one worker only until that worker is proved gone. Several agents share
a machine (`callboard up`), so each port is also claimed in the kernel: by an abstract socket, which lies in the same
network namespace as the port and goes with the agent. An agent that takes over from another claims again what the
workers that go on were given.

What a program listens on that was not given a port here is seen only by trying, so a stranger may be faster between the
moment a port is given and that in which the worker listens.
"""

from __future__ import annotations

import errno
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from callboard.agents.runtime import HostError
from callboard.model.log import structlog
from callboard.model.names import WORKER_PORTS

_log = structlog.get_logger(__name__)

UNUSED_S = 600.0
"""A port reserved for a worker that was not started by then is free again: its job went elsewhere."""


class Claim(Protocol):
    """A claim on a port among the agents of this machine."""

    def close(self) -> None:
        """Give it up."""


class NoPorts(HostError):
    """The node has too few free ports."""


@dataclass
class _Held:
    """What one worker was given."""

    ports: tuple[int, ...] = ()
    rendezvous: int = 0
    claims: list[Claim] = field(default_factory=list)
    unused_until: float | None = None


class Ports:
    """Which ports each worker of this node was given, by the worker's name."""

    def __init__(
        self,
        among: range = WORKER_PORTS,
        *,
        clock: Callable[[], float] = monotonic,
        claim: Callable[[int], Claim | None] | None = None,
        is_free: Callable[[int], bool] | None = None,
    ) -> None:
        """
        Args:
            among: ports that workers may be given.
            clock: seconds.
            claim: claims a port; None when another agent has it.
            is_free: whether nobody uses a port.
        """
        self._among = among
        self._claim = claim or _claim
        self._is_free = is_free or _is_free
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def reserve(self, name: str) -> int:
        """A port for the rendezvous of a worker and its peers, before it is started. Asked again, the same.

        Raises:
            NoPorts: none is free.
        """
        self._forget_unused()
        held = self._held.get(name) or _Held(unused_until=self._clock() + UNUSED_S)
        if not held.rendezvous:
            held.rendezvous = self._find(name, 1, held.claims)[0]
        self._held[name] = held
        return held.rendezvous

    def give(self, name: str, count: int) -> tuple[int, ...]:
        """Ports for a worker that is started now. Asked again, the same.

        Raises:
            NoPorts: too few are free.
        """
        self._forget_unused()
        held = self._held.get(name) or _Held()
        if len(held.ports) != count:
            held.ports = self._find(name, count, held.claims)
        held.unused_until = None
        if held.ports or held.rendezvous:
            self._held[name] = held
        return held.ports

    def keep(self, name: str, said: Mapping[str, Sequence[int] | int]) -> None:
        """What an earlier agent wrote down (:meth:`facts`) of a worker that goes on."""
        ports, rendezvous = said.get("ports", ()), said.get("rendezvous", 0)
        assert not isinstance(ports, int)
        assert isinstance(rendezvous, int)
        held = _Held(tuple(ports), rendezvous)
        for port in (*held.ports, *([rendezvous] if rendezvous else [])):
            claim = self._claim(port)
            if claim is None:
                _log.warning("port_claimed_by_another_agent", port=port, worker=name)
            else:
                held.claims.append(claim)
        if held.ports or held.rendezvous:
            self._held[name] = held

    def facts(self, name: str) -> dict[str, list[int] | int]:
        """What a later agent must know."""
        held = self._held.get(name)
        return {} if held is None else {"ports": list(held.ports), "rendezvous": held.rendezvous}

    def release(self, name: str) -> None:
        """The worker is proved gone, or does not come."""
        held = self._held.pop(name, None)
        for claim in held.claims if held is not None else ():
            claim.close()

    def close(self) -> None:
        """The agent ends: whatever is still reserved is free."""
        for name in list(self._held):
            self.release(name)

    def _find(self, name: str, count: int, claims: list[Claim]) -> tuple[int, ...]:
        start = zlib.crc32(name.encode()) % len(self._among)  # so that neighbours seldom try the same ports
        found: list[int] = []
        fresh: list[Claim] = []
        for step in range(len(self._among)):
            if len(found) == count:
                break
            port = self._among[(start + step) % len(self._among)]
            claim = self._claim(port)
            if claim is None:
                continue
            if self._is_free(port):
                found.append(port)
                fresh.append(claim)
            else:
                claim.close()
        if len(found) < count:
            for claim in fresh:
                claim.close()
            among = f"{self._among[0]} … {self._among[-1]}"
            raise NoPorts(f"only {len(found)} of {count} ports are free among {among}")
        claims += fresh
        return tuple(found)

    def _forget_unused(self) -> None:
        now = self._clock()
        for name in [name for name, held in self._held.items() if held.unused_until and held.unused_until <= now]:
            self.release(name)


def _claim(port: int) -> socket.socket | None:
    """A claim on a port among the agents of this machine; None: another has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0callboard-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    """Whether nobody uses a port, on any address."""
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - bound, never listened on
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a machine without this family
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((anywhere, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 that is switched off
                    return False
    return True
