"""The network: streams between agents and the controller, which lose, repeat and reorder messages.

Harsher than gRPC, where a stream that lives loses and reorders nothing: a protocol that survives this survives that.
A lost message costs its stream within the keepalive, as on a real connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from callboard.simulation.options import Fault
from callboard.simulation.world.virtual_time import Timeline

KEEPALIVE_MS = 15_000
"""Ping every 10 s, given up after 5 s: by then both sides know that a connection is dead."""

REFUSED = "refused: "
"""How the reason begins for which a stream ends that its agent should not open again."""

STUCK_HELLOS = 0.03
"""Share of Hellos that wait in a connection which their agent gives up meanwhile. One may reach a controller that was
started after it was sent, as through a proxy that keeps what it could not pass on."""

Message = tuple[str, Any]
"""(kind, content); the kinds are the fields of SessionRequest and SessionResponse."""


def between(least_ms: int, most_ms: int, part: float) -> int:
    """A time between two, by a number from 0 to 1."""
    return least_ms + int((most_ms - least_ms) * part)


class End(Protocol):
    """One end of a stream."""

    def receive(self, stream: Stream, message: Message) -> None:
        """A message came."""

    def broken(self, stream: Stream, why: str) -> None:
        """The stream is over."""


class Stream:
    """One session's connection. Each side knows for itself whether it is over."""

    __slots__ = ("agent", "agent_open", "controller", "controller_open", "last_ms", "node_id", "stuck")

    def __init__(self, node_id: str, agent: End, controller: End) -> None:
        self.node_id = node_id
        self.agent = agent
        self.controller = controller
        self.agent_open = True
        self.controller_open = True
        self.last_ms = {"up": 0, "down": 0}
        self.stuck = False
        """Its Hello is on its way for long; until it comes the controller knows of no stream that could end."""


