"""The options of a task: every way to run it alone, beside others or in turn that no other one beats."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from callboard.autoplace.instance.tasks import MIB, Instance, Option, Part
from callboard.autoplace.problem.problem import Component, Layout, Mode, NoPlan, Problem, Unplaceable

MOST_SIZES_OF_CYCLE = 300_000
"""Combinations of sizes of the members of a cycle that are looked at: some seconds."""


class Options:
    """Makes options out of modes.

    Args:
        unit: seconds of one time unit.
        pools: index of each pool by its name.
        memory: MiB per GPU of each pool; None: can't be exceeded.
    """

    def __init__(self, problem: Problem, unit: float, pools: dict[str, int], memory: tuple[int | None, ...]) -> None:
        self.problem = problem
        self.unit = unit
        self.pools = pools
        self.memory = memory

    def of(self, stage: tuple[int, ...]) -> tuple[Option, ...]:
        """Every option of a stage that isn't dominated."""
        found = self._single(stage[0]) if len(stage) == 1 else self._ping_pong(stage)
        return undominated(option for option in found if self._holds(option))

    def _holds(self, option: Option) -> bool:
        """Whether it fits its GPUs by itself."""
        return all(
            width <= self.problem.pools[pool].gpus and option.peak <= (self.memory[pool] or option.peak)
            for pool, width in option.widths
        )

    def _single(self, member: int) -> Iterator[Option]:
        component = self.problem.components[member]
        for mode in component.modes:
            for offloads in self._choices(component, mode):
                yield from self._variants(
                    (Part(component=member, mode=mode, offloads=offloads, pool=self.pools.get(mode.pool, -1)),),
                    widths={self.pools[mode.pool]: mode.gpus} if mode.gpus else {},
                    seconds=mode.seconds,
                    held=mode.held_seconds,
                    tail=mode.tail_seconds,
                    piece=mode.seconds / self.problem.chunks,
                )

    def _choices(self, component: Component, mode: Mode) -> tuple[bool, ...]:
        """Whether to offload: only where memory can run out, something would be freed, and it can."""
        if component.offload_seconds is None or not mode.gpus or not mode.resident_gib:
            return (False,)
        return (False, True) if self.memory[self.pools[mode.pool]] is not None else (False,)

    def _ping_pong(self, stage: tuple[int, ...]) -> Iterator[Option]:
        """A cycle as one stage: its members alternate piece by piece.

        On GPUs of their own they work on different pieces at one time: Σ p + max(p)·(M − 1), as in a pipeline of two
        stages. Those that share GPUs take turns, so their times add up. Members in one pool either all share or all
        lie side by side, in the order of the components.
        """
        components = [self.problem.components[member] for member in stage]
        sizes = [_skyline(component.modes) for component in components]
        count = prod(len(modes) for modes in sizes)
        if count > MOST_SIZES_OF_CYCLE:
            named = " and ".join(component.name for component in components)
            reason = (
                f"{named} are a cycle, and their sizes can be combined in {count} ways; state the counts to choose "
                "from, as in gpus: {counts: [8, 16, 32]}"
            )
            raise NoPlan((Unplaceable(component=components[0].name, gpus=(), reason=reason),))
        pool = sizes[0][0].pool
        if pool and self._is_plain(sizes):
            nobody = tuple(False for _ in stage)
            for modes in self._best_beside(sizes, self.problem.pools[self.pools[pool]].gpus):
                yield from self._beside(stage, modes, nobody)
            for modes in _best_in_turn(sizes):
                yield from self._in_turn(stage, modes, nobody)
            return
        for modes in product(*sizes):
            if not self._fits(modes):
                continue
            offloads = tuple(
                self._choices(component, mode)[-1] for component, mode in zip(components, modes, strict=True)
            )
            for chosen in dict.fromkeys((tuple(False for _ in stage), offloads)):
                yield from self._beside(stage, modes, chosen)
                if sum(1 for mode in modes if mode.gpus) > 1 and len({m.pool for m in modes if m.gpus}) == 1:
                    yield from self._in_turn(stage, modes, chosen)

    def _is_plain(self, sizes: Sequence[tuple[Mode, ...]]) -> bool:
        """Whether the members differ in GPUs and time alone: in one pool, none on CPUs, memory without end."""
        pools = {mode.pool for modes in sizes for mode in modes}
        return len(pools) == 1 and self.memory[self.pools[sizes[0][0].pool]] is None

    def _best_beside(self, sizes: Sequence[tuple[Mode, ...]], capacity: int) -> Iterator[tuple[Mode, ...]]:
        """The combinations side by side that none of fewer GPUs beats, before anything is made of them."""
        more = self.problem.chunks - 1
        found: list[tuple[int, float, float, int, tuple[Mode, ...]]] = []
        for modes in product(*sizes):
            width = sum(mode.gpus for mode in modes)
            if width <= capacity:
                piece = sum(mode.seconds for mode in modes)
                found.append((width, piece + max(mode.seconds for mode in modes) * more, piece, len(found), modes))
        stairs = Stairs()
        for _, work, piece, _, modes in sorted(found):
            if not stairs.beat(work, piece):
                stairs.add(work, piece)
                yield modes

    def _fits(self, modes: tuple[Mode, ...]) -> bool:
        return all(mode.gpus <= self.problem.pools[self.pools[mode.pool]].gpus for mode in modes if mode.gpus)

    def _beside(self, stage: tuple[int, ...], modes: tuple[Mode, ...], offloads: tuple[bool, ...]) -> Iterator[Option]:
        widths: dict[int, int] = {}
        parts = []
        for member, mode, offload in zip(stage, modes, offloads, strict=True):
            pool = self.pools[mode.pool] if mode.gpus else -1
            parts.append(Part(component=member, mode=mode, offloads=offload, column=widths.get(pool, 0), pool=pool))
            if mode.gpus:
                widths[pool] = widths.get(pool, 0) + mode.gpus
        pieces = [mode.seconds / self.problem.chunks for mode in modes]
        seconds = sum(pieces) + max(pieces) * (self.problem.chunks - 1)
        return self._variants(tuple(parts), widths=widths, seconds=seconds, held=seconds, tail=0.0, piece=sum(pieces))

    def _in_turn(self, stage: tuple[int, ...], modes: tuple[Mode, ...], offloads: tuple[bool, ...]) -> Iterator[Option]:
        pool = next(self.pools[mode.pool] for mode in modes if mode.gpus)
        parts = tuple(
            Part(component=member, mode=mode, offloads=offload, pool=pool if mode.gpus else -1)
            for member, mode, offload in zip(stage, modes, offloads, strict=True)
        )
        on_gpus = [mode.seconds for mode in modes if mode.gpus]
        on_cpus = [mode.seconds for mode in modes if not mode.gpus]
        pieces = [seconds / self.problem.chunks for seconds in (sum(on_gpus), *on_cpus)]
        seconds = sum(pieces) + max(pieces) * (self.problem.chunks - 1)
        return self._variants(
            parts,
            widths={pool: max(mode.gpus for mode in modes)},
            seconds=seconds,
            held=seconds,
            tail=0.0,
            piece=sum(pieces),
            in_turn=True,
        )

    def _variants(
        self,
        parts: tuple[Part, ...],
        *,
        widths: dict[int, int],
        seconds: float,
        held: float,
        tail: float,
        piece: float,
        in_turn: bool = False,
    ) -> Iterator[Option]:
        """The option that may share its GPUs, and the one that doesn't and saves the switching."""
        components = [self.problem.components[part.component] for part in parts]
        switch = sum(component.switch_seconds for component in components)
        offload = sum(c.offload_seconds or 0.0 for c, part in zip(components, parts, strict=True) if part.offloads)
        peak, resident = (
            self._memory(parts, in_turn) if any(self.memory[pool] is not None for pool in widths) else (0, 0)
        )
        sharing = Option(
            parts=parts,
            widths=tuple(sorted(widths.items())),
            work=round(seconds / self.unit),
            piece=round(piece / self.unit),
            extra=round((switch * (bool(widths) or self.problem.switch_always) + offload) / self.unit),
            peak=peak,
            resident=resident,
            held=round(held / self.unit),
            tail=round(tail / self.unit),
        )
        yield sharing
        # Those that take turns inside a stage share GPUs whatever the others do.
        if switch and widths and not in_turn and not self.problem.switch_always:
            yield replace(sharing, extra=round(offload / self.unit), alone=True)

    def _memory(self, parts: tuple[Part, ...], in_turn: bool) -> tuple[int, int]:
        """(peak, resident) MiB per GPU; members side by side count as the largest of them on every GPU."""
        resident = [0.0 if part.offloads else part.mode.resident_gib for part in parts]
        peaks = [part.mode.memory_gib for part in parts]
        if not in_turn:
            return round(max(peaks) * MIB), round(max(resident) * MIB)
        # Nobody leaves between two pieces: while one runs the others stay as they are between spans.
        kept = [part.mode.resident_gib for part in parts]
        peak = max(peak + sum(kept) - own for peak, own in zip(peaks, kept, strict=True))
        return round(peak * MIB), round(sum(resident) * MIB)


