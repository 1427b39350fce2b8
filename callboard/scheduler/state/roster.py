"""The roster: nodes by state, and which rank and which devices belong to which node.

A node that is LOST or LEFT is not there: its rank and its devices are free for others. Every answer costs the same
however many nodes there are, so that ten thousand can join in a row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection
from typing import TYPE_CHECKING

from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState
from callboard.scheduler.state.indexes import InOrder

if TYPE_CHECKING:
    # What knows the nodes needs no event to be read: `callboard plan` has none.
    from callboard.scheduler.records.events import NodeJoined

GONE = (NodeState.LOST, NodeState.LEFT)
"""Nodes in these states have no agent."""

_CONNECTED = (NodeState.READY, NodeState.DRAINING)
_AWAITED = (NodeState.SUSPECT, NodeState.JOINING)


class Roster:
    """The nodes, as far as others must know of them before one more joins."""

    def __init__(self) -> None:
        self.by_state: dict[NodeState, InOrder[str, str]] = {state: InOrder() for state in NodeState}
        self._holders: dict[int, str] = {}
        """Node that has a rank. Never two: whoever asks for one that is taken is refused."""
        self._gaps: list[int] = []
        """Heap of ranks below :attr:`_end` that were given back; some may be taken again."""
        self._in_gaps: set[int] = set()
        self._end = 0
        """Every rank below is taken or among the gaps."""
        self._owners: dict[str, str] = {}
        """Node that offers a device, by the device's uuid; simulated ones have none that counts."""
        self._connected: list[tuple[int, str]] = []
        """(rank, node id) of nodes whose agents can be told something, sorted."""

    def update(self, old: NodeRecord | None, new: NodeRecord | None) -> None:
        """Follows a node after its record changed."""
        if old is None or new is None or old.state is not new.state:
            if old is not None:
                del self.by_state[old.state][old.node_id]
            if new is not None:
                self.by_state[new.state].put(new.node_id, new.node_id)
        before = old if old is not None and old.state not in GONE else None
        after = new if new is not None and new.state not in GONE else None
        self._follow_rank(before, after)
        self._follow_devices(before, after)
        self._follow_connection(before, after)

    @property
    def awaited(self) -> bool:
        """Whether a node is out of touch or not up yet."""
        return any(self.by_state[state] for state in _AWAITED)

    def holder_of(self, rank: int) -> str | None:
        """The node that has a rank; None if it is free."""
        return self._holders.get(rank)

    def owner_of(self, uuid: str) -> str | None:
        """The node that offers a device; None if none does."""
        return self._owners.get(uuid)

    def taken(self, uuids: Collection[str], node_id: str) -> list[str]:
        """Which of these devices another node offers."""
        if self._owners.keys().isdisjoint(uuids):
            return []  # the rule for a node that is new
        owner_of = self._owners.get
        return [uuid for uuid in uuids if owner_of(uuid, node_id) != node_id]

    def lowest_free_rank(self) -> int:
        """The lowest rank that no node has."""
        while self._gaps:
            if self._gaps[0] not in self._holders:
                return self._gaps[0]
            self._in_gaps.discard(heapq.heappop(self._gaps))
        while self._end in self._holders:
            self._end += 1
        return self._end

    def first_connected(self) -> str:
        """The node of the lowest rank whose agent can be told something; empty if there is none."""
        return self._connected[0][1] if self._connected else ""

    def known(self) -> tuple[object, ...]:
        """Every entry, for the check of the invariants."""
        by_state = {state: set(nodes) for state, nodes in self.by_state.items()}
        return (by_state, dict(self._holders), dict(self._owners), list(self._connected), self.lowest_free_rank())

    def _follow_rank(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if before is not None and after is not None and before.rank == after.rank:
            return
        if before is not None and self._holders.get(before.rank) == before.node_id:
            del self._holders[before.rank]
            if before.rank < self._end and before.rank not in self._in_gaps:
                heapq.heappush(self._gaps, before.rank)
                self._in_gaps.add(before.rank)
        if after is not None:
            self._holders[after.rank] = after.node_id

    def _follow_devices(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if (
            before is not None
            and after is not None
            and before.devices is after.devices
            and before.simulated == after.simulated
        ):
            return
        had = uuids_of(before) if before is not None else []
        has = uuids_of(after) if after is not None else []
        if had == has:
            return  # an agent that is back names the same devices again
        if before is not None:
            for uuid in had:
                if self._owners.get(uuid) == before.node_id:
                    del self._owners[uuid]
        if after is not None:
            self._owners.update(dict.fromkeys(has, after.node_id))

    def _follow_connection(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        was = (before.rank, before.node_id) if before is not None and before.state in _CONNECTED else None
        now = (after.rank, after.node_id) if after is not None and after.state in _CONNECTED else None
        if was == now:
            return
        if was is not None:
            del self._connected[bisect_left(self._connected, was)]
        if now is not None:
            insort(self._connected, now)


def uuids_of(node: NodeRecord | NodeJoined) -> list[str]:
    """Devices of a node that nobody else may offer, by uuid. Simulated ones are nobody's."""
    return [] if node.simulated else [device.uuid for device in node.devices if device.uuid]
