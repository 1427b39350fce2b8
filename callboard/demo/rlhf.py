"""`callboard demo rlhf` from its first line to its last: a cluster of its own, six acts, the verdicts.

Guaranteed: whatever happens, Ctrl-C included, the cluster and the child that talks to Ray are ended, and
their end is proved, before the program ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from callboard.cli.cluster.start_progress import StartProgress
from callboard.cli.local.children import ChildEnded
from callboard.cli.local.cluster import LocalCluster, NotReady
from callboard.cli.local.interrupts import Interrupts
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.show.exits import Failure
from callboard.cli.show.failures import EXPECTED, failure_of
from callboard.client.client import Client
from callboard.demo.acts import ACTS, choose_scale, open_house
from callboard.demo.data_plane import DataPlane, RayFailed
from callboard.demo.stage import Stage, taken_down
from callboard.demo.story import Story, Verdict

READY_S = 90.0

_ANSWER_S = 3.0
"""How long a Ray cluster that is not ours may take to accept a connection."""

_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 - where Ray notes the one started last.

EXPECTED_IN_ACTS: tuple[type[Exception], ...] = (*EXPECTED, RayFailed, TimeoutError)
"""What can go wrong in an act without being a defect of the demonstration: the act failed."""


async def play(
    ray_address: str, planned: Callable[[str], ClusterPlan], story: Story, interrupts: Interrupts
) -> list[Verdict]:
    """Plays all acts.

    Args:
        ray_address: Ray cluster to use; empty: one of its own.
        planned: the cluster on the Ray cluster of an address, or on one of its own.
        story: is told what happens.
        interrupts: those of the program.

    Returns:
        A verdict for each; an act that was not played has failed.

    Raises:
        ChildEnded, NotReady: no cluster could be started.
        CommandFailed: the cluster is too small at every scale.
    """
    began = time.monotonic()
    verdicts: list[Verdict] = []
    for address in await _attempts(ray_address, story):
        try:
            verdicts = await _on_cluster(planned(address), story, interrupts)
        except (ChildEnded, NotReady) as error:
            if not address:
                raise
            story.attempt_failed(f"Ray at {address}", error.failure)
            continue
        break
    story.verdicts(verdicts, time.monotonic() - began)
    return verdicts


async def _on_cluster(plan: ClusterPlan, story: Story, interrupts: Interrupts) -> list[Verdict]:
    verdicts: list[Verdict] = []
    last = Verdict(ACTS[-1].title)
    with StartProgress(plan.agents) as progress:
        cluster = LocalCluster(plan, progress, hurry=interrupts.hurry)
        ray = DataPlane(plan.directory / "logs" / "ray-driver.log")
        try:
            nodes = await cluster.start(READY_S, alongside=ray.open)
            progress.finish()
            story.say(f"A controller at {plan.controller} and {len(nodes)} agents are up, each with a Ray node:")
            story.gpus(nodes)
            async with Client(plan.controller) as client:
                verdicts = await _play_acts(client, ray, plan, story)
        finally:
            with interrupts.cleaning():
                await ray.close()
                last = await _curtain(cluster, verdicts)
    if verdicts:
        verdicts[-1] = last
    return verdicts


async def _play_acts(client: Client, ray: DataPlane, plan: ClusterPlan, story: Story) -> list[Verdict]:
    setting, too_large = await choose_scale(client)
    for factor, why in too_large:
        story.say(f"At scale {factor} it does not fit: {why}.")
    if too_large:
        story.say(f"Everything is scaled to {setting.factor}.")
    stage = Stage(client=client, ray=ray, story=story, setting=setting)
    verdicts: list[Verdict] = []
    opening = Verdict("opening")
    for number, act in enumerate(ACTS, start=1):
        story.act(number, act.title)
        story.say(act.scene)
        try:
            if number == 1:
                await _connect(stage, plan)
                await open_house(stage, opening)
            verdict = await act.play(stage)
        except EXPECTED_IN_ACTS as error:
            said = failure_of(error)
            why = f"{said.what} {said.why}" if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
            verdicts.append(_failed(act.title, why))
            story.verdict(verdicts[-1])
            break
        if number == 1:
            verdict.checks += opening.checks
        verdicts.append(verdict)
        await stage.show_gpus()
        story.verdict(verdict)
    not_played = "it was not played, because an act before it failed"
    verdicts += [_failed(act.title, not_played) for act in ACTS[len(verdicts) :]]
    return verdicts


async def _connect(stage: Stage, plan: ClusterPlan) -> None:
    address = (await stage.client.stats()).ray_address
    await stage.ray.connect(address, token_path=plan.ray_token_path(), node_ip=plan.node_ip(0))
    await stage.remember_ray()


async def _curtain(cluster: LocalCluster, verdicts: Sequence[Verdict]) -> Verdict:
    """Ends the cluster; the last verdict with what that showed."""
    verdict = verdicts[-1] if verdicts else Verdict(ACTS[-1].title)
    left = await taken_down(cluster, verdict)
    verdict.figures |= {"left_on_machine": list(left), "files_left": cluster.plan.directory.exists()}
    verdict.shown = "no job, group, actor, process, port or file is left; the ledger is zero"
    return verdict


async def _attempts(ray_address: str, story: Story) -> list[str]:
    """Ray clusters to try, in order; "" is one of its own. What does not answer is told and left out."""
    if not ray_address:
        return [""]
    address = ray_address
    try:
        if address == "auto":
            address = _current_cluster()
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {_ANSWER_S:g} s"
        story.attempt_failed(f"Ray at {address}", Failure("It can't be reached.", f"{why}.", ""))
        return [""]
    return [address, ""]


def _current_cluster() -> str:
    return _CURRENT_CLUSTER.read_text(encoding="utf-8").strip()


def _failed(title: str, why: str) -> Verdict:
    return Verdict(title, [(why, False)])


def as_plain(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts for `--json`."""
    return {
        "acts": [
            {"name": verdict.name, "passed": verdict.passed, "figures": verdict.figures}
            | ({} if verdict.passed else {"failures": verdict.failures()})
            for verdict in verdicts
        ]
    }