class Network:
    """All streams, and what is cut."""

    def __init__(self, timeline: Timeline, chance: Random, faults: frozenset[Fault], counts: Counter[str]) -> None:
        self._timeline = timeline
        self._chance = chance
        self.faults = faults
        self._counts = counts
        self.happens: Callable[[str], bool] = lambda _: True
        """Whether the next fault of a kind does."""
        self.cut: dict[tuple[str, str], None] = {}
        """(node, direction) that nothing passes."""
        self.lag_ms: dict[str, int] = {}
        """By how much what goes down to a node is late."""
        self._streams: dict[Stream, None] = {}

    def open(self, node_id: str, agent: End, controller: End) -> Stream:
        """A stream as its agent sees it; the controller learns of it by the first message."""
        stream = Stream(node_id, agent, controller)
        self._streams[stream] = None
        if self.is_cut(node_id):
            self._timeline.after(self._chance.randint(1_000, KEEPALIVE_MS), lambda: self.cut_off(stream, "cut off"))
        return stream

    def is_cut(self, node_id: str) -> bool:
        """Whether anything of a node's traffic is lost."""
        return (node_id, "up") in self.cut or (node_id, "down") in self.cut

    def send(self, stream: Stream, way: str, message: Message) -> None:
        """Sends a message up (to the controller) or down (to the agent)."""
        if not (stream.agent_open if way == "up" else stream.controller_open):
            return
        # As many draws for each message, whatever becomes of it: what is left out of a shrunk run shifts none.
        draw = self._chance.random
        dropped, delayed, reordered, duplicated = draw(), draw(), draw(), draw()
        wait_ms, much = 1 + int(draw() * 4), draw()
        if (stream.node_id, way) in self.cut:
            return
        if way == "down":
            wait_ms += self.lag_ms.get(stream.node_id, 0)
        now_ms, opening = self._timeline.now_ms, message[0] in ("welcome", "hello")
        if dropped < 0.002 and self._strikes(Fault.DROP, "message dropped"):
            lost_ms = between(10, KEEPALIVE_MS, much)
            self._timeline.after(lost_ms, lambda: self.cut_off(stream, "a message was lost"))
            return
        if delayed < 0.005 and self._strikes(Fault.DELAY, "message delayed"):
            wait_ms = between(50, 6_000, much)
        if reordered < STUCK_HELLOS and message[0] == "hello" and self._strikes(Fault.REORDER, "Hello overtaken"):
            # A later one may overtake it, also one of a later run of the agent.
            stream.stuck = True
            wait_ms = between(5_000, 40_000, much)
        if reordered < 0.01 and not opening and self._strikes(Fault.REORDER, "message reordered"):
            self._arrive(stream, way, message, now_ms + between(1, 2_000, much))
        else:
            at_ms = stream.last_ms[way] = max(stream.last_ms[way], now_ms + wait_ms)
            self._arrive(stream, way, message, at_ms)
        if duplicated < 0.01 and not opening and self._strikes(Fault.DUPLICATE, "message duplicated"):
            self._arrive(stream, way, message, now_ms + between(1, 3_000, much))

    def _strikes(self, fault: Fault, what: str) -> bool:
        if not (fault in self.faults and self.happens(what)):
            return False
        self._counts[what] += 1
        return True

    def close(self, stream: Stream, way: str, why: str) -> None:
        """One side ends a stream; the other learns of it behind what is under way, or by its keepalive."""
        if way == "up":
            stream.agent_open = False
        else:
            stream.controller_open = False
        if (stream.node_id, way) in self.cut:
            self._timeline.after(self._chance.randint(1_000, KEEPALIVE_MS), lambda: self.cut_off(stream, "silent"))
            return
        at_ms = max(stream.last_ms[way], self._timeline.now_ms + self._chance.randint(1, 4))
        self._timeline.after(at_ms - self._timeline.now_ms, lambda: self._learn(stream, way, why))

    def cut_off(self, stream: Stream, why: str) -> None:
        """Both sides find a stream dead."""
        self._learn(stream, "up", why)
        self._learn(stream, "down", why)

    def vanish(self, stream: Stream) -> None:
        """An end lost its power: the other learns it by its keepalive."""
        stream.agent_open = False
        self._timeline.after(self._chance.randint(1_000, KEEPALIVE_MS), lambda: self.cut_off(stream, "silent"))

    def partition(self, node_id: str, ways: tuple[str, ...]) -> None:
        """Cuts a node off."""
        for way in ways:
            self.cut[node_id, way] = None
        for stream in [stream for stream in self._streams if stream.node_id == node_id]:
            # What is late is still on its way, and a sign of life.
            wait_ms = self.lag_ms.get(node_id, 0) + self._chance.randint(1_000, KEEPALIVE_MS)
            self._timeline.after(wait_ms, lambda stream=stream: self.cut_off(stream, "cut off"))  # type: ignore[misc]

    def heal(self, node_id: str) -> None:
        """Ends a partition."""
        self.cut.pop((node_id, "up"), None)
        self.cut.pop((node_id, "down"), None)
        self.lag_ms.pop(node_id, None)

    def break_all(self, why: str) -> None:
        """Every stream is dead, as both sides find."""
        for stream in list(self._streams):
            self.cut_off(stream, why)

    def _arrive(self, stream: Stream, way: str, message: Message, at_ms: int) -> None:
        def arrive() -> None:
            if stream.stuck and message[0] == "hello":
                stream.stuck = False
                if not stream.agent_open:
                    self._timeline.after(self._chance.randint(1, KEEPALIVE_MS), lambda: self.cut_off(stream, "silent"))
            if (stream.node_id, way) in self.cut:
                return
            if way == "up" and stream.controller_open:
                stream.controller.receive(stream, message)
            elif way == "down" and stream.agent_open:
                stream.agent.receive(stream, message)

        self._timeline.after(at_ms - self._timeline.now_ms, arrive)

    def _learn(self, stream: Stream, way: str, why: str) -> None:
        if way == "up" and stream.controller_open and not stream.stuck:
            stream.controller_open = False
            stream.controller.broken(stream, why)
        elif way == "down" and stream.agent_open:
            stream.agent_open = False
            stream.agent.broken(stream, why)
        if not stream.agent_open and not stream.controller_open:
            self._streams.pop(stream, None)
