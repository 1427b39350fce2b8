"""The loop: iterations of GRPO in a layout that is given, piece by piece where components have GPUs of their own.

    callboard up --detach --machine-gpus auto
    python -m examples.grpo_tiny.loop --layout "rollout,inference,actor: all"
    callboard down

Components that share a GPU take turns, and leave its memory to each other (`offload`, `reload`) or stay in it; those
that don't share one run at the same time, each working on the pieces that the one before it has made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray

from callboard import Client, ComponentSpec, JobHandle, JobSpec
from examples.grpo_tiny.policy import Sizes

ORDER = ("rollout", "inference", "actor")
"""Each works on what the one before it has made."""

Layout = Mapping[str, Sequence[int]]
"""Ranks of the GPUs of each component. One worker per GPU; none: one worker on CPUs."""


class Way(StrEnum):
    """How components use a GPU that they share."""

    LEAVING = "leaving"
    """They take turns, and leave its memory between their turns: for what doesn't fit together."""
    STAYING = "staying"
    """They take turns, and stay in its memory."""
    AT_ONCE = "at once"
    """They use it at the same time."""


def spec(name: str, layout: Layout, sizes: Mapping[str, Any], *, pool: str = "default", **fields: Any) -> JobSpec:
    """The job.

    Args:
        name: of the job.
        layout: who lies where.
        sizes: arguments of the workers, see :class:`~examples.grpo_tiny.policy.Sizes`.
        pool: to charge.
        fields: further fields of the job.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for component in ORDER:
        together.setdefault(tuple(layout[component]), []).append(component)
    places = {",".join(names): _written(ranks) for ranks, names in together.items()}
    return JobSpec(
        name=name,
        pool=pool,
        components=[
            ComponentSpec(
                each, f"examples.grpo_tiny.workers:{each.capitalize()}", kwargs=dict(sizes), max_concurrency=1
            )
            for each in ORDER
        ],
        placement_config=json.dumps({"cluster": {"component_placement": places}}),
        **fields,
    )


def _written(ranks: Sequence[int]) -> str | dict[str, str]:
    if not ranks:
        return {"node_group": "node", "placement": "0"}
    return f"{ranks[0]}-{ranks[-1]}"


def shares(layout: Layout, one: str, other: str) -> bool:
    """Whether two components have a GPU in common; on CPUs alone everybody has the same ones."""
    return bool(set(layout[one]) & set(layout[other])) or not (layout[one] or layout[other])


@dataclass
class Loop:
    """Iterations of one job.

    Attributes:
        job: the job; it runs.
        layout: its layout.
        sizes: of the model and the batch.
        way: how components use a GPU that they share.
        weight_sync_seconds: how long each iteration's weights were under way.
    """

    job: JobHandle
    layout: Layout
    sizes: Sizes
    way: Way = Way.LEAVING
    weight_sync_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = {each: self.job.workers(each) for each in ORDER}

    async def enter(self, number: int) -> None:
        """Bring every component onto its GPUs: a loop that shared them in another way may have left it elsewhere."""
        await asyncio.gather(*(worker.reload.remote(number) for each in ORDER for worker in self.workers[each]))

    async def iteration(self, number: int) -> tuple[float, float]:
        """(seconds, mean reward) of one iteration."""
        begun = time.perf_counter()
        made, scored = self._coming(), self._coming()
        async with asyncio.TaskGroup() as tasks:
            generated = tasks.create_task(self._rollout(number, made))
            inferred = tasks.create_task(self._inference(number, made, scored, generated))
            if self._takes_turns("actor", "rollout"):
                await generated
            if self._takes_turns("actor", "inference"):
                await inferred
            await self._turn("actor", number)
            actors = self.workers["actor"]
            learned = [
                actors[piece % len(actors)].learn.remote(number, await each) for piece, each in enumerate(scored)
            ]
            await asyncio.gather(*learned)
            rewards = await asyncio.gather(*(actor.step.remote(number) for actor in actors))
        await self._sync()
        await self._leave("actor", number)
        return time.perf_counter() - begun, statistics.fmean(rewards)

    def _coming(self) -> list[asyncio.Future[Any]]:
        """For each piece its reference, as soon as there is one."""
        return [asyncio.get_running_loop().create_future() for _ in range(self.sizes.pieces)]

    async def _rollout(self, number: int, made: list[asyncio.Future[Any]]) -> None:
        await self._turn("rollout", number)
        workers = self.workers["rollout"]

        async def read(rank: int) -> None:
            pieces = range(rank, self.sizes.pieces, len(workers))
            stream = workers[rank].options(stream=True).generate.remote(number, list(pieces))
            last = None
            for piece in pieces:
                # A stream that ends early ends with what went wrong, which those who wait for a piece are told.
                last = await anext(stream, last)
                made[piece].set_result(last)

        await asyncio.gather(*(read(rank) for rank in range(len(workers))))
        await self._leave("rollout", number)

    async def _inference(
        self,
        number: int,
        made: list[asyncio.Future[Any]],
        scored: list[asyncio.Future[Any]],
        generated: asyncio.Task[None],
    ) -> None:
        if self._takes_turns("inference", "rollout"):
            await generated
        await self._turn("inference", number)
        workers = self.workers["inference"]
        for piece, coming in enumerate(made):
            scored[piece].set_result(workers[piece % len(workers)].score.remote(number, await coming))
        await asyncio.gather(*(each.result() for each in scored))
        await self._leave("inference", number)

    async def _turn(self, component: str, number: int) -> None:
        """Returns when the component is on its GPUs."""
        if self._leaves(component):
            await asyncio.gather(*(worker.reload.remote(number) for worker in self.workers[component]))

    async def _leave(self, component: str, number: int) -> None:
        if self._leaves(component):
            await asyncio.gather(*(worker.offload.remote(number) for worker in self.workers[component]))

    async def _sync(self) -> None:
        begun = time.perf_counter()
        weights = self.workers["actor"][0].weights.remote()
        takers = [*self.workers["rollout"], *self.workers["inference"]]
        await asyncio.gather(*(taker.load.remote(weights) for taker in takers))
        self.weight_sync_seconds.append(time.perf_counter() - begun)

    def _takes_turns(self, one: str, other: str) -> bool:
        return self.way is not Way.AT_ONCE and shares(self.layout, one, other)

    def _leaves(self, component: str) -> bool:
        return self.way is Way.LEAVING and any(
            shares(self.layout, component, other) for other in ORDER if other != component
        )


def layout_of(text: str, gpus: int) -> Layout:
    """The layout that a text describes: ``rollout: 0-1; inference,actor: 2-3``; ``all`` is every GPU."""
    found: dict[str, Sequence[int]] = {}
    for part in text.split(";"):
        names, _, ranks = part.partition(":")
        first, _, last = ranks.strip().partition("-")
        numbers = range(gpus) if first == "all" else range(int(first), int(last or first) + 1)
        found |= {name.strip(): numbers for name in names.split(",")}
    if sorted(found) != sorted(ORDER):
        sys.exit(f"--layout names {', '.join(found)}; the components are {', '.join(ORDER)}")
    return found


async def main(arguments: argparse.Namespace) -> None:
    """Submits the job, runs the iterations, ends it."""
    sizes = json.loads(arguments.sizes)
    async with Client() as cb:
        await cb.connect_ray()
        await cb.ensure_pool("default")
        layout = layout_of(arguments.layout, int(ray.cluster_resources().get("GPU", 0)))  # type: ignore[no-untyped-call]
        job = await cb.submit(spec(arguments.name, layout, sizes))
        await job.running(timeout=300)
        loop = Loop(job, layout, Sizes(**sizes), way=Way(arguments.way))
        for number in range(arguments.iterations):
            seconds, mean = await loop.iteration(number)
            print(f"iteration {number}: {seconds:.3f} s, mean reward {mean:.3f}", flush=True)
        await job.complete()
        await job.finished(timeout=60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="rollout,inference,actor: all", help="who gets which GPUs")
    parser.add_argument("--iterations", type=int, default=5, help="how many to run (default: 5)")
    parser.add_argument("--sizes", default="{}", help='JSON: fields of Sizes, such as {"layers": 4}')
    parser.add_argument("--way", choices=list(Way), default=Way.LEAVING, help="how components share a GPU")
    parser.add_argument("--name", default="grpo-tiny", help="name of the job")
    asyncio.run(main(parser.parse_args()))
