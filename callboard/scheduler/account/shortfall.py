"""The shortfall of workers that find no room together: as many as possible are placed, the others go short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from callboard.model.quantities import MILLI, Resources, total
from callboard.model.specs import Strategy
from callboard.scheduler.plan.fitting import EXACT_LIMIT, fit
from callboard.scheduler.plan.packing import times
from callboard.scheduler.plan.rooms import NodeFilter, Rooms
from callboard.scheduler.plan.view import Room, View
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.state.state import State

Lack = tuple[str, int, int]
"""(resource, asked, free) of something a node is short of, in the units of Resources."""


@dataclass(frozen=True, slots=True)
class Together:
    """Some workers as one ask.

    Attributes:
        slots: the workers.
        ask: the sum of what they ask.
        least_share_milli: the smallest share of a device that one asks; 0: all ask whole devices or none.
        alike: all that ask for a device ask for the same share.
    """

    slots: tuple[Slot, ...]
    ask: Resources
    least_share_milli: int
    alike: bool

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Together:
        """These workers."""
        kept = tuple(slots)
        asks = [slot.resources.gpu_milli for slot in kept if slot.resources.gpu_milli]
        shares = [milli for milli in asks if milli < MILLI]
        alike = len(shares) == len(asks) and len(set(shares)) == 1
        return cls(kept, total(slot.resources for slot in kept), min(shares, default=0), alike)


@dataclass(slots=True)
class Shortfall:
    """Workers that find no room together.

    Attributes:
        view: what is taken for granted.
        placed: how many of them find room, from the first on.
        rest: those that must still find some; by STRICT_PACK all of them, on one node.
        taken: nodes that hold some of those placed, with what is left there.
        strategy: strategy of the first of those that must still find room: its component's or the job's.
        apart: nodes that hold workers of which it must be apart, by STRICT_SPREAD.
    """

    view: View
    placed: int
    rest: Together
    taken: dict[str, Room] = field(default_factory=dict)
    strategy: Strategy = Strategy.PACK
    apart: frozenset[str] = frozenset()

    def room(self, node: NodeRecord) -> Room:
        """What is left on a node beside the workers that are placed."""
        return self.taken.get(node.node_id) or self.view.room(node)


def shortfall(
    state: State, view: View, wanted: NodeFilter, slots: Sequence[Slot], strategy: Strategy
) -> Shortfall | None:
    """What is missing for workers, or None if they find room. How many do is found by bisection."""
    counted = _counted(state, view, wanted, slots, strategy)
    if counted is None:
        if fit(Rooms(state, view, wanted), slots, strategy) is not None:
            return None
    elif counted >= len(slots):
        return None
    slots = sorted(slots, key=lambda slot: slot.place is None)  # as they are placed
    low, high = (0, len(slots) - 1) if counted is None else (counted, counted)
    while low < high:
        middle = (low + high + 1) // 2
        if fit(Rooms(state, view, wanted), slots[:middle], strategy) is None:
            high = middle - 1
        else:
            low = middle
    own = slots[low].strategy
    if strategy is Strategy.STRICT_PACK and own is None:
        return Shortfall(view, low, Together.of([slot for slot in slots if slot.strategy is None]), strategy=strategy)
    if own is Strategy.STRICT_PACK:
        together = [slot for slot in slots if slot.component == slots[low].component]
        return Shortfall(view, low, Together.of(together), strategy=own)
    found = Shortfall(view, low, Together.of(slots[low:]), strategy=own or strategy)
    bundles = fit(Rooms(state, view, wanted), slots[:low], strategy) or ()
    found.apart = frozenset(
        bundle.node_id
        for slot, bundle in zip(slots, bundles, strict=False)
        if slot.place is None and slot.strategy is own and (own is None or slot.component == slots[low].component)
    )
    for bundle in bundles:
        node = state.nodes[bundle.node_id]
        room = found.taken.setdefault(node.node_id, found.room(node))
        room.use(bundle)
    return found


def _counted(state: State, view: View, wanted: NodeFilter, slots: Sequence[Slot], strategy: Strategy) -> int | None:
    """How many of many equal workers that go anywhere find room, by counting; None: they are few, or not equal."""
    first = slots[0]
    if len(slots) <= EXACT_LIMIT or first.place is not None or first.selector or first.prefers:
        return None
    same = {(slot.resources, slot.place, slot.selector, slot.prefers, slot.strategy) for slot in slots}
    if len(same) > 1:
        return None
    each = [times(room, first.resources) for room in Rooms(state, view, wanted).all(len(slots))]
    match first.strategy or strategy:
        case Strategy.STRICT_PACK:
            return max(each, default=0)
        case Strategy.STRICT_SPREAD:
            return sum(count > 0 for count in each)
        case _:
            return sum(each)


def lacks(room: Room, ask: Resources) -> list[Lack]:
    """Everything a node is short of for one worker."""
    have_gpu = room.whole_devices() * MILLI if ask.gpu_milli >= MILLI else max([0, *room.device_milli])
    return _short_of(room, ask, have_gpu)


def lacks_for_all(room: Room, workers: Together) -> list[Lack]:
    """Everything a node is short of for several workers."""
    if len(workers.slots) == 1:
        return lacks(room, workers.ask)
    share_milli = workers.least_share_milli
    if not share_milli:
        have_gpu = room.whole_devices() * MILLI
    elif workers.alike:
        have_gpu = sum(free // share_milli * share_milli for free in room.device_milli if free > 0)
    else:  # a share never straddles two devices, so what is left of one may be too little for any
        have_gpu = sum(free for free in room.device_milli if free >= share_milli)
    return _short_of(room, workers.ask, have_gpu)


def _short_of(room: Room, ask: Resources, have_gpu: int) -> list[Lack]:
    free = room.free()
    found = []
    for resource, asked in ask.items():
        have = have_gpu if resource == "gpu" else max(0, free.get(resource))
        if have < asked:
            found.append((resource, asked, have))
    return found
