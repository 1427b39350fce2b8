"""The start of a worker: predecessor gone, host up, assignment answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from callboard.agents.host.framing import Json
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.worker.worker_facts import WorkerFacts
from callboard.agents.worker.worker_record import Stage
from callboard.agents.worker.worker_reports import NotStarted
from callboard.agents.worker.worker_signals import First
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

_SIGNALLED = 128
"""Exit code of a command that a signal ended, less its number."""

_EXIT_SETTLE_S = 1.0
"""The socket of a dying process closes before its pidfd says so; a host that hangs up without dying is broken."""

_LAST_QUESTION_S = 1.0
"""For a process that was given up to say what it was at."""


class Predecessor(Protocol):
    """An older generation of the worker."""

    gone: asyncio.Event


class WorkerStart:
    """The start of one worker. On a problem, whoever asked for it ends what there is."""

    def __init__(self, facts: WorkerFacts, predecessor: Predecessor | None) -> None:
        self._facts = facts
        self._predecessor = predecessor

    async def run(self) -> NotStarted | None:
        """Bring the worker up; returns why it could not be, or None once it is ready and that is reported."""
        facts = self._facts
        # The bound counts from the command, so that the controller's own deadline can be set above it.
        deadline = facts.order.received_at + facts.order.command.start_timeout_ms / 1000
        with facts.site.spares.starting():
            try:
                return (
                    await self._succeed(deadline)
                    or await self._fence(deadline)
                    or await self._unpack(deadline)
                    or await self._bring_up(deadline)
                    or await self._assign(deadline)
                )
            except HostError as error:
                await asyncio.wait([facts.signals.over], timeout=_EXIT_SETTLE_S if facts.process else 0)
                if facts.signals.over.done():
                    return facts.cut_short(First.EXIT, "it was constructed")
                return NotStarted(agent_pb2.START_FAILURE_HOST, str(error))

    def tell_ready(self) -> None:
        """Report that it is ready, for the first time or again."""
        facts = self._facts
        assert facts.process is not None
        facts.reports.ready(
            pid=facts.process.pid,
            pid_start_ms=facts.site.processes.start_ms(facts.process),
            actor_name=facts.hosted.actor_name if facts.hosted is not None else "",
            hooks=sorted(facts.hooks),
            **facts.told,
        )

    def watch_entry(self) -> None:
        """Begin its entry method, if it has one and that hasn't begun, and report its end."""
        if self._facts.order.command.entry and self._facts.hosted is not None:
            self._facts.signals.watch(self._report_entry(self._facts.hosted))

    async def _succeed(self, deadline: float) -> NotStarted | None:
        if self._predecessor is not None:
            gone = asyncio.ensure_future(self._predecessor.gone.wait())
            first = await self._facts.signals.first(gone, deadline=deadline)
            if first is not First.WORK:
                gone.cancel()
                return self._facts.cut_short(first, "its older generation was gone")
            self._predecessor = None
        return None

    async def _fence(self, deadline: float) -> NotStarted | None:
        """No code of a strict job runs without a lease, nor before somebody besides this agent sees to its end (R5)."""
        facts = self._facts
        if facts.order.command.strict:
            for wait, what in (
                (facts.site.fence.watching, "the node's fence watched"),
                (facts.site.lease.held, "the node's lease was renewed"),
            ):
                waiting = asyncio.ensure_future(wait())
                first = await facts.signals.first(waiting, deadline=deadline)
                if first is not First.WORK:
                    waiting.cancel()
                    return facts.cut_short(first, what)
        return None

    async def _unpack(self, deadline: float) -> NotStarted | None:
        """The code that it brings along is there before its process is."""
        facts = self._facts
        package, folder = facts.order.command.working_dir, facts.order.plan and facts.order.plan["working_dir"]
        if not package or not folder or facts.hosted is not None:
            return None
        assert facts.site.packages is not None, "a node without packages was given code"
        unpacking = asyncio.ensure_future(facts.site.packages.unpack(package, Path(folder)))
        first = await facts.signals.first(unpacking, deadline=deadline)
        if first is not First.WORK:
            unpacking.cancel()
            return facts.cut_short(first, "its code was there")
        unpacking.result()
        return None

    async def _bring_up(self, deadline: float) -> NotStarted | None:
        facts = self._facts
        if facts.hosted is not None:
            return None
        if (cut := facts.signals.came) is not None:
            return facts.cut_short(cut, "its process was brought up")
        facts.write(Stage.LAUNCHING)
        facts.bringing.begin(facts.order)
        first = await facts.signals.first(facts.bringing.host, deadline=deadline)
        if first is not First.WORK:
            facts.bringing.abandon()
            return facts.cut_short(first, "its process was brought up")
        facts.learn_host(facts.bringing.host.result())
        facts.write(Stage.HOSTED)
        return None

    async def _assign(self, deadline: float) -> NotStarted | None:
        facts = self._facts
        assert facts.hosted is not None
        # Looked at again: this agent may have been stopped while the process came up, and another copy runs by now.
        if facts.order.command.strict and not facts.site.lease.holds():
            return NotStarted(agent_pb2.START_FAILURE_STOPPED, "the lease of its node ended before it was constructed")
        if (cut := facts.signals.came) is not None:
            # Its node may have been given up while it came up, and a copy of it runs elsewhere (R5).
            return facts.cut_short(cut, "it was constructed")
        assigned = asyncio.ensure_future(facts.hosted.control("assign", facts.order.plan))
        first = await facts.signals.first(assigned, deadline=deadline)
        if first is not First.WORK:
            assigned.cancel()
            member = await self._being_built() if first is First.DEADLINE else ""
            return facts.cut_short(first, f"its member {member} was constructed" if member else "it was constructed")
        answer = assigned.result()
        if not answer["ok"]:
            failure = agent_pb2.StartFailure.Value(f"START_FAILURE_{answer['failure']}")
            return NotStarted(failure, answer["message"], answer["traceback"])
        self._become_ready(answer)
        return None

    async def _being_built(self) -> str:
        """Which member of a group holds the others up; empty: it is no group, or its process doesn't say."""
        hosted = self._facts.hosted
        assert hosted is not None
        asked: asyncio.Task[Json] = asyncio.ensure_future(hosted.control("ping"))
        try:
            await asyncio.wait([asked], timeout=_LAST_QUESTION_S)
            return str(asked.result().get("building", "")) if asked.done() else ""
        except HostError:
            return ""
        finally:
            asked.cancel()

    def _become_ready(self, answer: Json) -> None:
        facts = self._facts
        facts.state = agent_pb2.AGENT_WORKER_STATE_READY
        facts.hooks = frozenset(answer["hooks"])
        took_s = asyncio.get_running_loop().time() - facts.order.received_at
        facts.told = {
            "start_ms": round(took_s * 1000),
            "warm": not facts.bringing.cold_reason,
            "cold_reason": facts.bringing.cold_reason,
            "visible_devices": answer["visible_devices"] or "",
        }
        self.tell_ready()
        facts.write(Stage.READY)
        self.watch_entry()

    async def _report_entry(self, hosted: Hosted) -> None:
        try:
            answer = await hosted.control("report")
        except HostError as error:
            # How the process ended is told by the one who watches it.
            _log.info("entry_end_unknown", worker=self._facts.order.launch.name, why=str(error))
            return
        if code := answer.get("exit_code", 0):
            if self._facts.stopping is not None:
                return  # A command that was asked to end may do so as it likes.
            killed = _SIGNALLED - code if code > _SIGNALLED else None
            verdict = self._facts.verdict(
                answer["traceback"], killed, oom_kills_then=self._facts.site.processes.oom_kills()
            )
            answer = {**answer, "traceback": verdict.message}
        self._facts.reports.finished(answer, "" if answer["succeeded"] else self._facts.stderr_tail())
