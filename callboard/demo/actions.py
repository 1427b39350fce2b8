"""What `callboard demo …` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from callboard.cli.cluster.checks import check_nodes, deal_gpus
from callboard.cli.local.interrupts import Interrupts, run_locally
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.options import wishes
from callboard.cli.show import consoles, printing
from callboard.cli.show.exits import FAILED, INTERRUPTED
from callboard.demo import elastic as elastic_demo
from callboard.demo.rlhf import as_plain, play
from callboard.demo.stage import own_plan
from callboard.demo.story import Story, Verdict
from callboard.demo.training_loop import TrainingStory


def rlhf(
    *,
    as_json: bool,
    ray_address: str,
    agents: int,
    cpus: str,
    memory: str,
    gpus: int,
    machine_gpus: str,
    counted: Sequence[str],
) -> None:
    """Plays the six acts; ends with 1 if a verdict fails."""
    check_nodes(ClusterPlan(directory=Path(), cpus=cpus, memory=memory))
    dealt, agents, gpus = deal_gpus(machine_gpus, (), agents=agents, gpus=gpus, stated=counted)
    console = consoles.stderr() if as_json else consoles.stdout()
    console.quiet = wishes.quiet

    def planned(address: str) -> ClusterPlan:
        return own_plan(agents, dealt, cpus=cpus, memory=memory, gpus=gpus, ray_address=address)

    async def main(interrupts: Interrupts) -> list[Verdict]:
        return await play(ray_address, planned, Story(console), interrupts)

    verdicts = run_locally(main, _stopped)
    if as_json:
        printing.print_json(as_plain(verdicts), compact=True)
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(FAILED)


def elastic(*, as_json: bool, actor: str, role: str, agents: int, pace_s: float) -> None:
    """Trains on a cluster that grows and shrinks; ends with 1 if something did not go as it must."""
    module, colon, name = actor.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise typer.BadParameter(f"{actor!r} reads pkg.module:Class", param_hint="--actor")
    console = consoles.stderr() if as_json else consoles.stdout()
    console.quiet = wishes.quiet
    options = elastic_demo.ElasticOptions(actor=actor, role=role, agents=agents, pace_s=pace_s)

    async def main(interrupts: Interrupts) -> elastic_demo.ElasticResult:
        return await elastic_demo.play(options, TrainingStory(console), interrupts)

    result = run_locally(main, _stopped)
    if as_json:
        printing.print_json(result.as_plain(), compact=True)
    if not result.passed:
        raise typer.Exit(FAILED)


def _stopped() -> int:
    consoles.stderr().print("Interrupted; nothing is left running.")
    return INTERRUPTED
