"""The calls of a client that concern jobs, and the renewal of session-owned ones while it is open.

Guaranteed: while the client is open and its event loop runs, every job it submitted with a session owner is renewed
three times per lease. Not guaranteed: that a job outlives a controller, a link or an event loop that stands still
for a whole lease; a lease is chosen with that in mind.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.jobs import ENDED, JobHandle
from callboard.client.packing import Packer, travelling
from callboard.client.workers import WorkerHandle
from callboard.model.faults import Fault, InvalidInput, guess
from callboard.model.inputs import SourceMapping, job_spec
from callboard.model.inputs.code import with_packages
from callboard.model.specs import JobSpec as ExactJobSpec
from callboard.v1.job_pb2 import Explanation, Job, JobState, Worker
from callboard.wire.enums import to_wire
from callboard.wire.refusals import CallboardError, NotFound, WrongState
from callboard.wire.specs import job_spec_to_proto

if TYPE_CHECKING:
    from callboard.model.requests import JobSpec

MAX_PACKAGE_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
"""Of a package in one message."""

_STATES = tuple(value.name.removeprefix("JOB_STATE_") for value in JobState.DESCRIPTOR.values if value.number)
LIVE_STATES = tuple(state for state in _STATES if state not in ENDED)
"""States of jobs that have not ended."""


class JobCalls:
    """Jobs."""

    _connection: Connection
    _sessions: SessionKeeper

    async def submit(self, spec: JobSpec | ExactJobSpec | Mapping[str, Any], *, request_id: str = "") -> JobHandle:
        """Submits a job. One with a session owner is renewed in the background until this client is closed.

        Args:
            spec: what is asked: the SDK's JobSpec, a mapping in human units, or a frozen spec.
            request_id: makes a repeated submit return the first job, at most 128 characters;
                empty: a new one, which still covers the repeats this call makes by itself.

        Raises:
            InvalidInput: the spec has faults; nothing was sent.
            RequestTooLarge: it has more than 4 MiB; nothing was sent.
            QuotaExceeded: the pool's quota can never hold it.
            Unschedulable: no node could ever hold it.
        """
        exact = await self._exact(spec)
        response = await self._connection.ask(
            methods.SUBMIT_JOB, spec=job_spec_to_proto(exact), request_id=request_id or uuid.uuid4().hex
        )
        if exact.session_lease_ms:
            self._sessions.keep(response.job.uid, exact.session_lease_ms)
        return JobHandle(self._connection, response.job)

    async def send_code(self, spec: JobSpec | Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the files that components name (``working_dir``, ``py_modules``, ``env: {requirements: …}``), unless
        the controller has them as they are.

        Returns:
            The spec with packages in their place.

        Raises:
            InvalidInput: something isn't there, too large, or holds a link that leads out of it.
        """
        mapping = spec if isinstance(spec, Mapping) else spec.to_mapping()
        parts = mapping.get("components")
        if not isinstance(parts, Sequence):
            return mapping
        sent: dict[tuple[Packer, str], str] = {}
        replaced = []
        for place, part in enumerate(parts):
            plain = part if isinstance(part, Mapping) else getattr(part, "to_mapping", dict)()
            files = dict(travelling(plain, f"components[{place}]"))
            for field, asked in files.items():
                if asked not in sent:
                    sent[asked] = await self._send(*asked, field)
            replaced.append(with_packages(plain, [sent[asked] for asked in files.values()]) if files else part)
        if not sent:
            return mapping
        values = {**mapping, "components": replaced}
        return SourceMapping.like(mapping, values) if isinstance(mapping, SourceMapping) else values

    async def _exact(self, spec: JobSpec | ExactJobSpec | Mapping[str, Any]) -> ExactJobSpec:
        return spec if isinstance(spec, ExactJobSpec) else job_spec(await self.send_code(spec))

    async def _send(self, pack: Packer, path: str, field: str) -> str:
        with tempfile.TemporaryFile() as file:
            package = await asyncio.to_thread(pack, Path(path), file, field)
            size = file.seek(0, os.SEEK_END)
            if size > MAX_PACKAGE_BYTES:
                most = f"{MAX_PACKAGE_BYTES >> 20} MiB are allowed; name data in .callboardignore"
                raise InvalidInput([Fault(field, f"{path} is {size >> 20} MiB when it is packed; {most}")])
            received, asked = 0, methods.PUT_PACKAGE.request(package=package, size_bytes=size)
            while received < size:
                before = received
                received = (await self._connection.call(methods.PUT_PACKAGE, asked)).received_bytes
                if asked.data and received <= before:
                    raise WrongState(f"the controller takes nothing more of {path}; submit it again")
                file.seek(received)
                data = file.read(PIECE_BYTES)
                asked = methods.PUT_PACKAGE.request(package=package, size_bytes=size, offset=received, data=data)
        return package

    async def validate(self, spec: JobSpec | ExactJobSpec | Mapping[str, Any]) -> Explanation:
        """What a submit would do now: checked and planned, nothing started.

        Raises:
            As :meth:`submit`.
        """
        response = await self._connection.ask(
            methods.SUBMIT_JOB, spec=job_spec_to_proto(await self._exact(spec)), validate_only=True
        )
        return response.plan

    async def get_job(self, name: str) -> JobHandle:
        """The newest job of that name, or the job of that uid.

        Raises:
            NotFound: there is none.
        """
        response = await self._connection.ask(methods.GET_JOB, name=f"jobs/{name}")
        return JobHandle(self._connection, response.job)

    async def report(self, name: str, gauges: Mapping[str, float]) -> dict[str, int]:
        """Reports gauges of a job: of workers, or of the trainer that submitted it; see :meth:`JobHandle.report`.

        Args:
            name: name or uid of the job; a worker finds its own in ``CALLBOARD_JOB``.
            gauges: ``{"queue_depth": 120}``.
        """
        return dict((await self._connection.ask(methods.REPORT_SIGNALS, name=f"jobs/{name}", gauges=gauges)).scaled)

    async def list_workers(self, *, job: str = "", node: str = "") -> list[tuple[Job, Worker]]:
        """Workers of the jobs that have not ended, each with its job: what they hold, and where.

        Args:
            job: only those of this job; empty: of all.
            node: only those on this node; empty: on all.
        """
        jobs = [(await self.get_job(job)).job] if job else await self.list_jobs(states=LIVE_STATES)
        return [
            (owner, worker)
            for owner in sorted(jobs, key=lambda each: each.spec.name)
            for worker in owner.workers
            if node in ("", worker.allocation.node_id)
        ]

    async def lookup(self, alias: str) -> list[WorkerHandle]:
        """Handles of the workers whose component carries an alias (``ray_options.name``), in rank order.

        The alias is a name for people and programs, not of an actor: the next attempt answers to it at once, and a job
        that has ended never does (PC-14). Of several jobs with one alias the newest counts.

        Args:
            alias: as in ``ray_options: {name: …}``.

        Raises:
            NotFound: no job that has not ended carries it.
        """
        for job in await self.list_jobs(states=LIVE_STATES):
            for component in job.spec.components:
                if component.ray_options.get("name") == alias:
                    return JobHandle(self._connection, job).workers(component.name)
        raise NotFound(f"no live job carries the alias {alias}", metadata={"subject": f"aliases/{alias}"})

    async def list_jobs(self, *, pool: str = "", states: Sequence[str] = ()) -> list[Job]:
        """Jobs, newest submission first.

        Args:
            pool: only those of this pool; empty: all.
            states: only those in these states, e.g. ``["RUNNING"]``; empty: all.

        Raises:
            InvalidInput: there is no such state; nothing was sent.
        """
        stated = [state.upper() for state in states]
        if faults := [
            Fault(f"states[{place}]", f"{states[place]} is not a state of a job; {guess(state, _STATES)}")
            for place, state in enumerate(stated)
            if state not in _STATES
        ]:
            raise InvalidInput(faults)
        wanted = [to_wire(JobState, state) for state in stated]

        return [
            job
            async for page in self._connection.pages(methods.LIST_JOBS, pool=pool, states=wanted)
            for job in page.jobs
        ]


