"""Short texts for tables: amounts, ages, places and workers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime

import yaml
from google.protobuf.timestamp_pb2 import Timestamp

from callboard.cli.show.plain import short_enum
from callboard.client.calls.cluster_calls import id_of
from callboard.client.jobs import ENDED
from callboard.model.quantities import IN_BYTES, Resources, format_amount, format_memory, format_milli
from callboard.v1 import common_pb2
from callboard.v1.agent_pb2 import Bundle
from callboard.v1.job_pb2 import ComponentSpec, Job, JobState, PlacementStrategy, Preemption, Worker, WorkerState
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.scheduler_pb2 import Stats
from callboard.wire.amounts import resources_from_proto, resources_to_proto

node_id = id_of

UNITS = {"cpu": "CPU", "gpu": "GPU"}

JOB_STATES = tuple(
    short_enum(JobState.DESCRIPTOR, value.number) for value in JobState.DESCRIPTOR.values if value.number
)
"""Every state of a job, in the order of its life."""

_NEARLY_WHOLE_MILLI = 990
"""Ten or fewer equal parts of 1000, each rounded down, sum up to at least this."""

LIVE_STATES = tuple(state for state in JOB_STATES if state not in ENDED)
"""States of jobs that have not ended."""


def job_state(job: Job) -> str:
    """State of a job, e.g. "RUNNING"."""
    return short_enum(JobState.DESCRIPTOR, job.state)


def worker_state(worker: Worker) -> str:
    """State of a worker, e.g. "READY"."""
    return short_enum(WorkerState.DESCRIPTOR, worker.state)


def node_state(node: Node) -> str:
    """State of a node, e.g. "READY"."""
    return short_enum(NodeState.DESCRIPTOR, node.state)


def jobs_on(*nodes: Node) -> list[str]:
    """Names of the jobs that have devices of these nodes, sorted."""
    return sorted({worker.job for node in nodes for use in node.devices for worker in use.workers})


def amounts(message: common_pb2.Resources) -> str:
    """ "1.5 CPU, 1 GPU, 1GiB"."""
    return amounts_of(resources_from_proto(message))


def has_left(node: Node) -> bool:
    """Whether a node said goodbye: it is kept for its history, and is no part of the cluster."""
    return node.state == NodeState.NODE_STATE_LEFT


def limits(message: common_pb2.Resources, limited: Collection[str]) -> str:
    """Amounts of the resources that are limited, also where there is nothing of one: "1 CPU, 0 GPU"."""
    held = resources_from_proto(message)
    names = sorted(limited, key=lambda name: (name not in UNITS, name))
    return ", ".join(
        amounts_of(Resources.from_items([(name, held.get(name))])) if held.get(name) else f"0 {UNITS.get(name, name)}"
        for name in names
    )


def amounts_of(resources: Resources) -> str:
    """ "1.5 CPU, 1 GPU, 1GiB"; "nothing" for none."""
    parts = [
        f"{format_memory(amount)}{'' if name == 'memory' else ' ' + name}"
        if name in IN_BYTES
        else f"{format_milli(amount)} {UNITS.get(name, name)}"
        for name, amount in resources.items()
    ]
    card = f" (GPU: {resources.card})" if resources.selects else ""
    return (", ".join(parts) or "nothing") + card


def share(used: common_pb2.Resources, whole: common_pb2.Resources, resource: str) -> str:
    """ "4.5/6" of one resource."""
    return f"{amount(used, resource)}/{amount(whole, resource)}"


def free_gpus(stats: Stats) -> str:
    """ "2 whole free", "0 whole free, 1.6 in parts": no whole GPU can be made of parts."""
    parts = f", {format_milli(stats.free_gpu_parts_milli)} in parts" if stats.free_gpu_parts_milli else ""
    return f"{stats.free_whole_gpus} whole free{parts}"


def amount(message: common_pb2.Resources, resource: str) -> str:
    """ "4.5" or "2GiB" of one resource."""
    held = resources_from_proto(message).get(resource)
    return format_amount(resource, held) if held else "0"


def age(since: Timestamp) -> str:
    """How long ago: "5s", "3m", "2h", "4d"."""
    elapsed = int((datetime.now(UTC) - since.ToDatetime(UTC)).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if elapsed >= size:
            return f"{elapsed // size}{unit}"
    return f"{max(elapsed, 0)}s"


def clock(moment: Timestamp) -> str:
    """Local time of day with milliseconds."""
    return moment.ToDatetime(UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def duration(milliseconds: int) -> str:
    """ "350 ms", "1.2 s", "2 min 5 s"."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    minutes, rest = divmod(milliseconds // 1000, 60)
    return f"{minutes} min {rest} s"


