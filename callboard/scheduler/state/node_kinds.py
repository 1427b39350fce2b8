"""The nodes that are there, by what they have and by their labels.

Whether a job could ever fit is asked of kinds: ten thousand equal nodes are one kind. A node that is cordoned or out of
touch counts, since it may come back; one that is LOST or LEFT doesn't.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from callboard.model.quantities import Resources
from callboard.model.specs import Labels
from callboard.scheduler.records.asks import INTERPRETER
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.state.roster import GONE

Kind = tuple[Resources, tuple[tuple[int, str], ...]]
"""(capacity, its devices as :func:`cards` has them): what decides how much a node can hold while it is empty."""

Place = tuple[int, str]
"""(rank, node id)."""

_Label = tuple[str, str] | None
"""None: of every node."""

NO_GROUP = ("node_group", "")
"""The label of a node in no node group. Who asks for it is told of all nodes."""

MOST_WAITING = 64
"""Most changes of nodes that wait to be followed, so that no single question pays for those of a long time."""


class NodeKinds:
    """Nodes by kind, of all and of each label; those of one kind by rank."""

    def __init__(self) -> None:
        self._nodes: dict[_Label, dict[Kind, list[Place]]] = {}
        self._known: dict[str, tuple[Place, Kind, list[_Label]]] = {}
        self._waiting: dict[str, NodeRecord | None] = {}

    def update(self, node_id: str, node: NodeRecord | None) -> None:
        """Follows a node after its record changed. Most changes are followed by others before anybody asks."""
        self._waiting[node_id] = node
        if len(self._waiting) > MOST_WAITING:
            self._follow()

    def of(self, required: Labels) -> dict[Kind, list[Place]]:
        """The nodes that may have these labels, by kind: those of the rarest label, and none where no node has it."""
        self._follow()
        found = self._nodes.get(None, {})
        for key, value in required:
            # The default of the one is the id, which is not a label; nearly all nodes have that of the other.
            if key != "node" and (key, value) != NO_GROUP:
                having = self._nodes.get((key, value), {})
                if _count(having) < _count(found):
                    found = having
        return found

    def known(self) -> dict[str, object]:
        """Every entry, for the check of the invariants."""
        self._follow()
        return {
            "known": dict(self._known),
            "nodes": {
                label: {kind: list(places) for kind, places in kinds.items()} for label, kinds in self._nodes.items()
            },
        }

    def _follow(self) -> None:
        for node_id, node in self._waiting.items():
            new = None if node is None or node.state in GONE else _entry(node)
            old = self._known.get(node_id)
            if old == new:
                continue
            if old is not None:
                self._take_out(*old)
                del self._known[node_id]
            if new is not None:
                self._put_in(*new)
                self._known[node_id] = new
        self._waiting.clear()

    def _put_in(self, place: Place, kind: Kind, labels: Iterable[_Label]) -> None:
        for label in labels:
            kinds = self._nodes.get(label)
            if kinds is None:
                kinds = self._nodes[label] = {}
            places = kinds.get(kind)
            if places is None:
                kinds[kind] = [place]
            elif places[-1] < place:
                places.append(place)  # nearly all come by rank
            else:
                insort(places, place)

    def _take_out(self, place: Place, kind: Kind, labels: Iterable[_Label]) -> None:
        for label in labels:
            kinds = self._nodes[label]
            places = kinds[kind]
            del places[bisect_left(places, place)]
            if not places:
                del kinds[kind]
                if not kinds:
                    del self._nodes[label]


_CARD = attrgetter("memory_bytes", "model")


def cards(node: NodeRecord) -> tuple[tuple[int, str], ...]:
    """(bytes of memory, model) of each device of a node, the smallest first."""
    found = list(map(_CARD, node.devices))
    if found.count(found[0]) == len(found) if found else True:
        return tuple(found)
    return tuple(sorted(found))


def _entry(node: NodeRecord) -> tuple[Place, Kind, list[_Label]]:
    labels: list[_Label] = [None, *node.labels]
    if node.node_group and not any(key == "node_group" for key, _ in node.labels):
        labels.append(("node_group", node.node_group))
    if node.interpreters:
        labels += [(INTERPRETER, path) for path in dict.fromkeys(node.interpreters)]
    return (node.rank, node.node_id), (node.capacity, cards(node)), labels


def _count(kinds: dict[Kind, list[Place]]) -> int:
    return sum(map(len, kinds.values()))
