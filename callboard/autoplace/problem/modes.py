"""The modes of a component: legal GPU counts of each pool that have a cost and fit the memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from callboard.autoplace.problem.costs import Cost, CostError, Scaling, costs_at
from callboard.autoplace.problem.problem import Component, Mode, NoPlan, Pool, Unplaceable
from callboard.model.frozen import dataclass

Memory = Mapping[int, float] | float
"""GiB per GPU: one number, or by GPU count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which GPU counts are legal.

    Attributes:
        multiple_of: model-parallel size.
        least: fewest GPUs.
        most: most GPUs.
        counts: the only legal ones; None: any.
        data_parallel_divides: ``gpus / multiple_of`` must divide this (groups of samples per step); None: any.
    """

    multiple_of: int = 1
    least: int = 0
    most: int = 1 << 30
    counts: frozenset[int] | None = None
    data_parallel_divides: int | None = None
    measured_only: bool = False

    def allows(self, gpus: int) -> bool:
        """Whether ``gpus`` is legal; every candidate is asked, the full size included."""
        if not self.least <= gpus <= self.most or gpus % self.multiple_of:
            return False
        if self.counts is not None and gpus not in self.counts:
            return False
        if self.data_parallel_divides is not None and gpus > 0:
            return self.data_parallel_divides % (gpus // self.multiple_of) == 0
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A component as it was described, before it meets a cluster.

    Attributes:
        seconds_by_gpus: measured seconds, in every pool it may lie in.
        seconds_by_pool: measured seconds per pool, instead.
        scaling: law for counts outside the measured range.
        work_gpu_seconds: GPU-seconds of the whole batch; the async cost, and the sync one where nothing is measured.
        tail_seconds: what remains after the work when the last sequences run alone.
        pools: the only pools it may lie in; None: any.
        memory_gib: per GPU while it runs.
        resident_gib: per GPU between its spans; None: all of it.
        offload_seconds: cost of leaving memory between spans; None: it can't.
        switch_seconds: cost of sharing GPUs in time.
    """

    name: str
    seconds_by_gpus: Mapping[int, float] | None = None
    seconds_by_pool: Mapping[str, Mapping[int, float]] | None = None
    scaling: Scaling | None = None
    work_gpu_seconds: float | None = None
    tail_seconds: float = 0.0
    pools: tuple[str, ...] | None = None
    memory_gib: Memory | None = None
    resident_gib: Memory | None = None
    offload_seconds: float | None = None
    switch_seconds: float = 0.0
    rules: Rules = Rules()


def component_of(asked: Asked, pools: tuple[Pool, ...]) -> Component | Unplaceable:
    """The component with every legal mode on these pools, or why it has none."""
    modes: list[Mode] = []
    looked_at: set[int] = set()
    reasons: list[str] = []
    for pool in pools:
        if asked.pools is not None and pool.name not in asked.pools:
            continue
        points = _points(asked, pool)
        if points is None:
            continue
        counts = _counts(asked.rules, points, pool)
        looked_at.update(counts or range(1, pool.gpus + 1))
        try:
            costs = _costs(asked, points, counts)
        except CostError as error:
            reasons.append(str(error))
            continue
        found = [_mode(asked, pool, gpus, cost) for gpus, cost in sorted(costs.items())]
        fitting = [mode for mode in found if pool.memory_gib is None or mode.memory_gib <= pool.memory_gib]
        # A CPU mode is the same in every pool.
        modes += [mode for mode in fitting if mode.gpus > 0 or mode not in modes]
        if not fitting:
            reasons.append(_why_none(asked, pool, points, counts, found))
    if modes:
        return Component(
            name=asked.name,
            modes=tuple(modes),
            switch_seconds=asked.switch_seconds,
            offload_seconds=asked.offload_seconds,
        )
    reason = "; ".join(dict.fromkeys(reasons)) or "it has no cost on any pool of this cluster"
    return Unplaceable(component=asked.name, gpus=tuple(sorted(looked_at)), reason=reason)