def labels(pairs: Mapping[str, str]) -> str:
    """ "role=train, team=a"."""
    return ", ".join(f"{key}={pairs[key]}" for key in sorted(pairs))


def devices(shares: Iterable[common_pb2.DeviceShare]) -> str:
    """ "0,1", "0:0.5"; empty for none."""
    return ",".join(item.id if item.milli in (0, 1000) else f"{item.id}:{format_milli(item.milli)}" for item in shares)


def places(parts: Iterable[common_pb2.Allocation | Bundle]) -> str:
    """Where something is, node by node: "node-0 GPU 0,1; node-1 GPU 0". Parts of one device are one sum."""
    by_node: dict[str, dict[str, int]] = {}
    for part in parts:
        if part.node_id:
            seen = by_node.setdefault(part.node_id, {})
            for share in part.devices:
                seen[share.id] = seen.get(share.id, 0) + (share.milli or 1000)
    return "; ".join(f"{node} GPU {devices(_summed(seen))}" if seen else node for node, seen in by_node.items())


def _summed(seen: Mapping[str, int]) -> Iterator[common_pb2.DeviceShare]:
    """Devices with the sum of their parts; three thirds are a whole."""
    for name, milli in seen.items():
        yield common_pb2.DeviceShare(id=name, milli=1000 if milli >= _NEARLY_WHOLE_MILLI else milli)


def places_of(job: Job) -> str:
    """Where a job runs, as far as its workers may have a process."""
    return places(worker.allocation for worker in job.workers if may_run(worker))


def may_run(worker: Worker) -> bool:
    return worker.state not in (WorkerState.WORKER_STATE_STOPPED, WorkerState.WORKER_STATE_LOST)


def ready_of_all(job: Job) -> str:
    """ "2/3" workers that answer, of those that were asked for."""
    ready = sum(1 for worker in job.workers if worker.state == WorkerState.WORKER_STATE_READY)
    # Members of a colocation group share their workers.
    asked = {
        component.colocation_group or component.name: component.min_workers
        or (component.workers if component.HasField("workers") else 1)
        for component in job.spec.components
    }
    return f"{ready}/{max(sum(asked.values()), len(job.workers))}"


def components_of(job: Job) -> str:
    """ "rollout, training: trainer, trajectory_pool": processes side by side, and who shares one."""
    groups: dict[str, list[str]] = {}
    for component in job.spec.components:
        members = groups.setdefault(component.colocation_group or component.name, [])
        members += [component.name] if component.colocation_group else []
    return "; ".join(f"{name}: {', '.join(members)}" if members else name for name, members in groups.items())


def component_of(worker: Worker) -> str:
    """ "train", or "training: trainer, trajectory_pool" for a colocation group."""
    if not worker.members:
        return worker.key.component
    return f"{worker.key.component}: {', '.join(worker.members)}"


def why(job: Job) -> str:
    """Why a job is where it is, one sentence: what it waits for, if it waits."""
    if job.state == JobState.JOB_STATE_PENDING and job.waiting_for:
        return "; ".join(reason.message for reason in job.waiting_for[:2])
    return _with_kill(job.state_reason, job)


