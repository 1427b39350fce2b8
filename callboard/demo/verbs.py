"""`callboard demo …`: live demonstrations."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import MachineGpusOption, counted_by, option, takes

app = typer.Typer()
demo_verbs = typer.Typer(help="Watch callboard at work on a cluster of its own.", no_args_is_help=True)
app.add_typer(demo_verbs, name="demo")


class Role(StrEnum):
    """What a class that works in `demo elastic` is."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    ENVIRONMENT = "environment"


@demo_verbs.callback()
def _group() -> None:
    """Watch callboard at work on a cluster of its own."""


@demo_verbs.command("rlhf", epilog="Example: callboard demo rlhf --json")
@takes("quiet")
def rlhf(
    context: typer.Context,
    as_json: Annotated[bool, option("--json", "Print one line of JSON with the verdicts.")] = False,
    ray_address: Annotated[
        str, option("--ray-address", "HOST:PORT", "Use this Ray cluster instead of starting one.", envvar="RAY_ADDRESS")
    ] = "",
    agents: Annotated[int, option("--agents", "N", "Nodes.", min=1, max=16)] = 3,
    cpus_per_node: Annotated[str, option("--cpus-per-node", "N", "CPUs of each node.")] = "3",
    memory_per_node: Annotated[str, option("--memory-per-node", "SIZE", "Memory of each node.")] = "4GiB",
    gpus: Annotated[int, option("--gpus-per-node", "N", "GPUs of each node.", min=1, max=8)] = 2,
    machine_gpus: MachineGpusOption = "",
) -> None:
    """An RLHF run in six acts: who gets which GPU, who yields to whom.

    Rollouts, a reward model and a trainer share the GPUs of a cluster of its own.
    """
    actions.demos.rlhf(
        as_json=as_json,
        ray_address=ray_address,
        agents=agents,
        cpus=cpus_per_node,
        memory=memory_per_node,
        gpus=gpus,
        machine_gpus=machine_gpus,
        counted=counted_by(context),
    )


@demo_verbs.command("elastic", epilog="Example: callboard demo elastic --json")
@takes("quiet")
def elastic(
    as_json: Annotated[bool, option("--json", "Print the results as one line of JSON at the end.")] = False,
    actor: Annotated[
        str, option("--actor", "PKG.MODULE:CLASS", "Your own class in place of the sample.")
    ] = "callboard.demo.training:TrainingActor",
    role: Annotated[
        Role, option("--role", "Role of that class; each step calls its train_step(n), generate(n) or rollout(n).")
    ] = Role.TRAINER,
    agents: Annotated[int, option("--agents", "N", "Nodes to start with.", min=2, max=7)] = 2,
    pace: Annotated[float, option("--pace", "SECONDS", "Pause between steps.", min=0, max=10)] = 0.2,
) -> None:
    """A training loop that follows its cluster as nodes come and go.

    A node joins, a worker is lost, a node is drained.
    """
    actions.demos.elastic(as_json=as_json, actor=actor, role=role.value, agents=agents, pace_s=pace)
