"""`callboard exec` and `callboard attach`: programs beside workers, and the terminals of their commands."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import argument, option, takes

app = typer.Typer()

JobArgument = Annotated[str, argument("JOB", "Name of the job.", autocompletion=completing.jobs)]
WorkerOption = Annotated[
    str,
    option(
        "--worker",
        "NAME",
        "Component of the worker; NAME/RANK says its rank too. Default: the only one.",
    ),
]


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
