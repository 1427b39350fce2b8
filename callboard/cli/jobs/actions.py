"""What `callboard job …` does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from callboard.cli.jobs import views as job_views
from callboard.cli.jobs.config_jobs import config_job
from callboard.cli.jobs.pending import with_reasons
from callboard.cli.layouts.config_source import read_text, rl_config
from callboard.cli.layouts.placement import refuse_placement, show_warnings
from callboard.cli.options import wishes
from callboard.cli.show import consoles, tables, words
from callboard.cli.show.exits import BAD_INPUT, NO_PLAN, CommandFailed
from callboard.cli.show.plain import plain, unprinted_job
from callboard.cli.show.printing import done, show_result
from callboard.cli.show.verb_guard import connected, waiting, with_client
from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.model.faults import Fault
from callboard.model.inputs import SourceMapping, job_spec, read_yaml
from callboard.model.inputs.placement_config import KEY
from callboard.v1.job_pb2 import Explanation
from callboard.wire.refusals import InvalidRequest

_STEP = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)|\[([0-9]+)\]")
"""One step of a fault's field: a key or an index."""


@connected
async def submit(
    client: Client,
    file: Path | None,
    *,
    config: str | None,
    config_path: Path | None,
    overrides: Sequence[str],
    actors: Sequence[str],
    kwargs: Sequence[str],
    pool: str,
    name: str,
    priority: float | None,
    planned_at: int,
    wait: bool,
    wait_end: bool,
    timeout_s: float,
    validate: bool,
    request_id: str,
) -> None:
    """Submits the job in ``file``, or the one that an RLinf ``config`` describes."""
    spec: Mapping[str, Any] = (
        config_job(
            *rl_config(config, config_path, overrides),
            pool=pool,
            name=name,
            priority=priority,
            actors=actors,
            kwargs=kwargs,
        )
        if config is not None
        else with_source(_job_in(file or Path("-")), file)
    )
    if planned_at:
        spec = (
            SourceMapping.like(spec, {**spec, "placement_revision": planned_at})
            if isinstance(spec, SourceMapping)
            else {**spec, "placement_revision": planned_at}
        )
    spec = await client.send_code(spec)
    exact = job_spec(spec)
    source = exact.placement_source or exact.name
    try:
        plan = await client.validate(spec) if validate else None
        job = None if validate else await client.submit(spec, request_id=request_id)
    except InvalidRequest as error:
        if exact.placement_config:
            await refuse_placement(client, source, exact.placement_config)
        raise _at_its_lines(error, spec) from error
    if exact.placement_config and not wishes.quiet:
        await show_warnings(client, source, exact.placement_config)
    if plan is not None:
        _show_plan(plan)
    if job is None:
        return
    if wait:
        async with waiting(f"{job.name}: waiting for its workers"):
            await job.running(timeout_s)
    if wait_end:
        async with waiting(f"{job.name}: waiting for its end"):
            await job.finished(timeout_s)
        if job.state != "SUCCEEDED":
            raise job.ended()
    if not (wishes.quiet or wishes.for_program):
        consoles.stderr().print(f"Job {job.name} is {job.state}.")
    if wishes.for_program or not wishes.quiet:
        show_result(plain(job.job), lambda wide: job_views.job_table([job.job], wide=wide))


def _job_in(file: Path) -> SourceMapping:
    """What a job file says, or the job that `job get` printed.

    Raises:
        CommandFailed: it can't be read, or is an RL config, which says nothing of what a job needs.
        InvalidInput: a printed job hides values that it needs.
    """
    found = unprinted_job(read_file(file))
    cluster = found.get("cluster")
    if isinstance(cluster, Mapping) and KEY in cluster and not {"name", "pool", "components"} & found.keys():
        raise CommandFailed(
            f"{file} is an RL config, not a job.",
            "It places components, and says neither which classes they are nor whose pool they are charged to.",
            f"Submit it as a config: `callboard job submit --config {file} --pool POOL`.",
            BAD_INPUT,
        )
    return found


def _at_its_lines(error: InvalidRequest, spec: Mapping[str, Any]) -> InvalidRequest:
    """What the controller says of a job's fields, at the lines where the file has them."""
    if not isinstance(spec, SourceMapping):
        return error
    return InvalidRequest(str(error), faults=tuple(_located(fault, spec) for fault in error.faults))


