"""The choice of victims: of all who must yield, those from whom the least is taken away.

Devices count first, then the largest share of the cluster that they hold of any other resource, then the work that is
lost. How many jobs or workers yield does not count. The choice is exact while few come into question, and else the best
of several good ones (choosing is a knapsack problem).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from callboard.model.quantities import Resources
from callboard.scheduler.plan.candidates import Candidate, cost_of
from callboard.scheduler.plan.rooms import NodeFilter
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.scheduler.records.states import LIVE
from callboard.scheduler.state.state import State

EXACT_UNITS = 14
"""Most units among which every set is considered."""

EXACT_TRIES = 300
"""Most questions that this may take; each is a whole plan. On one node the question is a sum, so it may take more."""

MOST_NODES = 128
"""Most nodes that are looked at one by one for a worker's room."""

Units = Sequence[Candidate]
Question = Callable[[Units], bool]


class Choice:
    """One choice.

    Args:
        capacity: what the whole cluster has, to weigh shares of it.
        enough: whether the job starts once these have yielded. More that yield never make it worse.
        allowed: whether just these may yield at once. With more that yield it never becomes true.
    """

    def __init__(self, capacity: Resources, enough: Question, allowed: Question) -> None:
        self._capacity = capacity
        self._enough = enough
        self._allowed = allowed
        self.best: list[Candidate] | None = None

    def offer(self, units: Units) -> None:
        """Takes a set that is enough, without those that turn out unnecessary, if none as good is known."""
        needed = irreducible(list(units), self._enough)
        better = self.best is None or cost_of(needed, self._capacity) < cost_of(self.best, self._capacity)
        if self._allowed(needed) and better:
            self.best = needed

    def offer_shortest_run(self, order: Units) -> None:
        """Takes the shortest run from the first on that is enough, found by bisection."""
        count = bisect_left(range(len(order)), True, lo=1, key=lambda count: self._enough(order[:count]))
        self.offer(order[:count])

    def improve(self, order: Units) -> None:
        """Looks for a better one among the sets of the first few units, as far as the questions go."""
        known = {unit.key: unit for unit in (*(self.best or ()), *order)}
        few = sorted(list(known.values())[:EXACT_UNITS], key=lambda unit: unit.cost)
        if self._enough(few):
            found = cheapest(few, self._enough, self._capacity, self.best, self._allowed, tries=EXACT_TRIES)
            if found is not None:
                self.best = found


def cheapest(
    units: Units,
    enough: Question,
    capacity: Resources,
    best: Units | None,
    allowed: Question | None = None,
    *,
    tries: int,
) -> list[Candidate] | None:
    """The set that takes least away, of units that are enough together, if it takes less than ``best``; by branch and
    bound, the most expensive spared first."""
    found: list[Candidate] | None = None
    bound = None if best is None else cost_of(best, capacity)
    left = tries

    def ask(chosen: Units) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and enough(chosen)

    def spare(i: int, chosen: list[Candidate]) -> None:
        """Decides about the first ``i`` units beside the chosen ones; all of them together are enough."""
        nonlocal found, bound
        if left < 0 or (bound is not None and chosen and cost_of(chosen, capacity)[:4] > bound[:4]):
            return
        if i and not (chosen and ask(chosen)):
            if left >= 0 and (i > 1 or chosen) and ask([*units[: i - 1], *chosen]):
                spare(i - 1, chosen)
            spare(i - 1, [units[i - 1], *chosen])
            return
        cost = cost_of(chosen, capacity)
        if left >= 0 and (bound is None or cost < bound) and (allowed is None or allowed(chosen)):
            found, bound = chosen, cost

    spare(len(units), [])
    return found


