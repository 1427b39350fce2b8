"""How long does callboard take, from a submit to the worker's first answer?

Every function measures once, in milliseconds, and leaves the cluster as it found it.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.local import Local
from callboard.client.jobs import JobHandle

CANCEL_TIMEOUT_MS = 500
KILL_TIMEOUT_MS = 3000

WORKERS = "benchmarks.latency_workers"


@dataclass
class Ours:
    """Measures through the controller and the client, as a trainer would."""

    local: Local
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def prepare(self) -> None:
        """Pools for each case: without placement groups, dynamic, and one that keeps a group for the only device."""
        client = self.local.client
        await client.set_policy(
            {"cancel_timeout": CANCEL_TIMEOUT_MS / 1000, "kill_timeout": KILL_TIMEOUT_MS / 1000},
        )
        await client.ensure_pool("plain", nominal={"gpu": 1})
        await client.ensure_pool("dynamic", nominal={"gpu": 1}, pg_pool={"max_dynamic": 1})
        # A group that is about, though idle, is what keeps spares ready between the jobs.
        reserved = {"reserved": [{"cpu": 1, "gpu": 1}], "max_dynamic": 1}
        await client.ensure_pool("reserved", nominal={"gpu": 1}, pg_pool=reserved)

    async def cold(self) -> float:
        """No group, no spare: an interpreter is named, and it is the agent's own."""
        return await self._start_and_end("plain", interpreter=sys.executable)

    async def dynamic(self) -> float:
        """A group is made for it; a spare is there."""
        await self.local.spare_ready()
        return await self._start_and_end("dynamic", destroy=True)

    async def reused(self) -> float:
        """The group of an earlier job is kept, and a spare is there."""
        await self.local.spare_ready()
        return await self._start_and_end("dynamic")

    async def reserved(self) -> float:
        """A reserved group is idle, and a spare is there."""
        await self.local.spare_ready()
        return await self._start_and_end("reserved", priority=9)

    async def preempt(self, victim: str) -> float:
        """The only device is taken by `victim` ("Cooperative" or "Hanging"), which has to yield."""
        await self.local.spare_ready()
        loser = await self.local.client.submit(self.spec("dynamic", victim, entry="run", on_preempt="cancel"))
        await loser.running(60)
        await self.local.spare_ready()
        took_ms, winner = await self._start("dynamic", priority=9)
        await loser.finished(60)
        await self._end(winner)
        return took_ms

    def spec(self, pool: str, actor: str, *, priority: float = 5, entry: str = "", **fields: Any) -> dict[str, Any]:
        """A job of one worker with the only device of its pool."""
        component = {"name": "w", "actor": f"{WORKERS}:{actor}", "resources": {"cpu": 1, "gpu": 1}}
        if entry:
            component["entry"] = entry
        if "interpreter" in fields:
            component["interpreter"] = fields.pop("interpreter")
        name = f"bench-{next(self.numbers)}"
        return {"name": name, "pool": pool, "priority": priority, "components": [component], **fields}

    async def _start_and_end(self, pool: str, *, destroy: bool = False, **fields: Any) -> float:
        took_ms, job = await self._start(pool, **fields)
        await self._end(job, destroy=destroy)
        return took_ms

    async def _start(self, pool: str, **fields: Any) -> tuple[float, JobHandle]:
        spec = self.spec(pool, "Echo", **fields)
        began = time.perf_counter()
        job = await self.local.client.submit(spec)
        await job.running(60)
        assert await job.workers()[0].method("echo").remote(7) == 7
        took_ms = (time.perf_counter() - began) * 1000
        expected = "interpreter" not in fields
        (worker,) = job.job.workers
        assert worker.warm is expected, f"a start was {'cold' if expected else 'warm'}: {worker.cold_reason}"
        return took_ms, job

    async def _end(self, job: JobHandle, *, destroy: bool = False) -> None:
        await job.cancel(destroy_placement_groups=destroy)
        await job.finished(60)
