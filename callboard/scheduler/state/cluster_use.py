"""The use of the whole cluster: sums over its nodes, kept from one question to the next.

A dashboard asks every few seconds, and meanwhile few nodes have changed: only those are looked at again, so that the
question takes as long as what happened since the last one, not as there are nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.quantities import MILLI, NOTHING, Resources
from callboard.scheduler.state.ledger import NodeBook
from callboard.scheduler.state.roster import GONE

_Account = tuple[Resources, Resources, Resources, Resources, Resources, "FreeGpus"]


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """GPUs that can be given now, on nodes that take work: a worker that asks for whole ones can't have parts.

    Attributes:
        whole: cards of which nobody has a share.
        parts_milli: what is left of shared cards.
    """

    whole: int = 0
    parts_milli: int = 0

    def plus(self, other: FreeGpus, sign: int = 1) -> FreeGpus:
        """The sum, or with the sign -1 the difference."""
        return FreeGpus(self.whole + sign * other.whole, self.parts_milli + sign * other.parts_milli)


class ClusterUse:
    """The account of all nodes together: ``used + held + free + quarantined = capacity`` (I10). Nodes that are gone are
    left out, for nobody can use what they had (MU-01)."""

    def __init__(self) -> None:
        self._sums: _Account = (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, FreeGpus())
        self._of_node: dict[str, _Account] = {}

    def update(self, node_id: str, book: NodeBook | None) -> None:
        """Follows a node after its record or its sums changed; None: it is gone for good."""
        old = self._of_node.pop(node_id, None)
        new = _account(book) if book is not None and book.node.state not in GONE else None
        if old == new:
            if new is not None:
                self._of_node[node_id] = new
            return
        sums = self._sums
        if old is not None:
            sums = _minus(sums, old)
        if new is not None:
            self._of_node[node_id] = new
            sums = _plus(sums, new)
        self._sums = sums

    @property
    def capacity(self) -> Resources:
        """What there is."""
        return self._sums[0]

    @property
    def used(self) -> Resources:
        """What live workers hold."""
        return self._sums[1]

    @property
    def held(self) -> Resources:
        """What is booked or claimed and used by nobody."""
        return self._sums[2]

    @property
    def free(self) -> Resources:
        """What is left."""
        return self._sums[3]

    @property
    def quarantined(self) -> Resources:
        """What workers hold whose end nobody proved."""
        return self._sums[4]

    @property
    def free_gpus(self) -> FreeGpus:
        """GPUs that can be given: whole ones, and parts."""
        return self._sums[5]


def _account(book: NodeBook) -> _Account:
    used, held, free, quarantined, left, _ = book.sums()
    gpus = FreeGpus()
    if book.node.usable:
        whole = left.count(MILLI)
        gpus = FreeGpus(whole, sum(left) - whole * MILLI)
    return (book.node.capacity, used, held, free, quarantined, gpus)


def _plus(left: _Account, right: _Account) -> _Account:
    free = left[5].plus(right[5])
    return (left[0] + right[0], left[1] + right[1], left[2] + right[2], left[3] + right[3], left[4] + right[4], free)


def _minus(left: _Account, right: _Account) -> _Account:
    free = left[5].plus(right[5], -1)
    return (left[0] - right[0], left[1] - right[1], left[2] - right[2], left[3] - right[3], left[4] - right[4], free)
