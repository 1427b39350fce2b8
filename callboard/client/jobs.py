"""One job from the side of who submitted it: wait for it, steer it, ask why, reach its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.calls.execs import ExecDone, ExecSession, run_exec
from callboard.client.calls.methods import Fields, Method, carried
from callboard.client.calls.watching import MISSING, LogLine, job_lines, watch_events
from callboard.client.errors import JobEnded, NoResult, WaitTimeout
from callboard.client.workers import TypedWorkerHandle, WorkerHandle
from callboard.model.durations import parse_duration_ms
from callboard.model.faults import Fault, InvalidInput, guess
from callboard.model.quantities import QuantityError
from callboard.v1.common_pb2 import OutputSelection, OutputStream
from callboard.v1.event_pb2 import Event, EventFilter
from callboard.v1.job_pb2 import Explanation, Job, JobState, Worker, WorkerState
from callboard.wire.enums import text_of
from callboard.wire.refusals import RevisionCompacted

T = TypeVar("T")

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
"""States that a job never leaves."""

_NOT_KEPT = "its `entry` had not returned, or its node could not write the result to its disk, as its stderr then says"


class SeenJob:
    """One job as it was last seen: what can be read of it without asking the controller.

    Attributes:
        job: the job as it was last seen; every method that talks to the controller renews it.
    """

    job: Job
    _controller: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.state})"

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.spec.name

    @property
    def state(self) -> str:
        """State when it was last seen: "PENDING", "RUNNING", …"""
        return text_of(self.job)

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
        """Handles of the workers as last seen, in rank order: their calls are plain Ray calls.

        A component of a colocation group is called like any other, though it shares its process: its handles address
        that member. Those of the group itself, by the group's name, call ``handle.method("member.method").remote()``.

        Args:
            component: only workers of this component or colocation group; empty: all, one per process, in the order
                of the spec.
            type: class of the workers, plain or of ``@ray.remote``. Handles then know its methods: another name raises
                AttributeError here instead of failing in the worker, ``dir`` lists them, and type checkers check
                ``handle.call(Trainer.run, 3)``.

        Raises:
            InvalidInput: the job has no such component or group.
        """
        order: dict[str, int] = {}
        group_of: dict[str, str] = {}
        for place, spec in enumerate(self.job.spec.components):
            order.setdefault(spec.colocation_group or spec.name, place)
            group_of[spec.name] = spec.colocation_group
        if component and component not in group_of and component not in order:
            known = guess(component, {*group_of, *order})
            raise InvalidInput([Fault("component", f"job {self.name} has no component {component}; {known}")])
        member = component if group_of.get(component) else ""
        wanted = group_of.get(component) or component
        found = [worker for worker in self.job.workers if wanted in ("", worker.key.component)]
        found.sort(key=lambda worker: (order.get(worker.key.component, 0), worker.key.rank))
        handles = [self._handle(worker, member) for worker in found]
        return handles if type is None else [TypedWorkerHandle.of(handle, type) for handle in handles]

    def ended(self) -> JobEnded:
        """The error that says how the job ended, as it was last seen."""
        return JobEnded(
            job=self.name,
            state=self.state,
            reason=self.job.state_reason,
            traceback=self.job.traceback,
            stderr_tail=self.job.stderr_tail,
        )

    def _handle(self, worker: Worker, member: str) -> WorkerHandle:
        return WorkerHandle(
            job=self.name,
            component=worker.key.component,
            member=member,
            rank=worker.key.rank,
            generation=worker.generation,
            node=worker.allocation.node_id,
            devices=tuple(share.id for share in worker.allocation.devices),
            actor_name=worker.actor_name,
            uid=self.job.uid,
            controller=self._controller,
            was_ready=worker.state == WorkerState.WORKER_STATE_READY,
        )


class JobHandle(SeenJob):
    """One job. It stays with the job it was made for, also when a later one takes the same name."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self._connection = connection
        self._controller = connection.address
        self.job = job

    async def refresh(self) -> Job:
        """The job as it is now."""
        return await self._renewed(methods.GET_JOB, name=self._resource)

    async def running(self, timeout: float | None = None) -> Job:
        """Waits until every worker was constructed and answered. A job that has succeeded meanwhile was there.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            JobEnded: it failed or was cancelled before; carries the reason and the worker's traceback.
            WaitTimeout: it is not running yet; carries what it waits for.
        """
        job = await self.until(lambda job: job.state == JobState.JOB_STATE_RUNNING, "RUNNING", timeout)
        if self.state in ENDED and self.state != "SUCCEEDED":
            raise self.ended()
        return job

    async def finished(self, timeout: float | None = None) -> Job:
        """Waits until the job has ended, well or not: look at the state of what is returned.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            WaitTimeout: it has not ended yet.
        """
        return await self.until(lambda _: False, "its end", timeout)

    async def exec(self, command: Sequence[str], *, component: str = "", rank: int = 0, stdin: bytes = b"") -> ExecDone:
        """Runs a program in the environment of a worker, with its devices and in its working directory, to its end.

        Args:
            command: the program and its arguments.
            component: of the worker; empty: the only one.
            rank: of the worker.
            stdin: what the program reads.

        Raises:
            WrongState: the worker isn't ready, or its pool does not allow it.
            NotFound: there is no such worker.
            Unavailable: the connection was lost, and the program ended.
        """
        return await run_exec(exec_session(self, command, component=component, rank=rank), stdin)

    async def result(self, timeout: float | None = None) -> dict[str, list[Any]]:
        """Waits until the job has ended, and returns what the ``entry`` methods of its last attempt returned.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            Component → result of each rank, in their order, of every component with an ``entry``. Results travel as
            JSON, at most 64 KiB each: tuples become lists.

        Raises:
            JobEnded: it did not succeed; carries the reason and the worker's traceback.
            WaitTimeout: it has not ended yet.
            NoResult: a result is missing: it is too large or no JSON, its node is gone, or the job was completed
                before the method returned.
        """
        job = await self.finished(timeout)
        if self.state != "SUCCEEDED":
            raise self.ended()
        selection = OutputSelection(
            first_attempt=job.attempt, last_attempt=job.attempt, streams=[OutputStream.OUTPUT_STREAM_RESULTS]
        )
        found: dict[tuple[str, int], dict[str, Any]] = {}
        gaps: dict[tuple[str, int], str] = {}
        async for line in job_lines(self._connection, self._resource, selection, follow=False):
            if line.stream == MISSING:
                gaps[line.component, line.rank] = line.text
            else:
                kept = json.loads(line.text)
                found[kept["member"] or line.component, line.rank] = kept
        returned: dict[str, list[Any]] = {}
        missing = []
        for component in job.spec.components:
            if not component.entry:
                continue
            ranks = {rank for name, rank in found if name == component.name}
            if not component.max_workers:  # Of an elastic one any rank may have left.
                ranks |= set(range(component.workers))
            returned[component.name] = []
            for rank in sorted(ranks):
                kept = found.get((component.name, rank), {})
                if "value" not in kept:
                    places = ((component.colocation_group or component.name, rank), ("", -1))
                    why = next((gaps[place] for place in places if place in gaps), _NOT_KEPT)
                    missing.append(f"{component.name}/{rank}: {kept.get('problem', why)}")
                returned[component.name].append(kept.get("value"))
        if missing:
            unfit = any("problem" in kept for kept in found.values())
            raise NoResult(job=self.name, missing=tuple(missing), unfit=unfit)
        return returned

    async def until(self, reached: Callable[[Job], bool], what: str, timeout: float | None = None) -> Job:
        """Waits until ``reached(job)`` is true or the job has ended, whichever comes first.

        Args:
            reached: looked at whenever the job or one of its workers changed.
            what: what is waited for, for the error.
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            WaitTimeout: neither happened in time.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._until(reached)
        except TimeoutError:
            raise WaitTimeout(
                job=self.name,
                waited_for=what,
                timeout_s=timeout or 0.0,
                state=self.state,
                reasons=tuple(reason.message for reason in self.job.waiting_for)
                or ((self.job.state_reason,) if self.job.state_reason else ()),
            ) from None

    async def cancel(
        self, reason: str = "", *, destroy_placement_groups: bool = False, grace: float | str | None = None
    ) -> Job:
        """Ends the job as cancelled; idempotent, in every state. Returns at once: wait with :meth:`finished`.

        Args:
            reason: why, for people.
            destroy_placement_groups: remove its placement groups too, also reserved ones.
            grace: seconds, or a span such as ``"5s"``, for its hooks; only shortens what the job and the policy say,
                even while it is being stopped.

        Raises:
            InvalidInput: ``grace`` is no span of time; nothing was sent.
        """
        try:
            grace_ms = None if grace is None else parse_duration_ms(grace)
        except QuantityError as error:
            raise InvalidInput([Fault("grace", str(error))]) from error
        return await self._renewed(
            methods.CANCEL_JOB,
            name=self._resource,
            reason=reason,
            destroy_placement_groups=destroy_placement_groups,
            grace_ms=grace_ms,
        )

    async def complete(self, reason: str = "") -> Job:
        """Ends the job as succeeded; idempotent, in every state. Returns at once: wait with :meth:`finished`."""
        return await self._renewed(methods.COMPLETE_JOB, name=self._resource, reason=reason)

    async def preempt(self, *, for_job: str = "", reason: str = "") -> Job:
        """Makes the job yield now.

        Args:
            for_job: name of the job that gets the room; empty: whoever is next.
            reason: why, for people.

        Raises:
            PreemptionRefused: the rules say no.
        """
        return await self._renewed(
            methods.PREEMPT_JOB, name=self._resource, for_job=f"jobs/{for_job}" if for_job else "", reason=reason
        )

    async def scale(self, component: str, workers: int) -> Job:
        """Says how many workers an elastic component should have. Returns at once: the highest ranks leave first,
        new ones start when there is room.

        Args:
            component: name of the component.
            workers: how many, within its bounds.

        Raises:
            InvalidRequest: the component is not elastic, or the number is out of its bounds.
        """
        return await self._renewed(methods.SCALE_JOB, name=self._resource, component=component, workers=workers)

    async def explain(self) -> Explanation:
        """Why the job is where it is, and what would unblock it."""
        return (await self._connection.ask(methods.EXPLAIN_JOB, name=self._resource)).explanation

    async def events(self, *, start_revision: int = 0) -> AsyncIterator[Event]:
        """Follows the events of the job and its workers, through reconnects, until the job has ended.

        Args:
            start_revision: first revision; 0: what comes after the state last seen in :attr:`job`.

        Raises:
            RevisionCompacted: the log no longer holds where the watch must go on.
            Unreachable: the controller stayed away for a minute.
        """
        subject = f"jobs/{self.name}"
        if not start_revision:
            if self.state in ENDED:
                return
            start_revision = self.job.revision + 1
        async for event in watch_events(
            self._connection, start_revision=start_revision, event_filter=EventFilter(subject=subject)
        ):
            if event.facts.get("uid", self.job.uid) != self.job.uid:
                continue  # another job of the name, that ends or has come
            yield event
            if event.subject == subject and event.state in ENDED:
                return

    async def report(self, gauges: Mapping[str, float]) -> dict[str, int]:
        """Reports gauges of the job, by which its elastic components may scale.

        Args:
            gauges: value by name, in whatever unit its scaling rules use: ``{"queue_depth": 120}``. What was reported
                before and isn't named stays as it is, for five minutes.

        Returns:
            Component → number of workers it should have from now on, of those that a rule changed.

        Raises:
            InvalidInput: a name or value that is none.
            WrongState: the job has ended.
        """
        return dict((await self._connection.ask(methods.REPORT_SIGNALS, name=self._resource, gauges=gauges)).scaled)

    async def logs(
        self,
        *,
        component: str = "",
        rank: int | None = None,
        attempt: int = 0,
        follow: bool = False,
        since: float | str = 0,
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine, None]:
        """What the job's workers print or printed, line by line, also once the job has ended: ``async for line in
        job.logs(follow=True): print(line.text)``. Lines that can't be read come as lines of the stream "missing".

        Args:
            component: only this component or colocation group; empty: all.
            rank: only this rank; None: all.
            attempt: only this attempt of the job, from 1; 0: the newest, and with ``follow`` those that come after it.
            follow: go on with what is printed from now on, until the job has ended.
            since: only what was printed in the last so many seconds, or a duration such as "10m"; 0: all.
            tail: only the last so many lines of each worker; None: all.

        Raises:
            NotFound: the job is forgotten, or had no such attempt, component or rank.
            WrongState: it has not started yet.
            LimitReached: too much output is being read.
            Unreachable: the controller stayed away for a minute.
        """
        since_ms = parse_duration_ms(since)
        with carried():
            selection = OutputSelection(
                component=component,
                rank=rank,
                first_attempt=attempt,
                last_attempt=attempt,
                since_ms=since_ms,
                tail_lines=tail,
            )
        async for line in job_lines(self._connection, self._resource, selection, follow=follow):
            yield line

    async def timings(self) -> AsyncIterator[LogLine]:
        """Timings that workers of all attempts recorded by ``ctx.timed(…)``: a JSON object per line.

        Raises:
            As :meth:`logs`.
        """
        selection = OutputSelection(first_attempt=1, streams=[OutputStream.OUTPUT_STREAM_TIMINGS])
        async for line in job_lines(self._connection, self._resource, selection, follow=False):
            yield line

    @property
    def _resource(self) -> str:
        return f"jobs/{self.job.uid}"

    async def _renewed(self, method: Method[Fields, Any, Any], *args: Fields.args, **fields: Fields.kwargs) -> Job:
        self.job = (await self._connection.ask(method, *args, **fields)).job
        return self.job

    async def _until(self, reached: Callable[[Job], bool]) -> Job:
        while True:
            job = await self.refresh()
            if reached(job) or self.state in ENDED:
                return job
            try:
                async for _ in self.events(start_revision=job.revision + 1):
                    job = await self.refresh()
                    if reached(job) or self.state in ENDED:
                        return job
            except RevisionCompacted:
                continue  # It was quiet for long; what is true now is read afresh.


def exec_session(job: JobHandle, command: Sequence[str], **how: Any) -> ExecSession:
    """A program beside a worker of a job, or the terminal of its command, for a caller that talks with it; the
    arguments are those of :class:`ExecSession`."""
    return ExecSession(job._connection, job._resource, command, **how)  # noqa: SLF001 - its own
