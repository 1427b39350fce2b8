"""The indexes of jobs and of workers: by state, in the order of the queue, and what each holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import cast

from callboard.scheduler.records.job_records import JobRecord, SpecRecord, WorkerRecord
from callboard.scheduler.records.states import HOLDING, JOB_PENDING, JOB_RUNNING, WORKER_STOPPING, JobState
from callboard.scheduler.state.indexes import InOrder, Members, add, remove
from callboard.scheduler.state.shapes import Holders, Shape, Shapes

QueueKey = tuple[int, int, int, str]

AGING_MS_PER_MILLI = 3600
"""A waiting job gains one milli of priority in the queue per this many ms: 1.0 an hour. Since every job gains at the
same rate, the order of two jobs never changes and the queue stays sorted without touching it."""


class JobIndex:
    """The indexes over jobs, in the order of their submission unless said otherwise.

    Attributes:
        shapes: shape of every job's spec.
        queue: PENDING jobs in the order they are looked at; the last item of a key is the uid.
        waiting: PENDING jobs by shape, each in the order of the queue.
        unplaced: PENDING jobs whose placement waits for nodes.
        elastic: RUNNING jobs with a component whose number of workers may change, or whose lost workers are replaced.
        requests: uid of the job that a request made, by the request's id.
    """

    def __init__(self, specs: Mapping[str, SpecRecord]) -> None:
        self._specs = specs
        self.shapes = Shapes(specs)
        self.by_state: dict[JobState, InOrder[str, int]] = {state: InOrder() for state in JobState}
        self.queue: list[QueueKey] = []
        self.waiting: dict[Shape, list[QueueKey]] = {}
        self.holders = Holders()
        self.nominated: InOrder[str, int] = InOrder()
        self.unplaced: InOrder[str, int] = InOrder()
        self.elastic: InOrder[str, int] = InOrder()
        self.requests: dict[str, str] = {}
        self._uids_of_name: dict[str, Members[str]] = {}

    def update(self, old: JobRecord | None, new: JobRecord | None) -> None:
        """Follows a job after its record changed."""
        if old is None or new is None:
            self._follow_name(old, new)
        if old is None or new is None or old.state is not new.state:
            self._follow_state(old, new)
        elif old.checkpoint_ms != new.checkpoint_ms:
            self.holders.update(new, new.uid, self.shapes)
        if new is not None and new.nominated:
            self.nominated.put(new.uid, new.order)
        elif old is not None and old.nominated:
            del self.nominated[old.uid]

    def add_ended(self, jobs: Sequence[JobRecord]) -> None:
        """As :meth:`update` for jobs that are new and have ended: only their names and their states lead to them."""
        names = self._uids_of_name
        fresh: dict[str, Members[str]] = {job.name: {job.uid: job.order} for job in jobs}
        if len(fresh) == len(jobs) and names.keys().isdisjoint(fresh):
            names.update(fresh)
            self.requests.update({job.request_id: job.uid for job in jobs if job.request_id})
        else:
            for job in jobs:
                self._follow_name(None, job)
        for state in {job.state for job in jobs}:
            self.by_state[state].add_all({job.uid: job.order for job in jobs if job.state is state})

    def follow_spec(self, record: SpecRecord, job: JobRecord | None) -> None:
        """Follows the spec of a job: of one that is new, or of one that waits and got its places."""
        if job is not None and job.state is JOB_PENDING:
            self._unqueue(job)
        self.shapes.drop(record.uid)
        if job is not None and job.state is JOB_PENDING:
            self._queue(job)

    def newest_of(self, name: str) -> str:
        """Uid of the newest job of a name; empty if there is none."""
        uids = self._uids_of_name.get(name)
        return next(reversed(uids)) if uids else ""

    def queue_key(self, job: JobRecord) -> QueueKey:
        """Where a waiting job stands: aged priority, then first submit time, then order of submission."""
        priority_milli = self._specs[job.uid].spec.priority_milli
        return (job.submit_ms - priority_milli * AGING_MS_PER_MILLI, job.submit_ms, job.order, job.uid)

    def _follow_state(self, old: JobRecord | None, new: JobRecord | None) -> None:
        uid = (new or cast("JobRecord", old)).uid
        self.holders.update(new, uid, self.shapes)
        if old is not None:
            del self.by_state[old.state][uid]
            if old.state is JOB_PENDING:
                self._unqueue(old)
            self.elastic.pop(uid, None)
        if new is None:
            return
        self.by_state[new.state].put(uid, new.order)
        if new.state is JOB_PENDING:
            self._queue(new)
        elif new.state is JOB_RUNNING and self._grows(uid):
            self.elastic.put(uid, new.order)

    def _grows(self, uid: str) -> bool:
        return self.shapes[uid].yield_class.elastic or self._specs[uid].spec.replaces

    def _queue(self, job: JobRecord) -> None:
        key = self.queue_key(job)
        insort(self.queue, key)
        insort(self.waiting.setdefault(self.shapes[job.uid], []), key)
        if self._specs[job.uid].spec.placement_nodes:
            self.unplaced.put(job.uid, job.order)

    def _unqueue(self, job: JobRecord) -> None:
        key, shape = self.queue_key(job), self.shapes[job.uid]
        del self.queue[bisect_left(self.queue, key)]
        alike = self.waiting[shape]
        del alike[bisect_left(alike, key)]
        if not alike:
            del self.waiting[shape]
        self.unplaced.pop(job.uid, None)

    def _follow_name(self, old: JobRecord | None, new: JobRecord | None) -> None:
        if new is not None:
            add(self._uids_of_name, new.name, new.uid, new.order)
            if new.request_id:
                self.requests[new.request_id] = new.uid
        if old is not None:
            remove(self._uids_of_name, old.name, old.uid)
            if old.request_id:
                del self.requests[old.request_id]


class WorkerIndex:
    """The indexes over workers, in the order of their generations.

    Attributes:
        of_job: every worker of a job.
        holding_of_job, in_group, on_node: those that hold room (I4).
        leaving_extras: extra ones that stop while their job runs on.
    """

    def __init__(self) -> None:
        self.of_job: dict[str, Members[int]] = {}
        self.holding_of_job: dict[str, Members[int]] = {}
        self.in_group: dict[str, Members[int]] = {}
        self.on_node: dict[str, Members[int]] = {}
        self.leaving_extras: InOrder[int, int] = InOrder()

    def update(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Follows a worker after its record changed."""
        if old is None and new is not None:
            add(self.of_job, new.job, new.generation, new.generation)
        elif old is not None and new is None:
            remove(self.of_job, old.job, old.generation)
        before = old if old is not None and old.state in HOLDING else None
        after = new if new is not None and new.state in HOLDING else None
        if before is None and after is not None:
            add(self.in_group, after.group_id, after.generation, after.generation)
            add(self.on_node, after.node_id, after.generation, after.generation)
            add(self.holding_of_job, after.job, after.generation, after.generation)
        elif before is not None and after is None:
            remove(self.in_group, before.group_id, before.generation)
            remove(self.on_node, before.node_id, before.generation)
            remove(self.holding_of_job, before.job, before.generation)
        if new is not None and new.extra and new.state is WORKER_STOPPING:
            self.leaving_extras.put(new.generation, new.generation)
        elif old is not None and old.extra:
            self.leaving_extras.pop(old.generation, None)
