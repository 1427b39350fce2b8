"""The checker of a plan: a simulation chunk by chunk that knows nothing of how the plan was found.

It reads the problem, and of the plan who lies where and who goes first on shared GPUs. Then every component works off
its pieces one by one: a piece starts when the one before it is done and when every stream has brought its own. The
last piece is handed on when its maker's span ends, and a span lasts at least its work and overhead: an idle wait is
used for switching. A plan whose time is not met to a thousandth is not returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from callboard.autoplace.problem.graphs import stages_of
from callboard.autoplace.problem.plan import Plan, Span
from callboard.autoplace.problem.problem import Async, Edge, EdgeKind, Mode, NoPlan, Problem, Unplaceable
from callboard.model.frozen import dataclass

TOLERANCE = 1e-3
"""Relative difference between the plan's time and the simulation's that is still agreement."""

MOST_PIECES = 65_536
"""A batch of more pieces is played through with this many: a chain of 64 components then differs by a thousandth."""

MIB = 1 / 1024
"""GiB that rounding memory to MiB may hide."""

_NOISE = 1e-6


class CheckFailed(AssertionError):
    """A plan that does not hold: a defect of the search, never of its input."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What runs as one: a component, or the members of a cycle."""

    members: tuple[str, ...]
    spans: tuple[Span, ...]
    pieces: tuple[float, ...]  # seconds per piece of each worker, in the order in which a piece meets them
    overhead: float

    @property
    def gpus(self) -> frozenset[int]:
        return frozenset(rank for span in self.spans for rank in span.gpu_ranks)

    @property
    def start(self) -> float:
        return min(span.start_seconds for span in self.spans)


def check_plan(plan: Plan) -> Plan:
    """The plan, with what the simulation measured.

    Raises:
        CheckFailed: ranges, memory, overlaps or the time don't hold.
    """
    _check_ranges(plan)
    _check_memory(plan)
    problem = plan.problem
    if isinstance(problem.objective, Async):
        measured = _check_period(plan, _stages(problem, plan.spans, problem.chunks))
    else:
        played = replace(problem, chunks=min(problem.chunks, MOST_PIECES))
        measured = _simulated(played, _stages(problem, plan.spans, played.chunks)) + problem.weight_sync_seconds
    if abs(measured - plan.iteration_seconds) > TOLERANCE * max(plan.iteration_seconds, _NOISE):
        raise CheckFailed(f"the plan says {plan.iteration_seconds} s and its simulation {measured} s")
    if plan.lower_bound_seconds > plan.iteration_seconds * (1 + _NOISE):
        raise CheckFailed(f"the bound {plan.lower_bound_seconds} s is above the plan's {plan.iteration_seconds} s")
    return replace(plan, checked_seconds=round(measured, 9))


def predict(problem: Problem, placement: Mapping[str, Sequence[int]]) -> float:
    """Seconds of one iteration of a synchronous problem with a given placement, by the model that the search uses.

    Components that share GPUs take turns in the problem's order, and pay for switching and offloading.

    Args:
        problem: the costs.
        placement: by component, the ranks of its GPUs; none: it runs on CPUs.

    Raises:
        NoPlan: a component has no cost on so many GPUs.
    """
    spans = []
    for turn, component in enumerate(problem.components):
        ranks = tuple(placement[component.name])
        mode = next((each for each in component.modes if each.gpus == len(ranks)), None)
        if mode is None:
            why = f"it has no cost on {len(ranks)} GPUs; measure it there"
            raise NoPlan((Unplaceable(component=component.name, gpus=(len(ranks),), reason=why),))
        shares = any(set(ranks) & set(other) for name, other in placement.items() if name != component.name)
        spans.append(
            Span(
                component=component.name,
                start_seconds=turn,
                end_seconds=turn,
                gpu_ranks=ranks,
                pool=mode.pool,
                estimated=mode.estimated,
                work_seconds=mode.seconds,
                overhead_seconds=(component.switch_seconds if shares or problem.switch_always else 0.0)
                + ((component.offload_seconds or 0.0) if shares else 0.0),
                offloads=shares and component.offload_seconds is not None,
            )
        )
    played = replace(problem, chunks=min(problem.chunks, MOST_PIECES))
    return _simulated(played, _stages(problem, spans, played.chunks)) + problem.weight_sync_seconds


