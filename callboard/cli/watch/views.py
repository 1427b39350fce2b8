"""Workers, their loads, findings and environments on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables, words
from callboard.client.diagnosis import Finding
from callboard.model.quantities import format_memory, format_milli
from callboard.v1.inspection_pb2 import CallLoad, DeviceLoad, NodeInspection
from callboard.v1.job_pb2 import Job, Worker

Key = tuple[str, str, int]
"""Uid of the job, component, and rank of a worker."""


def top_view(jobs: Sequence[Job], seen: Mapping[str, NodeInspection], silent: Mapping[str, str]) -> Group:
    """A row per worker and member, then the gauges."""
    names = {job.uid: job.spec.name for job in jobs}
    devices = _devices_of(jobs)
    rows: list[list[RenderableType]] = []
    for node_id, inspection in seen.items():
        on_devices, loads = _device_memory(inspection), {load.index: load for load in inspection.device_loads}
        for look in inspection.workers:
            if look.worker.job_id not in names:
                continue
            key = (look.worker.job_id, look.worker.component, look.worker.rank)
            row: list[RenderableType] = [
                names[look.worker.job_id],
                look.worker.component,
                str(look.worker.rank),
                node_id,
                format_milli(look.cpu_milli),
                format_memory(_rounded(look.memory_bytes)),
                format_memory(_rounded(look.peak_memory_bytes)),
                _busy([loads[index] for index in devices.get(key, ()) if index in loads]),
                on_devices.get(key, ""),
            ]
            calls = [_calls(load) for load in look.calls] or [Text(look.silent or "", style="yellow")]
            rows.append([*row, calls[0]])
            rows += [[*[""] * len(row), each] for each in calls[1:]]
    columns = ["JOB", "COMPONENT", "RANK", "NODE", "CPU", "MEMORY", "PEAK", "GPU", "GPU MEMORY", "CALLS"]
    parts: list[RenderableType] = [tables.table(columns, rows, right=("RANK", "CPU", "MEMORY", "PEAK"))]
    if not rows:
        parts = [Text("No workers run.", style="dim")]
    gauges = [(job.spec.name, name, job.gauges[name]) for job in jobs for name in sorted(job.gauges)]
    if gauges:
        table = tables.table(["JOB", "GAUGE", "VALUE"], [[job, name, f"{value:g}"] for job, name, value in gauges])
        parts += ["", table]
    parts += [Text(f"{node_id} could not be asked: {why}", style="yellow") for node_id, why in silent.items()]
    return Group(*parts)


def findings_view(address: str, nodes: int, found: Sequence[Finding]) -> Group:
    """Every finding with what to do."""
    if not found:
        return Group(Text(f"Healthy: nothing wrong was found at {address}; {nodes} nodes were asked.", style="green"))
    parts: list[RenderableType] = [
        Text(f"{len(found)} found at {address}, {nodes} {'node' if nodes == 1 else 'nodes'} asked.", style="bold")
    ]
    for finding in found:
        parts += ["", Text(f"{finding.kind}: {finding.what}", style="yellow"), Text(f"  do: {finding.remedy}")]
    return Group(*parts)


def versions_view(programs: Sequence[Mapping[str, str]], differ: Sequence[str]) -> Group:
    """A row per program, then what doesn't fit together."""
    rows = [[row["program"], row["callboard"] or "-", row["python"] or "-", row["ray"] or "-"] for row in programs]
    told = [Text(f"{text}; install the same everywhere", style="red") for text in differ]
    table = tables.table(("PROGRAM", "CALLBOARD", "PYTHON", "RAY"), rows)
    return Group(table, *(told or [Text("All fit together.", style="green")]))


