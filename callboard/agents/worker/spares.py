"""Spares: worker hosts that wait ready for a start.

A spare is a generic worker host that has imported nothing of a user's, or the modules that a pool preloads
(`preloads`). A start takes one and makes it its worker: a host serves one job and ends with it (PG-20). What is taken
is made again, never while a start is under way on the node: making one costs about half a second of a CPU, and starts
come first. Plain ones are made one at a time; those that import modules take seconds, so several are made at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.host.framing import Json
from callboard.agents.runtime import Hosted, HostError, Launch, Runtime
from callboard.agents.supplies.interpreters import Interpreters
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import answer_within, cancelled
from callboard.agents.worker.preloads import PLAIN, Kind, Modules, Preloads, Wish, difference
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.processes import ProcessId
from callboard.v1 import common_pb2

_log = structlog.get_logger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 1.0, 60.0
"""Between attempts after a spare could not be made. Starts work without: nothing is urgent."""

_QUIET_S = 0.25
"""After a start, before its spare is made again: the worker's first calls come first too. Far below what a spare takes
to come up, so it hardly adds to how long the node has none."""

_END_S = 5.0
"""For the end of a spare, which runs nothing that could resist."""

_IMPORT_S = 180.0
"""For the import of all modules of a preload: ten times what large ones take."""

MAX_KEPT = 64
"""Spares of one kind."""

_UNKNOWN = Kind(("?",))
"""Of a spare that an earlier agent made with modules: under which variables isn't recorded, so that it suits nobody."""