def placeable(found: Iterable[Component | Unplaceable]) -> tuple[Component, ...]:
    """The components, if each has a place.

    Raises:
        NoPlan: some have none.
    """
    parts = list(found)
    causes = tuple(part for part in parts if isinstance(part, Unplaceable))
    if causes:
        raise NoPlan(causes)
    return tuple(part for part in parts if isinstance(part, Component))


def _points(asked: Asked, pool: Pool) -> Mapping[int, float] | None:
    if asked.seconds_by_pool is not None:
        return asked.seconds_by_pool.get(pool.name)
    return asked.seconds_by_gpus or {}


def _counts(rules: Rules, points: Mapping[int, float], pool: Pool) -> list[int]:
    candidates = sorted(points) if rules.measured_only else sorted({0, *range(1, pool.gpus + 1)})
    return [gpus for gpus in candidates if gpus <= pool.gpus and rules.allows(gpus)]


def _costs(asked: Asked, points: Mapping[int, float], counts: list[int]) -> dict[int, Cost]:
    if points or asked.work_gpu_seconds is None:
        return costs_at(counts, points, asked.scaling)
    return {
        gpus: Cost(asked.work_gpu_seconds / gpus + asked.tail_seconds, estimated=True) for gpus in counts if gpus > 0
    }


def _mode(asked: Asked, pool: Pool, gpus: int, cost: Cost) -> Mode:
    by_work = asked.work_gpu_seconds is not None and gpus > 0
    memory = _at(asked.memory_gib, gpus)
    return Mode(
        pool=pool.name if gpus else "",
        gpus=gpus,
        seconds=cost.seconds,
        held_seconds=(asked.work_gpu_seconds or 0.0) / gpus if by_work else cost.seconds,
        tail_seconds=asked.tail_seconds if by_work else 0.0,
        estimated=cost.estimated,
        memory_gib=memory if gpus else 0.0,
        resident_gib=min(memory, memory if asked.resident_gib is None else _at(asked.resident_gib, gpus))
        if gpus
        else 0,
    )


def _at(memory: Memory | None, gpus: int) -> float:
    """GiB per GPU on ``gpus``: of a table the nearest count below, which needs no less; else its smallest count."""
    if memory is None:
        return 0.0
    if not isinstance(memory, Mapping):
        return memory
    below = max((count for count in memory if count <= gpus), default=min(memory, default=None))
    return 0.0 if below is None else memory[below]


def _why_none(asked: Asked, pool: Pool, points: Mapping[int, float], counts: list[int], found: list[Mode]) -> str:
    where = f"on the {pool.gpus} GPUs of pool {pool.name}"
    if not points and asked.work_gpu_seconds is None:
        return f"no cost is given: measure it at one count at least ({where})"
    measured = ", ".join(map(str, sorted(points)))
    if not counts:
        return f"no GPU count is legal {where} (measured: {measured or 'none'}){_rules_said(asked.rules)}"
    if not found:
        counts = [gpus for gpus in counts if gpus > 0] or counts
        legal = f"{counts[0]} to {counts[-1]}" if len(counts) > 4 else ", ".join(map(str, counts))
        return (
            f"the legal counts {where} ({legal}) have no cost; measured: {measured}; measure one of them, or in the "
            "general form name a scaling law"
        )
    least = min(mode.memory_gib for mode in found)
    return f"it needs {least:g} GiB per GPU and those of pool {pool.name} have {pool.memory_gib:g}"


def _rules_said(rules: Rules) -> str:
    """What the rules ask for, as the end of a sentence."""
    said = [
        f"multiples of {rules.multiple_of}" if rules.multiple_of > 1 else "",
        f"{rules.least} or more" if rules.least > 1 else "",
        f"one of {', '.join(map(str, sorted(rules.counts)))}" if rules.counts is not None else "",
        "only measured ones" if rules.measured_only else "",
    ]
    return ": asked for are " + ", ".join(filter(None, said)) if any(said) else ""
