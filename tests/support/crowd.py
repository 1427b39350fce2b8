"""A controller full of nodes and jobs, without a single agent: what agents would say is said to its driver.

For what has to be looked at in bulk: the web page with a thousand nodes. Everything else has tests with agents.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from callboard.controller.loop.driver import Listener
from callboard.controller.server import Controller
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec, StopPolicy
from callboard.scheduler import Outcome, State
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo, RayInfo
from callboard.scheduler.records.states import StopOutcome

NAMES = ("grpo-7b", "ppo-actor", "reward-model", "rollout", "critic", "eval-math", "sft", "dpo", "env-farm", "distill")
POOLS = (("rlhf", 0.5, "research"), ("agents", 0.25, "research"), ("evals", 0.15, ""), ("interactive", 0.1, ""))


class Crowd(Listener):
    """Nodes and jobs in a running controller."""

    def __init__(self, controller: Controller, *, seed: int = 7) -> None:
        self.driver = controller.driver
        self.chance = random.Random(seed)
        self._owed: list[cmd.Command] = []
        self._jobs = 0
        self.answers = True
        self.largest = 64.0
        """Most GPUs of a job that chance makes."""
        self.driver.subscribe(self)

    # ---- what the driver tells ----

    def deliver(self, commands: Sequence[cmd.Command]) -> None:
        """What agents are owed."""
        self._owed += commands

    # ---- what happens ----

    @property
    def state(self) -> State:
        """The controller's state."""
        return self.driver.state

    async def send(self, kind: type[ev.Event], **fields: Any) -> Outcome:
        """Has an event decided, and what agents answer to it."""
        outcome = await self._ask(kind, fields)
        while self.answers and self._owed:
            owed, self._owed = self._owed, []
            answers = [self._ask(*_answer(command)) for command in owed]
            await asyncio.gather(*answers)
        return outcome

    async def nodes(self, count: int, *, gpus: int = 8, prefix: str = "node-", model: str = "H200") -> None:
        """So many nodes join."""
        joining = [
            self.send(
                ev.NodeJoined,
                node_id=f"{prefix}{rank}",
                instance=f"run-{rank}",
                hostname=f"gpu-{rank:04d}.cluster.example",
                capacity=Resources.parse({"cpu": 16 * gpus, "memory": f"{128 * gpus}GiB", "gpu": gpus}),
                devices=tuple(DeviceInfo(id=str(index), model=model, memory_bytes=141 << 30) for index in range(gpus)),
                ray=RayInfo(gcs_address="10.0.0.1:6379", session="s", ray_node_id=f"{rank:08x}", head=rank == 0),
                labels=(("zone", f"z{rank % 4}"),),
                version="0.1.0",
                ray_version="2.49.0",
                python_version="3.11.7",
            )
            for rank in range(count)
        ]
        await asyncio.gather(*joining)

    async def fill(self, jobs: int, *, gpus: int) -> None:
        """So many jobs: those that fit in so many GPUs run, and the rest waits in a pool that is held back."""
        await self.send(ev.PoolCreated, spec=PoolSpec(name="batch", stop_policy=StopPolicy.HOLD))
        made = 0
        while made < jobs and self.state.cluster_use.used.gpu_milli < gpus * 850:
            made += 20
            await asyncio.gather(*(self.job() for _ in range(20)))
        for start in range(made, jobs, 200):
            await asyncio.gather(*(self.job(pool="batch") for _ in range(min(200, jobs - start))))

    async def pools(self, gpus: int) -> None:
        """The pools, which share so many GPUs."""
        self.largest = max(1, min(64, gpus / 6))
        for name, part, cohort in POOLS:
            quota = (("gpu", max(4, int(gpus * part)) * 1000), ("cpu", max(4, int(gpus * part)) * 16_000))
            groups = PgPoolSpec(enable=True, max_dynamic=10_000)
            await self.send(ev.PoolCreated, spec=PoolSpec(name=name, nominal=quota, cohort=cohort, pg_pool=groups))

    async def job(self, name: str = "", **fields: Any) -> str:
        """A job is submitted; one that chance makes, but for what is stated."""
        self._jobs += 1
        chance = self.chance
        workers = fields.pop("workers", chance.choice((1, 1, 1, 2, 2, 4, 8)))
        each = chance.choice((1, 1, 1, 2, 4, 8, 0.5))
        while workers * each > self.largest:
            workers, each = max(1, workers // 2), max(0.5, each / 2)
        ask = fields.pop("ask", {"gpu": each, "cpu": 8, "memory": "64GiB"})
        kind = chance.choice(NAMES)
        component = ComponentSpec(
            name=fields.pop("component", "trainer"),
            actor="recipes.workers:Trainer",
            min_workers=workers,
            max_workers=workers,
            resources=Resources.parse(ask),
        )
        stated: dict[str, Any] = {
            "name": name or f"{kind}-{self._jobs:05d}",
            "pool": chance.choices([each[0] for each in POOLS], [each[1] for each in POOLS])[0],
            "priority_milli": chance.choice((3000, 5000, 5000, 5000, 7000)),
            "labels": (("owner", chance.choice(("ana", "bo", "chen", "dara"))), ("recipe", kind)),
            "components": (component,),
        }
        outcome = await self.send(ev.JobSubmitted, uid=f"j-{self._jobs:032x}", spec=JobSpec(**(stated | fields)))
        return str(outcome.result)

    async def complete(self, uid: str) -> None:
        """A job ends well."""
        await self.send(ev.JobCompleted, uid=uid, reason="all entries returned")

    async def _ask(self, kind: type[ev.Event], fields: dict[str, Any]) -> Outcome:
        return await self.driver.ask(
            lambda now_ms, cause: kind(now_ms=now_ms, cause=cause, **fields), lambda outcome: outcome, source="crowd"
        )


def _answer(command: cmd.Command) -> tuple[type[ev.Event], dict[str, Any]]:
    """What an agent that meets no trouble says to a command."""
    if isinstance(command, cmd.CreateGroup):
        ray = {"ray_id": f"ray-{command.group_id}", "ray_session": "s"}
        return ev.GroupReady, {"group_id": command.group_id, "attempt": command.attempt} | ray
    if isinstance(command, cmd.RemoveGroup):
        return ev.GroupRemoved, {"group_id": command.group_id}
    if isinstance(command, cmd.ReservePort):
        generation = command.worker.generation
        return ev.PortReserved, {"node_id": command.node_id, "generation": generation, "port": 20_000 + generation}
    if isinstance(command, cmd.StartWorker):
        worker = command.worker
        devices = ",".join(share.id for share in worker.devices)
        started = {"pid": 10_000 + worker.generation, "visible_devices": devices, "start_ms": 900}
        return ev.WorkerStarted, {"node_id": command.node_id, "generation": worker.generation} | started
    ended = {"outcome": StopOutcome.COOPERATIVE}
    return ev.WorkerStopped, {"node_id": command.node_id, "generation": command.generation} | ended
