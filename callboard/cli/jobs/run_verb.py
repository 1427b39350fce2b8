"""`callboard run`: a program, unmodified, with quotas, priorities, logs and an end that is proved."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from callboard.cli import actions
from callboard.cli.options import argument, option, takes
from callboard.model.quantities import MILLI

app = typer.Typer()

_MOST = 10_000
"""Nodes of one run."""


@app.command(
    "run",
    epilog="Example: callboard run --pool research --nodes 2 --gpus-per-node 4 -- torchrun train.py --lr 1e-5",
    short_help="Run a program on the cluster and follow it.",
    context_settings={"allow_interspersed_args": False},
)
@takes("controller", "quiet")
def run(
    command: Annotated[
        list[str] | None, argument("COMMAND…", "The program and its arguments, as you would type them.")
    ] = None,
    pool: Annotated[str, option("--pool", "POOL", "Pool to charge.")] = "default",
    priority: Annotated[float | None, option("--priority", "N", "Priority of the job. Default: 5.")] = None,
    name: Annotated[str, option("--name", "NAME", "Name of the job. Default: made of the program's name.")] = "",
    nodes: Annotated[str, option("--nodes", "N", "Number of nodes; or the fewest and the most, as in 2:4.")] = "1",
    gpus_per_node: Annotated[int, option("--gpus-per-node", "N", "GPUs on each of them.", min=0, max=1024)] = 0,
    gpu_model: Annotated[str, option("--gpu-model", "WORDS", 'Model of the GPUs, e.g. H200 or "A100 80GB".')] = "",
    gpu_memory_min: Annotated[
        str, option("--gpu-memory-min", "SIZE", "Memory that each GPU must have, e.g. 80GiB.")
    ] = "",
    cpus_per_node: Annotated[
        float | None,
        option("--cpus-per-node", "N", "CPUs on each of them. Default: 1, or 1 per GPU.", min=0),
    ] = None,
    memory_per_node: Annotated[str, option("--memory-per-node", "SIZE", "Memory on each, e.g. 16GiB.")] = "",
    per_gpu: Annotated[
        bool,
        option("--per-gpu", "Start the program once for each GPU, on as few nodes as possible, not once per node."),
    ] = False,
    ray: Annotated[
        bool, option("--ray", "Run it on a Ray cluster of its own: a Ray node per node, RAY_ADDRESS is set.")
    ] = False,
    working_dir: Annotated[
        Path | None,
        option(
            "--working-dir",
            "DIR",
            "Directory that travels with the program, which runs there. What git ignores stays at home.",
        ),
    ] = None,
    py_module: Annotated[
        list[Path] | None,
        option(
            "--py-module",
            "PATH",
            "Directory or .py file that travels, too, and can be imported by its name; may be repeated.",
        ),
    ] = None,
    requirements: Annotated[
        Path | None,
        option(
            "--requirements",
            "FILE",
            "Requirements of a Python environment that each node builds once, and the program runs in.",
        ),
    ] = None,
    uv: Annotated[
        Path | None, option("--uv", "FILE", "The same, from a pyproject.toml with the uv.lock beside it.")
    ] = None,
    conda: Annotated[str, option("--conda", "NAME", "Conda environment of the nodes to run in, by its name.")] = "",
    container: Annotated[str, option("--container", "IMAGE", "Image to run in, by podman or apptainer.")] = "",
    env: Annotated[
        list[str] | None, option("--env", "NAME=VALUE", "Variable for the program; may be repeated.")
    ] = None,
    restarts: Annotated[
        int, option("--restarts", "N", "Start it again after so many failures.", min=0, max=10_000)
    ] = 0,
    wait_for_nodes: Annotated[
        str,
        option(
            "--wait-for-nodes",
            "TIME",
            "How long to wait for nodes that could hold it. Default: the job is refused if no node could hold it.",
        ),
    ] = "",
    array: Annotated[
        str,
        option(
            "--array",
            "0-9",
            "Run it once for each number (0-9, 0-9:2, 1,4,7), which is {index} in its arguments and $ARRAY_INDEX.",
        ),
    ] = "",
    file: Annotated[
        Path | None, option("--file", "FILE", "Run each line of this file as a command; - reads the input.")
    ] = None,
    tail: Annotated[str, option("--tail", "RANK", "Rank whose output is shown, or all.")] = "0",
    interactive: Annotated[bool, option("-i", "--interactive", "With -t: pass your keys on.")] = False,
    tty: Annotated[
        bool, option("-t", "--tty", "Give the program of rank 0 a terminal and show it here; Ctrl-P Ctrl-Q leaves it.")
    ] = False,
    detach: Annotated[bool, option("--detach", "-d", "Print the job's name and end; it runs on.")] = False,
) -> None:
    """Run a program on the cluster and follow it to its end.

    The exit code is the program's. While it waits, the reason is shown. Ctrl-C cancels it (SIGTERM, then time to
    end); pressed twice, it is ended at once. A lost terminal or connection ends nothing: the job runs on.
    """
    wrong = {
        "COMMAND": "state either a command, behind --, or --file" if bool(command) == (file is not None) else "",
        "--array": "is for one command; --file has a line for each" if file is not None and array else "",
        "--tail": "" if tail == "all" or tail.isdecimal() else f"{tail!r} is not a rank; use a number, or all",
        "-t": "is for one command, and needs a terminal as standard input"
        if tty and (file is not None or array or not (detach or sys.stdin.isatty()))
        else "",
        "-i": "is for -t; a program of a job reads no other input" if interactive and not tty else "",
        "--per-gpu": "needs --gpus-per-node" if per_gpu and not gpus_per_node else "",
        "--gpu-model": "needs --gpus-per-node" if gpu_model and not gpus_per_node else "",
        "--gpu-memory-min": "needs --gpus-per-node" if gpu_memory_min and not gpus_per_node else "",
    }
    if ray and per_gpu:
        wrong["--per-gpu"] = "is for programs without --ray, which has a node of Ray per node"
    for flag, why in wrong.items():
        if why:
            raise typer.BadParameter(why, param_hint=flag)
    each = gpus_per_node if per_gpu else 1
    fewest, most = (number * each for number in _fewest_and_most(nodes))
    if tail != "all" and int(tail) >= most:
        raise typer.BadParameter(f"there is no rank {tail}; there are {most}, from 0", param_hint="--tail")
    cpus = max(1, gpus_per_node) if cpus_per_node is None else cpus_per_node
    resources: dict[str, float | int | str] = {"cpu": _part_of(cpus, each)}
    if gpus_per_node:
        resources["gpu"] = gpus_per_node // each
    resources |= {key: value for key, value in (("gpu_model", gpu_model), ("gpu_memory_min", gpu_memory_min)) if value}
    workers = {"workers": most} if fewest == most else {"min_workers": fewest, "max_workers": most}
    component: dict[str, Any] = {"name": "main", **workers, "resources": resources}
    job = {"pool": pool, "priority": priority, "restart": {"max_restarts": restarts} if restarts else None}
    if wait_for_nodes:
        job["wait_for_nodes"] = wait_for_nodes
    component |= _code(working_dir, py_module, {"requirements": requirements, "uv": uv, "conda": conda}, container)
    if ray:
        import secrets  # noqa: PLC0415 - 5 ms that help doesn't need

        component |= {"ray": True, "secret_env": {"PRIVATE_RAY_TOKEN": secrets.token_hex(32)}}
    if tty:
        component["tty"] = True
        env = [f"TERM={os.environ.get('TERM', 'xterm')}", *(env or [])]
    if most > 1 and not per_gpu:
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


def _part_of(cpus: float, workers: int) -> float:
    """What each of a node's workers asks for: whole thousandths, and together no more than was asked."""
    return cpus if workers == 1 or not math.isfinite(cpus) else math.floor(cpus * MILLI / workers) / MILLI


