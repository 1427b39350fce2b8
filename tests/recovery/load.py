"""The load of a cluster under chaos: clients that submit, cancel, cordon and look, and what they were told."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callboard.client.client import Client
from callboard.client.jobs import ENDED
from callboard.security.processes import read_entry
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.wire.enums import text_of
from callboard.wire.refusals import DeadlineExceeded, NotFound, Unavailable, WrongState
from tests.recovery.programs import Violation

MOST_LIVE = 14
"""Jobs that have not ended; with more, the next operation cancels one."""


@dataclass
class Acknowledged:
    """What the clients were told has happened.

    Attributes:
        jobs: name → uid of every job that was submitted.
        unsure: names of jobs whose submission was not answered.
        cancelled: names of jobs whose cancellation was acknowledged.
        ended: name → state and revision of jobs that were seen at their end.
        pools: names of pools that were made.
        cordoned: whether the node n1 was cordoned last; None: that was not answered.
        revision: the highest that was seen.
    """

    jobs: dict[str, str] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    ended: dict[str, tuple[str, int]] = field(default_factory=dict)
    pools: set[str] = field(default_factory=set)
    cordoned: bool | None = False
    revision: int = 0


class Load:
    """What clients do, drawn from chance.

    Attributes:
        told: what they were told.
        counts: operations, and those that were not answered.
    """

    def __init__(self, folder: Path, first: Client, *, seed: int, families: bool) -> None:
        """
        Args:
            folder: where workers lock devices.
            first: the client that cordons: of two, the last would not be known.
            seed: of chance.
            families: whether workers start processes that outlive them.
        """
        self.told = Acknowledged()
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._first = first
        self._seed = seed
        self._families = families
        self._numbers = iter(range(1_000_000_000))

    async def work(self, client: Client, chance: random.Random, over: asyncio.Event) -> None:
        """One client's operations, one after the other, until it is over."""
        while not over.is_set():
            operation = chance.choices(
                (self._submit, self._cancel, self._look, self._make_pool, self._cordon), (10, 5, 3, 1, 1)
            )[0]
            if len(self.told.jobs) - len(self.told.ended) > MOST_LIVE:
                operation = self._cancel
            try:
                await operation(client, chance)
                self.counts["operations"] += 1
            except (Unavailable, DeadlineExceeded):
                self.counts["unanswered"] += 1
            except NotFound:
                self.counts["asked_too_early"] += 1  # a standby, just after its leader ended; looked for once at rest
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), chance.uniform(0.02, 0.3))

    async def _submit(self, client: Client, chance: random.Random) -> None:
        name = f"j{next(self._numbers)}"
        gpu = chance.choice((0.5, 1, 1, 2))
        then = chance.choice(("", "", "", "end", "die", "fail", "hang"))
        kwargs = {
            "folder": str(self._folder),
            "then": then,
            "family": chance.random() < 0.3 and self._families,
            "gpu": gpu,
        }
        component = {
            "name": "w",
            "actor": "tests.support.actors:Holder",
            "entry": "run",
            "kwargs": kwargs,
            "workers": chance.choice((1, 1, 2)) if gpu <= 1 else 1,
            "resources": {"cpu": 1, "gpu": gpu},
        }
        self.told.unsure.add(name)
        job = await client.submit(
            {
                "name": name,
                "pool": "p",
                "priority": chance.randrange(10),
                "components": [component],
                "wait_for_nodes": "1h",
                "restart": {"max_restarts": chance.choice((0, 50))},
            },
            request_id=f"{self._seed}-{name}",
        )
        self.told.jobs[name] = job.job.uid
        self.told.unsure.discard(name)

    async def _cancel(self, client: Client, chance: random.Random) -> None:
        alive = sorted(set(self.told.jobs) - set(self.told.ended) - self.told.cancelled)
        if not alive:
            return
        name = chance.choice(alive)
        job = await client.get_job(self.told.jobs[name])
        self.see(job.job)
        if job.state not in ENDED:
            with suppress(WrongState):
                await job.cancel()
            self.told.cancelled.add(name)

    async def _look(self, client: Client, chance: random.Random) -> None:
        for job in await client.list_jobs():
            self.see(job)

    async def _make_pool(self, client: Client, chance: random.Random) -> None:
        name = f"pool-{chance.randrange(50)}"
        await client.ensure_pool(name)
        self.told.pools.add(name)

    async def _cordon(self, client: Client, chance: random.Random) -> None:
        if client is not self._first:
            return
        wanted = chance.random() < 0.4
        self.told.cordoned = None
        try:
            await (client.cordon_node("n1") if wanted else client.uncordon_node("n1"))
            self.told.cordoned = wanted
        except (WrongState, NotFound):
            pass

    def see(self, job: Job) -> None:
        """A job as it was answered.

        Raises:
            Violation: it had ended, and has not any more.
        """
        name, state = job.spec.name, text_of(job)
        before, revision = self.told.ended.get(name, (state, 0))
        # Answers may overtake each other: an older one says nothing.
        if job.revision >= revision and before != state:
            raise Violation(f"job {name} was {before} at {revision} and is {state} at {job.revision}")
        if state in ENDED:
            self.told.ended[name] = (state, job.revision)

    def held(self) -> list[dict[str, Any]]:
        """What workers wrote about themselves."""
        with suppress(FileNotFoundError):
            lines = (self._folder / "held").read_bytes().split(b"\n")
            return [json.loads(line) for line in lines[:-1]]
        return []


def ready(jobs: list[Job]) -> Iterator[Worker]:
    for job in jobs:
        for worker in job.workers:
            if worker.state == WorkerState.WORKER_STATE_READY:
                yield worker


def lives(entry: Mapping[str, Any]) -> bool:
    found = read_entry(entry["pid"])
    return found is not None and not found.gone and found.id.start_ticks == entry["started"]


def unlike(jobs: list[Job], held: list[dict[str, Any]]) -> str:
    """How what the controller says runs differs from what runs; empty: not at all."""
    said = {
        (
            worker.pid,
            worker.allocation.node_id,
            tuple(sorted(share.id for share in worker.allocation.devices)),
            worker.generation,
        )
        for worker in ready(jobs)
    }
    real = {
        (entry["pid"], entry["node"], tuple(sorted(entry["devices"])), int(entry["who"][3]))
        for entry in held
        if lives(entry)
    }
    if said == real:
        return ""
    return f"only the controller knows {sorted(said - real)}, only the machine {sorted(real - said)}"
