"""Which running jobs are alike to a preemptor? Jobs that hold room, by what decides whether they must yield.

The rules between two jobs look at priority, pools, labels and ``preemptible`` only, so one look at a class answers for
all of its jobs; inside a class they are kept in the order in which they would be asked to yield.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from callboard.model.specs import JobSpec
from callboard.scheduler.records import JobRecord, JobState

YieldClass = tuple[int, str, tuple[tuple[str, str], ...], bool, tuple[str, ...], bool]
"""(priority in milli, pool, labels, preemptible, pools of components, elastic)."""

Order = tuple[int, int, int, int, str]
"""(workers, -ms since which work would be lost, -estimated ms, -order of submission, uid): cheapest victim first."""

_HOLDING = (JobState.STARTING, JobState.RUNNING)
_NOTHING_LOST = 1 << 62


class Holders:
    """STARTING and RUNNING jobs by class."""

    def __init__(self) -> None:
        self.classes: dict[YieldClass, list[Order]] = {}
        self._known: dict[str, tuple[YieldClass, Order]] = {}

    def update(self, job: JobRecord | None, uid: str, spec: JobSpec | None) -> None:
        """Follows a job after its record changed; None: it is gone."""
        old = self._known.get(uid)
        new = None
        if job is not None and spec is not None and job.state in _HOLDING:
            new = (yield_class(spec) if old is None else old[0], _order(job, spec))
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


def yield_class(spec: JobSpec) -> YieldClass:
    """What decides whether a job must yield, as far as its spec goes."""
    pools = tuple(sorted({spec.pool_of(component) for component in spec.components}))
    elastic = any(component.elastic for component in spec.components)
    return (spec.priority_milli, spec.pool, spec.labels, spec.preemptible, pools, elastic)


def _order(job: JobRecord, spec: JobSpec) -> Order:
    workers = sum(component.min_workers for component in spec.components)
    since_ms = max(job.running_ms, job.checkpoint_ms) if job.state is JobState.RUNNING else _NOTHING_LOST
    return (workers, -since_ms, -spec.estimated_duration_ms, -job.order, job.uid)