@dataclass(eq=False)
class Spare:
    """A host that is ready, or coming up.

    Attributes:
        launch: what it was launched with.
        modules: what it imports before; None: not known.
        importing: the host while it imports.
    """

    launch: Launch
    host: asyncio.Future[Hosted]
    modules: Modules | None = ()
    importing: Hosted | None = None

    @property
    def is_ready(self) -> bool:
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
        preload_bytes: int = 0,
        at_once: int = 1,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            prefix: of their names; unique for this run of the agent, because Ray remembers names of what just ended.
            variables: environment of a host before it has a job.
            preload_bytes: memory that all spares with modules may take together.
            at_once: how many of those are made at one time.
            on_change: called when modules are refused.
        """
        self._runtime = runtime
        self._run_dir = run_dir
        self._processes = processes
        self._prefix = prefix
        self._variables = variables
        self._preload_bytes = preload_bytes
        self._at_once = at_once
        self._on_change = on_change
        self._preloads = Preloads(variables)
        self._preload_backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        self._pausing = 0
        """Failed attempts at a spare with modules, after each of which none is made for a while."""
        self._numbers = itertools.count(1)
        # None: not told yet. What an earlier agent made is neither added to nor ended until then.
        self._target: int | None = None
        self._spares: list[Spare] = []
        self._starts = 0
        self._quiet_from = 0.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def aim(self, count: int, preloads: Sequence[Sequence[str]] = ()) -> None:
        """Keep so many from now on, and at least as many for each list of modules."""
        self._target = count
        self._preloads.ask(preloads if count else ())
        self._changed.set()

    def states(self) -> list[common_pb2.PreloadState]:
        """What became of each list of modules."""
        ready = Counter(spare.modules for spare in self._spares if spare.is_ready)
        preloads = self._preloads
        return [
            common_pb2.PreloadState(
                modules=modules,
                ready=ready[modules],
                memory_bytes=ready[modules] * preloads.bytes.get(modules, 0),
                refused=preloads.refused.get(modules, ""),
            )
            for modules in preloads.lists
        ]

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

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A start that is under way waits for something long: what is made meanwhile is beside nothing."""
        self._starts -= 1
        self._changed.set()
        try:
            yield
        finally:
            self._starts += 1

    def take(self, wish: Wish | None = None) -> tuple[Spare | None, str]:
        """A spare for a start, ready or coming up; None when there is none. It is the taker's from now on. Also why it
        isn't one with the modules that are wished for; empty: it is, or none are."""
        missed = ""
        if wish is not None:
            found = self._suiting(wish)
            if isinstance(found, Spare):
                self._spares.remove(found)
                return found, ""
            missed = found
        plain = [each for each in self._spares if each.modules == ()]
        ready = [each for each in plain if each.is_ready]
        coming = [each for each in plain if not each.host.done()]
        spare = next(iter([*ready, *coming]), None)
        if spare is not None:
            self._spares.remove(spare)
        return spare, missed

    def _suiting(self, wish: Wish) -> Spare | str:
        """A spare that is ready with the modules wished for, or why there is none."""
        kind = self._preloads.suits(wish, asyncio.get_running_loop().time())
        if isinstance(kind, str):
            return kind
        ready = [each for each in self._spares if each.modules == wish.modules and each.is_ready]
        suiting = next((each for each in ready if self._kind(each) == kind), None)
        if suiting is None and ready:
            return f"spares with these modules were made with other values of {difference(kind, self._kind(ready[0]))}"
        return suiting or "no spare with these modules is ready"

    def _kind(self, spare: Spare) -> Kind:
        if spare.modules is None:
            return _UNKNOWN
        return self._preloads.kind(spare.modules, spare.launch.variables) if spare.modules else PLAIN

    def adopt(self, launch: Launch, hosted: Hosted, *, preloaded: bool = False) -> None:
        """Go on with a spare that an earlier agent made. One with modules suits nobody, and is ended."""

        # Done at once, and no task that has yet to run: its process may be gone, and what notices that may run first.
        host: asyncio.Future[Hosted] = asyncio.get_running_loop().create_future()
        host.set_result(hosted)
        spare = Spare(launch, host, None if preloaded else ())
        self._spares.append(spare)
        self._watch(spare, hosted.process)

    def adopt_unfinished(self, name: str, *, preloaded: bool = False) -> None:
        """An earlier agent was killed while it made this one: find out what came of it by making it again."""
        spare = self._launch(name, PLAIN)
        spare.modules = None if preloaded else ()
        self._track(self._come_up(spare))

    def wake(self) -> None:
        """What hosts them is there now."""
        self._changed.set()

    async def keep(self) -> None:
        """Make and end spares as needed; runs until cancelled."""
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            self._changed.clear()
            await self._end(self._surplus())
            lacking = self._lacking()
            if self._starts or not lacking:
                await self._changed.wait()
            elif (noisy_s := self._quiet_from - asyncio.get_running_loop().time()) > 0:
                await answer_within(self._changed.wait(), noisy_s)
            elif lacking != [PLAIN]:
                # Beside everything else: they take seconds, and a plain one that is taken meanwhile is missed more.
                for kind in lacking:
                    self._launch_beside(kind)
            elif await self._come_up(self._begun(PLAIN)):
                backoff.reset()
            else:
                await answer_within(self._changed.wait(), backoff.next_s())

    async def close(self) -> None:
        """End all of them; nothing is made any more."""
        self.aim(0)
        await self._processes_end([each.importing for each in self._spares if each.importing is not None])
        coming = [each.host for each in self._spares if not each.host.done()]
        for spare in self._spares:
            if not spare.host.done():
                self._runtime.abandon(spare.launch)
        if coming:
            await asyncio.wait(coming, timeout=_END_S)
        await self._end(self._spares)
        await cancelled(self._tasks)

    # Making and ending.

    def _wanted(self) -> dict[Kind, int]:
        if not self._target:
            return {}
        return {PLAIN: self._target, **self._preloads.wanted(self._target, MAX_KEPT)}

    def _lacking(self) -> list[Kind]:
        """Kinds of the spares to be made next, beside each other: a plain one, or several with modules."""
        there = Counter(map(self._kind, self._spares))
        missing = Counter(self._wanted())
        missing.subtract(there)
        if missing[PLAIN] > 0:
            return [PLAIN]
        lacking: list[Kind] = []
        if self._pausing:
            return lacking
        at_once = self._at_once - sum(bool(spare.modules) and not spare.host.done() for spare in self._spares)
        room = self._preload_bytes - sum(self._bytes(spare.modules) for spare in self._spares)
        for kind, count in missing.items():
            for _ in range(count):
                # Of modules that were never imported here one tells how much they take.
                known = kind.modules in self._preloads.bytes
                if (
                    len(lacking) >= at_once
                    or room < self._bytes(kind.modules)
                    or (not known and there[kind] + lacking.count(kind))
                ):
                    break
                room -= self._bytes(kind.modules)
                lacking.append(kind)
        return lacking

    def _launch_beside(self, kind: Kind) -> None:
        """Begin to make a spare with modules."""
        spare = self._begun(kind)

        async def make() -> None:
            if await self._come_up(spare):
                self._preload_backoff.reset()
            else:
                self._pausing += 1
                await asyncio.sleep(self._preload_backoff.next_s())
                self._pausing -= 1
            self._changed.set()

        self._track(make())

    def _bytes(self, modules: Modules | None) -> int:
        return self._preloads.bytes.get(modules or (), 0)

    def _surplus(self) -> list[Spare]:
        if self._target is None:
            return []
        left, surplus = Counter(self._wanted()), []
        for spare in self._spares:
            if spare.is_ready:
                left[self._kind(spare)] -= 1
                if left[self._kind(spare)] < 0:
                    surplus.append(spare)
        return surplus

    def _begun(self, kind: Kind) -> Spare:
        name = f"{self._prefix}-{next(self._numbers)}"
        self._run_dir.put(Started("spare", None, name, _facts(kind.modules)))
        return self._launch(name, kind)

    def _launch(self, name: str, kind: Kind) -> Spare:
        variables = self._preloads.variables_of(kind) if kind.modules else self._variables
        launch = Launch(name, sys.executable, variables)
        spare = Spare(launch, asyncio.get_running_loop().create_future(), kind.modules)
        spare.host = asyncio.create_task(self._runtime.launch(launch) if not kind.modules else self._preload(spare))
        self._spares.append(spare)
        return spare

    async def _preload(self, spare: Spare) -> Hosted:
        """Bring a host up and have it import its modules.

        Raises:
            HostError: it can't be used; nothing of it is left.
        """
        modules = spare.modules
        assert modules
        hosted = spare.importing = await self._runtime.launch(spare.launch)
        answer: Json = {"read": [], "bytes": 0}
        argument = {"modules": list(modules), "variables": dict(spare.launch.variables)}
        try:
            async with asyncio.timeout(_IMPORT_S):
                answer = await hosted.control("preload", argument)
            why = "" if answer["ok"] else answer["why"]
        except TimeoutError:
            why = f"importing them took more than {_IMPORT_S:g} s"
        except HostError as error:
            why = f"importing them ended the process: {error}"
        if not why:
            self._preloads.learn(modules, answer["read"], answer["bytes"])
            why = self._preloads.refused.get(modules, "")
            if answer["bytes"] > self._preload_bytes:
                why = (
                    f"a spare with them takes {answer['bytes'] >> 20} MiB, and all together may take "
                    f"{self._preload_bytes >> 20} MiB (--preload-memory)"
                )
        spare.importing = None
        if not why:
            return hosted
        if await self._processes_end([hosted]):
            hosted.release()
        if self._target and modules not in self._preloads.refused:
            self._preloads.refused[modules] = why
        if self._target:
            _log.warning("preload_refused", modules=list(modules), why=why)
            self._on_change()
        raise HostError(why)

    async def _processes_end(self, hosts: Sequence[Hosted]) -> bool:
        end = await self._processes.end_roots([each.process for each in hosts], budget_s=_END_S) if hosts else None
        return end is None or end.gone

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
            if spare.modules and spare.modules in self._preloads.refused:
                return True
            _log.warning("spare_not_made", why=str(error))
            return False
        facts = {"address": hosted.address, **_facts(spare.modules)}
        self._run_dir.put(Started("spare", hosted.process, name, facts))
        self._watch(spare, hosted.process)
        _log.info("spare_ready", pid=hosted.process.pid, **_facts(spare.modules))
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