def irreducible(units: list[Candidate], enough: Question) -> list[Candidate]:
    """The units less those that are unnecessary, the last spared first. Large pieces are tried before small ones, so
    that few needed among many cost few questions."""
    needed = list(units)
    size = max(1, len(needed) // 2)
    while True:
        end = len(needed)
        while end > 0:
            start = max(0, end - size)
            rest = needed[:start] + needed[end:]
            if rest and enough(rest):
                needed = rest
            end = start
        if size == 1:
            return needed
        size //= 2


def worker_by_worker(
    state: State, base: Assumption, wanted: NodeFilter, slots: Iterable[Slot], units: Units
) -> list[Candidate]:
    """Who yields if each worker in turn, the largest first, goes to the node where that takes least away. A good
    guess: what the strategy says and quotas are not looked at."""
    nodes = _Nodes(state, base, wanted, units)
    chosen: dict[tuple[str, int], Candidate] = {}
    for slot in sorted(slots, key=lambda slot: (-slot.resources.gpu_milli, -slot.resources.cpu_milli)):
        for unit in nodes.room_for(slot):
            chosen[unit.key] = unit
    return list(chosen.values())


class _Nodes:
    """Nodes on which some units hold something or something is free, and what it costs to get a worker in."""

    def __init__(self, state: State, base: Assumption, wanted: NodeFilter, units: Units) -> None:
        self._state = state
        self._units = units
        self._capacity = state.cluster_use.capacity
        self._on: dict[str, list[Candidate]] = {}
        self._places = {unit.key: self._bundles_of(unit) for unit in units}
        for unit in units:
            for node_id in self._places[unit.key]:
                if state.nodes[node_id].usable and wanted.admits(state.nodes[node_id]) and self._may_add(node_id):
                    self._on.setdefault(node_id, []).append(unit)
        for node in sorted(state.nodes.values(), key=lambda node: node.rank):
            if node.usable and wanted.admits(node) and self._may_add(node.node_id):
                self._on.setdefault(node.node_id, [])
        view = View(state, base)
        self._rooms = {node_id: view.room(state.nodes[node_id]) for node_id in self._on}
        self._known: dict[tuple[str, Resources], list[Candidate] | None] = {}

    def room_for(self, slot: Slot) -> list[Candidate]:
        """Takes the room of one more worker where it is cheapest; who yields for it. Nobody if no node can hold it."""
        admits = NodeFilter(slot.selector).admits
        best: tuple[tuple[object, ...], int, str, list[Candidate]] | None = None
        for node_id in self._on:
            node = self._state.nodes[node_id]
            if (slot.place is not None and slot.place.node_id != node_id) or not admits(node):
                continue
            found = self._on_node(node_id, slot.resources)
            if found is not None:
                offer = (cost_of(found, self._capacity), node.rank, node_id, found)
                best = offer if best is None or offer[:2] < best[:2] else best
        if best is None:
            return []
        for unit in best[3]:
            self._release(unit)
        self._rooms[best[2]].take(slot.resources)
        self._forget(best[2])
        return best[3]

    def _on_node(self, node_id: str, ask: Resources) -> list[Candidate] | None:
        key = (node_id, ask)
        if key not in self._known:
            here = self._on[node_id]
            here = here if self._fits(node_id, here, ask) else []

            def fits(units: Units) -> bool:
                return self._fits(node_id, units, ask)

            found: list[Candidate] | None = None
            if fits([]):
                found = []
            elif here:
                by_cost = sorted(here, key=lambda unit: unit.cost)
                greedy = irreducible(by_cost, fits)
                better = cheapest(by_cost, fits, self._capacity, greedy, tries=EXACT_TRIES)
                found = greedy if better is None else better
            self._known[key] = found
        return self._known[key]

    def _fits(self, node_id: str, units: Units, ask: Resources) -> bool:
        room = self._rooms[node_id]
        back = [bundle for unit in units for bundle in self._places[unit.key][node_id]]
        for bundle in back:
            room.give_back(bundle)
        fits = room.fits(ask)
        for bundle in back:
            room.use(bundle)
        return fits

    def _release(self, unit: Candidate) -> None:
        for node_id, bundles in self._places[unit.key].items():
            if node_id in self._rooms:
                for bundle in bundles:
                    self._rooms[node_id].give_back(bundle)
                self._on[node_id] = [other for other in self._on[node_id] if other.key != unit.key]
                self._forget(node_id)

    def _forget(self, node_id: str) -> None:
        self._known = {key: found for key, found in self._known.items() if key[0] != node_id}

    def _may_add(self, node_id: str) -> bool:
        return node_id in self._on or len(self._on) < MOST_NODES

    def _bundles_of(self, unit: Candidate) -> dict[str, list[BundleRecord]]:
        """What comes free when a unit yields, by node."""
        found: dict[str, list[BundleRecord]] = {}
        groups = dict.fromkeys(
            worker.group_id
            for worker in self._state.workers_of(unit.job.uid)
            if worker.state in LIVE and (not unit.generation or worker.generation == unit.generation)
        )
        for group_id in groups:
            for bundle in self._state.groups[group_id].bundles:
                found.setdefault(bundle.node_id, []).append(bundle)
        return found
