"""The groups of GPUs that tasks share, and how many each needs, by dynamic programming over subsets.

In a steady state the components are split into groups with GPUs of their own; the members of a group take turns, so
its load is the sum of their times, and the period is at least the largest load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import product

from callboard.autoplace.instance.tasks import Instance, Option
from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tasks on GPUs of their own.

    Attributes:
        members: tasks, ascending.
        options: one per member.
        widths: (pool, GPUs) of the group; empty: CPU only.
        spans: how long each member holds the GPUs for one batch.
        tails: how long after that its last piece is done.
    """

    members: tuple[int, ...]
    options: tuple[Option, ...]
    widths: tuple[tuple[int, int], ...]
    spans: tuple[int, ...]
    tails: tuple[int, ...]

    @property
    def load(self) -> int:
        """Time that its GPUs are held per batch, the weight sync included when nothing can overlap it."""
        return sum(self.spans)

    @property
    def gpus(self) -> int:
        """GPUs over all pools."""
        return sum(width for _, width in self.widths)


Split = tuple[Group, ...]
"""Groups that have each task once."""


class Groups:
    """The groups that each set of tasks can be, from the leanest to the fastest.

    Args:
        sync: time of the weight sync: nothing overlaps it when one group has all tasks with GPUs.
    """

    def __init__(self, instance: Instance, sync: int) -> None:
        self.instance = instance
        self.sync = sync
        self.on_gpus = frozenset(
            i for i, task in enumerate(instance.tasks) if all(option.widths for option in task.options)
        )
        self._known: dict[tuple[int, ...], tuple[Group, ...]] = {}

    def syncs_inside(self, split: Iterable[Group]) -> bool:
        """Whether one group has all tasks with GPUs, so that its load has the weight sync already."""
        return any(self.on_gpus and self.on_gpus <= set(group.members) for group in split)

    def of(self, members: tuple[int, ...]) -> tuple[Group, ...]:
        """Every group of these tasks that no other beats in load and GPUs."""
        if members not in self._known:
            self._known[members] = tuple(self._single(members[0]) if len(members) == 1 else self._shared(members))
        return self._known[members]

    def _single(self, task: int) -> Iterator[Group]:
        options = self.instance.tasks[task].options
        # Alone on its GPUs a task pays for no switching and has all their memory.
        whole = self.sync if self.on_gpus == {task} else 0
        found = [
            Group(
                members=(task,),
                options=(option,),
                widths=option.widths,
                spans=(option.held + option.extra + whole,),
                tails=(option.tail,),
            )
            for option in options
        ]
        yield from _thinned(found)

    def _shared(self, members: tuple[int, ...]) -> Iterator[Group]:
        found: list[Group] = []
        for pool in range(len(self.instance.capacity)):
            choices = [self._in_pool(task, pool) for task in members]
            sizes = sorted({option.gpus for options in choices for option in options})
            for size in sizes:
                group = self._at(members, pool, size, choices)
                if group is not None:
                    found.append(group)
        yield from _thinned(found)

    def _in_pool(self, task: int, pool: int) -> list[Option]:
        return [
            option
            for option in self.instance.tasks[task].options
            if len(option.widths) == 1 and option.widths[0][0] == pool and not option.alone
        ]

    def _at(self, members: tuple[int, ...], pool: int, size: int, choices: list[list[Option]]) -> Group | None:
        """The group on ``size`` GPUs with the least load that fits the memory."""
        limit = self.instance.memory[pool]
        fastest: list[list[Option]] = []
        for options in choices:
            best: dict[tuple[int, int], Option] = {}
            for option in options:
                key = (option.peak, option.resident) if limit is not None else (0, 0)
                if option.gpus <= size and (key not in best or _turn(option) < _turn(best[key])):
                    best[key] = option
            fastest.append(list(best.values()))
        chosen: tuple[Option, ...] | None = None
        for combination in product(*fastest):
            if _fits(combination, limit) and (chosen is None or sum(map(_turn, combination)) < sum(map(_turn, chosen))):
                chosen = combination
        if chosen is None:
            return None
        spans = [_turn(option) for option in chosen]
        if self.on_gpus <= set(members):
            spans[-1] += self.sync
        width = max(option.gpus for option in chosen)
        return Group(
            members=members, options=chosen, widths=((pool, width),), spans=tuple(spans), tails=(0,) * len(members)
        )


def fewest_gpus(groups: Groups, period: int) -> bool:
    """Whether the tasks can be split into groups of at most this load that fit the pools together.

    By dynamic programming over subsets: for each the least GPUs per pool that it needs, as a Pareto set.
    """
    size = len(groups.instance.tasks)
    capacity = groups.instance.capacity
    needs: dict[int, set[tuple[int, ...]]] = {0: {(0,) * len(capacity)}}
    members = {mask: tuple(i for i in range(size) if mask >> i & 1) for mask in range(1, 1 << size)}
    for mask in range(1, 1 << size):
        lowest = mask & -mask
        rest = mask ^ lowest
        found: set[tuple[int, ...]] = set()
        part = rest
        while True:
            others = needs[rest ^ part]
            if others:
                for group in groups.of(members[part | lowest]):
                    if group.load > period:
                        continue
                    for used in others:
                        total = list(used)
                        for pool, width in group.widths:
                            total[pool] += width
                        if all(a <= b for a, b in zip(total, capacity, strict=True)):
                            found.add(tuple(total))
            if not part:
                break
            part = (part - 1) & rest
        needs[mask] = _pareto(found)
    return bool(needs[(1 << size) - 1])


def least_load(groups: Groups, most: int) -> int | None:
    """The least period that the loads alone allow; None: no split fits at all.

    Args:
        most: a load that is surely enough.
    """
    size = len(groups.instance.tasks)
    loads = sorted(
        {
            group.load
            for mask in range(1, 1 << size)
            for group in groups.of(tuple(i for i in range(size) if mask >> i & 1))
            if group.load <= most
        }
    )
    if not loads or not fewest_gpus(groups, loads[-1]):
        return None
    return loads[bisect_left(loads[:-1], True, key=lambda load: fewest_gpus(groups, load))]


def _turn(option: Option) -> int:
    """How long a member holds the GPUs: as in a synchronous iteration, for the next one waits for its tail too."""
    return option.span


def _fits(options: tuple[Option, ...], limit: int | None) -> bool:
    if limit is None:
        return True
    resident = sum(option.resident for option in options)
    return all(option.peak + resident - option.resident <= limit for option in options)


def _thinned(found: list[Group]) -> Iterator[Group]:
    """Groups that are faster in every member's turn or leaner than any other of the same pools."""
    kept: list[Group] = []
    for group in sorted(found, key=lambda g: (g.gpus, g.load, g.tails)):
        if not any(
            [pool for pool, _ in other.widths] == [pool for pool, _ in group.widths]
            and all(a[1] <= b[1] for a, b in zip(other.widths, group.widths, strict=True))
            and all(a <= b for a, b in zip(other.spans, group.spans, strict=True))
            and all(a <= b for a, b in zip(other.tails, group.tails, strict=True))
            and all(a.piece <= b.piece for a, b in zip(other.options, group.options, strict=True))
            for other in kept
        ):
            kept.append(group)
            yield group


def _pareto(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {
        one
        for one in found
        if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in found)
    }
