"""The records of jobs and of all that belongs to them, and the two changes: put a record, drop a record.

A change puts one record or drops one (:class:`Put`, :class:`Drop`); the journal stores changes, and replaying them
rebuilds the state without deciding again. Everything else the scheduler keeps (free room, usage, queues) is an index
over records, kept by :mod:`callboard.scheduler.state.state`.

All times are the controller's wall clock in milliseconds since 1970, clamped never to go back.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, get_args

from callboard.model.frozen import dataclass, evolver, quick
from callboard.model.policy import PreemptionPolicy
from callboard.model.quantities import Resources
from callboard.model.specs import JobSpec
from callboard.scheduler.records.node_record import DeviceShare, NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord, PoolRecord
from callboard.scheduler.records.states import JobState, Rule, StopKind, StopOutcome, WorkerState


@quick
@dataclass(frozen=True, slots=True)
class StoryLine:
    """One state a job entered."""

    revision: int
    at_ms: int
    state: str
    reason: str
    cause: str


@quick
@dataclass(frozen=True, slots=True)
class RanOn:
    """Workers of one component that were given to one node in one attempt: where their output is."""

    attempt: int
    node_id: str
    component: str
    ranks: tuple[int, ...]


@quick
@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a worker.

    Attributes:
        worker: ``component/rank``.
        died: its process ended by itself; otherwise its code raised, or it did not start.
        reason: the job's reason, should this be the cause.
        counts: it counts against the restart budget.
        survived: the job went on without the worker.
    """

    attempt: int
    at_ms: int
    worker: str
    node_id: str
    died: bool
    reason: str
    counts: bool = True
    survived: bool = False


FAILURES_LIMIT = 32
"""Most failures kept per job."""

RAN_LIMIT = 4_096
"""Most of these kept per job; of the oldest attempts nobody knows then where they ran."""

