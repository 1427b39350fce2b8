"""`callboard run`: a program, unmodified, with quotas, priorities, logs and an end that is proved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from callboard.cli import actions
from callboard.cli.options import takes

app = typer.Typer()


@app.command(
    "run",
    epilog="Example: callboard run --pool research --nodes 2 --gpus-per-node 4 -- torchrun train.py --lr 1e-5",
    short_help="Run a program on the cluster and follow it.",
    context_settings={"allow_interspersed_args": False},
)
@takes("controller", "quiet")
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND…", help="The program and its arguments, as you would type them."),
    ] = None,
    pool: Annotated[str, typer.Option("--pool", metavar="POOL", help="Pool to charge.")] = "default",
    priority: Annotated[
        float | None, typer.Option("--priority", help="Priority of the job. Default: 5.", show_default=False)
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="Name of the job. Default: made of the program's name.", show_default=False)
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Number of nodes.", min=1, max=10_000)] = 1,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="N", help="GPUs on each of them.", min=0, max=1024)
    ] = 0,
    cpus_per_node: Annotated[
        float,
        typer.Option(
            "--cpus-per-node",
            metavar="N",
            help="CPUs on each of them. Default: 1, or 1 per GPU.",
            min=0,
            show_default=False,
        ),
    ] = 0,
    memory_per_node: Annotated[
        str, typer.Option("--memory-per-node", metavar="SIZE", help="Memory on each, e.g. 16GiB.", show_default=False)
    ] = "",
    per_gpu: Annotated[
        bool,
        typer.Option(
            "--per-gpu", help="Start the program once for each GPU, on as few nodes as possible, not once per node."
        ),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run it on a Ray cluster of its own: a Ray node per node, RAY_ADDRESS is set.")
    ] = False,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            "--working-dir",
            metavar="DIR",
            help="Directory that travels with the program, which runs there. What git ignores stays at home.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable for the program; may be repeated.")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", help="Start it again after so many failures.", min=0, max=10_000)
    ] = 0,
    wait_for_nodes: Annotated[
        str,
        typer.Option(
            "--wait-for-nodes",
            metavar="TIME",
            help="How long to wait for nodes that could hold it. Default: it is refused where none could.",
            show_default=False,
        ),
    ] = "",
    array: Annotated[
        str,
        typer.Option(
            "--array",
            metavar="0-9",
            help="Run it once for each number (0-9, 0-9:2, 1,4,7), which is {index} in its arguments and $ARRAY_INDEX.",
            show_default=False,
        ),
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Run each line of this file as a command; - reads the input."),
    ] = None,
    tail: Annotated[str, typer.Option("--tail", metavar="RANK", help="Rank whose output is shown, or all.")] = "0",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the job's name and end; it runs on.", show_default=False)
    ] = False,
) -> None:
    """Run a program on the cluster and follow it to its end.

    The exit code is the program's. While it waits, the reason is shown. Ctrl-C cancels it (SIGTERM, then time to
    end); pressed twice, it is ended at once. A lost terminal or connection ends nothing: the job runs on.
    """
    if bool(command) == (file is not None):
        raise typer.BadParameter("state either a command, behind --, or --file", param_hint="COMMAND")
    if file is not None and array:
        raise typer.BadParameter("is for one command; --file has a line for each", param_hint="--array")
    if tail != "all" and not tail.isdecimal():
        raise typer.BadParameter(f"{tail!r} is no rank; use a number, or all", param_hint="--tail")
    if ray and per_gpu:
        raise typer.BadParameter(
            "is for programs without --ray, which has a node of Ray per node", param_hint="--per-gpu"
        )
    if per_gpu and not gpus_per_node:
        raise typer.BadParameter("needs --gpus-per-node", param_hint="--per-gpu")
    processes = nodes * gpus_per_node if per_gpu else nodes
    each = gpus_per_node if per_gpu else 1
    resources: dict[str, float | int | str] = {"cpu": (cpus_per_node or max(1, gpus_per_node)) / each}
    if gpus_per_node:
        resources["gpu"] = gpus_per_node // each
    component: dict[str, Any] = {"name": "main", "workers": processes, "resources": resources}
    job = {"pool": pool, "priority": priority, "restart": {"max_restarts": restarts} if restarts else None}
    if wait_for_nodes:
        job["wait_for_nodes"] = wait_for_nodes
    if working_dir is not None:
        component["working_dir"] = str(working_dir)
    if ray:
        import secrets  # noqa: PLC0415 - 5 ms that help doesn't need

        component |= {"ray": True, "secret_env": {"PRIVATE_RAY_TOKEN": secrets.token_hex(32)}}
    if nodes > 1 and not per_gpu:
        component["placement"] = "STRICT_SPREAD"
    actions.running.run(
        command or [],
        file=file,
        array=array,
        name=name,
        job={key: value for key, value in job.items() if value is not None},
        component=component,
        memory=(memory_per_node, each),
        env=env or [],
        rank=None if tail == "all" else int(tail),
        detach=detach,
    )