def environment_view(job: Job, found: Sequence[tuple[Worker, Mapping[str, str]]], silent: Mapping[str, str]) -> Group:
    parts: list[RenderableType] = []
    for worker, variables in found:
        head = f"{job.spec.name}/{words.component_of(worker)}/{worker.key.rank}"
        if parts:
            parts.append("")
        if not variables:
            parts.append(Text(f"{head} has no process whose variables are known", style="yellow"))
            continue
        parts += [Text(head, style="bold"), *(Text(f"  {name}={variables[name]}") for name in sorted(variables))]
    if not found:
        parts.append(Text(f"{job.spec.name} has no such workers now.", style="dim"))
    parts += [Text(f"{node_id} could not be asked: {why}", style="yellow") for node_id, why in silent.items()]
    return Group(*parts)


def _devices_of(jobs: Iterable[Job]) -> dict[Key, list[int]]:
    """Devices of each worker, by their place in the visible list of its node."""
    return {
        (job.uid, worker.key.component, worker.key.rank): [share.index for share in worker.allocation.devices]
        for job in jobs
        for worker in job.workers
    }


def _busy(loads: Sequence[DeviceLoad]) -> Text:
    """How busy the devices of a worker are, whoever makes them so: "0: 87%, 1: 90%"; "-" where nothing is known."""
    known = [load for load in loads if load.HasField("utilization_percent")]
    idle = bool(known) and not any(load.utilization_percent for load in known)
    text = ", ".join(f"{load.index}: {load.utilization_percent}%" for load in known)
    return Text(text or "-", style="yellow" if idle else "")


def _device_memory(inspection: NodeInspection) -> dict[Key, str]:
    """What each worker holds of which device, as the devices' driver says: "0: 12GiB, 1: 12GiB"."""
    held: dict[Key, list[str]] = {}
    for user in inspection.device_users:
        if user.HasField("worker"):
            key = (user.worker.job_id, user.worker.component, user.worker.rank)
            held.setdefault(key, []).append(f"{user.index}: {format_memory(_rounded(user.memory_bytes))}")
    return {key: ", ".join(parts) for key, parts in held.items()}


def _calls(load: CallLoad) -> Text:
    name = f"{load.member} " if load.member else ""
    waiting = load.in_flight - load.limit
    text = f"{name}{load.in_flight}/{load.limit}" + (f", {waiting} wait" if waiting > 0 else "")
    return Text(text, style="yellow" if waiting > 0 else "")


def _rounded(amount_bytes: int) -> int:
    """Whole mebibytes: more says nothing about a process."""
    return amount_bytes >> 20 << 20


def worker_list(workers: Sequence[tuple[Job, Worker]], *, wide: bool) -> Table:
    """A row per worker, with its job."""
    columns = ["JOB", "COMPONENT", "RANK", "STATE", "NODE", "GPUS", "HOLDS", "STARTED", "PID", "WHY"]
    if wide:
        columns += ["GENERATION", "ATTEMPT", "PG", "ACTOR", "JOB UID", "COLD BECAUSE"]
    rows: list[list[RenderableType]] = []
    for job, worker in workers:
        row: list[RenderableType] = [
            job.spec.name,
            words.component_of(worker),
            str(worker.key.rank),
            tables.state_text(words.worker_state(worker)),
            worker.allocation.node_id,
            words.devices(worker.allocation.devices) or "none",
            words.amounts(worker.allocation.resources),
            started(worker),
            str(worker.pid or ""),
            words.worker_why(worker),
        ]
        if wide:
            row += [str(worker.generation), str(worker.attempt), worker.allocation.placement_group_id]
            row += [worker.actor_name, job.uid, worker.cold_reason or worker.preload_missed]
        rows.append(row)
    return tables.table(columns, rows, right=("RANK", "PID", "GENERATION", "ATTEMPT"))


def started(worker: Worker) -> str:
    """ "warm in 14 ms", "cold in 350 ms"; empty until it answers."""
    if not worker.start_ms:
        return ""
    return (
        f"{'preloaded' if worker.preloaded else 'warm' if worker.warm else 'cold'} in {words.duration(worker.start_ms)}"
    )