def _check_ranges(plan: Plan) -> None:
    for component, span in zip(plan.problem.components, plan.spans, strict=True):
        if component.name != span.component:
            raise CheckFailed(f"{span.component} stands where {component.name} should")
        mode = _mode(plan.problem, span)
        if mode is None or abs(mode.seconds - span.work_seconds) > _NOISE:
            raise CheckFailed(f"{span.component} has no mode with {span.gpus} GPUs that takes {span.work_seconds} s")
        if span.gpu_ranks:
            ranks = plan.problem.pool(span.pool).gpu_ranks
            first = ranks.index(span.gpu_ranks[0])
            if ranks[first : first + span.gpus] != span.gpu_ranks:
                raise CheckFailed(f"{span.component}: GPUs {span.gpu_ranks} are no range of pool {span.pool}")


def _mode(problem: Problem, span: Span) -> Mode | None:
    modes = problem.component(span.component).modes
    return next((mode for mode in modes if mode.gpus == span.gpus and mode.pool == span.pool), None)


def _check_memory(plan: Plan) -> None:
    for pool in plan.problem.pools:
        if pool.memory_gib is None:
            continue
        for rank in pool.gpu_ranks:
            here = [span for span in plan.spans if rank in span.gpu_ranks]
            needs = []
            for span in here:
                mode = _mode(plan.problem, span)
                assert mode is not None
                needs.append((mode.memory_gib, 0.0 if span.offloads else mode.resident_gib))
            for i, (peak, _) in enumerate(needs):
                total = peak + sum(stays for j, (_, stays) in enumerate(needs) if j != i)
                if total > pool.memory_gib + MIB * len(needs):
                    raise CheckFailed(f"GPU {rank} needs {total:g} GiB and has {pool.memory_gib:g}")


def _stages(problem: Problem, given: Sequence[Span], chunks: int) -> list[_Stage]:
    by_name = {span.component: span for span in given}
    names = tuple(component.name for component in problem.components)
    found = []
    for members in stages_of(names, problem.edges):
        spans = tuple(by_name[name] for name in members)
        pieces = [span.work_seconds / chunks for span in spans]
        used = [set(span.gpu_ranks) for span in spans]
        sharing = [i for i, own in enumerate(used) if any(own & other for other in used if other is not own)]
        if sharing:
            # Those on the same GPUs take turns: one worker that needs the sum.
            together = sum(pieces[i] for i in sharing)
            pieces = [together, *(piece for i, piece in enumerate(pieces) if i not in sharing)]
        found.append(_Stage(members, spans, tuple(pieces), sum(span.overhead_seconds for span in spans)))
    return found


def _simulated(problem: Problem, stages: Sequence[_Stage]) -> float:
    """Seconds until the last stage has ended."""
    edges = [(edge, *_ends(edge, stages)) for edge in problem.edges]
    edges = [(edge, source, target) for edge, source, target in edges if source != target]
    waits = [{source for _, source, target in edges if target == i} for i in range(len(stages))]
    for i, stage in enumerate(stages):
        waits[i] |= {
            j
            for j, other in enumerate(stages)
            if j != i and stage.gpus & other.gpus and (other.start, j) < (stage.start, i)
        }
    handed: dict[int, list[float]] = {}
    made: dict[int, float] = {}
    ends: dict[int, float] = {}
    while len(ends) < len(stages):
        ready = [i for i in range(len(stages)) if i not in ends and waits[i] <= ends.keys()]
        if not ready:
            raise CheckFailed("the order on shared GPUs goes round in a circle")
        for i in ready:
            begin = max([0.0, *(ends[j] for j in waits[i] if stages[i].gpus & stages[j].gpus)])
            brought = [0.0] * problem.chunks
            first = 0.0
            for edge, source, target in edges:
                if target == i:
                    transfer = _transfer(edge, stages[source], stages[target])
                    if edge.kind is EdgeKind.BARRIER:
                        begin = max(begin, ends[source] + transfer)
                    else:
                        arrivals = _moved(handed[source], transfer)
                        first = max(first, made[source] + transfer / problem.chunks)
                        brought = [max(pair) for pair in zip(brought, arrivals, strict=True)]
            made[i], handed[i], ends[i] = _worked_off(stages[i], max(begin, first), brought)
    return max(ends.values())


