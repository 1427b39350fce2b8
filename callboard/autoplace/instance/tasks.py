"""The tasks of an instance, with whole-number times and rectangles, and a solution of it.

A *task* is a component, or the ping-pong stage of a cycle. An *option* of a task is one way to run it: GPUs in some
pools, a time, memory, and which of its parts offload. Times are whole numbers of a power of ten of seconds, small
enough that rounding is far below the measurements' noise and large enough for exact arithmetic in a solver.
"""

from __future__ import annotations

from callboard.autoplace.problem.problem import Mode
from callboard.model.frozen import dataclass

MIB = 1024
"""MiB in one GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component inside an option.

    Attributes:
        component: index in the problem.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan for an instance.

    Attributes:
        length: end of its last task, in units.
        options: one per task.
        starts: earliest starts.
        ends: ends.
        columns: first GPU by task and pool index.
    """

    length: int
    options: tuple[Option, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    columns: tuple[dict[int, int], ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The tie breaker: GPUs in total, then by task."""
        each = tuple(option.gpus for option in self.options)
        return (sum(each), *each)
