"""How long does raw Ray take for the same, done by hand on the same cluster?

Every function measures once, in milliseconds, and leaves the cluster as it found it. The actors are what a careful
person would write without a control plane: one device each, threads beside `run()` so that a hook can be called.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from benchmarks.latency_ours import CANCEL_TIMEOUT_MS
from benchmarks.latency_workers import Cooperative, Echo, Hanging

BUNDLE = {"CPU": 1, "GPU": 1}
_LOOK_S = 0.005
"""Between looks at Ray's books, outside of what is measured."""


class Raw:
    """Measures plain Ray."""

    def __init__(self) -> None:
        self._kept: PlacementGroup | None = None

    async def prepare(self) -> None:
        """A placement group that is kept."""
        self._kept = placement_group([BUNDLE])
        await self._kept.ready()

    async def finish(self) -> None:
        """Remove it."""
        if self._kept is not None:
            remove_placement_group(self._kept)

    async def cold(self) -> float:
        """An actor with a device, without a group and without an environment."""
        before = _devices()
        began = time.perf_counter()
        actor = _class(Echo).options(num_cpus=1, num_gpus=1).remote()
        assert await actor.echo.remote(7) == 7
        took_ms = _since(began)
        await _end(actor)
        while _devices() < before:  # noqa: ASYNC110 - Ray has no event for it
            await asyncio.sleep(_LOOK_S)
        return took_ms

    async def dynamic(self) -> float:
        """A group is made, and an actor in it."""
        began = time.perf_counter()
        group = placement_group([BUNDLE])
        await group.ready()
        actor = await self._answering(group)
        took_ms = _since(began)
        await _end(actor)
        before = _devices()
        remove_placement_group(group)
        while _devices() <= before:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return took_ms

    async def reused(self) -> float:
        """An actor in a group that is there."""
        began = time.perf_counter()
        actor = await self._answering(self._kept)
        took_ms = _since(began)
        await _end(actor)
        return took_ms

    async def kill_start(self) -> float:
        """An actor is killed, and another one answers in its group."""
        victim = await self._answering(self._kept)
        began = time.perf_counter()
        ray.kill(victim)
        actor = await self._answering(self._kept)
        took_ms = _since(began)
        await _end(actor)
        return took_ms

    async def preempt(self, victim: str) -> float:
        """Its cancel() is asked, at most for the cancel timeout, then it is killed and another one answers."""
        kind = {"Cooperative": Cooperative, "Hanging": Hanging}[victim]
        loser = await self._answering(self._kept, kind)
        run = loser.run.remote()
        began = time.perf_counter()
        asked = asyncio.ensure_future(_both(loser.cancel.remote(), run))
        await asyncio.wait([asked], timeout=CANCEL_TIMEOUT_MS / 1000)
        ray.kill(loser)
        actor = await self._answering(self._kept)
        took_ms = _since(began)
        await asyncio.wait([asked])
        asked.exception()
        await _end(actor)
        return took_ms

    async def plain_actor(self) -> Any:
        """An actor to call."""
        return await self._answering(self._kept)

    @staticmethod
    async def _answering(group: PlacementGroup | None, kind: type[Echo] = Echo) -> Any:
        assert group is not None, "prepare() makes it"
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = {"num_cpus": 1, "num_gpus": 1, "max_concurrency": 1 if kind is Echo else 4}
        actor = _class(kind).options(scheduling_strategy=strategy, **options).remote()
        assert await actor.echo.remote(7) == 7
        return actor


def _class(kind: type[Echo]) -> Any:
    return ray.remote(kind)


def _devices() -> float:
    return float(ray.available_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


async def _both(cancel: Any, run: Any) -> None:
    await cancel
    await run


async def _end(actor: Any) -> None:
    """Kill it, and wait until Ray says that it is dead."""
    ray.kill(actor)
    try:
        await actor.echo.remote(0)
    except ray.exceptions.RayActorError:
        return


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