BATCH = 1000
"""Jobs of one call: what the controller takes."""

_AGAIN_S = 1.0
"""Before the next try after one that failed; less where the lease is short."""


class SessionKeeper:
    """Renews session-owned jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lease_ms: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def kept(self) -> tuple[str, ...]:
        """Uids of the jobs that are renewed; those that ended are forgotten once nothing of their batch lives."""
        return tuple(self._lease_ms)

    def keep(self, uid: str, lease_ms: int) -> None:
        """Renew the job from now on.

        Args:
            uid: of the job.
            lease_ms: its session lease in milliseconds.
        """
        self._lease_ms[uid] = lease_ms
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="callboard session")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while self._lease_ms:
            self._changed.clear()
            uids = tuple(self._lease_ms)
            rests_s = [await self._renew(uids[start : start + BATCH]) for start in range(0, len(uids), BATCH)]
            known_s = [rest_s for rest_s in rests_s if rest_s is not None]
            # A job that is added meanwhile may have a shorter lease than all before it.
            if known_s:
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([waiting], timeout=min(known_s))
                waiting.cancel()

    async def _renew(self, uids: Sequence[str]) -> float | None:
        """Seconds until these must be renewed again; None: they have all ended, and are forgotten."""
        third_s = min(self._lease_ms[uid] for uid in uids) / 3000
        request = methods.RENEW_JOBS.request(names=[f"jobs/{uid}" for uid in uids])
        try:
            response = await self._connection.call(methods.RENEW_JOBS, request, timeout_s=max(third_s, 1.0))
        except CallboardError:
            return min(third_s, _AGAIN_S)  # The controller is away; what is lost by that, its next answers will tell.
        if not response.next_ms:
            for uid in uids:
                del self._lease_ms[uid]
            return None
        return response.next_ms / 1000
