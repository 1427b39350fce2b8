"""Jobs: submitted, read, ended, explained."""

from __future__ import annotations

import asyncio
import shlex
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from callboard.controller.loop.driver import Driver
from callboard.controller.metrics.traces import Traces
from callboard.controller.options import ControllerOptions
from callboard.controller.package_store import Packages
from callboard.controller.searches.placements import resolving
from callboard.controller.services.guard import begun, concerns
from callboard.controller.services.job_gauges import GaugeBoard, gauges_of
from callboard.controller.services.request_parts import (
    MAX_REQUEST_ID,
    Context,
    build_page,
    check_member,
    id_of,
    output_selection,
    page_of,
    sees_job,
    text_of,
)
from callboard.controller.sessions.execs import Execs, checked_command, checked_input, worker_meant
from callboard.controller.sessions.outputs import OutputReads
from callboard.controller.views.jobs import explanation_message, job_message
from callboard.model.inputs.scalars import DAY_MS
from callboard.model.roles import unfused
from callboard.model.specs import JobSpec
from callboard.scheduler import Outcome, Scheduler, State
from callboard.scheduler.records.events import (
    JobCancelled,
    JobCompleted,
    JobPreempted,
    JobScaled,
    JobsRenewed,
    JobSubmitted,
    SignalsReported,
)
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import ENDED, JobState
from callboard.security.caller_roles import caller
from callboard.v1 import common_pb2, job_pb2, job_pb2_grpc
from callboard.wire.enums import from_wire
from callboard.wire.refusals import DeadlineExceeded, LimitReached, NotFound, invalid
from callboard.wire.specs import job_spec_from_proto

MAX_RENEWED = 1_000
"""Most jobs renewed by one call."""

MOST_STALLED_S = 600.0
"""How long a reader of output may take none. It holds a read and streams of nodes."""

T = TypeVar("T")


