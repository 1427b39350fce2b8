"""The prologue, before the first act: policy and pool at the largest scale that fits, and a worker without a GPU proves
that it sees none."""

from __future__ import annotations

import asyncio

from callboard.client.client import Client
from callboard.demo.setting import POLICY, POOL, Setting, cpu_only, settings
from callboard.demo.stage import END_S, START_S, Stage
from callboard.demo.story import Verdict
from callboard.v1.placement_group_pb2 import PlacementGroupState
from callboard.wire.errors import QuotaExceeded, Unschedulable

_REHEARSAL = "rehearsal"


class DoesNotFit(Exception):
    """The demonstration fits the cluster at no scale.

    Attributes:
        tried: (scale, why not) of each.
    """

    def __init__(self, tried: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"at {factor}: {why}" for factor, why in tried))
        self.tried = tuple(tried)


async def choose_scale(client: Client) -> tuple[Setting, list[tuple[str, str]]]:
    """The largest scale at which `validate_only` places everything at once.

    Returns:
        The setting, and (scale, why not) of those that were too large.

    Raises:
        DoesNotFit: it fits at no scale.
    """
    await client.create_pool({"name": _REHEARSAL})
    too_large: list[tuple[str, str]] = []
    try:
        for setting in settings():
            why = await _why_not(client, setting)
            if not why:
                return setting, too_large
            too_large.append((setting.factor, why))
    finally:
        await client.delete_pool(_REHEARSAL)
    raise DoesNotFit(too_large)


async def open_house(stage: Stage, verdict: Verdict) -> None:
    """Sets the policy, lets a worker without a GPU look around, and makes the pool with its reserved groups."""
    await stage.client.set_policy(POLICY)
    await _cpu_worker_sees_nothing(stage, verdict)
    revision = (await stage.client.stats()).revision
    await stage.client.create_pool(stage.setting.pool())
    async with asyncio.timeout(START_S):
        if not await _reserved_ready(stage.client):
            async for _ in stage.client.watch(start_revision=revision + 1):
                if await _reserved_ready(stage.client):
                    break


async def _why_not(client: Client, setting: Setting) -> str:
    try:
        plan = await client.validate(setting.everything_at_once(_REHEARSAL))
    except (Unschedulable, QuotaExceeded) as error:
        return str(error)
    return "" if plan.verdict == "START" else plan.summary or plan.verdict


async def _cpu_worker_sees_nothing(stage: Stage, verdict: Verdict) -> None:
    await stage.client.create_pool({"name": _REHEARSAL})
    job = await stage.client.submit(cpu_only(_REHEARSAL))
    await stage.running(job)
    answer = await stage.ray.call(job.workers()[0], "run", 1)
    seen = answer["visible_devices"]
    verdict.check(f"a worker without a GPU sees {seen!r}, expected ''", seen == "")
    stage.story.measured(f"a worker that asked for no GPU sees CUDA_VISIBLE_DEVICES={seen!r}")
    await job.complete()
    await job.finished(END_S)
    await stage.client.delete_pool(_REHEARSAL)


async def _reserved_ready(client: Client) -> bool:
    groups = await client.list_placement_groups(pool=POOL)
    ready = [group for group in groups if group.state == PlacementGroupState.PLACEMENT_GROUP_STATE_READY]
    return len(ready) >= 2
