"""What does the solver see? Tasks with whole-number times and rectangles; cycles are one task already.

A *task* is a component, or the ping-pong stage of a cycle. An *option* of a task is one way to run it: GPUs in some
pools, a time, memory, and which of its parts offload. Times are whole numbers of a power of ten of seconds, small
enough that rounding is far below the measurements' noise and large enough for exact arithmetic in a solver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from callboard.autoplace.cycles import stages_of
from callboard.autoplace.problem import Component, EdgeKind, Layout, Mode, NoPlan, Problem, Unplaceable

MOST_UNITS = 4_000_000_000
"""Longest horizon in time units: far from where a solver's linear relaxation loses digits."""

MIB = 1024
"""MiB in one GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component inside an option.

    Attributes:
        component: index in the problem.
        mode: the mode it runs in.
        offloads: it leaves memory between its spans.
        column: first GPU of its range, from the first of the option's range in its pool.
        pool: index of the pool; −1: CPU only.
    """

    component: int
    mode: Mode
    offloads: bool = False
    column: int = 0
    pool: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a task. Times in units, memory in MiB per GPU.

    Attributes:
        parts: its components.
        widths: (pool index, GPUs), ascending by pool; empty: CPU only.
        work: time for the whole batch.
        piece: time for one piece, at least.
        extra: switching and offloading, part of the span.
        alone: it shares no GPU; so it need not pay for switching.
        peak: memory while it runs.
        resident: memory between its spans.
        held: time that GPUs are held per batch in a steady state.
        tail: time from the end of the held time to the last piece, in a steady state.
    """

    parts: tuple[Part, ...]
    widths: tuple[tuple[int, int], ...]
    work: int
    piece: int
    extra: int = 0
    alone: bool = False
    peak: int = 0
    resident: int = 0
    held: int = 0
    tail: int = 0

    @property
    def gpus(self) -> int:
        """GPUs over all pools."""
        return sum(width for _, width in self.widths)

    @property
    def span(self) -> int:
        """Shortest span."""
        return self.work + self.extra

    @property
    def takes_turns(self) -> bool:
        """Whether its parts share GPUs among themselves."""
        ranges = [part for part in self.parts if part.mode.gpus]
        return len(ranges) > 1 and len(self.widths) == 1 and self.gpus < sum(part.mode.gpus for part in ranges)

    @property
    def lies_side_by_side(self) -> bool:
        """Whether it has several parts with GPUs of their own."""
        return sum(1 for part in self.parts if part.mode.gpus) > 1 and not self.takes_turns

    def pool_of(self, component: int) -> str:
        """Name of the pool of a component; empty: CPU only."""
        return next(part.mode.pool for part in self.parts if part.component == component)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A component or the stage of a cycle.

    Attributes:
        members: indices of its components.
        options: sorted by GPUs, then time; none dominates another.
    """

    members: tuple[int, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """An edge between tasks.

    Attributes:
        source: index of a task.
        target: index of another.
        barrier: the target starts at the source's end; else piece by piece.
        ends: the components that it joins.
        transfer: time to move the batch between pools.
        transfer_piece: the same for one piece.
    """

    source: int
    target: int
    barrier: bool
    ends: tuple[int, int]
    transfer: int = 0
    transfer_piece: int = 0

    def delay(self, source: Option, target: Option) -> tuple[int, int]:
        """(whole batch, one piece) of the transfer between two options; nothing inside one pool or from the CPU."""
        if not self.transfer:
            return 0, 0
        pools = source.pool_of(self.ends[0]), target.pool_of(self.ends[1])
        return (self.transfer, self.transfer_piece) if all(pools) and pools[0] != pools[1] else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem for a solver.

    Attributes:
        tasks: acyclic by ``arcs``.
        arcs: between them.
        capacity: GPUs of each pool.
        memory: MiB per GPU of each pool; None: can't be exceeded, so it is not looked at.
        unit_seconds: seconds of one time unit.
        horizon: no sensible plan is longer.
        reach: ``reach[i]`` has j when j can only start after i did.
        ends_before: ``ends_before[i]`` has j when j can only start after i ended.
    """

    tasks: tuple[Task, ...]
    arcs: tuple[Arc, ...]
    capacity: tuple[int, ...]
    memory: tuple[int | None, ...]
    unit_seconds: float
    horizon: int
    reach: tuple[frozenset[int], ...]
    ends_before: tuple[frozenset[int], ...]


def instance_of(problem: Problem) -> Instance:
    """The tasks of a problem.

    Raises:
        NoPlan: the members of a cycle fit no GPUs together, neither in turn nor side by side.
    """
    names = tuple(component.name for component in problem.components)
    index = {name: i for i, name in enumerate(names)}
    stages = [tuple(index[name] for name in stage) for stage in stages_of(names, problem.edges)]
    unit = _unit_seconds(problem)
    memory = _binding_memory(problem)
    pools = {pool.name: i for i, pool in enumerate(problem.pools)}
    builder = _Builder(problem, unit, pools, memory)
    tasks = tuple(Task(members=stage, options=builder.options(stage)) for stage in stages)
    homeless = [names[member] for task in tasks if not task.options for member in task.members]
    if homeless:
        around = " ⇄ ".join(homeless)
        raise NoPlan(
            tuple(
                Unplaceable(
                    component=name,
                    gpus=tuple(sorted({mode.gpus for mode in problem.component(name).modes})),
                    reason=f"the cycle {around} fits the GPUs and their memory neither in turn nor side by side",
                )
                for name in homeless
            )
        )
    task_of = {member: i for i, stage in enumerate(stages) for member in stage}
    arcs = tuple(
        Arc(
            source=task_of[index[edge.source]],
            target=task_of[index[edge.target]],
            barrier=edge.kind is EdgeKind.BARRIER,
            ends=(index[edge.source], index[edge.target]),
            transfer=round(edge.transfer_seconds / unit),
            transfer_piece=round(edge.transfer_seconds / problem.chunks / unit),
        )
        for edge in problem.edges
        if task_of[index[edge.source]] != task_of[index[edge.target]]
    )
    longest = sum(max(option.span for option in task.options) for task in tasks)
    return Instance(
        tasks=tasks,
        arcs=arcs,
        capacity=tuple(pool.gpus for pool in problem.pools),
        memory=memory,
        unit_seconds=unit,
        horizon=longest + sum(2 * arc.transfer for arc in arcs),
        reach=_closed(len(tasks), ((arc.source, arc.target) for arc in arcs)),
        ends_before=_ends_before(len(tasks), arcs),
    )


class _Builder:
    """Makes options out of modes."""

    def __init__(self, problem: Problem, unit: float, pools: dict[str, int], memory: tuple[int | None, ...]) -> None:
        self.problem = problem
        self.unit = unit
        self.pools = pools
        self.memory = memory

    def options(self, stage: tuple[int, ...]) -> tuple[Option, ...]:
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
        for modes in product(*(_skyline(component.modes) for component in components)):
            if not self._fits(modes):
                continue
            offloads = tuple(
                self._choices(component, mode)[-1] for component, mode in zip(components, modes, strict=True)
            )
            for chosen in dict.fromkeys((tuple(False for _ in stage), offloads)):
                yield from self._beside(stage, modes, chosen)
                if sum(1 for mode in modes if mode.gpus) > 1 and len({m.pool for m in modes if m.gpus}) == 1:
                    yield from self._in_turn(stage, modes, chosen)

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
    same_pools: dict[object, list[Option]] = {}
    fastest: dict[object, int] = {}
    ordered = sorted(options, key=lambda o: (o.gpus, o.work, o.extra, o.alone, o.peak, o.resident, o.held, o.tail))
    for option in ordered:
        # Who takes turns and who lies side by side are kept apart: a pure layout has only one of them.
        pools: object = (option.takes_turns, *(part.mode.pool for part in option.parts))
        same = same_pools.setdefault(pools, [])
        # Faster than all before: nothing beats it, and nothing has to be compared.
        if option.work < fastest.get(pools, option.work + 1) or not any(_beats(other, option) for other in same):
            same.append(option)
            kept.append(option)
            fastest[pools] = min(option.work, fastest.get(pools, option.work))
    return tuple(kept)


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


def _unit_seconds(problem: Problem) -> float:
    total = sum(
        max(mode.seconds + mode.tail_seconds for mode in component.modes)
        + component.switch_seconds
        + (component.offload_seconds or 0.0)
        for component in problem.components
    ) + sum(2 * edge.transfer_seconds for edge in problem.edges)
    exponent = 9
    while exponent > -3 and total * 10**exponent > MOST_UNITS:
        exponent -= 1
    return float(10.0**-exponent)


def _binding_memory(problem: Problem) -> tuple[int | None, ...]:
    """MiB per GPU where the components together could exceed it; None elsewhere, and nobody has to look."""
    limits: list[int | None] = []
    for pool in problem.pools:
        needs = [
            max((mode.memory_gib for mode in component.modes if mode.pool == pool.name), default=0.0)
            for component in problem.components
        ]
        enough = pool.memory_gib is None or sum(needs) <= pool.memory_gib
        limits.append(None if enough or pool.memory_gib is None else round(pool.memory_gib * MIB))
    return tuple(limits)


def _closed(size: int, pairs: Iterable[tuple[int, int]]) -> tuple[frozenset[int], ...]:
    reach: list[set[int]] = [set() for _ in range(size)]
    for source, target in pairs:
        reach[source].add(target)
    for middle in range(size):
        for start in range(size):
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return tuple(frozenset(each) for each in reach)


def _ends_before(size: int, arcs: tuple[Arc, ...]) -> tuple[frozenset[int], ...]:
    """A barrier anywhere on the way makes the target start after the source's end: pieces end in order."""
    reach = _closed(size, ((arc.source, arc.target) for arc in arcs))
    found: list[set[int]] = [set() for _ in range(size)]
    for arc in arcs:
        if arc.barrier:
            for source in range(size):
                if source == arc.source or arc.source in reach[source]:
                    found[source] |= {arc.target} | reach[arc.target]
    return tuple(frozenset(each) for each in found)


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
            replace(
                task,
                options=tuple(o for o in task.options if (lonely or not o.alone) and not o.lies_side_by_side),
            )
            for task in instance.tasks
        )
        return replace(instance, tasks=tasks)
    return instance
