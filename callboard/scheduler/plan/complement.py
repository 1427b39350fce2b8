"""The complement of a job: the workers that a component should have, has, and is without.

Questions about records alone, so that whoever explains or counts demand needs nothing of what acts on the answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.specs import ComponentSpec, JobSpec, ScalingAction, Strategy
from callboard.scheduler.records.job_records import JobRecord, WorkerRecord
from callboard.scheduler.records.states import LIVE, WorkerState
from callboard.scheduler.state.state import State


def wanted(job: JobRecord, component: ComponentSpec) -> int:
    """Workers that a component should have. One that signals make grow starts with its fewest, any other with as many
    as find room."""
    grows_by_signals = any(rule.action is ScalingAction.UP for rule in component.scaling)
    unsaid = component.min_workers if grows_by_signals else component.max_workers
    return dict(job.targets).get(component.name, unsaid)


def live_of(state: State, job: JobRecord, component: ComponentSpec) -> list[WorkerRecord]:
    """Workers of a component that are there and stay."""
    return [
        worker
        for worker in state.workers_of(job.uid)
        if worker.component == component.name
        and worker.attempt == job.attempt
        and worker.state in LIVE
        and worker.state is not WorkerState.STOPPING
    ]


def is_leaving(state: State, job: JobRecord, component: ComponentSpec, rank: int) -> bool:
    """Whether the worker that had this rank is still on its way out: no rank is there twice (R5)."""
    return any(
        worker.state is WorkerState.STOPPING
        and (worker.component, worker.rank, worker.attempt) == (component.name, rank, job.attempt)
        for worker in state.workers_of(job.uid)
    )


def next_rank(live: Sequence[WorkerRecord]) -> int:
    """The lowest rank that none of a component's workers has."""
    taken = {worker.rank for worker in live}
    return next(rank for rank in range(len(live) + 1) if rank not in taken)


def closed_to(state: State, job: JobRecord, spec: JobSpec, component: ComponentSpec) -> frozenset[str]:
    """Ids of the nodes where a further worker of a component may not go, because of where the others are: by
    STRICT_SPREAD those nodes, by STRICT_PACK all but theirs."""
    strategy = component.placement or spec.placement
    if component.places or strategy not in (Strategy.STRICT_SPREAD, Strategy.STRICT_PACK):
        return frozenset()
    # Components without a strategy of their own follow that of their job together.
    peers = {each.name for each in spec.components if not (each.placement or each.places)}
    peers = {component.name} if component.placement else peers
    nodes = frozenset(w.node_id for w in state.workers_of(job.uid) if w.component in peers and w.state in LIVE)
    return nodes if strategy is Strategy.STRICT_SPREAD or not nodes else frozenset(state.nodes) - nodes


def missing(state: State, uid: str) -> dict[str, list[int]]:
    """Ranks, by component, that a job is not whole without and that are being replaced."""
    job, spec = state.jobs[uid], state.specs[uid].spec
    found: dict[str, list[int]] = {}
    for component in spec.components:
        there = live_of(state, job, component)
        short = component.min_workers - sum(1 for worker in there if not worker.extra)
        held = {worker.rank for worker in there if not worker.extra}
        absent = [rank for rank in range(component.max_workers) if rank not in held]
        if short > 0:
            found[component.name] = absent[:short]
    return found