def undominated(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other beats in everything, sorted by GPUs, time and overhead."""
    kept: list[Option] = []
    # Who takes turns and who lies side by side are kept apart: a pure layout has only one of them.
    same_pools: dict[object, dict[_Overhead, _Alike]] = {}
    for option in sorted(options, key=lambda o: (o.gpus, o.work, o.extra, o.alone, o.peak, o.resident, o.held, o.tail)):
        same = same_pools.setdefault((option.takes_turns, *(part.mode.pool for part in option.parts)), {})
        overhead = (option.extra, option.alone, option.tail, option.peak, option.resident)
        if not any(
            alike.beat(option)
            for other, alike in same.items()
            if all(one <= two for one, two in zip(other, overhead, strict=True))
        ):
            same.setdefault(overhead, _Alike()).add(option)
            kept.append(option)
    return tuple(kept)


_Overhead = tuple[int, bool, int, int, int]


class _Alike:
    """Options of one overhead by ascending GPUs, thousands of them on a large cluster."""

    def __init__(self) -> None:
        self._stairs = Stairs()
        self._others: list[Option] = []

    def add(self, option: Option) -> None:
        """One more, which none beats."""
        if option.held == option.work and len(option.widths) <= 1:
            self._stairs.add(option.work, option.piece)
        else:
            self._others.append(option)

    def beat(self, option: Option) -> bool:
        """Whether one of them beats ``option``, which has no fewer GPUs and no less overhead."""
        if len(option.widths) <= 1 and self._stairs.beat(min(option.work, option.held), option.piece):
            return True
        return any(_beats(other, option) for other in self._others)


class Stairs:
    """Pairs of times that no other pair is below in both, so that the second falls as the first rises."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._second: list[float] = []

    def beat(self, first: float, second: float) -> bool:
        """Whether a pair is at or below these two."""
        at = bisect_right(self._first, first)
        return at > 0 and self._second[at - 1] <= second

    def add(self, first: float, second: float) -> None:
        """A pair that none beats."""
        at = end = bisect_left(self._first, first)
        while end < len(self._first) and self._second[end] >= second:
            end += 1
        self._first[at:end] = [first]
        self._second[at:end] = [second]


def _beats(one: Option, other: Option) -> bool:
    return (
        one.work <= other.work
        and one.piece <= other.piece
        and one.held <= other.held
        and one.tail <= other.tail
        and one.extra <= other.extra
        and one.alone <= other.alone
        and one.peak <= other.peak
        and one.resident <= other.resident
        and all(a[1] <= b[1] for a, b in zip(one.widths, other.widths, strict=True))
    )


def _best_in_turn(sizes: Sequence[tuple[Mode, ...]]) -> Iterator[tuple[Mode, ...]]:
    """For each number of GPUs the fastest size of every member that fits: those that take turns take the sum."""
    widths = sorted({mode.gpus for modes in sizes for mode in modes})
    least = max(modes[0].gpus for modes in sizes)
    for width in widths:
        if width >= least:
            yield tuple(
                min((m for m in modes if m.gpus <= width), key=lambda m: (m.seconds, m.gpus)) for modes in sizes
            )


def _skyline(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """Modes that are faster, or held shorter, or smaller than every narrower one of the same pool."""
    kept: list[Mode] = []
    for mode in sorted(modes, key=lambda m: (m.pool, m.gpus)):
        if not any(
            other.pool == mode.pool
            and other.seconds <= mode.seconds
            and other.held_seconds <= mode.held_seconds
            and other.memory_gib <= mode.memory_gib
            and other.resident_gib <= mode.resident_gib
            for other in kept
        ):
            kept.append(mode)
    return tuple(kept)


def for_layout(instance: Instance, layout: Layout) -> Instance:
    """The instance with the options that can be best in a pure layout.

    Where nothing is shared nobody pays for switching, and nobody's memory is in another's way; where everything is
    shared, nobody is alone. The members of a cycle count one by one.
    """
    if layout is Layout.DISAGGREGATED:
        apart = [
            [replace(option, resident=0, alone=True) for option in task.options if not option.takes_turns]
            for task in instance.tasks
        ]
        tasks = tuple(
            replace(task, options=undominated(options)) for task, options in zip(instance.tasks, apart, strict=True)
        )
        return replace(instance, tasks=tasks)
    if layout is Layout.COLLOCATED:
        lonely = sum(any(o.gpus for o in task.options) for task in instance.tasks) == 1
        tasks = tuple(
            replace(task, options=tuple(o for o in task.options if (lonely or not o.alone) and not o.lies_side_by_side))
            for task in instance.tasks
        )
        return replace(instance, tasks=tasks)
    return instance