def _worked_off(stage: _Stage, begin: float, brought: Sequence[float]) -> tuple[float, list[float], float]:
    """(when the first piece is made, when each is handed on, end of the span).

    Every worker takes the pieces in order. A span starts when the first piece is made upstream: what it has to switch
    can be done before that piece is handed on, which a batch of one piece is only at the end of its span.
    """
    free = [begin] * len(stage.pieces)
    handed = []
    for arrival in brought:
        at = max(arrival, begin)
        for worker, seconds in enumerate(stage.pieces):
            at = max(at, free[worker]) + seconds
            free[worker] = at
        handed.append(at)
    work = sum(stage.pieces) + max(stage.pieces) * (len(brought) - 1)
    end = max(handed[-1], begin + work + stage.overhead)
    return begin + sum(stage.pieces), [*handed[:-1], end], end


def _moved(handed: Sequence[float], transfer: float) -> list[float]:
    """When pieces arrive that move one after the other."""
    if not transfer:
        return list(handed)
    each = transfer / len(handed)
    free = 0.0
    arrivals = []
    for at in handed:
        free = max(free, at) + each
        arrivals.append(free)
    return arrivals


def _transfer(edge: Edge, source: _Stage, target: _Stage) -> float:
    pools = [
        next(span.pool for span in stage.spans if span.component == name)
        for stage, name in ((source, edge.source), (target, edge.target))
    ]
    return edge.transfer_seconds if all(pools) and pools[0] != pools[1] else 0.0


def _ends(edge: Edge, stages: Sequence[_Stage]) -> tuple[int, int]:
    where = {name: i for i, stage in enumerate(stages) for name in stage.members}
    return where[edge.source], where[edge.target]


def _check_period(plan: Plan, stages: Sequence[_Stage]) -> float:
    """The period that the busiest GPUs allow, once no two batches meet and every batch is in time."""
    period = plan.iteration_seconds
    objective = plan.problem.objective
    assert isinstance(objective, Async)
    slack = period * TOLERANCE
    if plan.latency_seconds > (objective.staleness + 1) * period + slack:
        raise CheckFailed(f"a batch takes {plan.latency_seconds} s; {objective.staleness:g} periods late is allowed")
    for i, stage in enumerate(stages):
        first, last = stage.start, max(span.end_seconds for span in stage.spans)
        if stage.gpus and last - first > period + slack:
            raise CheckFailed(f"{stage.members[0]} is not done when its next batch starts")
        for other in stages[:i]:
            if stage.gpus & other.gpus:
                begin, end = other.start, max(span.end_seconds for span in other.spans)
                if min(last - first, end - begin) <= slack:
                    continue  # too short for the tolerance to tell before from after
                # Shifted by whole periods into the one after this stage's start.
                offset = (begin - first) % period
                offset = 0.0 if period - offset < slack else offset
                if offset + slack < last - first or offset + (end - begin) > period + slack:
                    raise CheckFailed(f"{stage.members[0]} and {other.members[0]} meet on a GPU")
    _check_batch(plan, stages, slack)
    return period


def _check_batch(plan: Plan, stages: Sequence[_Stage], slack: float) -> None:
    """Every edge of one batch, at the times of the plan."""
    for edge in plan.problem.edges:
        source, target = _ends(edge, stages)
        if source == target:
            continue
        one, other = stages[source].spans[0], stages[target].spans[0]
        done = max(span.end_seconds + span.tail_seconds for span in stages[source].spans)
        transfer = _transfer(edge, stages[source], stages[target])
        if edge.kind is EdgeKind.BARRIER:
            late = done + transfer - other.start_seconds
        else:
            first = one.start_seconds + sum(stages[source].pieces) + transfer / plan.problem.chunks
            final = done + transfer / plan.problem.chunks + sum(stages[target].pieces)
            late = max(first - other.start_seconds, final - other.end_seconds - other.tail_seconds)
        if late > slack:
            raise CheckFailed(f"{edge.target} runs {late:g} s before {edge.source} has brought its pieces")
