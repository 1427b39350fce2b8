"""The rooms of a view: the nodes that come into question, with what is free on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources
from callboard.model.specs import Labels
from callboard.scheduler.plan.view import Room, View
from callboard.scheduler.records.asks import INTERPRETER
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.refusals import Reason
from callboard.scheduler.records.states import NodeState
from callboard.scheduler.records.wording import bring_back, unusable
from callboard.scheduler.state.state import State


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """Which nodes come into question.

    Attributes:
        required: labels that a node must have, and interpreters that it must allow.
        preferred: labels that are better to have.
        excluded: nodes that don't come into question, whatever their labels.
    """

    required: Labels = ()
    preferred: Labels = ()
    excluded: frozenset[str] = frozenset()

    def admits(self, node: NodeRecord) -> bool:
        """Whether a node has every required label."""
        return _has(node, self.required) and node.node_id not in self.excluded

    def prefers(self, node: NodeRecord) -> bool:
        """Whether a node has every preferred label."""
        return _has(node, self.preferred)


ANY_NODE = NodeFilter()


def _has(node: NodeRecord, labels: Labels) -> bool:
    if not labels:
        return True
    own = dict(node.labels)
    own.setdefault("node", node.node_id)
    own.setdefault("node_group", node.node_group)
    return all(value in node.interpreters if key == INTERPRETER else own.get(key) == value for key, value in labels)


OPENS_AGAIN = ("DRAINING", "CORDONED", "NODE_STATE")
"""Codes of what may pass without another machine, if the node isn't gone."""


def node_closed(node: NodeRecord, labels: Labels) -> list[Reason]:
    """Why nothing may be placed on a node, whatever is free there; empty: it may."""
    subject, name = f"nodes/{node.node_id}", node.node_id
    own = {"node": node.node_id, "node_group": node.node_group, **dict(node.labels)}
    for key, value in labels:
        if key == INTERPRETER:
            if value not in node.interpreters:
                return [Reason("INTERPRETER_NOT_ALLOWED", subject, f"{name} does not allow the interpreter {value}")]
        elif own.get(key) != value:
            return [Reason("LABEL_MISMATCH", subject, f"{name} lacks the label {key}={value}")]
    reasons = []
    if node.state is NodeState.DRAINING:
        reasons.append(Reason("DRAINING", subject, f"{name} is draining"))
    elif node.cordoned:
        reasons.append(Reason("CORDONED", subject, f"{name} is cordoned"))
    if node.state not in (NodeState.READY, NodeState.DRAINING):
        reasons.append(Reason("NODE_STATE", subject, f"{name} {unusable(node)}"))
    elif node.ghosts:
        reasons.append(Reason("NODE_STATE", subject, f"{name} still ends unwanted workers"))
    return reasons


def opening(node: NodeRecord) -> list[str]:
    """What lets a node take work again."""
    changes = [f"uncordon {node.node_id}"] if node.cordoned else []
    if node.state not in (NodeState.READY, NodeState.DRAINING):
        changes.append(bring_back(node))
    elif node.ghosts:
        changes.append(f"wait until {node.node_id} has ended unwanted workers")
    return changes


