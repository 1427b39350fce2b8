"""Workers on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from callboard.cli.show import screen, words
from callboard.v1.job_pb2 import Job, Worker


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
            screen.state_text(words.worker_state(worker)),
            worker.allocation.node_id,
            words.devices(worker.allocation.devices) or "none",
            words.amounts(worker.allocation.resources),
            started(worker),
            str(worker.pid or ""),
            words.worker_why(worker),
        ]
        if wide:
            row += [str(worker.generation), str(worker.attempt), worker.allocation.placement_group_id]
            row += [worker.actor_name, job.uid, worker.cold_reason]
        rows.append(row)
    return screen.table(columns, rows, right=("RANK", "PID", "GENERATION", "ATTEMPT"))


def started(worker: Worker) -> str:
    """ "warm in 14 ms", "cold in 350 ms"; empty until it answers."""
    if not worker.start_ms:
        return ""
    return f"{'warm' if worker.warm else 'cold'} in {words.duration(worker.start_ms)}"
