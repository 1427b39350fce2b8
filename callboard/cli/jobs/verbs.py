"""`callboard job …`, `exec` and `attach`: submit jobs, look at them, end them, ask why; programs beside workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from callboard.cli import actions, completing
from callboard.cli.options import ConfigPathOption, PoolOption, TimeoutOption, argument, option, reads, takes, writes

app = typer.Typer()
job_verbs = typer.Typer(help="Submit, follow, change and end jobs; ask why they wait.", no_args_is_help=True)
app.add_typer(job_verbs, name="job")

JobArgument = Annotated[str, argument("JOB", "Name of the job.", autocompletion=completing.jobs)]
ReasonOption = Annotated[str, option("--reason", "TEXT", "Reason, shown to people.")]
WaitOption = Annotated[bool, option("--wait", "-w", "Wait until it is done.")]
WorkerOption = Annotated[
    str,
    option(
        "--worker",
        "NAME",
        "Component of the worker; NAME/RANK says its rank too. Default: the only one.",
    ),
]
ComponentOption = Annotated[str, option("--component", "NAME", "Only workers of this component.")]


class _Submit(TyperCommand):
    """`--wait` is a switch that may be given a value, which options of typer can't be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line."""
        written = {"--wait=end": "--wait-end", "--wait=running": "--wait"}
        return super().parse_args(ctx, [written.get(each, each) for each in args])


@job_verbs.command("submit", cls=_Submit, epilog="Example: callboard job submit train.yaml --wait")
@takes("controller", "output", "quiet")
def submit(
    arguments: Annotated[
        list[str] | None,
        argument(
            "FILE | [KEY=VALUE]...", "YAML or JSON file with the job, or what `job get` printed; - reads the input."
        ),
    ] = None,
    config_path: ConfigPathOption = None,
    config: Annotated[
        str | None, option("--config", "FILE", "Instead of a job: an RLinf config, run as it is placed.")
    ] = None,
    actors: Annotated[
        list[str] | None,
        option(
            "--actors",
            "NAME=pkg:Class",
            "With --config: the class of a component; may be repeated. Default: a probe that reports where it runs.",
        ),
    ] = None,
    kwargs: Annotated[
        list[str] | None,
        option(
            "--kwargs",
            "NAME={KEY: VALUE}",
            "With --actors: keyword arguments of the class of a component, as YAML; may be repeated.",
        ),
    ] = None,
    pool: Annotated[
        str, option("--pool", "POOL", "With --config: pool to charge.", autocompletion=completing.pools)
    ] = "default",
    name: Annotated[str, option("--name", "NAME", "With --config: name of the job.")] = "",
    priority: Annotated[float | None, option("--priority", "N", "With --config: priority of the job.")] = None,
    planned_at: Annotated[
        int,
        option(
            "--planned-at",
            "REVISION",
            "Refuse the job if any node has changed since this revision (printed by `autoplace`).",
            min=0,
            show_default=False,
        ),
    ] = 0,
    wait: Annotated[
        bool, option("--wait", "-w", "Wait until every worker answers; --wait=end: until the job ends.")
    ] = False,
    wait_end: Annotated[bool, option("--wait-end", "The same as --wait=end.", hidden=True)] = False,
    timeout: TimeoutOption = 300.0,
    validate: Annotated[bool, option("--validate", "Only check the job and show where it would run.")] = False,
    request_id: Annotated[
        str, option("--request-id", "ID", "Id of this request: a submit that repeats it returns the first job.")
    ] = "",
) -> None:
    """Submit a job."""
    given = arguments or []
    if (config is None) == (not given) and not (config and given):
        raise typer.BadParameter("give either FILE or --config", param_hint="FILE")
    if config is None and len(given) > 1:
        raise typer.BadParameter("give one FILE; KEY=VALUE belongs to --config", param_hint="FILE")
    if config is not None and (files := [each for each in given if "=" not in each]):
        raise typer.BadParameter(f"give either FILE or --config; {files[0]} is not a KEY=VALUE", param_hint="FILE")
    actions.jobs.submit(
        Path(given[0]) if config is None else None,
        config=config,
        config_path=config_path,
        overrides=given if config is not None else [],
        actors=actors or [],
        kwargs=kwargs or [],
        pool=pool,
        name=name,
        priority=priority,
        planned_at=planned_at,
        wait=wait,
        wait_end=wait_end,
        timeout_s=timeout,
        validate=validate,
        request_id=request_id,
    )


@job_verbs.command("list", epilog="Example: callboard job list --pool rlhf --state RUNNING")
@reads
def list_jobs(
    pool: PoolOption = "",
    state: Annotated[list[str] | None, option("--state", "STATE", "Only jobs in this state; may be repeated.")] = None,
    every: Annotated[bool, option("--all", "-a", "Also jobs that have ended.")] = False,
) -> None:
    """List jobs, newest first."""
    actions.jobs.show_list(pool=pool, states=state or [], every=every)


@job_verbs.command("get", epilog="Example: callboard job get train-00 -o yaml")
@reads
def get(job: JobArgument) -> None:
    """Show one job: its workers, its past, what it waits for."""
    actions.jobs.show(job)


