"""Which jobs are alike? Jobs of one shape are blocked for the same reasons, so only the first of them is looked at."""

from __future__ import annotations

from callboard.model.specs import JobSpec
from callboard.scheduler.asks import Ask, asks_of


class Shape:
    """Everything of a job that decides whether and where it can start. Who it yielded to is not in it: the few jobs
    that did are looked at one by one.

    Attributes:
        jobs: how many jobs there are of it.
    """

    __slots__ = ("_asks", "_hash", "_key", "_spec", "jobs")

    def __init__(self, spec: JobSpec) -> None:
        self._key = (
            spec.pool,
            spec.priority_milli,
            spec.labels,
            spec.placement,
            spec.node_selector,
            spec.node_selector_soft,
            spec.never_preempts,
            spec.estimated_duration_ms,
            tuple([(c.name, c.pool, c.resources, c.min_workers, c.places) for c in spec.components]),
        )
        self._hash = hash(self._key)
        self._spec = spec
        self._asks: tuple[Ask, ...] | None = None
        self.jobs = 0

    @property
    def asks(self) -> tuple[Ask, ...]:
        """What its jobs need to start."""
        if self._asks is None:
            self._asks = asks_of(self._spec)
        return self._asks

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Shape) and self._key == other._key)


class Shapes:
    """The shape of every job's spec. Each is kept once, so that to compare two is to compare their addresses."""

    def __init__(self) -> None:
        self._of_job: dict[str, Shape] = {}
        self._kept: dict[Shape, Shape] = {}
        self._newest: tuple[JobSpec, Shape] | None = None
        """What was asked last: a spec is asked about several times while it is submitted."""

    def __getitem__(self, uid: str) -> Shape:
        return self._of_job[uid]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shapes) and self._of_job == other._of_job and self._counts() == other._counts()

    __hash__ = None  # type: ignore[assignment]  # an index, that changes

    def _counts(self) -> dict[Shape, int]:
        return {shape: shape.jobs for shape in self._kept}

    def of(self, spec: JobSpec) -> Shape:
        """The shape of a spec, whether a job has it or not."""
        if self._newest is not None and self._newest[0] is spec:
            return self._newest[1]
        shape = Shape(spec)
        shape = self._kept.get(shape, shape)
        self._newest = (spec, shape)
        return shape

    def put(self, uid: str, spec: JobSpec) -> None:
        """A job has this spec."""
        if uid in self._of_job:
            self.drop(uid)
        shape = self.of(spec)
        shape.jobs += 1
        self._kept[shape] = shape
        self._of_job[uid] = shape

    def drop(self, uid: str) -> None:
        """A job is gone."""
        shape = self._of_job.pop(uid)
        shape.jobs -= 1
        if not shape.jobs:
            del self._kept[shape]
            self._newest = None
