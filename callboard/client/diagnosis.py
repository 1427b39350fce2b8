"""The diagnosis: the ledger, compared with what nodes, Ray, devices and workers say of themselves.

Every finding names one difference, why it matters and what to do. Nothing is changed by looking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from callboard.client.calls.cluster_calls import GONE, id_of
from callboard.model.frozen import dataclass
from callboard.model.quantities import format_memory
from callboard.model.ray_fault import RayFault, RayFaultCode
from callboard.v1 import common_pb2
from callboard.v1.inspection_pb2 import NodeInspection, RayActor, WorkerInspection
from callboard.v1.job_pb2 import Job, JobState, Worker
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.placement_group_pb2 import PlacementGroup, PlacementGroupKind, PlacementGroupState
from callboard.wire.enums import from_wire

OURS = "cb/"
"""Beginning of the name of everything that callboard makes in Ray."""

Key = tuple[str, str, int]
"""Uid of the job, component, and rank of a worker."""

_SHOWN_NODES = 8

_PENDING_IN_RAY = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")

_KILL_NAMED = (
    "[ray.kill(each) for named in ray.util.list_named_actors(True) "
    'if (each := ray.get_actor(**named))._actor_id.hex() == "{id}"]'
)
"""By id, because several namespaces may have the name."""


class FindingKind(StrEnum):
    """What can be found, by the names that programs read."""

    NODE_STATE = "node-state"
    NODE_SILENT = "node-silent"
    UNKNOWN = "unknown"
    VERSIONS = "versions"
    PENDING_ACTOR = "pending-actor"
    FOREIGN_ACTOR = "foreign-actor"
    LEFTOVER_ACTOR = "leftover-actor"
    MISSING_ACTOR = "missing-actor"
    FOREIGN_GROUP = "foreign-group"
    LEFTOVER_GROUP = "leftover-group"
    MISSING_GROUP = "missing-group"
    FOREIGN_PROCESS = "foreign-process"
    PENDING = "pending"
    OUT_OF_MEMORY = "out-of-memory"
    QUARANTINED = "quarantined"
    PRELOAD = "preload"
    DEVICE = "device"
    WORKER_SILENT = "worker-silent"
    CONCURRENCY = "concurrency"
    MEMORY = "memory"
    NO_GPU = "no-gpu"
    VISIBLE_DEVICES = "visible-devices"
    MODEL_ON_CPU = "model-on-cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        kind: what kind of thing.
        subject: what it is about: "nodes/n1", "train-00/trainer/0".
        what: what is seen, one sentence.
        remedy: what to do; commands are in backticks, those that begin with `kill` are for the machine that is named.
    """

    kind: FindingKind
    subject: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a diagnosis looks at.

    Attributes:
        nodes: every node.
        jobs: jobs that have not ended, with why they wait; and those that failed lately.
        groups: every placement group.
        seen: node → what it sees; a node that could not be asked is missing.
        silent: node → why it could not be asked.
        repeated: uids of failed jobs that were submitted again under their names: what ended them is dealt with.
    """

    nodes: Sequence[Node]
    jobs: Sequence[Job]
    groups: Sequence[PlacementGroup]
    seen: Mapping[str, NodeInspection]
    silent: Mapping[str, str]
    repeated: frozenset[str] = frozenset()


def diagnose(evidence: Evidence) -> list[Finding]:
    """Every finding, nodes first, then what Ray knows, devices, workers and jobs."""
    looks = {_key(look): look for seen in evidence.seen.values() for look in seen.workers}
    found = [*_nodes(evidence), *_versions(evidence.nodes), *_actors(evidence), *_missing_actors(evidence, looks)]
    found += [*_groups(evidence), *_missing_groups(evidence), *_devices(evidence)]
    for job in evidence.jobs:
        found += _job(job, repeated=job.uid in evidence.repeated)
        for worker in job.workers:
            found += _worker(job, worker, looks.get((job.uid, worker.key.component, worker.key.rank)))
    return list(dict.fromkeys(found))


def _nodes(evidence: Evidence) -> Iterable[Finding]:
    for node in evidence.nodes:
        node_id = id_of(node)
        yield from _node_state(node, node_id)
        yield from _quarantined(node, node_id)
        yield from _preloads(node, node_id)
        yield from _closed_devices(node, node_id)
        if node_id in evidence.silent:
            what = f"{node_id} could not be asked: {evidence.silent[node_id]}"
            yield Finding(FindingKind.NODE_SILENT, node.name, what, _wake(node))
    outside = {id_of(node) for node in evidence.nodes if node.HasField("ray_fault")}
    for node_id, seen in evidence.seen.items():
        for text in () if node_id in outside else seen.unknown:
            remedy = "Look again in a moment: `callboard doctor`; if that lasts, look at the log of its agent."
            yield Finding(FindingKind.UNKNOWN, f"nodes/{node_id}", f"{node_id}: {text}", remedy)


def _node_state(node: Node, node_id: str) -> Iterable[Finding]:
    faulty = node.HasField("ray_fault")
    if node.state == NodeState.NODE_STATE_READY or (node.state == NodeState.NODE_STATE_LEFT and not faulty):
        return
    state = NodeState.Name(node.state).removeprefix("NODE_STATE_")
    reason = node.ray_fault.message if faulty else node.state_reason
    if faulty:
        remedy = _ray_fault(node).remedy(node_id)
        remedy = f"{remedy[:1].upper()}{remedy[1:]}."
    elif node.state in (NodeState.NODE_STATE_CORDONED, NodeState.NODE_STATE_DRAINING):
        remedy = f"`callboard node uncordon {node_id}` has it take work."
    elif node.state == NodeState.NODE_STATE_LOST:
        remedy = (
            f"Start its agent again if the machine is there; `callboard node remove {node_id}` forgets it if it is not."
        )
    elif node.state == NodeState.NODE_STATE_JOINING:
        remedy = "Its Ray node is being started; if that lasts, look at its agent's log."
    else:
        remedy = _wake(node)
    yield Finding(FindingKind.NODE_STATE, node.name, f"{node_id} is {state}{f': {reason}' if reason else ''}", remedy)


def _quarantined(node: Node, node_id: str) -> Iterable[Finding]:
    """Said of the node: the worker may be of an attempt that is over, or of a job that has ended."""
    for worker in node.quarantined_workers:
        subject = f"{worker.worker.job}/{worker.worker.component}/{worker.worker.rank}"
        what = f"{subject} could not be proved gone from {node_id}: {worker.reason}"
        remedy = f"Its room stays unused until the process ends; look at the processes of {node_id}."
        if worker.pid:
            remedy = (
                f"Its room stays unused until the process ends: on {node_id}, `kill -KILL {worker.pid}`; where even "
                "that does not end it, a driver holds it, and only a restart of the machine helps."
            )
        yield Finding(FindingKind.QUARANTINED, subject, what, remedy)


def _closed_devices(node: Node, node_id: str) -> Iterable[Finding]:
    for use in node.devices:
        state = use.state
        if not state.closed and not state.warning:
            continue
        pids = " ".join(str(process.pid) for process in state.foreign if process.pid)
        remedy = (
            f"It is looked at all the time and takes work again once that is over, or after `callboard node uncordon "
            f"{node_id} --gpu {use.device.index}`; nvidia-smi on {node_id} shows more."
        )
        if pids:
            remedy = (
                f"It is looked at all the time, and takes work again once they have ended: on {node_id}, `kill {pids}` "
                "if nobody needs them. An agent with --foreign-gpu-use warn has work placed beside them."
            )
        what = f"takes no new work: {state.closed}" if state.closed else state.warning
        yield Finding(FindingKind.DEVICE, node.name, f"GPU {use.device.id} of {node_id}: {what}", remedy)


def _preloads(node: Node, node_id: str) -> Iterable[Finding]:
    for state in node.preloads:
        if state.refused:
            modules = ", ".join(state.modules)
            what = f"spares on {node_id} do not import {modules}, so starts there import them: {state.refused}"
            remedy = (
                "Correct that and start the agent again, or change what the pool preloads: `callboard pool list -o "
                "yaml` shows it."
            )
            yield Finding(FindingKind.PRELOAD, node.name, what, remedy)


def _wake(node: Node) -> str:
    """How an agent that says nothing is made to speak again."""
    node_id = id_of(node)
    if not node.agent_pid:
        return f"See that the agent of {node_id} runs, is not stopped, and reaches the controller."
    return (
        f"On {node.hostname or node_id}, `kill -CONT {node.agent_pid}` lets its agent go on if it is stopped; start it "
        "again if it has ended; if it runs, its log says why it does not answer."
    )


def _versions(nodes: Sequence[Node]) -> Iterable[Finding]:
    """Nodes whose programs differ in what the handshake lets pass: a patch of callboard or of Python."""
    here = [node for node in nodes if node.state not in GONE]
    for name, field in (("callboard", "version"), ("Python", "python_version")):
        by_version: dict[str, list[str]] = {}
        for node in here:
            if found := getattr(node, field):
                by_version.setdefault(found, []).append(id_of(node))
        if len(by_version) > 1:
            listed = "; ".join(
                f"{found} on {', '.join(names[:_SHOWN_NODES])}{' …' if len(names) > _SHOWN_NODES else ''}"
                for found, names in sorted(by_version.items())
            )
            # Whichever most have is the least work.
            _, most = max((len(names), found) for found, names in by_version.items())
            others = [node_id for found, names in sorted(by_version.items()) if found != most for node_id in names]
            each = ", ".join(f"`callboard node drain {node_id}`" for node_id in others[:_SHOWN_NODES])
            back = ", ".join(f"`callboard node uncordon {node_id}`" for node_id in others[:_SHOWN_NODES])
            remedy = f"{each}; install {name} {most} there and start the agents again; {back}."
            what = f"nodes have different versions of {name}: {listed}"
            yield Finding(FindingKind.VERSIONS, "nodes", what, remedy)


def _ray_fault(node: Node) -> RayFault:
    fault = node.ray_fault
    known = fault.code in common_pb2.RayFaultCode.values()
    code = from_wire(common_pb2.RayFaultCode, fault.code, RayFaultCode) if known else None
    return RayFault(code or RayFaultCode.START_FAILED, fault.message, fault.permanent)


def _actors(evidence: Evidence) -> Iterable[Finding]:
    known = {worker.actor_name for job in evidence.jobs for worker in job.workers if worker.actor_name}
    for node_id, seen in evidence.seen.items():
        for actor in seen.actors:
            subject = f"nodes/{node_id}" if actor.ray_node_id else "ray"
            name = actor.name or f"{actor.class_name} {actor.id}"
            if actor.state in _PENDING_IN_RAY and not actor.name.startswith(OURS):
                what = f"Ray's actor {name} waits to be created: Ray finds no room for it"
                yield Finding(FindingKind.PENDING_ACTOR, subject, what, _give_up(actor))
            elif not actor.name.startswith(OURS):
                what = f"Ray's actor {name} (pid {actor.pid}) on {node_id} is not callboard's"
                remedy = (
                    f"It uses what the ledger gives to others: end it (on {node_id}, `kill {actor.pid}`) and the "
                    "program that made it, or run it as a job."
                )
                yield Finding(FindingKind.FOREIGN_ACTOR, subject, what, remedy)
            elif actor.name not in known and not actor.name.startswith(f"{OURS}spare/"):
                what = f"Ray's actor {name} (pid {actor.pid}) on {node_id} is of no worker that the ledger knows"
                remedy = f"Its agent ends it soon; if it stays, end it: on {node_id}, `kill -KILL {actor.pid}`."
                yield Finding(FindingKind.LEFTOVER_ACTOR, subject, what, remedy)


def _give_up(actor: RayActor) -> str:
    """How Ray is rid of an actor that it finds no room for."""
    if actor.name:
        return f"Lower what it asks for, or give it up, on any node: `{_in_ray(_KILL_NAMED.format(id=actor.id))}`."
    if actor.program_pid:
        end = f"on {actor.program_ip}, `kill {actor.program_pid}`"
        return f"Lower what it asks for, or end the program that made it: {end}."
    return "Its program has ended and it has no name, so only the end of the Ray cluster removes it, or room for it."


def _missing_actors(evidence: Evidence, looks: Mapping[Key, WorkerInspection]) -> Iterable[Finding]:
    """Workers that run, and whose actor Ray has lost: no caller reaches them."""
    for job in evidence.jobs:
        for worker in job.workers:
            node_id = worker.allocation.node_id
            seen = evidence.seen.get(node_id)
            look = looks.get((job.uid, worker.key.component, worker.key.rank))
            if seen is None or look is None or not seen.ray_listed or not worker.actor_name:
                continue
            if look.generation == worker.generation and worker.actor_name not in {actor.name for actor in seen.actors}:
                subject = f"{job.spec.name}/{worker.key.component}/{worker.key.rank}"
                what = f"{subject} runs on {node_id} as process {look.pid}, and Ray does not know its actor"
                remedy = f"Nobody can call it: `callboard job preempt {job.spec.name}` starts it anew."
                yield Finding(FindingKind.MISSING_ACTOR, subject, what, remedy)


def _groups(evidence: Evidence) -> Iterable[Finding]:
    known = {group.ray_placement_group_id for group in evidence.groups if group.ray_placement_group_id}
    names = {group.name.removeprefix("placementGroups/") for group in evidence.groups}
    for seen in evidence.seen.values():
        for group in seen.placement_groups:
            if group.id in known:
                continue
            if not group.name.startswith(OURS):
                what = f"Ray's placement group {group.name or group.id} ({group.state}) is not callboard's"
                remedy = (
                    "It books what the ledger gives to others: end the program that made it, or remove it, on any of "
                    f"the nodes: `{_removing(group.id)}`."
                )
                yield Finding(FindingKind.FOREIGN_GROUP, "ray", what, remedy)
            elif not names & set(group.name.split("/")):
                what = f"Ray's placement group {group.name} ({group.state}) is of no group that the ledger knows"
                remedy = f"Its agents remove it soon; if it stays, remove it, on any node: `{_removing(group.id)}`."
                yield Finding(FindingKind.LEFTOVER_GROUP, "ray", what, remedy)


def _removing(ray_id: str) -> str:
    return _in_ray(
        "from ray.util.placement_group import *; "
        f'remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex("{ray_id}")))'
    )


def _in_ray(program: str) -> str:
    """A command for what Ray has none for."""
    return f"python -c 'import ray, callboard; callboard.SyncClient().connect_ray(); {program}'"


def _missing_groups(evidence: Evidence) -> Iterable[Finding]:
    """Placement groups that the ledger has and Ray doesn't: what they should keep is anybody's."""
    listing = [seen for seen in evidence.seen.values() if seen.ray_listed]
    there = {group.id for seen in listing for group in seen.placement_groups}
    for group in evidence.groups:
        ready = group.state == PlacementGroupState.PLACEMENT_GROUP_STATE_READY
        if listing and ready and group.ray_placement_group_id and group.ray_placement_group_id not in there:
            name = group.name.removeprefix("placementGroups/")
            what = f"placement group {name} is READY, and Ray does not have it"
            yield Finding(FindingKind.MISSING_GROUP, group.name, what, _remake(group, name))


def _remake(group: PlacementGroup, name: str) -> str:
    """How what a lost group kept is kept again."""
    remedy = f"What it keeps is free for others in Ray: `callboard pg delete {name} --when-free`"
    if group.job:
        remedy += f", then `callboard job preempt {group.job}`, which starts anew in another group"
    if group.kind == PlacementGroupKind.PLACEMENT_GROUP_KIND_RESERVED:
        # A reserved group that was deleted stays away until somebody sets something of its pool.
        return (
            f"{remedy}; then `callboard pool set {group.pool} pg_pool.enable=true` has this reserved group made again."
        )
    return f"{remedy}; another is made if needed."


def _devices(evidence: Evidence) -> Iterable[Finding]:
    held = {
        (worker.allocation.node_id, share.index): (job.uid, worker.key.component, worker.key.rank)
        for job in evidence.jobs
        for worker in job.workers
        for share in worker.allocation.devices
    }
    names = {job.uid: job.spec.name for job in evidence.jobs}
    told = {
        (id_of(node), use.state.index, process.pid)
        for node in evidence.nodes
        for use in node.devices
        if use.state.closed or use.state.warning
        for process in use.state.foreign
    }
    for node_id, seen in evidence.seen.items():
        for user in seen.device_users:
            if (node_id, user.index, user.pid) in told:
                continue  # with its device, which takes no work because of it
            memory = f" with {format_memory(user.memory_bytes)}" if user.memory_bytes else ""
            if not user.HasField("worker"):
                what = f"process {user.pid} uses GPU {user.index} of {node_id}{memory} and is no worker"
                yield Finding(FindingKind.FOREIGN_PROCESS, f"nodes/{node_id}", what, _end_user(user.pid, node_id))
            elif (node_id, user.index) not in held:
                worker = f"{user.worker.component}/{user.worker.rank}"
                what = f"{worker} uses GPU {user.index} of {node_id}{memory}, which nobody was given"
                name = names.get(user.worker.job_id, user.worker.job_id)
                remedy = f"Its code changes CUDA_VISIBLE_DEVICES or asks Ray for GPUs of its own: {_fixed(name)}"
                yield Finding(FindingKind.FOREIGN_PROCESS, f"nodes/{node_id}", what, remedy)


def _end_user(pid: int, node_id: str) -> str:
    return (
        f"End it (on {node_id}, `kill {pid}`), or keep the GPU from callboard by CUDA_VISIBLE_DEVICES where the agent "
        "is started."
    )


def _fixed(name: str) -> str:
    return f"mend that; `callboard job preempt {name}` then starts it anew."


def _submit_again(job: Job, change: str) -> str:
    """What to do where the job asks for the wrong thing."""
    cancel = "" if job.state == JobState.JOB_STATE_FAILED else f"`callboard job cancel {job.spec.name} --wait` and "
    return f"{change}, in its file, then {cancel}`callboard job submit FILE`."


def _job(job: Job, *, repeated: bool) -> Iterable[Finding]:
    subject = f"jobs/{job.spec.name}"
    if job.state == JobState.JOB_STATE_PENDING:
        why = "; ".join(reason.message for reason in job.waiting_for[:3]) or job.state_reason
        what = f"{job.spec.name} waits, so its actors are not created yet: {why}"
        yield Finding(
            FindingKind.PENDING, subject, what, f"`callboard job explain {job.spec.name}` says what would unblock it."
        )
    for change in () if repeated else job.history:
        if "out of memory" in change.reason:
            what = f"{job.spec.name} lost a worker: {change.reason}"
            instead = (
                "Ask for more memory or keep less (a smaller pool of trajectories, checkpointing); where it says that "
                "another worker held most, do it there"
            )
            remedy = _submit_again(job, instead)
            yield Finding(FindingKind.OUT_OF_MEMORY, subject, what, remedy)


def _worker(job: Job, worker: Worker, look: WorkerInspection | None) -> Iterable[Finding]:
    subject = f"{job.spec.name}/{worker.key.component}/{worker.key.rank}"
    if look is None or look.generation != worker.generation:
        return
    if look.silent:
        what = f"{subject} was not asked what it does: {look.silent}"
        yield Finding(FindingKind.WORKER_SILENT, subject, what, _unstick(job))
    yield from _device_use(job, worker, look, subject)
    for load in look.calls:
        if load.in_flight > load.limit:
            name = f"{subject} ({load.member})" if load.member else subject
            waiting = load.in_flight - load.limit
            what = f"{name} has {waiting} calls waiting: max_concurrency is {load.limit}"
            change = "Raise max_concurrency, if the class can serve more at once, or the number of workers"
            remedy = _submit_again(job, change)
            yield Finding(FindingKind.CONCURRENCY, subject, what, remedy)
    asked = worker.allocation.resources.memory_bytes
    if asked and look.memory_bytes > asked:
        what = f"{subject} holds {format_memory(look.memory_bytes)} and asked for {format_memory(asked)}"
        yield Finding(FindingKind.MEMORY, subject, what, _submit_again(job, "Ask for the memory that it needs"))


def _unstick(job: Job) -> str:
    return f"If that lasts, look at its log and stack; `callboard job preempt {job.spec.name}` starts it anew."


def _device_use(job: Job, worker: Worker, look: WorkerInspection, subject: str) -> Iterable[Finding]:
    """Why a GPU may be idle: none asked for, the wrong ones visible, the model on the CPU."""
    holds = [share.id for share in worker.allocation.devices]
    if not holds:
        if look.framework and _is_trainer(job, worker):
            what = f"{subject} trains with {look.framework} and asks for no GPU"
            yield Finding(FindingKind.NO_GPU, subject, what, _submit_again(job, "Say resources: {gpu: 1}"))
        return
    if look.HasField("visible_devices") and look.visible_devices != ",".join(holds):
        what = f"{subject} holds GPU {','.join(holds)} and sees {look.visible_devices or 'none'}"
        yield Finding(
            FindingKind.VISIBLE_DEVICES, subject, what, f"Its code changes the variable: {_fixed(job.spec.name)}"
        )
    elif look.framework and not look.uses_device:
        what = (
            f"{subject} holds GPU {','.join(holds)}, which its {look.framework} never touched: the model is on the CPU"
        )
        yield Finding(
            FindingKind.MODEL_ON_CPU,
            subject,
            what,
            f'Move model and data to the device, model.to("cuda"): {_fixed(job.spec.name)}',
        )


def _is_trainer(job: Job, worker: Worker) -> bool:
    names = {worker.key.component, *worker.members}
    return any("trainer" in (spec.role, spec.name) for spec in job.spec.components if spec.name in names)


def _key(look: WorkerInspection) -> Key:
    return (look.worker.job_id, look.worker.component, look.worker.rank)