def _fewest_and_most(nodes: str) -> tuple[int, int]:
    """The numbers of `--nodes`: one is both."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", nodes)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < fewest <= most <= _MOST:
        why = f"{nodes!r} is neither a number nor the fewest and the most, such as 2:4; 1 to {_MOST:,} are allowed"
        raise typer.BadParameter(why, param_hint="--nodes")
    return fewest, most


def _code(
    working_dir: Path | None,
    py_modules: list[Path] | None,
    environments: dict[str, Path | str | None],
    container: str,
) -> dict[str, Any]:
    """What travels with a program, and what it runs in."""
    named = [("--working-dir", working_dir), *(("--py-module", each) for each in py_modules or [])]
    named += [(f"--{kind}", each) for kind, each in environments.items() if isinstance(each, Path)]
    for flag, path in named:
        if path is not None and not path.exists():
            # Said of the option: who typed it knows no field of a job file.
            why = f"{path} is not there; name a path that is (a relative one begins at {Path.cwd()}), or leave it out"
            raise typer.BadParameter(why, param_hint=flag)
    found: dict[str, Any] = {}
    if working_dir is not None:
        found["working_dir"] = str(working_dir)
    if py_modules:
        found["py_modules"] = [str(each) for each in py_modules]
    stated = {kind: str(value) for kind, value in environments.items() if value}
    if len(stated) + bool(container) > 1:
        raise typer.BadParameter("state one of --requirements, --uv, --conda and --container", param_hint="--container")
    if stated:
        found["environment"] = stated
    if container:
        found["container"] = container
    return found