@job_verbs.command("cancel", epilog="Example: callboard job cancel rollout-00 --wait")
@writes
def cancel(
    job: JobArgument,
    reason: ReasonOption = "",
    destroy_pg: Annotated[bool, option("--destroy-pg", "Remove its placement groups too, also reserved ones.")] = False,
    grace: Annotated[
        str,
        option(
            "--grace",
            "TIME",
            "Time for cancel() and checkpoint(), e.g. 5s; also shortens a stop that is under way. "
            "Default: as the job and the policy say.",
        ),
    ] = "",
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """End a job as cancelled. Does nothing if it has ended."""
    actions.jobs.cancel(
        job, reason=reason, destroy_placement_groups=destroy_pg, grace=grace, wait=wait, timeout_s=timeout
    )


@job_verbs.command("complete", epilog="Example: callboard job complete train-00")
@writes
def complete(
    job: JobArgument, reason: ReasonOption = "", wait: WaitOption = False, timeout: TimeoutOption = 60.0
) -> None:
    """End a job as succeeded. Does nothing if it has ended."""
    actions.jobs.complete(job, reason=reason, wait=wait, timeout_s=timeout)


@job_verbs.command("preempt", epilog="Example: callboard job preempt rollout-00 --for train-00")
@writes
def preempt(
    job: JobArgument,
    for_job: Annotated[
        str,
        option(
            "--for",
            "JOB",
            "Job that gets the room. Default: the next one in the queue.",
            autocompletion=completing.jobs,
        ),
    ] = "",
    reason: ReasonOption = "",
) -> None:
    """Make a job yield now; it then waits as of its first submission."""
    actions.jobs.preempt(job, for_job=for_job, reason=reason)


@job_verbs.command("explain", epilog="Example: callboard job explain rollout-00")
@reads
def explain(job: JobArgument) -> None:
    """Say why a job is where it is, and what would unblock it."""
    actions.jobs.explain(job)


@job_verbs.command("watch", epilog="Example: callboard job watch train-00")
@takes("controller", "output")
def watch(job: JobArgument) -> None:
    """Follow a job until it ends: state, workers, what it waits for.

    Ends with 0 if the job succeeded, 1 if it failed or was cancelled. JSON and YAML give one event each.
    """
    actions.events.watch(job)


@job_verbs.command("result", epilog="Example: callboard job result train-00 -o json")
@takes("controller", "output")
def result(job: JobArgument, timeout: TimeoutOption = 60.0) -> None:
    """Wait until a job ends, and show what its `entry` methods returned."""
    actions.jobs.result(job, timeout_s=timeout)


@job_verbs.command("logs", epilog="Example: callboard job logs train-00 --component actor --rank 0 --follow")
@takes("controller")
def logs(
    job: JobArgument,
    component: ComponentOption = "",
    rank: Annotated[int | None, option("--rank", "N", "Only workers of this rank.", min=0)] = None,
    follow: Annotated[bool, option("--follow", "-f", "Go on until the job ends, or Ctrl-C.")] = False,
    tail: Annotated[
        int | None,
        option(
            "--tail",
            "-n",
            "N",
            "Start with the last N lines of each worker; -1: all. Default: 100, or all with --since.",
            min=-1,
            max=2**31 - 1,
        ),
    ] = None,
    attempt: Annotated[int, option("--attempt", "N", "Attempt of the job, from 1; 0: the newest.", min=0)] = 0,
    since: Annotated[
        str, option("--since", "TIME", "All that was printed in the last 10m, 1h, …, and nothing older.")
    ] = "",
) -> None:
    """Show what the workers of a job print, on whatever node.

    Works until the job is forgotten, also after it has ended and for earlier attempts. What can't be shown is named,
    with the reason.
    """
    actions.job_logs.show(job, component=component, rank=rank, attempt=attempt, follow=follow, since=since, tail=tail)


@job_verbs.command("env", epilog="Example: callboard job env train-00 --component trainer --rank 0")
@reads
def env(
    name: JobArgument,
    component: ComponentOption = "",
    rank: Annotated[int, option("--rank", "N", "Only the worker of this rank; -1: all.", min=-1)] = -1,
) -> None:
    """Show the environment of a job's workers.

    It is shown as the nodes made it, with the values of secret variables masked.
    """
    actions.workers.environment(name, component=component, rank=rank)


@job_verbs.command("scale", epilog="Example: callboard job scale train-00 rollout 4")
@writes
def scale(
    job: JobArgument,
    component: Annotated[str, argument("COMPONENT", "Name of an elastic component.")],
    workers: Annotated[int, argument("N", "How many workers it should have.", min=0)],
) -> None:
    """Say how many workers an elastic component should have.

    The highest ranks leave first.
    """
    actions.jobs.scale(job, component=component, workers=workers)


@app.command(
    "exec",
    epilog="Example: callboard exec train --rank 0 -- nvidia-smi",
    short_help="Run a program in the environment of a worker.",
)
@takes("controller", "quiet")
def exec_(
    job: JobArgument,
    command: Annotated[list[str], argument("COMMAND…", "The program and its arguments, after --.")],
    rank: Annotated[int, option("--rank", "N", "Rank of the worker.", min=0)] = 0,
    worker: WorkerOption = "",
    interactive: Annotated[
        bool, option("-i", "--interactive", "Pass on what you type; input from a file or a pipe is always passed on.")
    ] = False,
    tty: Annotated[bool, option("-t", "--tty", "Give the program a terminal.")] = False,
) -> None:
    """Run a program in the environment of a worker.

    It has the worker's devices, variables and working directory, and ends with the worker. The exit code is the
    program's. With -it it has a terminal; Ctrl-P Ctrl-Q leaves it, which ends the program.
    """
    actions.executing.execute(job, command, rank=rank, worker=worker, interactive=interactive, tty=tty)


@app.command("attach", epilog="Example: callboard attach train", short_help="Show the terminal of a command again.")
@takes("controller", "quiet")
def attach(job: JobArgument) -> None:
    """Take over the terminal of a command that `callboard run -it` started.

    Ctrl-P Ctrl-Q leaves it; the command runs on. What it printed last is shown first.
    """
    actions.executing.attach(job)
