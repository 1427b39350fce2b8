"""The use of the whole cluster: sums over its nodes, kept from one question to the next.

A dashboard asks every few seconds, and meanwhile few nodes have changed: only those are looked at again, so that the
question takes as long as what happened since the last one, not as there are nodes.
"""

from __future__ import annotations

from operator import add, sub
from typing import NamedTuple

from callboard.model.frozen import dataclass
from callboard.model.quantities import MILLI, NOTHING, Resources
from callboard.scheduler.state.ledger import NodeBook
from callboard.scheduler.state.roster import GONE


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """GPUs that can be given now, on nodes that take work: a worker that asks for whole ones can't have parts.

    Attributes:
        whole: cards of which nobody has a share.
        parts_milli: what is left of shared cards.
    """

    whole: int = 0
    parts_milli: int = 0

    def __add__(self, other: FreeGpus) -> FreeGpus:
        return FreeGpus(self.whole + other.whole, self.parts_milli + other.parts_milli)

    def __sub__(self, other: FreeGpus) -> FreeGpus:
        return FreeGpus(self.whole - other.whole, self.parts_milli - other.parts_milli)


class Account(NamedTuple):
    """What some nodes have, and what it is used for: ``used + held + free + quarantined = capacity`` (I10).

    Attributes:
        used: what live workers hold.
        held: what is booked or claimed and used by nobody.
        quarantined: what workers hold whose end nobody proved.
    """

    capacity: Resources = NOTHING
    used: Resources = NOTHING
    held: Resources = NOTHING
    free: Resources = NOTHING
    quarantined: Resources = NOTHING
    free_gpus: FreeGpus = FreeGpus()


class ClusterUse:
    """The account of all nodes together. Nodes that are gone are left out, for nobody can use what they had (MU-01)."""

    def __init__(self) -> None:
        self.sums = Account()
        self._of_node: dict[str, Account] = {}

    def update(self, node_id: str, book: NodeBook | None) -> None:
        """Follows a node after its record or its sums changed; None: it is gone for good."""
        old = self._of_node.pop(node_id, None)
        new = _account(book) if book is not None and book.node.state not in GONE else None
        if new is not None:
            self._of_node[node_id] = new
        if old == new:
            return
        if old is not None:
            self.sums = Account._make(map(sub, self.sums, old))
        if new is not None:
            self.sums = Account._make(map(add, self.sums, new))


def _account(book: NodeBook) -> Account:
    used, held, free, quarantined, left, _ = book.sums()
    gpus = FreeGpus()
    if book.node.usable:
        whole = left.count(MILLI)
        gpus = FreeGpus(whole, sum(left) - whole * MILLI)
    return Account(book.node.capacity, used, held, free, quarantined, gpus)