def _facts(modules: Modules | None) -> dict[str, Any]:
    """What its record says of the modules of a spare."""
    return {"preload": list(modules)} if modules else {}


NO_SPARE = "no spare ready"
BEGUN = "the node's agent was replaced during the start"


@dataclass(eq=False)
class Bringing:
    """Brings up the host of one worker."""

    runtime: Runtime
    run_dir: RunDir
    spares: Spares
    interpreters: Interpreters
    cold_reason: str = ""
    """Why no warm spare is used; empty while one is."""
    preloaded: bool = False
    """Whether the spare had imported what was wished for."""
    preload_missed: str = ""
    """Why it hadn't; empty: it had, or nothing was."""
    begun_before: bool = False
    """An earlier agent began this start. A host of the worker's own name may be there then: only a launch under
    that name finds it, and a spare would leave it behind."""
    host: asyncio.Task[Hosted] | None = None
    """The host, once one was asked for and is up; fails with `HostError`."""
    _launch: Launch | None = None
    _spare: str = ""

    @property
    def told(self) -> dict[str, bool | str]:
        """How the start was served, as the fields of `WorkerReady`."""
        return {
            "warm": not self.cold_reason,
            "cold_reason": self.cold_reason,
            "preloaded": self.preloaded,
            "preload_missed": self.preload_missed,
        }

    def begin(self, launch: Launch, why_cold: str, wish: Wish | None = None) -> asyncio.Task[Hosted]:
        """Take a spare, unless `why_cold` says why none can do, or launch a host."""
        self.host = asyncio.create_task(self._bring_up(launch, why_cold, wish))
        return self.host

    def abandon(self) -> None:
        """Nobody wants the host any more: hurry it to an end."""
        if self._launch is not None:
            self.runtime.abandon(self._launch)

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
            self.run_dir.drop("spare", self._spare)
            self._spare = ""

    async def _bring_up(self, launch: Launch, why_cold: str, wish: Wish | None) -> Hosted:
        self.cold_reason = why_cold or (BEGUN if self.begun_before else "")
        if not self.cold_reason:
            hosted = await self._take_spare(wish)
            if hosted is not None:
                return hosted
        elif wish is not None:
            self.preload_missed = self.cold_reason
        if self.begun_before:
            # Not checked: whatever came of that, what was launched must be found, or nobody would end it.
            launch = replace(launch, again=True)
        else:
            await self.interpreters.check(launch.interpreter, launch.early)
        self._launch = launch
        return await self.runtime.launch(launch)

    async def _take_spare(self, wish: Wish | None) -> Hosted | None:
        """A spare; one that is still coming up is as slow as a cold start at worst, and counts as one."""
        spare, self.preload_missed = self.spares.take(wish)
        self.preloaded = spare is not None and bool(spare.modules)
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
