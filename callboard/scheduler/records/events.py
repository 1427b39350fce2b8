"""The events: all that can happen, as frozen data that carry their time and every fresh id.

``now_ms`` is the controller's wall clock, clamped never to go back; ``cause`` threads through everything an event
leads to. What the event log says of it afterwards is another record: :class:`~.job_records.EventRecord`.
"""

from __future__ import annotations

from typing import Protocol

from callboard.model.frozen import dataclass
from callboard.model.policy import PreemptionPolicy
from callboard.model.quantities import Resources
from callboard.model.ray_fault import RayFault
from callboard.model.specs import JobSpec, Labels, PoolSpec
from callboard.scheduler.records.node_record import DeviceInfo, HardwareInfo, RayInfo
from callboard.scheduler.records.states import StopOutcome, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that happens."""

    now_ms: int
    cause: str = ""


class Make(Protocol):
    """Makes an event at the moment it is handled: most often a class of events, with all that is known before."""

    def __call__(self, *, now_ms: int, cause: str) -> Event:
        """The event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted(Event):
    """A controller took over the state. Nothing is admitted until every known node is back or ``grace_ms`` passed."""

    grace_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCreated(Event):
    """Somebody asks for a pool. Result: the pool's name."""

    spec: PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUpdated(Event):
    """Somebody changes a pool. ``expected_version`` 0: whatever is there."""

    spec: PoolSpec
    expected_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDeleted(Event):
    """Somebody deletes a pool; ``force`` cancels the jobs in it."""

    name: str
    force: bool = False
    expected_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet(Event):
    """Somebody replaces the cluster's preemption policy."""

    policy: PreemptionPolicy
    expected_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Event):
    """Somebody submits a job. Result: the job's uid (an earlier one's for a repeated ``request_id``)."""

    uid: str
    spec: JobSpec
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(Event):
    """Somebody cancels a job; ``within_ms`` shortens the time of its hooks, also of a stop that is under way."""

    uid: str
    reason: str = ""
    destroy_groups: bool = False
    within_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCompleted(Event):
    """Somebody ends a job as succeeded."""

    uid: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreempted(Event):
    """Somebody makes a job yield by hand; with ``for_uid`` its room is nominated to that job."""

    uid: str
    for_uid: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRenewed(Event):
    """The client of session-owned jobs is alive. Result: the shortest lease among them in ms, 0 if there is none."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScaled(Event):
    """Somebody says how many workers an elastic component should have. Result: the job's uid."""

    uid: str
    component: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResolved(Event):
    """The nodes that a job's placement waited for are there: its text was resolved against the nodes of this moment,
    beside the loop that decides.

    Attributes:
        spec: the job with its places.
    """

    uid: str
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalsReported(Event):
    """Somebody reported gauges of a job. Result: (component, workers it should have) of what that changed.

    Attributes:
        gauges: (name, value in thousandths) of every gauge of the job that is known.
    """

    uid: str
    gauges: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDeleted(Event):
    """Somebody removes a placement group: an idle one, or (``when_free``) any once nobody uses it."""

    group_id: str
    when_free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that an agent reports when it joins."""

    generation: int
    job: str
    component: str
    rank: int
    state: WorkerState
    pid: int = 0
    pid_start_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """An agent opened a session. Result: :class:`Admission`.

    Attributes:
        rank: rank asked for; -1: the lowest free one.
        previous_alive: the session layer still has a living stream of this node id.
        hello_number, hello_clock_ms, address, closed: as in :class:`NodeRecord`.
    """

    node_id: str
    instance: str
    rank: int = -1
    labels: Labels = ()
    node_group: str = ""
    capacity: Resources
    devices: tuple[DeviceInfo, ...] = ()
    simulated: bool = False
    visibility_variable: str = "CUDA_VISIBLE_DEVICES"
    interpreters: tuple[str, ...] = ()
    runtime: str = "ray"
    ray: RayInfo | None = None
    version: str = ""
    hostname: str = ""
    hardware: tuple[HardwareInfo, ...] = ()
    ray_fault: RayFault | None = None
    ray_version: str = ""
    python_version: str = ""
    agent_pid: int = 0
    running: tuple[RunningWorker, ...] = ()
    previous_alive: bool = False
    hello_number: int = 0
    hello_clock_ms: int = 0
    address: str = ""
    closed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a joining node is told: its rank, the number of its session and the generations that shall go on."""

    rank: int
    epoch: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRayChanged(Event):
    """A node's part in Ray changed: it is up (``ray``), or down (None) with what keeps it out, if that is known."""

    node_id: str
    epoch: int
    ray: RayInfo | None
    fault: RayFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObserved(Event):
    """An agent reports which of its devices take no new work, or what its spares don't import; None: as before.

    Attributes:
        closed, refused_preloads: as in :class:`NodeRecord`.
        warnings: (index, what) of devices about which something is unusual.
    """

    node_id: str
    epoch: int
    closed: tuple[tuple[int, str], ...] | None = None
    warnings: tuple[tuple[int, str], ...] = ()
    refused_preloads: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSuspected(Event):
    """A node has not been heard of lately, or (``suspected`` False) it has been heard of again.

    Attributes:
        leaving: it is no silence: its agent says that it leaves.
        kill_within_ms: when it kills what runs there, in ms, while it leaves; None: it didn't say.
    """

    node_id: str
    epoch: int
    suspected: bool = True
    leaving: bool = False
    kill_within_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """A node is given up: its lease and grace are over, or its Ray node died."""

    node_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft(Event):
    """An agent said goodbye, after ending its workers."""

    node_id: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCordoned(Event):
    """Somebody cordons a node, or takes the cordon back; ``devices``: opens these of its devices, by index."""

    node_id: str
    cordoned: bool
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained(Event):
    """Somebody drains a node: nothing new starts there and what runs yields by ``deadline_ms`` (0: by its timeouts).

    Attributes:
        until_rejoin: the cordon that comes with it ends when another program of the node's agent joins.
    """

    node_id: str
    deadline_ms: int = 0
    reason: str = ""
    until_rejoin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRemoved(Event):
    """Somebody has a node forgotten that is gone."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent(Event):
    """Something an agent reports about one worker; an unknown or finished generation changes nothing (I9)."""

    node_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReserved(WorkerEvent):
    """A node reserved a port for the rendezvous of a worker and its peers; 0: it can't."""

    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(WorkerEvent):
    """A worker was constructed and answered."""

    pid: int = 0
    pid_start_ms: int = 0
    actor_name: str = ""
    start_ms: int = 0
    visible_devices: str = ""
    warm: bool = False
    cold_reason: str = ""
    preloaded: bool = False
    preload_missed: str = ""
    can_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgressed(WorkerEvent):
    """A worker's start takes long. ``message``: what its node is at, as the end of a sentence."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStartFailed(WorkerEvent):
    """A worker could not be started. ``user_fault``: its own code raised; ``died``: its process ended by itself."""

    message: str
    traceback: str = ""
    user_fault: bool = False
    died: bool = False
    quarantined: bool = False
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(WorkerEvent):
    """A worker was stopped as asked, or a quarantined one is gone at last.

    Attributes:
        checkpoint_lost: why it left no checkpoint, though it was asked for one; empty: none was lost.
    """

    outcome: StopOutcome
    checkpoint_data: bytes = b""
    checkpoint_uri: str = ""
    took_ms: int = 0
    detail: str = ""
    checkpoint_lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(WorkerEvent):
    """A worker died without being asked, ``ago_ms`` before."""

    message: str
    quarantined: bool = False
    stderr_tail: str = ""
    ago_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished(WorkerEvent):
    """The entry method of a worker returned or raised."""

    succeeded: bool
    traceback: str = ""
    stderr_tail: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady(Event):
    """A placement group is booked in Ray.

    Attributes:
        devices: indexes of each bundle's devices, where Ray gave it others than were asked for; empty: those.
    """

    group_id: str
    attempt: int
    ray_id: str = ""
    ray_session: str = ""
    devices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFound(Event):
    """An agent that joined found a placement group of this cluster in Ray."""

    group_id: str
    ray_id: str
    ray_session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed(Event):
    """A placement group could not be made; nothing of it is left in Ray."""

    group_id: str
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRemoved(Event):
    """A placement group is gone from Ray."""

    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySessionLost(Event):
    """Ray's head died: every placement group and actor of the session is void."""

    session: str
    reason: str = ""
