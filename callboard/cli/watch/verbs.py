"""`callboard status`, `top`, `doctor`, `ray-env`, `worker`, `events`, `audit`: what there is, does, and changed."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import JobOption, option, reads, takes

app = typer.Typer()


@app.command(
    "top",
    epilog="Example: callboard top --once -o json",
    short_help="Show CPU, memory, GPU, calls and gauges of workers.",
)
@takes("controller", "output")
def top(
    job: JobOption = "",
    once: Annotated[bool, option("--once", "Show it once, then exit.")] = False,
    interval: Annotated[float, option("--interval", "SECONDS", "Refresh interval.", min=0.5, max=3600)] = 2.0,
) -> None:
    """Show what each worker uses, how the calls of its members queue, and which gauges jobs reported.

    GPU is how busy the worker's devices are by their driver, which also sees other programs; - where it says nothing.
    CALLS are those that run or wait, out of max_concurrency: more than that wait. Ctrl-C ends it; for programs (json,
    yaml, a pipe) it is shown once.
    """
    actions.workers.top(job=job, once=once, interval_s=interval)


@app.command("page", epilog="Example: callboard page", short_help="Print a link to the web page, logged in.")
@takes("controller", "quiet", "output")
def page(
    opens: Annotated[bool, option("--open", "Open it in this machine's browser instead.")] = False,
) -> None:
    """Print a link that logs you in to the controller's web page. It works once, within two minutes.

    If you call the controller with a certificate, the page asks for a token.
    """
    actions.page.show(opens=opens)


@app.command(
    "doctor",
    epilog="Example: callboard doctor --controller 10.0.0.1:7700",
    short_help="Compare the ledger with what nodes, Ray and GPUs say.",
)
@reads
def doctor() -> None:
    """Say what is not as it should be: foreign users of GPUs, actors and placement groups that the ledger doesn't know,
    workers that don't use their GPU, calls that queue, workers lost for lack of memory, jobs that wait.

    Exit code 1: something was found. Nothing is changed.
    """
    actions.doctor.doctor()


@app.command(
    "version",
    epilog="Example: callboard version --check",
    short_help="Show the version here, and whether those of the cluster fit.",
)
@takes("controller", "output")
def version(
    check: Annotated[bool, option("--check", "Compare with the controller and all agents.")] = False,
) -> None:
    """Show the version of callboard; with --check also those of the controller and of each agent, with their Python and
    Ray.

    Exit code 1: some differ. All of a cluster should have one callboard. Agents, and programs that call workers, need
    the same Ray and the same minor version of Python.
    """
    actions.doctor.version(check=check)


@app.command(
    "ray-env",
    epilog="Example: callboard ray-env > ray.env && . ./ray.env && ray status",
    short_help="Print the variables by which Ray's own tools find the cluster.",
)
@takes("controller", "output")
def ray_env() -> None:
    """Print `export` lines for a shell, so that `ray status` and `ray.init()` use the Ray of this cluster.

    `ray list` and the dashboard do so, too, if the head is installed with the extra `head`.
    The token of a cluster that runs on this machine is found; elsewhere set RAY_AUTH_TOKEN_PATH yourself.
    """
    actions.doctor.ray_env()


@app.command("events", epilog="Example: callboard events --follow --type preemption.")
@takes("controller", "output")
def events(
    follow: Annotated[bool, option("--follow", "-f", "--watch", "Keep printing new events until Ctrl-C.")] = False,
    last: Annotated[int, option("--last", "-n", "N", "Start with the last N events.", min=0, max=1000)] = 20,
    kind: Annotated[
        list[str] | None,
        option("--type", "TYPE", "Only events of this type; a trailing dot selects a family (job.). May be repeated."),
    ] = None,
    job: JobOption = "",
) -> None:
    """Show what changed in the cluster, oldest first."""
    actions.events.show(follow=follow, last=last, types=kind or [], job=job)


@app.command("audit", epilog="Example: callboard audit --who alice")
@reads
def audit(
    last: Annotated[int, option("--last", "-n", "N", "Show the last N entries.", min=1, max=1000)] = 20,
    who: Annotated[str, option("--who", "NAME", "Only what this client did.")] = "",
) -> None:
    """Show who changed what, when and from where."""
    actions.events.show_audit(last=last, who=who)


@app.command("status", epilog="Example: callboard status")
@reads
def status() -> None:
    """Show nodes with their GPUs, pools, jobs and why they wait.

    Of a large cluster it shows 50 nodes, those that need attention first, and 50 jobs; `-o wide` shows everything.
    """
    actions.status.show()


worker_verbs = typer.Typer(help="Show workers: which process of which job runs where.", no_args_is_help=True)
app.add_typer(worker_verbs, name="worker")


@worker_verbs.command("list", epilog="Example: callboard worker list --job train-00 -o wide")
@reads
def list_workers(
    job: JobOption = "",
    node: Annotated[str, option("--node", "NODE", "Only workers on this node.", autocompletion=completing.nodes)] = "",
) -> None:
    """List the workers of every job that has not ended.

    With -o wide it says why a start was cold.
    """
    actions.workers.list_workers(job=job, node=node)


@worker_verbs.callback()
def _worker_group() -> None:
    """Show workers: which process of which job runs where."""
