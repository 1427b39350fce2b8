"""Variants: who offloads, who is alone, who pays, decided only where it matters.

With every task free to offload or not, to share or not, there are 4ⁿ ways, and most make no difference. So each task
starts with all of its options at once, in a *relaxed* chain that has the least of everything: the shortest span, the
smallest memory. Its best plan is a bound. Then the plan is *repaired*: those that share pay for it, and those for whom
memory is short offload. If the repair cost nothing, the plan is the best of the node; if it did, the task that pays
most has its options split in two, and both halves are searched, the lower bound first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from callboard.autoplace.exact.branch_and_bound import Shortest, improved, meet, tidied
from callboard.autoplace.exact.combination import Combination
from callboard.autoplace.instance.chains import Chain
from callboard.autoplace.instance.stopping import Budget, Stopped
from callboard.autoplace.instance.tasks import Found, Instance, Option

OptionSet = tuple[Option, ...]
Sets = tuple[OptionSet, ...]

LARGE = 6
"""With more tasks each relaxed plan is improved before its proof."""


class Variants:
    """The search over option sets.

    Args:
        budget: nodes and interruption of all branch and bound together.
        on_found: told of each plan, better than the last or not.
    """

    def __init__(self, instance: Instance, budget: Budget, on_found: Callable[[Found], None]) -> None:
        self.instance = instance
        self.budget = budget
        self.on_found = on_found
        self.best: Found | None = None
        self.open = 1 << 62

    def run(self, below: int) -> bool:
        """Searches plans shorter than ``below``; whether it is done. If not, ``open`` bounds what is left."""
        queue: list[tuple[int, int, Sets]] = []
        for place, sets in enumerate(_places(self.instance)):
            heapq.heappush(queue, (0, place, sets))
        count = len(queue)
        while queue:
            bound, _, sets = heapq.heappop(queue)
            if bound >= below:
                return True
            try:
                relaxed, repaired, sure = self._solved(sets, below)
            except Stopped:
                self.open = min([bound, *(other for other, _, _ in queue), below])
                return False
            if repaired is not None and repaired.length < below:
                below = repaired.length
                self.best = repaired
                self.on_found(repaired)
            if relaxed is None or (sure and repaired is not None and repaired.length <= relaxed.length):
                if not sure:
                    self.open = bound
                    return False
                continue
            if relaxed.length < below:
                for half in self._split(sets, relaxed, repaired):
                    count += 1
                    heapq.heappush(queue, (relaxed.length if sure else bound, count, half))
        return True

    def _solved(self, sets: Sets, below: int) -> tuple[Found | None, Found | None, bool]:
        """(best relaxed plan, the same repaired, whether the first is proved)."""
        search = Combination(self.instance, tuple(relaxed_chain(options) for options in sets))
        shortest = Shortest(below, self.budget)
        if search.size > LARGE and self.best is not None:
            self._improve_towards(search, sets, below)
        shortest.run(search)
        if shortest.best is None:
            return None, None, not search.unsure
        return shortest.best, self._repaired(sets, shortest.best), not search.unsure

    def _improve_towards(self, search: Combination, sets: Sets, below: int) -> None:
        """A plan of this node that is near the best one, if that is one of its own."""
        assert self.best is not None
        if all(option in options for option, options in zip(self.best.options, sets, strict=True)):
            start = replace(self.best, options=self.best.options)
            better = improved(search, start, Budget(None, self.budget.stopped))
            repaired = self._repaired(sets, better) if better is not start else None
            if repaired is not None and repaired.length < min(below, self.best.length):
                self.best = repaired
                self.on_found(repaired)

    def _repaired(self, sets: Sets, found: Found) -> Found | None:
        """The plan with options that pay for what they share and fit the memory; None when none do."""
        shares = [False] * len(sets)
        for i, j in Combination(self.instance, tuple(Chain.of((option,)) for option in found.options)).pairs():
            if meet(found.options, found.columns, i, j):
                shares[i] = shares[j] = True
        candidates = [
            sorted(
                (
                    option
                    for option in options
                    if option.widths == chosen.widths
                    and _pools(option) == _pools(chosen)
                    and not (option.alone and shared)
                ),
                key=lambda option: (option.span, option.resident, option.peak),
            )
            for options, chosen, shared in zip(sets, found.options, shares, strict=True)
        ]
        if not all(candidates):
            return None
        chosen = self._fitting([list(options) for options in candidates], found)
        if chosen is None:
            return None
        return tidied(self.instance, chosen, found.starts, found.ends, found.columns)

    def _fitting(self, candidates: list[list[Option]], found: Found) -> tuple[Option, ...] | None:
        """One candidate each: the shortest, and where memory is short those that give most for the least time."""
        while True:
            chosen = tuple(options[0] for options in candidates)
            crowded = self._crowded(chosen, found)
            if not crowded:
                return chosen
            steps = [
                (other.span - chosen[i].span, i, place)
                for i in crowded
                for place, other in enumerate(candidates[i])
                if other.resident < chosen[i].resident or other.peak < chosen[i].peak
            ]
            if not steps:
                return None
            _, i, place = min(steps)
            candidates[i] = candidates[i][place:]

    def _crowded(self, chosen: tuple[Option, ...], found: Found) -> list[int]:
        """The tasks on some GPU whose memory is exceeded."""
        for pool, limit in enumerate(self.instance.memory):
            if limit is None:
                continue
            inside = [i for i in range(len(chosen)) if pool in found.columns[i]]
            for point in inside:
                at = found.columns[point][pool]
                here = [
                    i
                    for i in inside
                    if found.columns[i][pool] <= at < found.columns[i][pool] + dict(chosen[i].widths)[pool]
                ]
                resident = sum(chosen[i].resident for i in here)
                if any(chosen[i].peak + resident - chosen[i].resident > limit for i in here):
                    return here
        return []

    def _split(self, sets: Sets, relaxed: Found, repaired: Found | None) -> Iterator[Sets]:
        """The node in two, by the options of the task that pays most for the repair."""
        mixed = [i for i, options in enumerate(sets) if _differs(options)]
        if not mixed:
            return
        if repaired is None:
            crowded = self._crowded(relaxed.options, relaxed)
            worst = next((i for i in mixed if i in crowded), mixed[0])
        else:
            pays = [actual.span - loose.span for actual, loose in zip(repaired.options, relaxed.options, strict=True)]
            worst = max(mixed, key=lambda i: (pays[i], -i))
        for half in _halves(sets[worst]):
            yield (*sets[:worst], half, *sets[worst + 1 :])


def relaxed_chain(options: OptionSet) -> Chain:
    """The chain that is at least as good as any option of a set: its shortest spans and smallest memory."""
    peak = min(option.peak for option in options)
    resident = min(option.resident for option in options)
    alone = all(option.alone for option in options)
    fastest: dict[int, Option] = {}
    for option in options:
        best = fastest.get(option.gpus)
        if best is None or (option.span, option.alone) < (best.span, best.alone):
            fastest[option.gpus] = option
    kept: list[Option] = []
    for gpus in sorted(fastest):
        option = fastest[gpus]
        if not kept or (option.span < kept[-1].span and option.piece <= kept[-1].piece):
            kept.append(option)
    return Chain.of(replace(option, peak=peak, resident=resident, alone=alone) for option in kept)


def _places(instance: Instance) -> Iterator[Sets]:
    """Option sets of one kind of place per task, in every combination: those may vary in one width only."""
    by_task = []
    for task in instance.tasks:
        places: dict[object, list[Option]] = {}
        for option in task.options:
            fixed = option.widths if len(option.widths) > 1 else tuple(pool for pool, _ in option.widths)
            # A stage has options of one width that differ in more than their span; each is a place of its own.
            places.setdefault((fixed, _pools(option), option if len(option.parts) > 1 else None), []).append(option)
        by_task.append([tuple(options) for options in places.values()])
    return product(*by_task)


def _pools(option: Option) -> tuple[str, ...]:
    return tuple(part.mode.pool for part in option.parts)


def _differs(options: OptionSet) -> bool:
    return len({(option.extra, option.alone, option.peak, option.resident) for option in options}) > 1


def _halves(options: OptionSet) -> Iterator[OptionSet]:
    """Options in two: alone or not, offloading or not, else by GPUs."""
    rules: list[Callable[[Option], object]] = [
        lambda option: any(part.offloads for part in option.parts),
        lambda option: option.alone,
    ]
    for rule in rules:
        values = {bool(rule(option)) for option in options}
        if len(values) > 1:
            yield tuple(option for option in options if not rule(option))
            yield tuple(option for option in options if rule(option))
            return
    ordered = sorted(options, key=lambda option: (option.gpus, option.span))
    yield tuple(ordered[: len(ordered) // 2])
    yield tuple(ordered[len(ordered) // 2 :])
