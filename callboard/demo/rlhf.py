"""`callboard demo rlhf` from its first line to its last: a cluster of its own, six acts, the verdicts.

Guaranteed: whatever happens, Ctrl-C included, the cluster and the child that talks to Ray are ended, and
their end is proved, before the program ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callboard.agents.ray.ray_command import free_port
from callboard.cli.cluster.local_failures import in_words
from callboard.cli.cluster.start_progress import StartProgress
from callboard.cli.local.children import ChildEnded
from callboard.cli.local.cluster import LocalCluster, NotReady
from callboard.cli.local.interrupts import Interrupts
from callboard.cli.local.machine_gpus import MachineGpus
from callboard.cli.local.plan import ClusterPlan, free_block
from callboard.cli.local.taking_down import Leftovers
from callboard.cli.show.exits import Failure
from callboard.cli.show.failures import EXPECTED, failure_of
from callboard.client.client import Client
from callboard.client.clusters import cluster_directory, recorded_clusters
from callboard.demo.acts import ACTS, choose_scale, open_house
from callboard.demo.data_plane import DataPlane, RayFailed
from callboard.demo.stage import Stage
from callboard.demo.story import Story, Verdict
from callboard.security.places import run_directory

READY_S = 90.0

_ANSWER_S = 3.0
"""How long a Ray cluster that is not ours may take to accept a connection."""

_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 - where Ray notes it.

EXPECTED_IN_ACTS = (*EXPECTED, RayFailed, TimeoutError)
"""What can go wrong in an act without being a defect of the demonstration: the act failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How the demonstration runs.

    Attributes:
        ray_address: Ray cluster to use; empty: one of its own.
        cpus: CPUs of each node, as text.
        memory: memory of each node, as text.
        machine_gpus: those of this machine that are dealt out; none: each node has simulated ones of its own.
    """

    ray_address: str
    agents: int
    cpus: str
    memory: str
    gpus: int
    machine_gpus: MachineGpus = MachineGpus((), real=False)


async def play(options: DemoOptions, story: Story, interrupts: Interrupts) -> list[Verdict]:
    """Plays all acts.

    Returns:
        A verdict for each; an act that was not played has failed.

    Raises:
        ChildEnded, NotReady: no cluster could be started.
        DoesNotFit: the cluster is too small at every scale.
    """
    began = time.monotonic()
    verdicts: list[Verdict] = []
    for address in await _attempts(options.ray_address, story):
        plan = _plan(options, address)
        try:
            verdicts = await _on_cluster(plan, story, interrupts)
        except (ChildEnded, NotReady) as error:
            if not address:
                raise
            story.attempt_failed(f"Ray at {address}", in_words(error).failure)
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
                last = await _taken_down(cluster, verdicts)
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
            verdicts.append(_failed(act.title, error))
            story.verdict(verdicts[-1])
            break
        if number == 1:
            verdict.checks += opening.checks
        verdicts.append(verdict)
        await stage.show_gpus()
        story.verdict(verdict)
    verdicts += [_not_played(act.title) for act in ACTS[len(verdicts) :]]
    return verdicts


async def _connect(stage: Stage, plan: ClusterPlan) -> None:
    address = (await stage.client.stats()).ray_address
    await stage.ray.connect(address, token_path=plan.ray_token_path(), node_ip=plan.node_ip(0))
    await stage.remember_ray()


async def _taken_down(cluster: LocalCluster, verdicts: Sequence[Verdict]) -> Verdict:
    """Ends the cluster; the last verdict with what that showed."""
    verdict = verdicts[-1] if verdicts else Verdict(ACTS[-1].title)
    left: tuple[str, ...] = ()
    try:
        await cluster.stop()
    except Leftovers as error:
        left = error.what
    gone = not cluster.plan.directory.exists()
    verdict.check(f"left on the machine: {', '.join(left) or 'nothing'}", not left)
    verdict.check("files of the cluster are left", gone)
    verdict.figures |= {"left_on_machine": list(left), "files_left": not gone}
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
    """Address of the Ray cluster that was started last on this machine."""
    return _CURRENT_CLUSTER.read_text(encoding="utf-8").strip()


def _plan(options: DemoOptions, ray_address: str) -> ClusterPlan:
    base = run_directory()
    name = f"demo-{os.getpid()}"
    return ClusterPlan(
        name=name,
        directory=cluster_directory(name, base),
        port=free_port(),
        agents=options.agents,
        cpus=options.cpus,
        memory=options.memory,
        gpus=options.gpus,
        machine_gpus=options.machine_gpus.ids,
        real_gpus=options.machine_gpus.real,
        ray_address=ray_address,
        block=free_block(record.block for record in recorded_clusters(base)),
    )


def _failed(title: str, error: Exception) -> Verdict:
    said = failure_of(error)
    why = f"{said.what} {said.why}" if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
    verdict = Verdict(title)
    verdict.check(why, holds=False)
    return verdict


def _not_played(title: str) -> Verdict:
    verdict = Verdict(title)
    verdict.check("it was not played, because an act before it failed", holds=False)
    return verdict


def as_plain(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts for `--json`."""
    return {
        "acts": [
            {"name": verdict.name, "passed": verdict.passed, "figures": verdict.figures}
            | ({} if verdict.passed else {"failures": verdict.failures()})
            for verdict in verdicts
        ]
    }