class Rooms:
    """Room of the nodes that come into question, in a view. What a plan takes from one is seen by the next question.

    Walks the index of free room where it is valid; nodes that the view or an earlier part of the plan changed are
    looked at one by one.
    """

    def __init__(self, state: State, view: View, wanted: NodeFilter) -> None:
        self._state = state
        self._view = view
        closed = view.assumption.closed
        self._wanted = wanted = replace(wanted, excluded=wanted.excluded | closed) if closed else wanted
        self._known: dict[str, Room] = {}
        self.indexed = not view.assumption.empty and not wanted.preferred
        if self.indexed:
            for node_id in view.changed_nodes():
                node = state.nodes[node_id]
                if node.usable and wanted.admits(node):
                    self._known[node_id] = view.room(node)

    def narrowed(self, required: Labels, excluded: frozenset[str]) -> Rooms:
        """The same rooms without nodes that lack a label or are excluded. What is taken from one is taken from both
        once this one adopts the other again."""
        wanted = replace(
            self._wanted,
            required=tuple(sorted({*self._wanted.required, *required})),
            excluded=self._wanted.excluded | excluded,
        )
        rooms = Rooms(self._state, self._view, wanted)
        rooms.adopt(self)
        return rooms

    def adopt(self, other: Rooms) -> None:
        """Shares the rooms that another ask of the same job has used."""
        for node_id, room in other._known.items():
            if self._wanted.admits(room.node):
                self._known[node_id] = room

    def all(self, workers: int, selectors: Sequence[Labels] = ()) -> list[Room]:
        """Every node, preferred ones first, then by rank. Under the assumption that nothing is used, nodes that are
        only cordoned or out of touch count too: what could *ever* fit?

        Args:
            workers: how many are to be placed. Of nodes that are alike while empty, as many are enough.
            selectors: labels by which some of the workers tell nodes apart.
        """
        wanted = self._wanted
        if self._view.assumption.empty:
            nodes = self._while_empty(workers, selectors)
        else:
            anywhere = not (wanted.required or wanted.excluded)
            nodes = [node for node in self._state.nodes.values() if node.usable and (anywhere or wanted.admits(node))]
        nodes.sort(key=lambda node: node.rank)
        if wanted.preferred:
            nodes.sort(key=lambda node: not wanted.prefers(node))
        return [self._room(node) for node in nodes]

    def _while_empty(self, workers: int, selectors: Sequence[Labels]) -> list[NodeRecord]:
        """Nodes that come into question, of each kind as many as there are workers."""
        nodes, wanted = self._state.nodes, self._wanted
        anywhere = not (wanted.required or wanted.excluded)
        telling = [NodeFilter(selector) for selector in dict.fromkeys(selectors) if selector]
        found: list[NodeRecord] = []
        for places in self._state.node_kinds.of(wanted.required).values():
            alike: dict[tuple[bool, ...], int] = {}
            order = [nodes[node_id] for _, node_id in places] if wanted.preferred else None
            if order is not None:
                order.sort(key=lambda node: not wanted.prefers(node))
            for node in order or (nodes[node_id] for _, node_id in places):
                if not (anywhere or wanted.admits(node)):
                    continue
                kind = tuple([told.admits(node) for told in telling])
                count = alike.get(kind, 0)
                if count < workers:
                    alike[kind] = count + 1
                    found.append(node)
                elif not telling:
                    break
        return found

    def at(self, node_id: str) -> Room | None:
        """One node, if it comes into question."""
        node = self._state.nodes.get(node_id)
        if node is None or not self._wanted.admits(node):
            return None
        if not node.usable and not (self._view.assumption.empty and could_return(node)):
            return None
        return self._room(node)

    def fullest_first(self, ask: Resources) -> Iterator[Room]:
        """Nodes that may hold an ask, the one with the least to spare first."""
        walk = self._state.free.fullest_first(ask)
        if not self._known:
            return self._merged(walk, [], 1)
        changed = sorted(self._known.values(), key=lambda room: (emptiness(room), room.node.rank))
        return self._merged(walk, changed, 1)

    def emptiest_first(self, ask: Resources) -> Iterator[Room]:
        """Nodes that may hold an ask, the one with most to spare first."""
        changed = sorted(self._known.values(), key=lambda room: (*(-free for free in emptiness(room)), room.node.rank))
        return self._merged(self._state.free.emptiest_first(ask), changed, -1)

    def _merged(self, walk: Iterator[str], changed: list[Room], sign: int) -> Iterator[Room]:
        """The walk with the changed nodes at their places."""
        skip = set(self._known)
        waiting = list(reversed(changed))
        nodes, anywhere = self._state.nodes, not (self._wanted.required or self._wanted.excluded)
        for node_id in walk:
            if node_id in skip or not (anywhere or self._wanted.admits(nodes[node_id])):
                continue
            room = self._view.room(nodes[node_id])
            while waiting and _goes_before(waiting[-1], room, sign):
                yield waiting.pop()
            self._known[node_id] = room
            yield room
        while waiting:
            yield waiting.pop()

    def _room(self, node: NodeRecord) -> Room:
        room = self._known.get(node.node_id)
        if room is None:
            room = self._known[node.node_id] = self._view.room(node)
        return room


def _goes_before(left: Room, right: Room, sign: int) -> bool:
    first, second = emptiness(left), emptiness(right)
    if first != second:
        return first < second if sign > 0 else first > second
    return left.node.rank < right.node.rank


def could_return(node: NodeRecord) -> bool:
    """Whether a node that takes no work now may take some later without anybody adding a machine."""
    return node.state is not NodeState.LOST and node.state is not NodeState.LEFT


def emptiness(room: Room) -> tuple[int, int]:
    free = room.device_milli if not room.node.closed else [max(0, milli) for milli in room.device_milli]
    return (sum(free), room.cpu_milli)
