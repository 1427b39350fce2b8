"""The shortfall of workers that find no room together: as many as possible are placed, the others go short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field

from callboard.model.frozen import dataclass
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
        kept = tuple(slots)
        if len(kept) == 1:
            ask = kept[0].resources
            share_milli = ask.gpu_milli if ask.gpu_milli < MILLI else 0
            return cls(kept, ask, share_milli, bool(share_milli))
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
    free = room.device_milli
    if ask.selects:
        free = [milli for index, milli in enumerate(free) if room.suits(index, ask)]
    have_gpu = sum(milli >= MILLI for milli in free) * MILLI if ask.gpu_milli >= MILLI else max([0, *free])
    have_bytes = _most_memory(room, ask) if ask.gpu_memory_bytes else 0
    return _short_of(room, ask, have_gpu, have_bytes)


def lacks_for_all(room: Room, workers: Together) -> list[Lack]:
    """Everything a node is short of for several workers."""
    if len(workers.slots) == 1:
        return lacks(room, workers.ask)
    share_milli = workers.least_share_milli
    if any(slot.resources.selects for slot in workers.slots):
        have_gpu = _placed(room, workers).gpu_milli
    elif not share_milli:
        have_gpu = room.whole_devices() * MILLI
    elif workers.alike:
        have_gpu = sum(free // share_milli * share_milli for free in room.device_milli if free > 0)
    else:  # a share never straddles two devices, so what is left of one may be too little for any
        have_gpu = sum(free for free in room.device_milli if free >= share_milli)
    have_bytes = _placed(room, workers).gpu_memory_bytes if workers.ask.gpu_memory_bytes else 0
    return _short_of(room, workers.ask, have_gpu, have_bytes)


def _most_memory(room: Room, ask: Resources) -> int:
    """How much memory a worker could have on as many devices as it asks for, an equal part on each. Devices that are
    too few are a lack of their own: then all there are count."""
    need, count = min(ask.gpu_milli, MILLI), max(1, ask.gpu_milli // MILLI)
    having = [index for index, free in enumerate(room.device_milli) if free >= need > 0 and room.suits(index, ask)]
    if len(having) < count and need:
        having = list(range(len(room.device_milli)))
    free_bytes = sorted((max(0, room.free_bytes(index)) for index in having), reverse=True)
    if len(free_bytes) < count:
        return 0
    return min(ask.gpu_memory_bytes, free_bytes[count - 1] * count)


def _placed(room: Room, workers: Together) -> Resources:
    """What several workers would have of GPUs and their memory, each put on a node in turn if its GPUs are there."""
    asks = sorted((slot.resources for slot in workers.slots), key=lambda ask: not ask.selects)
    parts = [Resources(gpu_milli=ask.gpu_milli, gpu_memory_bytes=ask.gpu_memory_bytes).on_gpus_of(ask) for ask in asks]
    taken = [(ask, room.take(ask)) for ask in parts if room.fits(ask)]
    for ask, devices in taken:
        room.untake(ask, devices)
    return total(ask for ask, _ in taken)


def _short_of(room: Room, ask: Resources, have_gpu: int, have_bytes: int) -> list[Lack]:
    free = room.free()
    found = [("gpu", MILLI, 0)] if ask.selects and not ask.gpu_milli else []
    for resource, asked in ask.items():
        have = have_gpu if resource == "gpu" else have_bytes if resource == "gpu_memory" else max(0, free.get(resource))
        if have < asked:
            found.append((resource, asked, have))
    return found