class JobService(job_pb2_grpc.JobServiceServicer):
    def __init__(
        self,
        driver: Driver,
        outputs: OutputReads,
        options: ControllerOptions,
        *,
        new_uid: Callable[[], str] = lambda: f"j-{uuid.uuid4().hex}",
    ) -> None:
        self._driver = driver
        self._outputs = outputs
        self._options = options
        self._new_uid = new_uid
        self._gauges = GaugeBoard()
        self.packages: Packages | None = None
        self.traces: Traces | None = None
        self.execs: Execs | None = None

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Context) -> job_pb2.SubmitJobResponse:
        """Submits a job, or only says what would become of it."""
        spec = job_spec_from_proto(request.spec)
        request_id = text_of(request.request_id, "request_id", MAX_REQUEST_ID)
        self._check_submit(spec)
        self._driver.check_serving()  # a standby names the leader, and does not know what is kept there
        await self._check_packages(spec)
        if request.validate_only:
            return job_pb2.SubmitJobResponse(plan=await self._plan(spec, request_id))
        uid = self._new_uid()
        if self.traces is not None:
            sent = dict(context.invocation_metadata() or ())
            self.traces.submitted(uid, str(sent.get("traceparent", ""))[:128])

        async def submit(resolved: Callable[[], JobSpec]) -> job_pb2.Job:
            return await self._driver.ask(
                lambda now_ms, cause: JobSubmitted(
                    now_ms=now_ms, cause=cause, uid=uid, spec=resolved(), request_id=request_id
                ),
                self._result,
                source="submit",
            )

        job = await self._resolving(spec, request_id, submit)
        return job_pb2.SubmitJobResponse(job=job)

    async def _check_packages(self, spec: JobSpec) -> None:
        parts = unfused(spec).components
        for place, component in enumerate(parts):
            for package in component.packages:
                if self.packages is None or not await self.packages.obtain(package):
                    why = f"{package} isn't kept here; submit with `callboard` or the SDK, which send it before"
                    raise invalid(f"spec.components[{place}].{component.field_of(package)}", why)
        if self.packages is not None and (needed := {each for part in parts for each in part.packages}):
            await self.packages.check_room(spec.pool, needed)

    async def PutPackage(self, request: job_pb2.PutPackageRequest, context: Context) -> job_pb2.PutPackageResponse:
        assert self.packages is not None, "this controller has no state directory"
        self._driver.check_serving()
        received = await self.packages.put(request.package, request.size_bytes, request.offset, request.data)
        return job_pb2.PutPackageResponse(received_bytes=received)

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Context) -> job_pb2.GetJobResponse:
        """One job, with why it waits or is short of workers."""
        wanted = id_of(request.name, "jobs")

        self._driver.check_readable()
        state, now_ms = self._driver.state, self._driver.now_ms()
        uid = self._seen(state, wanted).uid

        def build(scheduler: Scheduler) -> job_pb2.Job:
            return job_message(scheduler.state.jobs[uid], scheduler.state, scheduler.explain(uid, now_ms).reasons)

        if state.jobs[uid].state is JobState.PENDING or uid in state.elastic:
            message = await self._driver.question(build)
        else:
            message = await self._driver.read(lambda state: job_message(self._seen(state, wanted), state))
        message.gauges.update(self._gauges.of(uid, self._driver.now_ms()))
        return job_pb2.GetJobResponse(job=message)

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Context) -> job_pb2.ListJobsResponse:
        """Jobs, newest first. Why they wait is a question to GetJob and ExplainJob: it costs a plan for each."""
        states = _states(request)
        page = page_of(
            request.page_size, request.page_token, "jobs", [request.pool, *sorted(state.value for state in states)]
        )
        state, who = self._driver.state, caller()
        after = None if page.after is None else int(page.after)
        jobs = [
            job
            for job in state.jobs.values()
            if (after is None or job.order < after)
            and (not states or job.state in states)
            and (not request.pool or request.pool in state.specs[job.uid].spec.pools)
            and (not who.in_pools_only or sees_job(state, job, who.name))
        ]
        jobs.sort(key=lambda job: -job.order)
        shown, token = await build_page(
            jobs,
            page,
            key=lambda job: str(job.order),
            show=lambda job: self._shown(state, job.uid),
            most_bytes=self._options.limits.page_bytes,
        )
        await self._driver.journaled()
        return job_pb2.ListJobsResponse(jobs=shown, next_page_token=token)

    async def foremost(self, most: int) -> tuple[list[job_pb2.Job], int]:
        """Jobs that have not ended, newest first, and how many there are beside them: the newest that hold something
        and the first of the queue, half and half. What they say may not be journaled yet."""
        state, who = self._driver.state, caller()
        holding = sorted(
            (
                state.jobs[uid]
                for kind, uids in state.jobs_by_state.items()
                if kind is not JobState.PENDING and kind not in ENDED
                for uid in uids
            ),
            key=lambda job: -job.order,
        )
        waiting = [state.jobs[key[-1]] for key in state.queue]
        if who.in_pools_only:
            holding = [job for job in holding if sees_job(state, job, who.name)]
            waiting = [job for job in waiting if sees_job(state, job, who.name)]
        taken = max(most - len(waiting), min(most - most // 2, len(holding)))
        chosen = [*holding[:taken], *waiting[: most - min(taken, len(holding))]]
        jobs, _ = await build_page(
            sorted(chosen, key=lambda job: -job.order),
            page_of(most, "", "jobs"),
            key=lambda job: job.uid,
            show=lambda job: self._shown(state, job.uid),
            most_bytes=self._options.limits.page_bytes // 4,
        )
        return jobs, len(holding) + len(waiting) - len(jobs)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Context) -> job_pb2.CancelJobResponse:
        wanted, reason = id_of(request.name, "jobs"), text_of(request.reason, "reason")
        within_ms = request.grace_ms if request.HasField("grace_ms") else None
        if within_ms is not None and not 0 <= within_ms <= DAY_MS:
            raise invalid("grace_ms", f"{within_ms} ms; 0 to {DAY_MS} are allowed")
        self._check(wanted)
        job = await self._driver.ask(
            lambda now_ms, cause: JobCancelled(
                now_ms=now_ms,
                cause=cause,
                uid=self._uid(wanted),
                reason=reason,
                destroy_groups=request.destroy_placement_groups,
                within_ms=within_ms,
            ),
            self._result,
            source="cancel",
        )
        return job_pb2.CancelJobResponse(job=job)

    async def CompleteJob(self, request: job_pb2.CompleteJobRequest, context: Context) -> job_pb2.CompleteJobResponse:
        """Ends a job as succeeded."""
        wanted, reason = id_of(request.name, "jobs"), text_of(request.reason, "reason")
        self._check(wanted)
        job = await self._driver.ask(
            lambda now_ms, cause: JobCompleted(now_ms=now_ms, cause=cause, uid=self._uid(wanted), reason=reason),
            self._result,
            source="complete",
        )
        return job_pb2.CompleteJobResponse(job=job)

    async def PreemptJob(self, request: job_pb2.PreemptJobRequest, context: Context) -> job_pb2.PreemptJobResponse:
        wanted, reason = id_of(request.name, "jobs"), text_of(request.reason, "reason")
        for_job = id_of(request.for_job, "jobs", "for_job") if request.for_job else ""
        job = await self._driver.ask(
            lambda now_ms, cause: JobPreempted(
                now_ms=now_ms,
                cause=cause,
                uid=self._uid(wanted),
                for_uid=self._uid(for_job) if for_job else "",
                reason=reason,
            ),
            self._result,
            source="preempt",
        )
        return job_pb2.PreemptJobResponse(job=job)

    async def ScaleJob(self, request: job_pb2.ScaleJobRequest, context: Context) -> job_pb2.ScaleJobResponse:
        """Changes the number of workers of an elastic component."""
        wanted, component = id_of(request.name, "jobs"), text_of(request.component, "component")
        self._check(wanted)
        job = await self._driver.ask(
            lambda now_ms, cause: JobScaled(
                now_ms=now_ms, cause=cause, uid=self._uid(wanted), component=component, workers=request.workers
            ),
            self._result,
            source="scale",
        )
        return job_pb2.ScaleJobResponse(job=job)

    async def RenewJobs(self, request: job_pb2.RenewJobsRequest, context: Context) -> job_pb2.RenewJobsResponse:
        """Hears that the client of session-owned jobs is alive."""
        if len(request.names) > MAX_RENEWED:
            raise invalid("names", f"{len(request.names)} jobs; at most {MAX_RENEWED} at once")
        wanted = [id_of(name, "jobs", f"names[{i}]") for i, name in enumerate(request.names)]
        for name in wanted:
            self._check(name)

        def uids() -> tuple[str, ...]:
            found = (self._driver.state.find_job(name) for name in wanted)
            return tuple(job.uid for job in found if job is not None)

        lease_ms = await self._driver.ask(
            lambda now_ms, cause: JobsRenewed(now_ms=now_ms, cause=cause, uids=uids()),
            lambda outcome: int(outcome.result),
            source="renew",
        )
        return job_pb2.RenewJobsResponse(next_ms=lease_ms // 3)

    async def ReportSignals(
        self, request: job_pb2.ReportSignalsRequest, context: Context
    ) -> job_pb2.ReportSignalsResponse:
        """Hears gauges of a running job, by which its elastic components may scale."""
        wanted, gauges = id_of(request.name, "jobs"), gauges_of(request.gauges)
        self._driver.check_serving()
        state = self._driver.state
        job = self._seen(state, wanted)
        self._gauges.keep_only(state.jobs)
        known = self._gauges.note(job.uid, gauges, self._driver.now_ms())
        if not any(component.scaling for component in state.specs[job.uid].spec.components):
            return job_pb2.ReportSignalsResponse()
        scaled = await self._driver.ask(
            partial(SignalsReported, uid=job.uid, gauges=known), lambda outcome: dict(outcome.result), source="signals"
        )
        return job_pb2.ReportSignalsResponse(scaled=scaled)

    async def ExplainJob(self, request: job_pb2.ExplainJobRequest, context: Context) -> job_pb2.ExplainJobResponse:
        """Why a job is where it is."""
        wanted = id_of(request.name, "jobs")
        self._driver.check_readable()
        now_ms, uid = self._driver.now_ms(), self._seen(self._driver.state, wanted).uid
        account = await self._driver.question(lambda scheduler: explanation_message(scheduler.explain(uid, now_ms)))
        return job_pb2.ExplainJobResponse(explanation=account)

    # A coroutine that writes, not a generator: a generator stuck in a write could not be told to end.
    async def ReadJobOutput(  # type: ignore[override]
        self, request: job_pb2.ReadJobOutputRequest, context: Context
    ) -> None:
        """What workers of a job printed."""
        wanted, selection = id_of(request.name, "jobs"), output_selection(request.selection)
        try:
            uid = (await self._driver.read(lambda state: self._seen(state, wanted))).uid
        except NotFound as error:
            kept = self._options.limits.ended_jobs
            why = f"one that ended is forgotten after its ttl_after_finished, or after {kept} others, with its output"
            raise NotFound(f"{error}; {why}", metadata=error.error.metadata) from None
        self._driver.check_serving()  # agents are connected to the leader
        async for response in self._outputs.read(uid, selection, follow=request.follow):
            try:
                async with asyncio.timeout(MOST_STALLED_S):
                    await context.write(response)
            except TimeoutError:
                raise DeadlineExceeded(f"nothing was taken for {MOST_STALLED_S:.0f} s; read on from there") from None

    async def ExecWorker(  # type: ignore[override]
        self, request_iterator: AsyncIterator[job_pb2.ExecWorkerRequest], context: Context
    ) -> None:
        """A program in the environment of a worker."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("start"):
            raise invalid("start", "is what the first message says: which worker, and what to run")
        start = first.start
        wanted, command = id_of(start.name, "jobs"), checked_command(start.command)
        component = text_of(start.component, "start.component", 63)
        if start.rank < 0:
            raise invalid("start.rank", f"{start.rank} is negative")
        what = shlex.join(command.arguments) or "attach"
        concerns(request_iterator, f"jobs/{wanted} {component or 'worker'}/{start.rank}: {what}")
        job = await self._driver.read(lambda state: self._seen(state, wanted))
        worker = worker_meant(self._driver, job, component, start.rank)
        concerns(request_iterator, f"jobs/{job.name} {worker.component}/{worker.rank}: {what}")
        begun(request_iterator)

        async def inputs() -> AsyncGenerator[common_pb2.ExecInput, None]:
            async for request in request_iterator:
                yield checked_input(request.input)

        async def tell(output: common_pb2.ExecOutput) -> None:
            await context.write(job_pb2.ExecWorkerResponse(output=output))

        assert self.execs is not None, "this controller has no agents"
        async with aclosing(inputs()) as given:
            await self.execs.run(worker, command, given, tell)

    async def _plan(self, spec: JobSpec, request_id: str) -> job_pb2.Explanation:
        """What would become of a job: its submission, decided and taken back."""

        async def plan(resolved: Callable[[], JobSpec]) -> job_pb2.Explanation:
            self._driver.check_serving()
            now_ms, uid = self._driver.now_ms(), self._new_uid()
            event = JobSubmitted(now_ms=now_ms, cause="trial", uid=uid, spec=resolved(), request_id=request_id)
            return await self._driver.question(lambda scheduler: explanation_message(scheduler.what_if(event)))

        return await self._resolving(spec, request_id, plan)

    async def _resolving(
        self, spec: JobSpec, request_id: str, use: Callable[[Callable[[], JobSpec]], Awaitable[T]]
    ) -> T:
        self._driver.check_serving()
        return await resolving(spec, request_id, self._options.roles, lambda: self._driver.state, use)

    def _shown(self, state: State, uid: str) -> job_pb2.Job | None:
        if uid not in state.jobs:
            return None
        message = job_message(state.jobs[uid], state)
        message.gauges.update(self._gauges.of(uid, self._driver.now_ms()))
        return message

    def _seen(self, state: State, wanted: str) -> JobRecord:
        """The job that is meant, if the caller may see it."""
        job = _found(state, wanted)
        check_member(state, state.specs[job.uid].spec.pools, f"job {wanted}")
        return job

    def _check(self, wanted: str) -> None:
        """Whether the caller may change a job; one that is not there is told when the event is decided."""
        if self._driver.state.find_job(wanted) is not None:
            self._seen(self._driver.state, wanted)

    def _check_submit(self, spec: JobSpec) -> None:
        """Whether the caller may submit a job, and no more of them wait than may."""
        pools = spec.pools or (spec.pool,)
        state = self._driver.state
        check_member(state, pools, f"job {spec.name}")
        if not caller().in_pools_only:
            return
        most = self._options.limits.client_waiting_jobs
        for pool in sorted(pools):
            waiting = sum(len(keys) for shape, keys in state.waiting.items() if pool in shape.yield_class.pools)
            if waiting >= most:
                raise LimitReached(
                    f"{waiting} jobs wait in pool {pool} already; wait until some have run, or cancel some"
                )

    def _uid(self, wanted: str) -> str:
        """The job that is meant at the moment the event is decided."""
        return _found(self._driver.state, wanted).uid

    def _result(self, outcome: Outcome) -> job_pb2.Job:
        """The job that an event was about."""
        state = self._driver.state
        uid = str(outcome.result)
        if uid not in state.jobs:
            raise NotFound(f"job {uid} ended and is no longer kept", metadata={"subject": f"jobs/{uid}"})
        return job_message(state.jobs[uid], state)


def _found(state: State, wanted: str) -> JobRecord:
    job = state.find_job(wanted)
    if job is None:
        raise NotFound(f"there is no job {wanted}", metadata={"subject": f"jobs/{wanted}"})
    return job


def _states(request: job_pb2.ListJobsRequest) -> frozenset[JobState]:
    found = set()
    for number in request.states:
        try:
            state = from_wire(job_pb2.JobState, number, JobState)
        except ValueError:
            state = None
        if state is None:
            raise invalid("states", f"{number} is not a state of a job")
        found.add(state)
    return frozenset(found)
