"""Jobs on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables, words
from callboard.model.quantities import format_milli
from callboard.v1.job_pb2 import Explanation, Job, JobState, Worker, WorkerFailure

_VERDICTS = {
    "START": "It would start now.",
    "WAIT": "It waits.",
    "PREEMPT": "It starts once others have yielded.",
    "TRIM": "It starts once an idle placement group is removed.",
    "UNSCHEDULABLE": "No node could ever hold it.",
    # Not pending: the summary says what it is and why.
    "NONE": "",
}


def job_table(jobs: Sequence[Job], *, wide: bool) -> Table:
    columns = ["NAME", "POOL", "PRIORITY", "STATE", "WORKERS", "WHERE", "AGE", "WHY"]
    if wide:
        columns[-1:] = ["COMPONENTS", "ATTEMPT", "PREEMPTED", "PGS", "UID", "REVISION", "WHY"]
    rows: list[list[RenderableType]] = []
    for job in jobs:
        row: list[RenderableType] = [
            job.spec.name,
            job.spec.pool,
            format_milli(job.spec.priority_milli),
            tables.state_text(words.job_state(job)),
            words.ready_of_all(job),
            words.places_of(job),
            words.age(job.submit_time),
        ]
        if wide:
            groups = ",".join(name.removeprefix("placementGroups/") for name in job.placement_groups)
            row += [
                words.components_of(job),
                str(job.attempt),
                str(job.preemptions),
                groups,
                job.uid,
                str(job.revision),
            ]
        rows.append([*row, words.trouble(job)])
    return tables.table(columns, rows, right=("PRIORITY", "ATTEMPT", "PREEMPTED", "REVISION"))


def job_view(job: Job, *, wide: bool) -> Group:
    parts: list[RenderableType] = [tables.facts(_facts(job, wide=wide))]
    if job.workers:
        parts += ["", _worker_table(job, wide=wide)]
    if job.waiting_for:
        title = "Waits for" if job.state == JobState.JOB_STATE_PENDING else "Still to come"
        parts += ["", Text(title, style="bold"), *(f"  {reason.message}" for reason in job.waiting_for)]
    if job.victims:
        parts += ["", Text("Made room", style="bold"), *(f"  {words.yielding(victim)}" for victim in job.victims)]
    if len(job.failures) > 1:
        parts += ["", Text("Failures", style="bold"), *(f"  {_failure(failure)}" for failure in job.failures)]
    if job.history:
        parts += ["", Text("History", style="bold"), _history(job, wide=wide)]
    if job.traceback:
        parts += ["", Text("Traceback", style="bold"), Text(job.traceback.rstrip())]
    if job.stderr_tail:
        parts += ["", Text("End of its stderr", style="bold"), Text(job.stderr_tail.rstrip())]
    return Group(*parts)


def explanation_view(name: str, state: str, explanation: Explanation) -> Group:
    """Why a job is where it is, or what a submit would do.

    Args:
        name: name of the job; empty for a plan.
        state: its state; empty for a plan.
    """
    told = bool(name) and explanation.verdict != "NONE"  # else the summary itself begins with the name and state
    parts: list[RenderableType] = [Text(f"{name} is {state}. " if told else "", style="bold") + _verdict(explanation)]
    yielding = {f"jobs/{victim.victim}" for victim in explanation.victims}
    reasons = [reason.message for reason in explanation.reasons if reason.subject not in yielding]
    if reasons:
        parts += ["", Text("Because", style="bold"), *(f"  {reason}" for reason in reasons)]
    if explanation.unblock:
        heading = f"What would unblock it{', all together' if len(explanation.unblock) > 1 else ''}"
        parts += ["", Text(heading, style="bold"), *(f"  {change}" for change in explanation.unblock)]
    if explanation.victims:
        parts += ["", Text("Who makes room", style="bold")]
        parts += [f"  {victim.victim}: {victim.reason}" for victim in explanation.victims]
    if explanation.workers:
        rows = [
            [worker.component, str(worker.rank), worker.node_id, words.devices(worker.devices)]
            for worker in explanation.workers
        ]
        parts += ["", tables.table(["COMPONENT", "RANK", "NODE", "GPUS"], rows, right=("RANK",))]
    return Group(*parts)


def _verdict(explanation: Explanation) -> Text:
    verdict = _VERDICTS.get(explanation.verdict, explanation.verdict)
    place = f"Its place in the queue is {explanation.queue_position}." if explanation.queue_position else ""
    # A summary of reasons that follow one by one would only repeat them.
    summary = "" if explanation.queue_position and explanation.reasons else explanation.summary
    return Text(" ".join(part if part.endswith(".") else f"{part}." for part in (verdict, summary, place) if part))


def _facts(job: Job, *, wide: bool) -> list[tuple[str, RenderableType]]:
    found: list[tuple[str, RenderableType]] = [
        ("Job", job.spec.name),
        ("State", tables.state_text(words.job_state(job))),
        ("Why", words.why(job)),
        ("Checkpoint lost", job.checkpoint_lost),
        ("Pool", job.spec.pool),
        ("Priority", format_milli(job.spec.priority_milli)),
        ("Labels", words.labels(job.spec.labels)),
        ("Asks", words.ask(job)),
        ("Placement", words.placement(job)),
        ("Submitted", f"{words.age(job.submit_time)} ago"),
        ("Attempt", f"{job.attempt}; yielded {job.preemptions} times, restarted {job.restarts} times"),
    ]
    if wide:
        found += [
            ("Uid", job.uid),
            ("Revision", str(job.revision)),
            ("Placement groups", ", ".join(job.placement_groups)),
        ]
    return [(name, value) for name, value in found if value]


def _failure(failure: WorkerFailure) -> str:
    cause = " (the cause)" if failure.cause else ""
    return f"{words.clock(failure.time)}, attempt {failure.attempt}: {failure.message}{cause}"


def _worker_table(job: Job, *, wide: bool) -> Table:
    columns = ["COMPONENT", "RANK", "STATE", "NODE", "GPUS", "SEES", "STARTED IN", "PID"]
    if wide:
        columns += ["GENERATION", "PG", "ACTOR", "COLD BECAUSE"]
    rows: list[list[RenderableType]] = []
    for worker in job.workers:
        row: list[RenderableType] = [
            words.component_of(worker),
            str(worker.key.rank),
            _worker_state(worker),
            worker.allocation.node_id,
            words.devices(worker.allocation.devices) or "none",
            worker.visible_devices or "none",
            words.duration(worker.start_ms) if worker.start_ms else "",
            str(worker.pid or ""),
        ]
        if wide:
            group = worker.allocation.placement_group_id
            row += [str(worker.generation), group, worker.actor_name, worker.cold_reason or worker.preload_missed]
        rows.append(row)
    return tables.table(columns, rows, right=("RANK", "PID", "GENERATION"))


def _worker_state(worker: Worker) -> Text:
    state = tables.state_text(words.worker_state(worker))
    parts = [words.kill_in(worker), f"checkpoint lost: {worker.checkpoint_lost}" if worker.checkpoint_lost else ""]
    return state.append("".join(f"; {part}" for part in parts if part), style="not bold")


def _history(job: Job, *, wide: bool) -> Table:
    columns = ["  TIME", "STATE", "WHY"] + (["REVISION", "CAUSE"] if wide else [])
    rows: list[list[RenderableType]] = []
    for change in job.history:
        row: list[RenderableType] = [f"  {words.clock(change.time)}", tables.state_text(change.state), change.reason]
        rows.append([*row, str(change.revision), change.cause] if wide else row)
    return tables.table(columns, rows, right=("REVISION",))
