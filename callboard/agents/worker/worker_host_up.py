"""The way to a host for a worker: a warm spare, or a cold start."""

from __future__ import annotations

import asyncio

import structlog

from callboard.agents.runtime import Hosted, HostError, Launch
from callboard.agents.worker.worker_order import Site, WorkerOrder

_log = structlog.get_logger(__name__)

NO_SPARE = "no spare ready"
BEGUN = "the node's agent was replaced during the start"


class Bringing:
    """Brings up the host of one worker."""

    def __init__(self, site: Site) -> None:
        self.cold_reason = ""
        """Why no warm spare is used; empty while one is."""
        self.begun_before = False
        """An earlier agent began this start. A host of the worker's own name may be there then: only a launch under
        that name finds it, and a spare would leave it behind."""
        self._site = site
        self._launch: Launch | None = None
        self._spare = ""
        self._task: asyncio.Task[Hosted] | None = None

    @property
    def begun(self) -> bool:
        """Whether a host was asked for."""
        return self._task is not None

    @property
    def host(self) -> asyncio.Task[Hosted]:
        """The host, once it is up; fails with `HostError`."""
        assert self._task is not None
        return self._task

    def begin(self, order: WorkerOrder) -> None:
        """Take a spare, or launch a host."""
        self._task = asyncio.create_task(self._bring_up(order))

    def abandon(self) -> None:
        """Nobody wants the host any more: hurry it to an end."""
        if self._launch is not None:
            self._site.runtime.abandon(self._launch)

    async def settled(self, budget_s: float) -> Hosted | str | None:
        """What came of it: the host, None when there is none, or text when it isn't known within `budget_s`."""
        assert self._task is not None
        await asyncio.wait([self._task], timeout=budget_s)
        if not self._task.done():
            return "its host may still come up"
        return self._task.result() if self._task.exception() is None else None

    def settle_spare(self) -> None:
        """The spare is recorded as the worker now."""
        if self._spare:
            self._site.run_dir.drop("spare", self._spare)
            self._spare = ""

    async def _bring_up(self, order: WorkerOrder) -> Hosted:
        self.cold_reason = order.why_cold or (BEGUN if self.begun_before else "")
        if not self.cold_reason:
            hosted = await self._take_spare()
            if hosted is not None:
                return hosted
        self._launch = order.launch
        await self._site.interpreters.check(order.launch.interpreter)
        return await self._site.runtime.launch(order.launch)

    async def _take_spare(self) -> Hosted | None:
        """A spare; one that is still coming up is as slow as a cold start at worst, and counts as one."""
        spare = self._site.spares.take()
        if spare is None:
            self.cold_reason = NO_SPARE
            return None
        self._launch = spare.launch
        self._spare = spare.launch.name
        if not spare.is_ready:
            self.cold_reason = f"{NO_SPARE}: took the one that was coming up"
        try:
            return await asyncio.shield(spare.host)
        except HostError as error:
            _log.warning("spare_not_made", why=str(error))
            self.cold_reason = f"{NO_SPARE}: {error}"
            self.settle_spare()
            return None