STORY_LIMIT = 100
"""Most story lines kept per job."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job, but for its spec (:class:`SpecRecord`), which never changes.

    Attributes:
        order: counts submissions; the last tie-break of the queue.
        attempt: starts so far, counting the present one.
        groups: placement groups it uses, or is nominated for.
        targets: (component, number of workers) it should have, where that was said.
        scaled: (component, index of the scaling rule, when it acted last in ms).
        patient: its nomination waits for running jobs to end by themselves (starvation), not for victims.
        nominated: its ask charges its pools and its groups are held for it, though it has not started (I7).
        waits_for: uids of the victims and ids of the groups (being removed) whose end it waits for when nominated.
        target: state it ends in, while STOPPING.
        yielded_to: uids of jobs that it was preempted for or that overtook its nomination; it never takes their place,
            nor that of one they yielded to, so that no set of rules makes jobs evict each other in a circle.
        failures: times of failures that count against the restart budget.
        eligible_ms: not looked at before.
        starving_ms: from then on, while it is blocked, the room it needs is held for it; 0: never.
        starving: it was looked at since then.
        retry_ms: it is blocked, and by time alone that may be over then; 0: not by time alone.
        session_ms: cancelled then, unless its client is heard before; 0: detached, or ended.
        ran: where its workers ran, oldest attempt first.
        failed: failures of its workers, oldest first.
        cause_ms: until then it is seen whether a process died, of which an exception is the consequence; 0: no failure
            is looked into.
        checkpoint_lost: why checkpoints were lost when it was last asked for them; empty: none was.
        traceback: of the worker that failed it last.
        stderr_tail: end of what that worker wrote to stderr.
        exit_code: of the command that it ran, should that be what failed.
        destroy_groups: its groups are removed when it lets go of them.
    """

    kind: ClassVar[str] = "job"

    uid: str
    name: str
    order: int
    state: JobState
    reason: str = ""
    attempt: int = 0
    submit_ms: int = 0
    running_ms: int = 0
    end_ms: int = 0
    groups: tuple[str, ...] = ()
    targets: tuple[tuple[str, int], ...] = ()
    scaled: tuple[tuple[str, int, int], ...] = ()
    nominated: bool = False
    patient: bool = False
    waits_for: tuple[str, ...] = ()
    target: JobState | None = None
    preemptions: int = 0
    yielded_to: tuple[str, ...] = ()
    restarts: int = 0
    failures: tuple[int, ...] = ()
    eligible_ms: int = 0
    deadline_ms: int = 0
    session_ms: int = 0
    starving_ms: int = 0
    starving: bool = False
    retry_ms: int = 0
    checkpoint_ms: int = 0
    checkpoint_lost: str = ""
    failed: tuple[Failure, ...] = ()
    cause_ms: int = 0
    ran: tuple[RanOn, ...] = ()
    traceback: str = ""
    stderr_tail: str = ""
    exit_code: int = 0
    destroy_groups: bool = False
    request_id: str = ""
    story: tuple[StoryLine, ...] = ()
    cause: str = ""
    revision: int = 0

    key = property(attrgetter("uid"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRecord:
    """What was asked of a job."""

    kind: ClassVar[str] = "spec"

    uid: str
    spec: JobSpec

    key = property(attrgetter("uid"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker of one attempt, keyed by its generation: the fencing token of reports about it (I9).

    Attributes:
        pool: pool that its resources are charged to.
        extra: it is above the component's fewest workers: a unit of its own that may come and go while the job runs.
        cancel_timeout_ms, kill_timeout_ms: bounds of its stop, while STOPPING.
        master_port: of the first worker of a component, the port that its node reserved for the rendezvous of all of
            them; 0: not asked for, or not answered yet; -1: its node can't reserve one.
        kill_ms: when it is killed at the latest, while STOPPING.
        stop_kind: what it is stopped for.
        hastened: times that a stop which was under way was shortened.
        can_checkpoint: its class has ``checkpoint()``.
        checkpoint_lost: why it left no checkpoint, though it was asked for one; empty: none was lost.
        deadline_ms: when its start or stop is over at the latest; 0: none.
    """

    kind: ClassVar[str] = "worker"

    generation: int
    job: str
    component: str
    rank: int
    attempt: int
    state: WorkerState
    node_id: str
    group_id: str
    bundle_index: int
    pool: str
    resources: Resources
    devices: tuple[DeviceShare, ...] = ()
    extra: bool = False
    reason: str = ""
    pid: int = 0
    pid_start_ms: int = 0
    actor_name: str = ""
    start_ms: int = 0
    visible_devices: str = ""
    warm: bool = False
    cold_reason: str = ""
    preloaded: bool = False
    preload_missed: str = ""
    ready_ms: int = 0
    finished: bool = False
    master_port: int = 0
    cancel_timeout_ms: int = 0
    kill_timeout_ms: int = 0
    checkpoint: bool = False
    kill_ms: int = 0
    stop_kind: StopKind | None = None
    hastened: int = 0
    can_checkpoint: bool = False
    checkpoint_lost: str = ""
    deadline_ms: int = 0
    outcome: StopOutcome | None = None
    revision: int = 0

    key = property(attrgetter("generation"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """State that one worker left for the next attempt of its job: ``data`` (≤ 1 MiB) or a ``uri``."""

    kind: ClassVar[str] = "checkpoint"

    job: str
    component: str
    rank: int
    data: bytes = b""
    uri: str = ""
    at_ms: int = 0

    key = property(attrgetter("job", "component", "rank"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRecord:
    """One victim that yields or yielded.

    Attributes:
        generation: the one extra worker that yields; 0: the whole job does.
        yield_ms: milliseconds from decision until its room was free; -1 until then.
        outcome: worst stop outcome of its workers; None until then.
        lost_work_ms: work since its start or last checkpoint when it was decided.
        checkpoint_lost: why checkpoints that were asked of it were lost; empty: none was.
    """

    kind: ClassVar[str] = "preemption"

    number: int
    victim: str
    victim_name: str
    preemptor: str
    preemptor_name: str
    pool: str
    rule: Rule
    reason: str
    decided_ms: int
    generation: int = 0
    lost_work_ms: int = 0
    yield_ms: int = -1
    outcome: StopOutcome | None = None
    checkpoint_lost: str = ""

    key = property(attrgetter("number"))


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRecord:
    """Counters and settings of the whole cluster.

    Attributes:
        term: counts the controller's starts; commands carry it.
        reconcile_until_ms: nothing is admitted before, unless every known node is back; 0: not reconciling.
        unsettled: what waits was not looked at to the end; the next event goes on with it.
        overlooked: something began to leave, and what waits was not looked at since.
        look_on: where in the queue to go on, for one event may not look at all that waits: (1 where a borrower stands
            behind all owners, queue key); None: the queue was gone through.
        look_most: most plans that an event may make before it leaves the rest for the next; 0: as few as usual.
        starting: (placement group, generation) of what is there whose workers are still to be asked for, from which
            generation on: one event may not ask for all of a large gang.
    """

    kind: ClassVar[str] = "meta"

    now_ms: int = 0
    revision: int = 0
    term: int = 0
    reconcile_until_ms: int = 0
    next_generation: int = 1
    next_group: int = 1
    next_order: int = 1
    next_preemption: int = 1
    policy: PreemptionPolicy = PreemptionPolicy()
    policy_version: int = 1
    total_submitted: int = 0
    total_preemptions: int = 0
    preemption_outcomes: tuple[tuple[str, int], ...] = ()
    warm_starts: int = 0
    cold_starts: int = 0
    preloaded_starts: int = 0
    unsettled: bool = False
    overlooked: bool = False
    look_on: tuple[int, int, int, int, str] | None = None
    look_most: int = 0
    starting: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> str:
        """Key of the only record of its kind."""
        return ""


Record = (
    NodeRecord
    | PoolRecord
    | GroupRecord
    | JobRecord
    | SpecRecord
    | WorkerRecord
    | CheckpointRecord
    | PreemptionRecord
    | MetaRecord
)
"""Everything the state is made of."""


RECORD_TYPES: tuple[type[Record], ...] = get_args(Record)
"""The record types, by which a journal finds its decoders (``kind`` is the name in the log)."""


Key = str | int | tuple[str, str, int]


@dataclass(slots=True)
class Put:
    """A record is new, or replaces the one with its key. Made with every change, so nothing guards its one field."""

    record: Record


@dataclass(frozen=True, slots=True)
class Drop:
    """The record of this kind and key is gone."""

    kind: str
    key: Key


Change = Put | Drop
"""What the journal stores and :meth:`State.apply` applies."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One entry of the event log: what changed, for people and watchers. Never read by the scheduler."""

    revision: int
    at_ms: int
    type: str
    subject: str
    state: str
    reason: str
    cause: str
    facts: tuple[tuple[str, str], ...] = ()


_Evolving = TypeVar("_Evolving", bound=Record)


class _Evolvers(dict[type, Callable[[Any, dict[str, Any]], Any]]):
    def __missing__(self, cls: type) -> Callable[[Any, dict[str, Any]], Any]:
        return self[cls.__bases__[0]]  # of a record that sleeps


_EVOLVERS = _Evolvers({cls: evolver(cls) for cls in RECORD_TYPES})


def evolve(record: _Evolving, **changes: Any) -> _Evolving:
    """The record with some fields changed: what ``dataclasses.replace`` gives, at a tenth of its cost."""
    evolved: _Evolving = _EVOLVERS[type(record)](record, changes)
    return evolved
