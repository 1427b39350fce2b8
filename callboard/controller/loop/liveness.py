"""Liveness: deadlines per node on one timer, at the cost of one assignment per heartbeat.

The inequalities behind the numbers (all in milliseconds):

- ``suspect_after = 2.5 × heartbeat``: two heartbeats, each up to a quarter late by jitter, may be on their way; less
  would suspect a node whose one message was lost. It is below the lease (3 heartbeats), so nothing new is placed on a
  node that may be about to give up.
- ``lost_after = lease + kill_timeout + margin``: a cut-off agent ends its strict workers when its lease is over, and
  that takes up to ``kill_timeout``. Its lease counts from when it sent what was answered last, ours from when that was
  heard, which is later, however long answers are on their way. Its fence may be half a second late, and the clocks of
  two machines drift: ``margin``. Only then may a strict job run elsewhere (R5).

Silence counts only while somebody listens: the time for which this program was held up itself (stopped, swapped out, a
machine that was moved) is taken off, or a minute of that would give up every node there is and restart every job. So
the timer never waits for longer than a second: what it is late by tells when the loop last ran.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from callboard.model.log import structlog

MARGIN_MS = 2_000
"""See above; 10⁻⁴ of drift over a minute makes 6 ms."""


log = structlog.get_logger(__name__)

HELD_UP_S = 1.0
"""A timer that is later than this tells that the loop was held up; below, it is a busy loop's ordinary lateness. It is
set for no longer, so that all of a hold-up is seen and at most as much again; and as long is waited afterwards before
nodes are judged: what they said meanwhile is there, and is read first."""


class Verdicts(Protocol):
    """Who is told about silent nodes."""

    def suspected(self, node_id: str, epoch: int, *, suspected: bool) -> None:
        """A node has been silent for long, or is heard of again."""

    def lost(self, node_id: str, epoch: int, silent_ms: int) -> None:
        """A node is given up."""


@dataclass(slots=True)
class _Watched:
    epoch: int
    heard_s: float
    suspected: bool = False
    ticket: int = 0  # of its entry in the heap; older entries are void


class Liveness:
    """The nodes that should be heard of, with one timer for the earliest deadline among them."""

    def __init__(
        self, verdicts: Verdicts, *, heartbeat_ms: int, lease_ms: int, kill_timeout_ms: Callable[[], int]
    ) -> None:
        self._verdicts = verdicts
        self._suspect_s = heartbeat_ms * 2.5 / 1000
        self._lease_ms = lease_ms
        self._kill_timeout_ms = kill_timeout_ms
        self.margin_ms = MARGIN_MS
        self._nodes: dict[str, _Watched] = {}
        self._heap: list[tuple[float, str, int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._set_s = self._due_s = 0.0
        """When the timer was set, and for when."""
        self._not_before_s = 0.0
        """Nobody is judged before."""

    def watch(self, node_id: str, epoch: int) -> None:
        """Expects the node to be heard of from now on."""
        now = asyncio.get_running_loop().time()
        self._nodes[node_id] = _Watched(epoch, now)
        self._push(now + self._suspect_s, node_id, self._nodes[node_id])
        self._arm()

    def ages_s(self) -> dict[str, float]:
        """Seconds since each node was heard of."""
        now = asyncio.get_running_loop().time()
        return {node_id: max(0.0, now - node.heard_s) for node_id, node in self._nodes.items()}

    def heard(self, node_id: str, epoch: int) -> None:
        """The node said something."""
        node = self._nodes.get(node_id)
        if node is None or node.epoch != epoch:
            return
        node.heard_s = asyncio.get_running_loop().time()
        if node.suspected:
            node.suspected = False
            self._push(node.heard_s + self._suspect_s, node_id, node)
            self._arm()
            self._verdicts.suspected(node_id, epoch, suspected=False)

    def is_fresh(self, node_id: str) -> bool:
        """Whether the node has been heard of lately."""
        node = self._nodes.get(node_id)
        return node is not None and not node.suspected

    def forget(self, node_id: str, epoch: int) -> None:
        node = self._nodes.get(node_id)
        if node is not None and node.epoch == epoch:
            del self._nodes[node_id]

    def clear(self) -> None:
        self._nodes.clear()
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def lost_after_ms(self) -> int:
        """Silence after which a node is given up."""
        return self._lease_ms + self._kill_timeout_ms() + self.margin_ms

    def _push(self, due_s: float, node_id: str, node: _Watched) -> None:
        node.ticket += 1
        heapq.heappush(self._heap, (due_s, node_id, node.epoch, node.ticket))

    def _arm(self) -> None:
        if not self._heap:
            return
        now = asyncio.get_running_loop().time()
        # Never in the past, or the next look would take its own lateness for time that was not listened.
        due_s = max(min(self._heap[0][0], now + HELD_UP_S), self._not_before_s, now)
        if self._timer is not None:
            if self._timer.when() <= due_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._set_s, self._due_s = now, due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        if now - self._due_s > HELD_UP_S:
            self._take_off(now - self._set_s, now)
            self._not_before_s = now + HELD_UP_S
            self._arm()
            return
        while self._heap and self._heap[0][0] <= now:
            _, node_id, epoch, ticket = heapq.heappop(self._heap)
            node = self._nodes.get(node_id)
            if node is not None and (node.epoch, node.ticket) == (epoch, ticket):
                self._look_at(node_id, node, now)
        self._arm()

    def _take_off(self, held_up_s: float, now: float) -> None:
        """Nobody listened for so long. Whatever is later than it must be is safe for the leases of agents (R5)."""
        log.warning("held up: nodes are not judged by their silence meanwhile", seconds=round(held_up_s, 1))
        for node in self._nodes.values():
            node.heard_s = min(now, node.heard_s + held_up_s)

    def _look_at(self, node_id: str, node: _Watched, now: float) -> None:
        # Sums as they stand in the heap: a difference may be rounded the other way, and the loop would never end.
        lost_s = node.heard_s + self.lost_after_ms / 1000
        suspect_s = node.heard_s + self._suspect_s
        if now >= lost_s:
            del self._nodes[node_id]
            self._verdicts.lost(node_id, node.epoch, round((now - node.heard_s) * 1000))
        elif now >= suspect_s:
            if not node.suspected:
                node.suspected = True
                self._verdicts.suspected(node_id, node.epoch, suspected=True)
            self._push(lost_s, node_id, node)
        else:
            # It was heard of since the deadline was set: heartbeats don't move entries in the heap.
            self._push(suspect_s, node_id, node)