def _located(fault: Fault, source: SourceMapping) -> Fault:
    if fault.line or not fault.field:
        return fault
    field = fault.field.removeprefix("spec.")
    place = tuple(int(index) if index else key for key, index in _STEP.findall(field))
    line, column = source.position(place)
    return replace(fault, field=field, line=line, column=column)


def show_list(*, pool: str, states: Sequence[str], every: bool) -> None:
    wanted = [state.upper() for state in states]
    if unknown := [state for state in wanted if state not in words.JOB_STATES]:
        raise typer.BadParameter(
            f"{unknown[0]} is not a state; the states are {', '.join(words.JOB_STATES)}", param_hint="--state"
        )
    if not wanted and not every:
        wanted = list(words.LIVE_STATES)

    async def action(client: Client) -> None:
        jobs = await client.list_jobs(pool=pool, states=wanted)
        if not wishes.for_program:
            jobs = await with_reasons(client, jobs)
        hint = "" if every else " Jobs that have ended are shown with --all."
        show_result(
            [plain(job) for job in jobs],
            lambda wide: job_views.job_table(jobs, wide=wide),
            empty=f"No jobs at {client.address}.{hint}",
        )

    with_client(action)


@connected
async def show(client: Client, name: str) -> None:
    job = await client.get_job(name)
    show_result(plain(job.job), lambda wide: job_views.job_view(job.job, wide=wide))


@connected
async def cancel(
    client: Client, name: str, *, reason: str, destroy_placement_groups: bool, grace: str, wait: bool, timeout_s: float
) -> None:
    job = await client.get_job(name)
    await job.cancel(reason, destroy_placement_groups=destroy_placement_groups, grace=grace or None)
    await _finish(job, wait=wait, timeout_s=timeout_s)


@connected
async def complete(client: Client, name: str, *, reason: str, wait: bool, timeout_s: float) -> None:
    job = await client.get_job(name)
    await job.complete(reason)
    await _finish(job, wait=wait, timeout_s=timeout_s)


@connected
async def preempt(client: Client, name: str, *, for_job: str, reason: str) -> None:
    job = await client.get_job(name)
    await job.preempt(for_job=for_job, reason=reason)
    to = f" to {for_job}" if for_job else ""
    done(job.job, f"Job {job.name} yields{to}; it is {words.and_kill(job.state, job.job)}.")


@connected
async def scale(client: Client, name: str, *, component: str, workers: int) -> None:
    job = await client.get_job(name)
    await job.scale(component, workers)
    done(job.job, f"Job {job.name} goes to {workers} × {component}; it is {job.state}.")


@connected
async def result(client: Client, name: str, *, timeout_s: float) -> None:
    """Shows what the entry methods of a job returned."""
    job = await client.get_job(name)
    found = await job.result(timeout_s)
    rows = [
        [component, str(rank), json.dumps(value, ensure_ascii=False)]
        for component, values in found.items()
        for rank, value in enumerate(values)
    ]
    show_result(found, lambda _: tables.table(["COMPONENT", "RANK", "RESULT"], rows, right=("RANK",)))


@connected
async def explain(client: Client, name: str) -> None:
    job = await client.get_job(name)
    explanation = await job.explain()
    show_result(plain(explanation), lambda _: job_views.explanation_view(job.name, job.state, explanation))


def read_file(file: Path) -> SourceMapping:
    """The mapping in ``file``; "-" is the standard input.

    Raises:
        CommandFailed: it can't be read.
        InvalidInput: it is no YAML mapping.
    """
    return read_yaml(read_text(file))


def with_source(spec: SourceMapping, file: Path | None) -> SourceMapping:
    """A job that says what file its placement is from."""
    parts = spec.get("components")
    placed = [part for part in parts if isinstance(part, dict) and KEY in part] if isinstance(parts, list) else []
    if file is None or ("cluster" not in spec and not placed):
        return spec
    return SourceMapping.like(spec, {**spec, "placement_source": str(file)[-200:]})


async def _finish(job: JobHandle, *, wait: bool, timeout_s: float) -> None:
    if wait:
        async with waiting(f"{job.name}: waiting for its end"):
            await job.finished(timeout_s)
    done(job.job, f"Job {job.name} is {words.and_kill(job.state, job.job)}.")


def _show_plan(plan: Explanation) -> None:
    show_result(plain(plan), lambda _: job_views.explanation_view("", "", plan))
    if plan.verdict == "UNSCHEDULABLE":
        raise typer.Exit(NO_PLAN)
