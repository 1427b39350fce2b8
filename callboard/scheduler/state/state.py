"""The state: every record, the one way to change it, and the indexes that make questions cheap.

:meth:`State.apply` is the only mutator. It keeps the indexes in step, and never decides anything: a journal of
changes replayed through it gives the same state on any version of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast

from callboard.model.policy import PreemptionPolicy
from callboard.model.quantities import NOTHING, Resources, total
from callboard.scheduler.records.job_records import (
    Change,
    CheckpointRecord,
    Drop,
    JobRecord,
    Key,
    MetaRecord,
    PreemptionRecord,
    Put,
    Record,
    SpecRecord,
    WorkerRecord,
)
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord, PoolRecord
from callboard.scheduler.records.states import (
    ENDED,
    GROUP_BACKOFF,
    GROUP_CREATING,
    GROUP_READY,
    GROUP_REMOVING,
    HOLDING,
    JOB_PENDING,
    JOB_PREEMPTING,
    JOB_RUNNING,
    JOB_STARTING,
    JOB_STOPPING,
    KIND_DYNAMIC,
    KIND_RESERVED,
    LIVE,
    WORKER_READY,
    WORKER_STOPPING,
)
from callboard.scheduler.state.cluster_use import Account, ClusterUse
from callboard.scheduler.state.deadlines import Deadlines
from callboard.scheduler.state.free_index import FreeIndex
from callboard.scheduler.state.group_index import GroupIndex
from callboard.scheduler.state.indexes import InOrder, Members, add, remove
from callboard.scheduler.state.job_index import JobIndex, QueueKey, WorkerIndex
from callboard.scheduler.state.ledger import Ledger, NodeUse
from callboard.scheduler.state.node_kinds import NodeKinds
from callboard.scheduler.state.roster import GONE, Roster
from callboard.scheduler.state.shapes import Shape


class State:
    """All records and the indexes over them. Read freely; change only through :meth:`apply`."""

    def __init__(self) -> None:
        self.meta = MetaRecord()
        # Each table is walked through in an order of its own, whatever became of its records meanwhile.
        self.nodes: InOrder[str, NodeRecord] = InOrder(attrgetter("node_id"))
        self.pools: InOrder[str, PoolRecord] = InOrder(attrgetter("made_at", "spec.name"))
        self.groups: InOrder[str, GroupRecord] = InOrder(attrgetter("number"))
        self.jobs: InOrder[str, JobRecord] = InOrder(attrgetter("order"))
        self.specs: InOrder[str, SpecRecord] = InOrder(attrgetter("uid"))
        self.workers: InOrder[int, WorkerRecord] = InOrder(attrgetter("generation"))
        self.checkpoints: InOrder[tuple[str, str, int], CheckpointRecord] = InOrder(attrgetter("key"))
        self.preemptions: InOrder[int, PreemptionRecord] = InOrder(attrgetter("number"))
        self.ledger = Ledger()
        self._free = FreeIndex()
        self._cluster_use = ClusterUse()
        self.room_version = 0
        """Counts changes that could let a waiting job start: freed room, new nodes, quotas, policies. Of this and the
        next only what one event adds means anything."""
        self.leaving_version = 0
        """Counts what began to leave: jobs, extra workers, placement groups. Their room may be promised already."""
        self.nodes_version = 0
        """Counts changes of nodes, for those who work something out beside the loop. Nothing is decided by it."""
        self._tables: dict[str, InOrder[Key, Record]] = {
            "node": cast("InOrder[Key, Record]", self.nodes),
            "pool": cast("InOrder[Key, Record]", self.pools),
            "group": cast("InOrder[Key, Record]", self.groups),
            "spec": cast("InOrder[Key, Record]", self.specs),
            "job": cast("InOrder[Key, Record]", self.jobs),
            "worker": cast("InOrder[Key, Record]", self.workers),
            "checkpoint": cast("InOrder[Key, Record]", self.checkpoints),
            "preemption": cast("InOrder[Key, Record]", self.preemptions),
        }
        self._reindex: dict[str, Callable[[Any, Any], None]] = {
            "node": self._index_node,
            "pool": self._index_pool,
            "group": self._index_group,
            "spec": self._index_spec,
            "job": self._index_job,
            "worker": self._index_worker,
            "checkpoint": self._index_checkpoint,
            "preemption": self._index_preemption,
        }
        self.fits_ever: dict[Shape, bool] = {}
        """What is known of whether a shape could ever fit; forgotten when a node or a quota changes."""
        self.roster = Roster()
        self.node_kinds = NodeKinds()
        self.group_index = GroupIndex(self.groups, self._is_there)
        self._job_index = JobIndex(self.specs)
        # What is asked of these all the time is asked without a detour.
        self.shapes = self._job_index.shapes
        self.jobs_by_state = self._job_index.by_state
        self.queue, self.waiting = self._job_index.queue, self._job_index.waiting
        self.holders = self._job_index.holders
        self.nominated, self.elastic = self._job_index.nominated, self._job_index.elastic
        self.unplaced, self.requests = self._job_index.unplaced, self._job_index.requests
        self._worker_index = WorkerIndex()
        self.jobs_holding, self.leaving_extras = self._worker_index.holding_of_job, self._worker_index.leaving_extras
        self._checkpoints_of_job: dict[str, Members[tuple[str, str, int]]] = {}
        self._preemptions_for: dict[str, Members[int]] = {}
        self._open_preemptions: dict[str, Members[int]] = {}
        self._policies: dict[str, PreemptionPolicy] = {}
        """The policy of each pool, as far as somebody asked; forgotten when one changes."""
        self.deadlines = Deadlines()
        self._timed: set[str] = set()
        """Jobs that state a time by which something is due."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> State:
        """A state made of these records, in any order that :meth:`records` gives."""
        state = cls()
        for record in records:
            state.apply(Put(record))
        return state

    def records(self) -> Iterator[Record]:
        """Every record, in an order in which they can be applied: nodes, groups, workers; specs before jobs."""
        yield self.meta
        for table in self._tables.values():
            yield from table.values()

    def apply(self, change: Change) -> Record | None:
        """Carries out one change and returns the record it replaced or dropped, or None."""
        if isinstance(change, Drop):
            old = self._tables[change.kind].pop(change.key, None)
            if old is not None:
                self._reindex[change.kind](old, None)
            return old
        new = change.record
        kind = new.kind
        if kind == "meta":
            return self._put_meta(cast("MetaRecord", new))
        key, table = new.key, self._tables[kind]
        old = table.get(key)
        if old is None:
            table.add(key, new)
        else:
            table[key] = new
        self._reindex[kind](old, new)
        return old

    def put_ended(self, specs: Sequence[SpecRecord], jobs: Sequence[JobRecord]) -> None:
        """As :meth:`apply` for jobs that have ended, are new and state no time by which something is due, and for their
        specs; at a third of the cost, since a restart has a hundred thousand of them."""
        uids = [job.uid for job in jobs]
        self.specs.add_all(dict(zip(uids, specs, strict=True)))
        self.jobs.add_all(dict(zip(uids, jobs, strict=True)))
        self._job_index.add_ended(jobs)
        self.room_version += len(jobs)

    def _put_meta(self, new: MetaRecord) -> MetaRecord:
        old, self.meta = self.meta, new
        if old.policy is not new.policy:
            self._policies.clear()
        if old.policy is not new.policy or old.reconcile_until_ms != new.reconcile_until_ms:
            self.room_version += 1
            self.deadlines.set("meta", "", new.reconcile_until_ms)
        if old.look_on is not None or new.look_on is not None or old.starting or new.starting:
            goes_on = new.look_on is not None or new.starting
            self.deadlines.set("look", "", new.now_ms + 1 if goes_on else 0)
        return old

    # ---- questions ----

    @property
    def free(self) -> FreeIndex:
        """Usable nodes by what is free on them. Brought up to date when asked, once for many changes."""
        for node_id in self.ledger.touched:
            book = self.ledger.nodes.get(node_id)
            if book is None:
                self._free.drop(node_id)
            else:
                self._free.update(book)
        self.ledger.touched.clear()
        return self._free

    @property
    def cluster_use(self) -> Account:
        """What the nodes that are there are used for. Brought up to date when asked, once for many changes."""
        for node_id in self.ledger.changed:
            self._cluster_use.update(node_id, self.ledger.nodes.get(node_id))
        self.ledger.changed.clear()
        return self._cluster_use.sums

    def find_job(self, name_or_uid: str) -> JobRecord | None:
        """The job with this uid, or the newest with this name; None if there is none."""
        job = self.jobs.get(name_or_uid)
        if job is not None:
            return job
        uid = self._job_index.newest_of(name_or_uid)
        return self.jobs[uid] if uid else None

    def live_job_named(self, name: str) -> JobRecord | None:
        """The job that has this name; None if it is free: once a job is on its way to its end, the next one may come,
        and the name leads to that one (PC-14)."""
        job = self.find_job(name)
        going = job is None or job.state in ENDED or job.state is JOB_STOPPING
        return None if going or job is None or job.name != name else job

    def workers_of(self, uid: str) -> list[WorkerRecord]:
        """Workers of a job, in the order of their generations."""
        return [self.workers[generation] for generation in self._worker_index.of_job.get(uid, ())]

    def all_ready(self, job: JobRecord) -> bool:
        """Whether every worker of a job's present attempt was constructed and answers."""
        # Workers tend to become ready in order, so the last ones tell soonest that some are not.
        for generation in reversed(self._worker_index.of_job.get(job.uid, {})):
            worker = self.workers[generation]
            if worker.state is not WORKER_READY and worker.attempt == job.attempt:
                return False
        return True

    @property
    def leaving(self) -> bool:
        """Whether anything is on its way out: jobs, extra workers, placement groups."""
        by_job = self.jobs_by_state
        return bool(
            by_job[JOB_STOPPING]
            or by_job[JOB_PREEMPTING]
            or self.group_index.returning
            or self.leaving_extras
            or self.group_index.doomed
        )

    def workers_in(self, group_id: str) -> list[WorkerRecord]:
        """Workers that hold a placement group: nobody else may use it (I4)."""
        return [self.workers[generation] for generation in self._worker_index.in_group.get(group_id, ())]

    def generations_in(self, group_id: str, first: int = 0) -> list[int]:
        """Workers that hold a placement group, by generation, from one on."""
        return [generation for generation in self._worker_index.in_group.get(group_id, ()) if generation >= first]

    def generations_of(self, uid: str) -> Iterable[int]:
        """Workers of a job, by generation."""
        return self._worker_index.of_job.get(uid, ())

    def workers_on(self, node_id: str) -> list[WorkerRecord]:
        """Workers that hold room on a node."""
        return [self.workers[generation] for generation in self._worker_index.on_node.get(node_id, ())]

    def checkpoints_of(self, uid: str) -> list[CheckpointRecord]:
        """Checkpoints that a job's workers left."""
        return [self.checkpoints[key] for key in self._checkpoints_of_job.get(uid, ())]

    def preemptions_for(self, uid: str) -> list[PreemptionRecord]:
        """Victims that yielded or yield to a job, oldest first."""
        return [self.preemptions[number] for number in self._preemptions_for.get(uid, ())]

    def open_preemptions(self, victim: str) -> list[PreemptionRecord]:
        """Preemptions of a job that are decided and not over."""
        return [self.preemptions[number] for number in self._open_preemptions.get(victim, ())]

    def node_use(self, node_id: str) -> NodeUse:
        """What a node is used for."""
        return self.ledger.nodes[node_id].use()

    def policy_for(self, pool: str) -> PreemptionPolicy:
        """The cluster's policy with a pool's overrides."""
        policy = self._policies.get(pool)
        if policy is None:
            record = self.pools.get(pool)
            policy = record.spec.preemption.over(self.meta.policy) if record else self.meta.policy
            self._policies[pool] = policy
        return policy

    def charged(self, pool: str) -> Resources:
        """What is charged to a pool: workers, and reserved groups where the pool says so."""
        used = self.ledger.used_by(pool)
        record = self.pools.get(pool)
        if record is None or not record.spec.pg_pool.charge_reserved:
            return used
        idle = [
            bundle.resources
            for group_id in self.group_index.of_pool.get(pool, ())
            if (group := self.groups[group_id]).group_kind is KIND_RESERVED
            and group.state in (GROUP_CREATING, GROUP_READY)
            and not self._worker_index.in_group.get(group_id)
            for bundle in group.bundles
        ]
        return used + total(idle)

    def nominated_ask(self, pool: str, but: Collection[str] = ()) -> Resources:
        """What nominated jobs, without some, will charge to a pool when they start (I7)."""
        ask = NOTHING
        for uid in self.nominated:
            if uid not in but:
                spec = self.specs[uid].spec
                for component in spec.components:
                    if spec.pool_of(component) == pool:
                        ask = ask + component.resources_of_first(component.min_workers)
        return ask

    def queue_key(self, job: JobRecord) -> QueueKey:
        """Where a waiting job stands: aged priority, then first submit time, then order of submission."""
        return self._job_index.queue_key(job)

    # ---- indexes ----

    def _index_spec(self, old: SpecRecord | None, new: SpecRecord | None) -> None:
        if new is not None:
            if old is not None:  # nothing stands by one that is new: a spec comes before its job
                self._job_index.follow_spec(new, self.jobs.get(new.uid))
        elif old is not None:
            self.shapes.drop(old.uid)

    def _index_node(self, old: NodeRecord | None, new: NodeRecord | None) -> None:
        self.nodes_version += 1
        self.fits_ever.clear()
        self.roster.update(old, new)
        self.node_kinds.update((new or cast("NodeRecord", old)).node_id, new)
        self.ledger.node_changed(old, new)
        was_there = old is not None and old.state not in GONE
        if was_there != (new is not None and new.state not in GONE):
            self.group_index.node_came_or_went((new or cast("NodeRecord", old)).node_id)
        self.room_version += 1

    def _is_there(self, node_id: str) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and node.state not in GONE

    def _index_pool(self, old: PoolRecord | None, new: PoolRecord | None) -> None:
        if _idle_ttl_ms(old) != _idle_ttl_ms(new):
            for group_id in self.group_index.of_pool.get((new or cast("PoolRecord", old)).key, ()):
                self.deadlines.set("idle", group_id, self._idle_end_ms(self.groups[group_id]))
        if old is None or new is None or old.spec is not new.spec:
            self._policies.clear()
        if (
            old is None
            or new is None
            or old.spec_version != new.spec_version
            or old.deleting != new.deleting
            or old.destroyed_reserved != new.destroyed_reserved
        ):
            self.fits_ever.clear()
            self.room_version += 1

    def _index_checkpoint(self, old: CheckpointRecord | None, new: CheckpointRecord | None) -> None:
        if old is None and new is not None:
            add(self._checkpoints_of_job, new.job, new.key, new.key)
        elif old is not None and new is None:
            remove(self._checkpoints_of_job, old.job, old.key)

    def _index_preemption(self, old: PreemptionRecord | None, new: PreemptionRecord | None) -> None:
        if old is None and new is not None:
            add(self._preemptions_for, new.preemptor, new.number, new.number)
        elif old is not None and new is None:
            remove(self._preemptions_for, old.preemptor, old.number)
        before = old if old is not None and old.yield_ms < 0 else None
        after = new if new is not None and new.yield_ms < 0 else None
        if before is None and after is not None:
            add(self._open_preemptions, after.victim, after.number, after.number)
        elif before is not None and after is None:
            remove(self._open_preemptions, before.victim, before.number)

    def _index_worker(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        self.ledger.worker_changed(old, new)
        self._worker_index.update(old, new)
        if new is not None and new.extra and new.state is WORKER_STOPPING:
            self.leaving_version += 1
        if old is not None and (
            (old.state in LIVE and (new is None or new.state not in LIVE))
            # Also when it is quarantined: whoever waits for its room must look elsewhere.
            or (old.state in HOLDING and (new is None or new.state not in HOLDING))
        ):
            self.room_version += 1
        worker = new or cast("WorkerRecord", old)
        at_ms = 0 if new is None else new.deadline_ms
        if at_ms != (0 if old is None else old.deadline_ms):
            self.deadlines.set("worker", worker.generation, at_ms)
        if worker.job in self._timed and (old is not None and old.state in HOLDING) != (
            new is not None and new.state in HOLDING
        ):
            job = self.jobs.get(worker.job)
            if job is not None and job.deadline_ms:
                self.deadlines.set("job", job.uid, self._end_of_wait_ms(job))

    def _index_job(self, old: JobRecord | None, new: JobRecord | None) -> None:
        self._job_index.update(old, new)
        if old is None or new is None or old.state is not new.state:
            if new is None or new.state in ENDED:
                self.room_version += 1  # who yielded to it may take places again
            elif new.state is JOB_STOPPING or new.state is JOB_PREEMPTING:
                self.leaving_version += 1
        if (
            old is not None
            and old.nominated
            and not (new is not None and new.nominated)
            and (new is None or new.state is not JOB_STARTING)  # one that starts takes what was held
        ):
            self.room_version += 1
        uid = (new or cast("JobRecord", old)).uid
        if new is not None and (
            new.deadline_ms or new.starving_ms or new.eligible_ms or new.session_ms or new.retry_ms or new.cause_ms
        ):
            self._timed.add(uid)
        elif uid in self._timed:
            self._timed.remove(uid)
        else:
            return  # it states no time by which something is due: few do
        waits = new is not None and new.state is JOB_PENDING
        at = self.deadlines.set
        at("eligible", uid, 0 if new is None else new.eligible_ms)
        at("session", uid, 0 if new is None else new.session_ms)
        at("job", uid, 0 if new is None else self._end_of_wait_ms(new))
        holds = new is not None and new.state in (JOB_STARTING, JOB_RUNNING)
        at("cause", uid, new.cause_ms if new is not None and holds else 0)
        at("starving", uid, new.starving_ms if new is not None and waits and not new.starving else 0)
        at("retry", uid, new.retry_ms if new is not None and waits and not new.nominated else 0)

    def _end_of_wait_ms(self, job: JobRecord) -> int:
        """When a job has waited long enough for nodes or for the replacement of a worker, or when one that ended may
        be forgotten: not while a worker of it is on record that nobody proved gone."""
        if job.state in (JOB_PENDING, JOB_RUNNING):
            return job.deadline_ms
        return job.deadline_ms if job.state in ENDED and job.uid not in self.jobs_holding else 0

    def _index_group(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        self.ledger.group_changed(old, new)
        self.group_index.update(old, new)
        if old is not None and _frees(old, new):
            self.room_version += 1
        if new is not None and (new.destroy or new.state is GROUP_REMOVING):
            self.leaving_version += 1
        group_id = (new or cast("GroupRecord", old)).group_id
        at_ms = 0 if new is None else new.deadline_ms
        if at_ms != (0 if old is None else old.deadline_ms):
            self.deadlines.set("group", group_id, at_ms)
        if (new is not None and new.idle_since_ms) or (old is not None and old.idle_since_ms):
            self.deadlines.set("idle", group_id, 0 if new is None else self._idle_end_ms(new))

    def _idle_end_ms(self, group: GroupRecord) -> int:
        if not group.idle_since_ms or group.group_kind is not KIND_DYNAMIC or group.nominee or group.destroy:
            return 0
        return group.idle_since_ms + _idle_ttl_ms(self.pools.get(group.pool))


def _idle_ttl_ms(pool: PoolRecord | None) -> int:
    """How long a pool keeps an idle group; of a pool that is gone, not at all."""
    return pool.spec.pg_pool.idle_ttl_ms if pool is not None else 0


def _frees(old: GroupRecord, new: GroupRecord | None) -> bool:
    """Whether a change of a group can let a waiting job start."""
    if new is None or (new.state is not old.state and new.state in (GROUP_REMOVING, GROUP_BACKOFF)):
        return True
    return (old.job != "" and new.job == "") or (old.nominee != "" and new.nominee == "")
