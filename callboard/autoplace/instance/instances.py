"""The instance of a problem: whole units of time and memory, its graph closed over all that follows."""

from __future__ import annotations

from collections.abc import Iterable

from callboard.autoplace.instance.options import Options
from callboard.autoplace.instance.tasks import MIB, Arc, Instance, Task
from callboard.autoplace.problem.graphs import stages_of
from callboard.autoplace.problem.problem import EdgeKind, Problem, no_plan

MOST_UNITS = 4_000_000_000
"""Longest horizon in time units: far from where a solver's linear relaxation loses digits."""


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
    options = Options(problem, unit, pools, memory)
    tasks = tuple(Task(members=stage, options=options.of(stage)) for stage in stages)
    homeless = [names[member] for task in tasks if not task.options for member in task.members]
    if homeless:
        around = " ⇄ ".join(homeless)
        reason = f"the cycle {around} fits the GPUs and their memory neither in turn nor side by side"
        raise no_plan(map(problem.component, homeless), reason)
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
