"""`callboard top` and `callboard doctor`: what workers do now, and what is not as it should be."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import JobOption, reads, takes


def add_to(app: typer.Typer) -> None:
    """Adds the verbs to the program."""
    app.command(
        "top",
        epilog="Example: callboard top --once -o json",
        short_help="Show CPU, memory, GPU, calls and gauges of workers.",
    )(top)
    app.command(
        "ray-env",
        epilog="Example: callboard ray-env > ray.env && . ./ray.env && ray status",
        short_help="Print the variables by which Ray's own tools find the cluster.",
    )(ray_env)
    app.command(
        "doctor",
        epilog="Example: callboard doctor --controller 10.0.0.1:7700",
        short_help="Compare the ledger with what nodes, Ray and GPUs say.",
    )(doctor)


@takes("controller", "output")
def top(
    job: JobOption = "",
    once: Annotated[bool, typer.Option("--once", help="Show it once, then exit.", show_default=False)] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Refresh interval.", min=0.5, max=3600)
    ] = 2.0,
) -> None:
    """Show what each worker uses and how its calls queue, by member, and what gauges jobs reported.

    GPU is how busy the worker's devices are, as their driver says, whoever uses them; - where it says nothing. CALLS is
    what runs or waits, against max_concurrency: more than that waits. Ctrl-C ends it; for programs (json, yaml, a pipe)
    it is shown once.
    """
    actions.looking.top(job=job, once=once, interval_s=interval)


@reads
def doctor() -> None:
    """Say what is not as it should be: foreign users of GPUs, actors and placement groups that the ledger doesn't know,
    workers that don't use their GPU, calls that queue, workers lost for lack of memory, jobs that wait.

    Exit code 1: something was found. Nothing is changed.
    """
    actions.looking.doctor()


@takes("controller", "output")
def ray_env() -> None:
    """Print `export` lines for a shell, so that `ray status`, `ray list` and `ray.init()` use this cluster's Ray.

    The token of a cluster that runs on this machine is found; elsewhere set RAY_AUTH_TOKEN_PATH yourself.
    """
    actions.looking.ray_env()
