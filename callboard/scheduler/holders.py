"""Which running jobs are alike to a preemptor? Jobs that hold room, by what decides whether they must yield.

The rules between two jobs look at priority, pools, labels and ``preemptible`` only, so one look at a class answers for
all of its jobs. All of a class hold equal amounts; inside it they are kept in the order in which they would be asked to
yield.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from callboard.scheduler.records import JobRecord
from callboard.scheduler.shapes import Shape, YieldClass
from callboard.scheduler.states import JobState

Order = tuple[int, int, int, str]
"""(-ms since which work would be lost, -estimated ms, -order of submission, uid): cheapest victim first."""

_HOLDING = (JobState.STARTING, JobState.RUNNING)
_NOTHING_LOST = 1 << 62


class Holders:
    """STARTING and RUNNING jobs by class."""

    def __init__(self) -> None:
        self.classes: dict[YieldClass, list[Order]] = {}
        self._known: dict[str, tuple[YieldClass, Order]] = {}

    def update(self, job: JobRecord | None, uid: str, shape: Shape | None) -> None:
        """Follows a job after its record changed; None: it is gone."""
        old = self._known.get(uid)
        new = None
        if job is not None and shape is not None and job.state in _HOLDING:
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
    since_ms = max(job.running_ms, job.checkpoint_ms) if job.state is JobState.RUNNING else _NOTHING_LOST
    return (-since_ms, -shape.estimated_ms, -job.order, job.uid)
