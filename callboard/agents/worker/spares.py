"""Spares: worker hosts that wait ready for a start.

A spare is a generic worker host that has imported nothing of a user's. A start takes one and makes it its worker: a
host serves one job and ends with it (PG-20). What is taken is made again, one at a time and never while a start is
under way on the node: making one costs about half a second of a CPU, and starts come first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.runtime import Hosted, HostError, Launch, Runtime
from callboard.agents.system.process_tree import ProcessId
from callboard.agents.system.processes import Processes
from callboard.agents.worker.interpreters import Interpreters
from callboard.model.durations import Backoff

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 1.0, 60.0
"""Between attempts after a spare could not be made. Starts work without: nothing is urgent."""

_QUIET_S = 0.25
"""After a start, before its spare is made again: the worker's first calls come first too. Far below what a spare takes
to come up, so it hardly adds to how long the node has none."""

_END_S = 5.0
"""For the end of a spare, which runs nothing that could resist."""


@dataclass(frozen=True)
class Spare:
    """A host that is ready, or coming up."""

    launch: Launch
    host: asyncio.Future[Hosted]

    @property
    def is_ready(self) -> bool:
        """Whether it is up."""
        return self.host.done() and not self.host.cancelled() and self.host.exception() is None


class Spares:
    """The spares of one node."""

    def __init__(
        self,
        runtime: Runtime,
        run_dir: RunDir,
        processes: Processes,
        *,
        prefix: str,
        variables: Mapping[str, str],
    ) -> None:
        """
        Args:
            runtime: hosts them.
            run_dir: where they are recorded.
            processes: ends them.
            prefix: of their names; unique for this run of the agent, because Ray remembers names of what just ended.
            variables: environment of a host before it has a job.
        """
        self._runtime = runtime
        self._run_dir = run_dir
        self._processes = processes
        self._prefix = prefix
        self._variables = variables
        self._numbers = itertools.count(1)
        # None: not told yet. What an earlier agent made is neither added to nor ended until then.
        self._target: int | None = None
        self._spares: list[Spare] = []
        self._starts = 0
        self._quiet_from = 0.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def aim(self, count: int) -> None:
        """Keep so many from now on."""
        self._target = count
        self._changed.set()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A start is under way: nothing is made beside it."""
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1
            self._quiet_from = asyncio.get_running_loop().time() + _QUIET_S
            self._changed.set()

    def take(self) -> Spare | None:
        """A spare for a start, ready or coming up; None when there is none. It is the taker's from now on."""
        ready = [each for each in self._spares if each.is_ready]
        coming = [each for each in self._spares if not each.host.done()]
        spare = next(iter([*ready, *coming]), None)
        if spare is not None:
            self._spares.remove(spare)
        return spare

    def adopt(self, launch: Launch, hosted: Hosted) -> None:
        """Go on with a spare that an earlier agent made."""

        # Done at once, and no task that has yet to run: its process may be gone, and what notices that may run first.
        host: asyncio.Future[Hosted] = asyncio.get_running_loop().create_future()
        host.set_result(hosted)
        spare = Spare(launch, host)
        self._spares.append(spare)
        self._watch(spare, hosted.process)

    def adopt_unfinished(self, name: str) -> None:
        """An earlier agent was killed while it made this one: find out what came of it by making it again."""
        self._track(self._come_up(self._launch(name)))

    def wake(self) -> None:
        """What hosts them is there now."""
        self._changed.set()

    async def keep(self) -> None:
        """Make and end spares as needed; runs until cancelled."""
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            self._changed.clear()
            await self._end(self._surplus())
            if self._starts or len(self._spares) >= (self._target or 0):
                await self._changed.wait()
            elif (noisy_s := self._quiet_from - asyncio.get_running_loop().time()) > 0:
                await self._change_within(noisy_s)
            elif await self._make():
                backoff.reset()
            else:
                await self._change_within(backoff.next_s())

    async def close(self) -> None:
        """End all of them; nothing is made any more."""
        self._target = 0
        coming = [each.host for each in self._spares if not each.host.done()]
        for spare in self._spares:
            if not spare.host.done():
                self._runtime.abandon(spare.launch)
        if coming:
            await asyncio.wait(coming, timeout=_END_S)
        await self._end(self._spares)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _change_within(self, seconds: float) -> None:
        waiting = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait([waiting], timeout=seconds)
        waiting.cancel()

    # Making and ending.

    def _surplus(self) -> list[Spare]:
        ready = [each for each in self._spares if each.is_ready]
        return [] if self._target is None else ready[self._target :]

    async def _make(self) -> bool:
        name = f"{self._prefix}-{next(self._numbers)}"
        self._run_dir.put(Started("spare", None, name))
        return await self._come_up(self._launch(name))

    def _launch(self, name: str) -> Spare:
        launch = Launch(name, sys.executable, self._variables)
        spare = Spare(launch, asyncio.create_task(self._runtime.launch(launch)))
        self._spares.append(spare)
        return spare

    async def _come_up(self, spare: Spare) -> bool:
        name = spare.launch.name
        await asyncio.wait([spare.host])
        if spare not in self._spares:
            return True  # A start took it meanwhile.
        try:
            hosted = spare.host.result()
        except HostError as error:
            self._spares.remove(spare)
            self._run_dir.drop("spare", name)
            _log.warning("spare_not_made", why=str(error))
            return False
        self._run_dir.put(Started("spare", hosted.process, name, {"address": hosted.address}))
        self._watch(spare, hosted.process)
        _log.info("spare_ready", pid=hosted.process.pid)
        return True

    def _watch(self, spare: Spare, process: ProcessId) -> None:
        self._track(self._notice_end(spare, process))

    def _track(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notice_end(self, spare: Spare, process: ProcessId) -> None:
        await self._processes.exited(process)
        if spare in self._spares:
            self._spares.remove(spare)
            _log.warning("spare_ended", pid=process.pid)
            self._forget(spare)
            self._changed.set()

    async def _end(self, spares: Iterable[Spare]) -> None:
        ending = [each for each in spares if each.is_ready]
        self._spares = [each for each in self._spares if each not in ending]
        if not ending:
            return
        end = await self._processes.end_roots([each.host.result().process for each in ending], budget_s=_END_S)
        for spare in ending:
            if spare.host.result().process not in end.left:
                self._forget(spare)

    def _forget(self, spare: Spare) -> None:
        spare.host.result().release()
        self._run_dir.drop("spare", spare.launch.name)


NO_SPARE = "no spare ready"
BEGUN = "the node's agent was replaced during the start"


class Bringing:
    """Brings up the host of one worker."""

    def __init__(self, runtime: Runtime, run_dir: RunDir, spares: Spares, interpreters: Interpreters) -> None:
        self.cold_reason = ""
        """Why no warm spare is used; empty while one is."""
        self.begun_before = False
        """An earlier agent began this start. A host of the worker's own name may be there then: only a launch under
        that name finds it, and a spare would leave it behind."""
        self._runtime = runtime
        self._run_dir = run_dir
        self._spares = spares
        self._interpreters = interpreters
        self._launch: Launch | None = None
        self._spare = ""
        self.host: asyncio.Task[Hosted] | None = None
        """The host, once one was asked for and is up; fails with `HostError`."""

    def begin(self, launch: Launch, why_cold: str) -> asyncio.Task[Hosted]:
        """Take a spare, unless `why_cold` says why none can do, or launch a host."""
        self.host = asyncio.create_task(self._bring_up(launch, why_cold))
        return self.host

    def abandon(self) -> None:
        """Nobody wants the host any more: hurry it to an end."""
        if self._launch is not None:
            self._runtime.abandon(self._launch)

    async def settled(self, budget_s: float) -> Hosted | str | None:
        """What came of it: the host, None when there is none, or text when it isn't known within `budget_s`."""
        if self.host is None:
            return None
        await asyncio.wait([self.host], timeout=budget_s)
        if not self.host.done():
            return "its host may still come up"
        return self.host.result() if self.host.exception() is None else None

    def settle_spare(self) -> None:
        """The spare is recorded as the worker now."""
        if self._spare:
            self._run_dir.drop("spare", self._spare)
            self._spare = ""

    async def _bring_up(self, launch: Launch, why_cold: str) -> Hosted:
        self.cold_reason = why_cold or (BEGUN if self.begun_before else "")
        if not self.cold_reason:
            hosted = await self._take_spare()
            if hosted is not None:
                return hosted
        self._launch = launch
        await self._interpreters.check(launch.interpreter)
        return await self._runtime.launch(launch)

    async def _take_spare(self) -> Hosted | None:
        """A spare; one that is still coming up is as slow as a cold start at worst, and counts as one."""
        spare = self._spares.take()
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
