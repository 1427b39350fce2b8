"""Which nodes are still heard of? The rules and numbers of ``callboard.controller.liveness``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from callboard.simulation.timeline import Timeline

MARGIN_MS = 2_000


class Verdicts(Protocol):
    """Who is told about silent nodes."""

    def suspected(self, node_id: str, epoch: int, *, suspected: bool) -> None:
        """A node has been silent for long, or is heard of again."""

    def lost(self, node_id: str, epoch: int, silent_ms: int) -> None:
        """A node is given up."""


@dataclass(slots=True, eq=False)
class _Watched:
    epoch: int
    heard_ms: int
    suspected: bool = False


class Liveness:
    """The nodes that should be heard of."""

    def __init__(
        self,
        timeline: Timeline,
        verdicts: Verdicts,
        *,
        heartbeat_ms: int,
        lease_ms: int,
        kill_timeout_ms: Callable[[], int],
    ) -> None:
        self._timeline = timeline
        self._verdicts = verdicts
        self._suspect_ms = heartbeat_ms * 5 // 2
        self._lease_ms = lease_ms
        self._kill_timeout_ms = kill_timeout_ms
        self._nodes: dict[str, _Watched] = {}

    def watch(self, node_id: str, epoch: int) -> None:
        """Expects a node to be heard of from now on."""
        node = self._nodes[node_id] = _Watched(epoch, self._timeline.now_ms)
        self._look_in(self._suspect_ms, node_id, node)

    def heard(self, node_id: str, epoch: int) -> None:
        """The node said something."""
        node = self._nodes.get(node_id)
        if node is None or node.epoch != epoch:
            return
        node.heard_ms = self._timeline.now_ms
        if node.suspected:
            node.suspected = False
            self._verdicts.suspected(node_id, epoch, suspected=False)

    def is_fresh(self, node_id: str) -> bool:
        """Whether the node has been heard of lately."""
        node = self._nodes.get(node_id)
        return node is not None and not node.suspected

    def forget(self, node_id: str, epoch: int) -> None:
        """Nothing is expected of this session any more."""
        node = self._nodes.get(node_id)
        if node is not None and node.epoch == epoch:
            del self._nodes[node_id]

    def clear(self) -> None:
        """Forgets every node."""
        self._nodes.clear()

    def _look_in(self, wait_ms: int, node_id: str, node: _Watched) -> None:
        self._timeline.after(max(1, wait_ms), lambda: self._look_at(node_id, node))

    def _look_at(self, node_id: str, node: _Watched) -> None:
        if self._nodes.get(node_id) is not node:
            return
        now_ms = self._timeline.now_ms
        lost_ms = node.heard_ms + self._lease_ms + self._kill_timeout_ms() + MARGIN_MS
        silent_ms = now_ms - node.heard_ms
        if now_ms >= lost_ms:
            del self._nodes[node_id]
            self._verdicts.lost(node_id, node.epoch, silent_ms)
        elif silent_ms >= self._suspect_ms:
            if not node.suspected:
                node.suspected = True
                self._verdicts.suspected(node_id, node.epoch, suspected=True)
            self._look_in(min(lost_ms - now_ms, self._suspect_ms), node_id, node)
        else:
            self._look_in(node.heard_ms + self._suspect_ms - now_ms, node_id, node)
