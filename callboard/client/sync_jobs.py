"""One job, for programs whose calls block: a :class:`callboard.client.JobHandle` behind the background loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from callboard.client.background import BackgroundLoop
from callboard.client.errors import JobEnded
from callboard.client.jobs import JobHandle
from callboard.client.output import LogLine
from callboard.client.workers import TypedWorkerHandle, WorkerHandle
from callboard.v1.event_pb2 import Event
from callboard.v1.job_pb2 import Explanation, Job

T = TypeVar("T")


class SyncJobHandle:
    """One job. Arguments, results and errors are those of :class:`callboard.client.JobHandle`."""

    def __init__(self, loop: BackgroundLoop, handle: JobHandle) -> None:
        self._loop = loop
        self._handle = handle

    def __repr__(self) -> str:
        return f"SyncJobHandle({self.name}, {self.state})"

    @property
    def job(self) -> Job:
        """The job as it was last seen; every method that talks to the controller renews it."""
        return self._handle.job

    @property
    def name(self) -> str:
        """Name of the job."""
        return self._handle.name

    @property
    def state(self) -> str:
        """State when it was last seen: "PENDING", "RUNNING", …"""
        return self._handle.state

    @overload
    def workers(self, component: str = "") -> list[WorkerHandle]: ...

    @overload
    def workers(self, component: str, *, type: type[T]) -> list[TypedWorkerHandle[T]]: ...

    def workers(
        self,
        component: str = "",
        *,
        type: type[Any] | None = None,  # noqa: A002 - reads best where it is called
    ) -> Sequence[WorkerHandle]:
        """Handles of the workers as last seen, in rank order: their calls are plain Ray calls."""
        return self._handle.workers(component) if type is None else self._handle.workers(component, type=type)

    def report(self, gauges: Mapping[str, float]) -> dict[str, int]:
        """Reports gauges of the job, by which its elastic components may scale."""
        return self._loop.run(self._handle.report(gauges))

    def ended(self) -> JobEnded:
        """The error that says how the job ended, as it was last seen."""
        return self._handle.ended()

    def refresh(self) -> Job:
        """The job as it is now."""
        return self._loop.run(self._handle.refresh())

    def running(self, timeout: float | None = None) -> Job:
        """Waits until every worker was constructed and answered."""
        return self._loop.run(self._handle.running(timeout))

    def finished(self, timeout: float | None = None) -> Job:
        """Waits until the job has ended, well or not: look at the state of what is returned."""
        return self._loop.run(self._handle.finished(timeout))

    def result(self, timeout: float | None = None) -> dict[str, list[Any]]:
        """Waits until the job has ended, and returns what the ``entry`` methods of its last attempt returned."""
        return self._loop.run(self._handle.result(timeout))

    def until(self, reached: Callable[[Job], bool], what: str, timeout: float | None = None) -> Job:
        """Waits until ``reached(job)`` is true or the job has ended, whichever comes first."""
        return self._loop.run(self._handle.until(reached, what, timeout))

    def cancel(
        self, reason: str = "", *, destroy_placement_groups: bool = False, grace: float | str | None = None
    ) -> Job:
        """Ends the job as cancelled; idempotent, in every state. Returns at once: wait with :meth:`finished`."""
        return self._loop.run(
            self._handle.cancel(reason, destroy_placement_groups=destroy_placement_groups, grace=grace)
        )

    def complete(self, reason: str = "") -> Job:
        """Ends the job as succeeded; idempotent, in every state. Returns at once: wait with :meth:`finished`."""
        return self._loop.run(self._handle.complete(reason))

    def preempt(self, *, for_job: str = "", reason: str = "") -> Job:
        """Makes the job yield now."""
        return self._loop.run(self._handle.preempt(for_job=for_job, reason=reason))

    def scale(self, component: str, workers: int) -> Job:
        """Says how many workers an elastic component should have. Returns at once."""
        return self._loop.run(self._handle.scale(component, workers))

    def explain(self) -> Explanation:
        """Why the job is where it is, and what would unblock it."""
        return self._loop.run(self._handle.explain())

    def logs(
        self,
        *,
        component: str = "",
        rank: int | None = None,
        attempt: int = 0,
        follow: bool = False,
        since: float | str = 0,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """What the job's workers print or printed, line by line, also once the job has ended."""
        lines = self._handle.logs(
            component=component, rank=rank, attempt=attempt, follow=follow, since=since, tail=tail
        )
        return self._loop.iterate(lines)

    def timings(self) -> Iterator[LogLine]:
        """Timings that workers of all attempts recorded: a JSON object per line."""
        return self._loop.iterate(self._handle.timings())

    def events(self, *, start_revision: int = 0) -> Iterator[Event]:
        """Follows the events of the job and its workers, through reconnects, until the job has ended."""
        return self._loop.iterate(self._handle.events(start_revision=start_revision))
