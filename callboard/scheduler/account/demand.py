"""The demand beyond what there is: workers without a place, by pool and shape, for an autoscaler.

A job that has its room on the way (victims that yield, a group that is made) wants nothing more. What an elastic
component would take if it could is counted apart: a running job does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources
from callboard.model.specs import JobSpec, Labels
from callboard.scheduler.plan.complement import live_of, wanted
from callboard.scheduler.plan.quota import shortages
from callboard.scheduler.plan.view import Assumption, View
from callboard.scheduler.records.asks import Slot
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import JobState
from callboard.scheduler.state.state import State

MAX_JOBS_NAMED = 20


@dataclass(frozen=True, slots=True)
class Want:
    """Equal workers of a job that have no place.

    Attributes:
        since_ms: when its job began to want it.
        optional: its job runs without it.
        quota_blocked: a quota stands in the way, so that room alone would not help.
    """

    count: int
    pool: str
    resources: Resources
    selector: Labels
    job: str
    since_ms: int
    optional: bool
    quota_blocked: bool


@dataclass(slots=True)
class Demand:
    """Workers of one shape that have no place, in one pool.

    Attributes:
        selector: labels that a node must have.
        optional: how many of them a running job does without.
        jobs: names of the first jobs that want them.
        since_ms: when the first of them began to wait.
        quota_blocked: a quota stands in the way of all of them.
    """

    pool: str
    shape: Resources
    selector: Labels
    count: int = 0
    optional: int = 0
    jobs: list[str] = field(default_factory=list)
    since_ms: int = 0
    quota_blocked: bool = True

    def add(self, want: Want) -> None:
        """Counts some workers more."""
        self.since_ms = min(self.since_ms, want.since_ms) if self.count else want.since_ms
        self.count += want.count
        self.optional += want.count if want.optional else 0
        self.quota_blocked = self.quota_blocked and want.quota_blocked
        if want.job not in self.jobs and len(self.jobs) < MAX_JOBS_NAMED:
            self.jobs.append(want.job)


def demand(state: State) -> list[Demand]:
    """What is wanted, oldest first."""
    found: dict[tuple[str, Resources, Labels], Demand] = {}
    for want in _wants(state):
        key = (want.pool, want.resources, want.selector)
        found.setdefault(key, Demand(*key)).add(want)
    return sorted(found.values(), key=lambda entry: (entry.since_ms, entry.pool, str(entry.shape)))


def _wants(state: State) -> Iterator[Want]:
    view = View(state, Assumption())
    for *_, uid in state.queue:
        job, spec = state.jobs[uid], state.specs[uid].spec
        if not job.nominated:
            yield from _of_waiting(state, view, job, spec)
    for uid in state.elastic:
        yield from _of_growing(state, view, state.jobs[uid], state.specs[uid].spec)


def _of_waiting(state: State, view: View, job: JobRecord, spec: JobSpec) -> Iterator[Want]:
    asks = state.shapes[job.uid].asks
    short = {ask.pool for ask in asks if _is_short(state, view, ask.pool, ask.resources)}
    for ask in asks:
        # Workers of a component differ only by their places.
        slots = ask.slots if ask.placed else [Slot.of(part, ranks[0]) for part, ranks in ask.parts if ranks]
        counts = [1] * ask.count if ask.placed else [len(ranks) for _, ranks in ask.parts if ranks]
        for count, slot in zip(counts, slots, strict=True):
            selector = _selector(spec, slot.selector)
            yield Want(count, ask.pool, slot.resources, selector, job.name, job.submit_ms, False, ask.pool in short)


def _of_growing(state: State, view: View, job: JobRecord, spec: JobSpec) -> Iterator[Want]:
    if job.state is not JobState.RUNNING:
        return
    for component in spec.components:
        if not (component.elastic or spec.replaces):
            continue
        missing = wanted(job, component) - len(live_of(state, job, component))
        pool = spec.pool_of(component)
        short = _is_short(state, view, pool, component.resources)
        selector = _selector(spec, () if component.node_selector_soft else component.node_selector)
        if missing > 0:
            yield Want(missing, pool, component.resources, selector, job.name, job.running_ms, True, short)


def _is_short(state: State, view: View, pool: str, ask: Resources) -> bool:
    record = state.pools.get(pool)
    return record is None or bool(shortages(state.pools, view.charged, record.spec, ask))


def _selector(spec: JobSpec, more: Labels) -> Labels:
    hard = () if spec.node_selector_soft else spec.node_selector
    return tuple(sorted({*hard, *more}))
