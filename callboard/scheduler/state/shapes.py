"""The shapes of jobs: which waiting jobs are blocked alike, and which running jobs are alike to a preemptor."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any, NamedTuple

from callboard.model.quantities import total
from callboard.model.specs import JobSpec, Labels
from callboard.scheduler.records.asks import asks_of
from callboard.scheduler.records.job_records import JobRecord, SpecRecord
from callboard.scheduler.records.states import JOB_RUNNING, JOB_STARTING


class YieldClass(NamedTuple):
    """What decides whether a job must yield, and how much that takes away."""

    priority_milli: int
    pool: str
    labels: Labels
    preemptible: bool
    pools: tuple[str, ...]
    """Pools of its components."""
    elastic: bool
    held: tuple[tuple[str, int], ...]
    """What its fewest workers hold."""


ShapeKey = tuple[object, ...]

MAX_SHAPES = 10_000
"""Most shapes kept of specs that no job has; beyond, those are forgotten."""


class Shape:
    """Everything of a job that decides whether and where it can start. Who it yielded to is not in it: the few jobs
    that did are looked at one by one.

    Attributes:
        key: equal for specs of one shape.
        asks: what its jobs need to start.
        yield_class: what decides whether its jobs must yield, and how much that takes away.
        least: what the fewest workers of a job hold.
        estimated_ms: how long a job is thought to run; 0: unknown.
        placed: some of its workers must run at certain places.
        jobs: how many jobs there are of it.
    """

    __slots__ = ("asks", "estimated_ms", "jobs", "key", "least", "placed", "yield_class")

    def __init__(self, key: ShapeKey, spec: JobSpec) -> None:
        pools = tuple(sorted({spec.pool_of(component) for component in spec.components}))
        elastic = any(component.elastic for component in spec.components)
        self.key = key
        self.asks = asks_of(spec)
        self.least = total(ask.resources for ask in self.asks)
        self.yield_class = YieldClass(
            spec.priority_milli,
            spec.pool,
            spec.labels,
            spec.preemptible,
            pools,
            elastic,
            tuple(self.least.items()),
        )
        self.estimated_ms = spec.estimated_duration_ms
        self.placed = spec.placed
        self.jobs = 0


class Shapes(dict[str, Shape]):
    """The shape of every job's spec, by uid, worked out when it is first asked for: nobody asks for most of those of
    jobs that have ended. Each is kept once, so that to compare two is to compare their addresses."""

    def __init__(self, specs: Mapping[str, SpecRecord]) -> None:
        super().__init__()
        self._specs = specs
        self._kept: dict[ShapeKey, Shape] = {}
        self._unused = 0
        self._newest: tuple[JobSpec, Shape] | None = None
        """What was asked last: a spec is asked about several times while it is submitted."""

    def of(self, spec: JobSpec) -> Shape:
        """The shape of a spec, whether a job has it or not."""
        if self._newest is not None and self._newest[0] is spec:
            return self._newest[1]
        key = _key(spec)
        shape = self._kept.get(key)
        if shape is None:
            if self._unused >= MAX_SHAPES:
                self._kept = {key: shape for key, shape in self._kept.items() if shape.jobs}
                self._unused = 0
            shape = self._kept[key] = Shape(key, spec)
            self._unused += 1
        self._newest = (spec, shape)
        return shape

    def __missing__(self, uid: str) -> Shape:
        shape = self.of(self._specs[uid].spec)
        self._unused -= not shape.jobs
        shape.jobs += 1
        self[uid] = shape
        return shape

    def get(self, uid: str, default: Any = None) -> Any:
        """The shape of a job, if there is such a job."""
        return self[uid] if uid in self or uid in self._specs else default

    def drop(self, uid: str) -> None:
        """A job is gone, or has another spec."""
        shape = self.pop(uid, None)
        if shape is not None:
            shape.jobs -= 1
            self._unused += not shape.jobs

    def known(self) -> dict[str, ShapeKey]:
        """The shape of every job, for the check of the invariants."""
        return {uid: self[uid].key for uid in self._specs}


def _key(spec: JobSpec) -> ShapeKey:
    return (
        spec.pool,
        spec.priority_milli,
        spec.labels,
        spec.preemptible,
        spec.placement,
        spec.node_selector,
        spec.node_selector_soft,
        spec.never_preempts,
        spec.estimated_duration_ms,
        tuple(
            [
                (
                    *(c.name, c.pool, c.resources, c.min_workers, c.elastic, c.places),
                    *(c.node_selector, c.node_selector_soft, c.interpreter, c.placement),
                )
                for c in spec.components
            ]
        ),
    )


Order = tuple[int, int, int, str]
"""(-ms since which work would be lost, -estimated ms, -order of submission, uid): cheapest victim first."""

_HOLDING = (JOB_STARTING, JOB_RUNNING)
_NOTHING_LOST = 1 << 62


class Holders:
    """STARTING and RUNNING jobs by class."""

    def __init__(self) -> None:
        self.classes: dict[YieldClass, list[Order]] = {}
        self._known: dict[str, tuple[YieldClass, Order]] = {}

    def update(self, job: JobRecord | None, uid: str, shapes: Shapes) -> None:
        """Follows a job after its record changed; None: it is gone."""
        old = self._known.get(uid)
        new = None
        if job is not None and job.state in _HOLDING:
            shape = shapes[uid]
            new = (shape.yield_class, _order(job, shape))
        if old == new:
            return
        if old is not None:
            members = self.classes[old[0]]
            del members[bisect_left(members, old[1])]
            if not members:
                del self.classes[old[0]]
            del self._known[uid]
        if new is not None:
            insort(self.classes.setdefault(new[0], []), new[1])
            self._known[uid] = new

    def known(self) -> dict[str, tuple[YieldClass, Order]]:
        """Every entry, for the check of the invariants."""
        return dict(self._known)


def _order(job: JobRecord, shape: Shape) -> Order:
    since_ms = max(job.running_ms, job.checkpoint_ms) if job.state is JOB_RUNNING else _NOTHING_LOST
    return (-since_ms, -shape.estimated_ms, -job.order, job.uid)