def node_why(node: Node) -> str:
    """Why a node is in its state, and when what leaves it is gone."""
    return _with_kill(node.state_reason, node)


def kill_in(shown: Job | Worker | Node) -> str:
    """ "killed at the latest in 12 s" of what is being stopped; empty for anything else."""
    if not shown.HasField("kill_time"):
        return ""
    left = shown.kill_time.ToDatetime(UTC) - datetime.now(UTC)
    left_s = max(0, math.ceil(left.total_seconds()))
    return (
        f"killed at the latest in {left_s} s" if left_s < 60 else f"killed at the latest in {duration(left_s * 1000)}"
    )


def worker_why(worker: Worker) -> str:
    """Why a worker is in its state, and when it is gone if it is being stopped."""
    return "" if worker_state(worker) == "READY" else _with_kill(worker.state_reason, worker)


def and_kill(state: str, job: Job) -> str:
    """ "STOPPING, killed at the latest in 12 s"."""
    return ", ".join(part for part in (state, kill_in(job)) if part)


def _with_kill(reason: str, shown: Job | Worker | Node) -> str:
    return "; ".join(part for part in (reason, kill_in(shown)) if part)


def trouble(job: Job) -> str:
    """As :func:`why`, but nothing for a job that runs as it should."""
    return "" if job.state == JobState.JOB_STATE_RUNNING else why(job)


def ask(job: Job) -> str:
    """What each worker of a job asks for, component by component if there are several."""
    if len(job.spec.components) == 1:
        return _asked(job.spec.components[0])
    return "; ".join(f"{_name_of(component)} {_asked(component)}" for component in job.spec.components)


def _asked(component: ComponentSpec) -> str:
    """What the workers of a component ask to start, each and together, or where a placement decides about the devices
    what all of them hold: "3 workers of 1 CPU each, 3 CPU together"."""
    asked = amounts(component.resources)
    workers = component.min_workers or (component.workers if component.HasField("workers") else 1)
    if workers > 1 and asked != "nothing":
        together = resources_to_proto(resources_from_proto(component.resources).scaled(workers))
        asked = f"{workers} workers of {asked} each, {amounts(together)} together"
    held = sum(share.milli for place in component.places for share in place.devices)
    if not component.places:
        return asked
    gpus = f"{format_milli(held)} GPU in all" if held else "no GPU"
    return f"{gpus} as placed" if asked == "nothing" else f"{asked}, and {gpus} as placed"


def placement(job: Job) -> str:
    """How the workers of a job lie: the placement text of its components, or the strategy."""
    if not job.spec.placement_config:
        return short_enum(PlacementStrategy.DESCRIPTOR, job.spec.placement)
    try:
        placed = yaml.safe_load(job.spec.placement_config)["cluster"]["component_placement"]
        texts = {name: _placement_text(value) for name, value in placed.items()}
    except (yaml.YAMLError, KeyError, AttributeError, TypeError):
        return "as its text says"
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _placement_text(value: object) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    groups = value.get("node_group", "")
    of = "+".join(map(str, groups)) if isinstance(groups, list) else str(groups)
    return f"{value.get('placement', '')} of {of}" if of else str(value.get("placement", ""))


def _name_of(component: ComponentSpec) -> str:
    group = component.colocation_group
    return f"{component.name} (in {group})" if group else component.name


def yielding(victim: Preemption) -> str:
    """ "rollout-01 yielded to train-00 in 620 ms (COOPERATIVE)"."""
    to = f" to {victim.preemptor}" if victim.preemptor else ""
    if not victim.HasField("yield_ms"):
        return f"{victim.victim} is yielding{to}"
    how = victim.outcome.partition(";")[0].lower().replace("_", " ")
    outcome = f" ({how})" if how else ""
    outcome += f"; checkpoint lost: {victim.checkpoint_lost}" if victim.checkpoint_lost else ""
    return f"{victim.victim} yielded{to} in {duration(victim.yield_ms)}{outcome}"
