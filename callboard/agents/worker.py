"""What happens to one worker in one generation, from its start command to the proof that it is gone?

One task walks it through STARTING → READY → STOPPING → gone, or QUARANTINED before gone when proof takes too long.
A stop may come at any moment, also before the process exists (PC-13). Every way out ends the whole process
tree before a report says so (I4).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from callboard.agents.framing import Json
from callboard.agents.process_tree import ProcessId, start_ms
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.stop_ladder import StopOrder, Yielded, ask_to_yield
from callboard.agents.worker_order import Site, WorkerOrder
from callboard.agents.worker_signals import First, Signals
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

UNASKED_KILL_S = 10.0
"""For the kill of a worker that nobody gave a time for: one that died alone or failed to start."""

QUARANTINE_RETRY_S = 1.0
"""Between attempts to end what is quarantined: mostly uninterruptible sleep, which ends by itself."""

_EXIT_SETTLE_S = 1.0
"""The socket of a dying process closes before its pidfd says so; a host that hangs up without dying is broken."""

COLD_REASON = "this node keeps no warm spares"


@dataclass(frozen=True)
class _NotStarted:
    failure: agent_pb2.StartFailure.ValueType
    message: str
    traceback: str = ""


class Worker:
    """One worker in one generation."""

    def __init__(self, order: WorkerOrder, site: Site, predecessor: Worker | None) -> None:
        self.order = order
        self.state: agent_pb2.AgentWorkerState.ValueType = agent_pb2.AGENT_WORKER_STATE_STARTING
        self.process: ProcessId | None = None
        self.tree: frozenset[ProcessId] = frozenset()
        """The process tree as last seen, for the day the worker dies alone."""
        self.gone = asyncio.Event()
        """Set once everything of the worker is proved gone."""
        self._site = site
        self._predecessor = predecessor
        self._launching: asyncio.Task[Hosted] | None = None
        self._hosted: Hosted | None = None
        self._hooks: frozenset[str] = frozenset()
        self._stop: StopOrder | None = None
        self._signals = Signals()

    def report(self) -> agent_pb2.WorkerReport:
        """The worker as Hello shows it."""
        report = agent_pb2.WorkerReport(**self._ref, state=self.state)
        if self.process is not None:
            report.pid = self.process.pid
            report.pid_start_ms = start_ms(self.process)
        return report

    def stop(self, order: StopOrder) -> None:
        """Stop the worker; orders while one runs join it."""
        if self._stop is None:
            self._stop = order
            self._signals.ask_stop()
        else:
            self._stop.join(order)

    def host_lost(self, message: str) -> None:
        """What hosts the node's workers ended: this one can't go on either."""
        self._signals.end(message)

    async def run(self) -> None:
        """The worker's whole life; returns when everything of it is proved gone."""
        try:
            problem = await self._start()
            if problem is not None:
                left = await self._end_failed(problem)
            elif await self._signals.first() is First.STOP:
                left = await self._end_stopped()
            else:
                left = await self._end_alone()
            if left:
                await self._end_quarantined()
        finally:
            self._signals.close()
        if self._hosted is not None:
            self._hosted.release()
            self._site.run_dir.discard(self._hosted.process)
        self.gone.set()
        self._answer_stops(agent_pb2.STOP_OUTCOME_ALREADY_GONE)

    @property
    def _ref(self) -> dict[str, Any]:
        return {"worker": self.order.command.worker, "generation": self.order.command.generation}

    # Starting.

    async def _start(self) -> _NotStarted | None:
        """Bring the worker up; on a problem its caller ends what there is."""
        loop = asyncio.get_running_loop()
        # The bound counts from the command, so that the controller's own deadline can be set above it.
        deadline = self.order.received_at + self.order.command.start_timeout_ms / 1000
        if self._predecessor is not None:
            first = await self._signals.first(loop.create_task(self._predecessor.gone.wait()), deadline=deadline)
            if first is not First.WORK:
                return self._cut_short(first, "its older generation was gone")
            self._predecessor = None
        try:
            first = await self._launch(deadline)
            if first is not First.WORK:
                return self._cut_short(first, "its process was brought up")
            assert self._hosted is not None
            assigned = loop.create_task(self._hosted.control("assign", self.order.plan))
            first = await self._signals.first(assigned, deadline=deadline)
            if first is not First.WORK:
                assigned.cancel()
                return self._cut_short(first, "it was constructed")
            answer = assigned.result()
        except HostError as error:
            await asyncio.wait([self._signals.over], timeout=_EXIT_SETTLE_S if self.process else 0)
            if self._signals.over.done():
                return self._cut_short(First.EXIT, "it was constructed")
            return _NotStarted(agent_pb2.START_FAILURE_HOST, str(error))
        if not answer["ok"]:
            failure = agent_pb2.StartFailure.Value(f"START_FAILURE_{answer['failure']}")
            return _NotStarted(failure, answer["message"], answer["traceback"])
        self._become_ready(answer)
        return None

    async def _launch(self, deadline: float) -> First:
        self._launching = asyncio.create_task(self._bring_up())
        first = await self._signals.first(self._launching, deadline=deadline)
        if first is First.WORK:
            self._learn_process(self._launching.result())
        else:
            self._site.runtime.abandon(self.order.launch)
        return first

    async def _bring_up(self) -> Hosted:
        await self._site.interpreters.check(self.order.launch.interpreter)
        return await self._site.runtime.launch(self.order.launch)

    def _learn_process(self, hosted: Hosted) -> None:
        self._hosted = hosted
        self.process = hosted.process
        self._site.run_dir.add("worker", hosted.process)
        self._signals.watch_process(hosted.process)

    def _cut_short(self, first: First, during: str) -> _NotStarted:
        match first:
            case First.STOP:
                return _NotStarted(agent_pb2.START_FAILURE_STOPPED, f"stopped before {during}")
            case First.DEADLINE:
                limit = self.order.command.start_timeout_ms / 1000
                return _NotStarted(
                    agent_pb2.START_FAILURE_DEADLINE, f"not ready after {limit:g} s: not before {during}"
                )
            case _:
                return _NotStarted(agent_pb2.START_FAILURE_DIED, f"{self._exit_message()} before {during}")

    def _become_ready(self, answer: Json) -> None:
        assert self._hosted is not None
        assert self.process is not None
        self.state = agent_pb2.AGENT_WORKER_STATE_READY
        self._hooks = frozenset(answer["hooks"])
        took_s = asyncio.get_running_loop().time() - self.order.received_at
        ready = agent_pb2.WorkerReady(
            **self._ref,
            pid=self.process.pid,
            pid_start_ms=start_ms(self.process),
            actor_name=self._hosted.actor_name,
            start_ms=round(took_s * 1000),
            cold_reason=COLD_REASON,
            visible_devices=answer["visible_devices"] or "",
        )
        self._site.outbox.report(self.order.command_id, worker_ready=ready)
        _log.info("worker_ready", worker=self.order.launch.name, pid=ready.pid, ms=ready.start_ms)
        if self.order.command.entry:
            self._signals.watch(self._report_entry(self._hosted))

    async def _report_entry(self, hosted: Hosted) -> None:
        try:
            answer = await hosted.control("report")
        except HostError as error:
            # How the process ended is told by the one who watches it.
            _log.info("entry_end_unknown", worker=self.order.launch.name, why=str(error))
            return
        finished = agent_pb2.WorkerFinished(**self._ref, **answer)
        self._site.outbox.report("", worker_finished=finished)

    def _exit_message(self) -> str:
        if self._signals.over.done() and self._signals.over.result():
            return self._signals.over.result()
        return "ended" if self._hosted is None else self._hosted.exit_message()

    # Ending. What these return is what is left, as text: empty when all is proved gone.

    async def _end_failed(self, problem: _NotStarted) -> str:
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
        left = await self._end_tree(UNASKED_KILL_S if self._stop is None else self._stop.kill_s)
        failed = agent_pb2.WorkerStartFailed(
            **self._ref,
            failure=problem.failure,
            message=problem.message,
            traceback=problem.traceback,
            quarantined=bool(left),
        )
        self._site.outbox.report(self.order.command_id, worker_start_failed=failed)
        _log.info("worker_not_started", worker=self.order.launch.name, why=problem.message)
        self._answer_stops(_outcome(left, Yielded()), detail=left)
        return left

    async def _end_stopped(self) -> str:
        order = self._stop
        assert order is not None
        assert self._hosted is not None
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
        yielded = await ask_to_yield(self._hosted, self._hooks, order, self._signals.over)
        left = await self._end_tree(order.kill_s)
        unasked = ""
        if not order.command_ids:
            # The end of a lease, a leaving node, a worker not to be kept: no command, but a report.
            order.command_ids.append("")
            unasked = order.reason
        detail = "; ".join(text for text in (unasked, yielded.detail, left) if text)
        self._answer_stops(_outcome(left, yielded), yielded.checkpoint, detail)
        return left

    async def _end_alone(self) -> str:
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
        left = await self._end_tree(UNASKED_KILL_S, alone=True)
        message = "; ".join(text for text in (self._exit_message(), left) if text)
        _log.warning("worker_exited", worker=self.order.launch.name, why=message)
        dead = agent_pb2.WorkerExited(**self._ref, message=message, quarantined=bool(left))
        self._site.outbox.report("", worker_exited=dead)
        return left

    async def _end_quarantined(self) -> None:
        """Try until it is gone, then say so a second time."""
        self.state = agent_pb2.AGENT_WORKER_STATE_QUARANTINED
        while left := await self._end_tree(QUARANTINE_RETRY_S):
            self._answer_stops(agent_pb2.STOP_OUTCOME_QUARANTINED, detail=left)
        gone = agent_pb2.WorkerStopped(**self._ref, outcome=agent_pb2.STOP_OUTCOME_KILLED, detail="out of quarantine")
        self._site.outbox.report("", worker_stopped=gone)

    async def _end_tree(self, budget_s: float, *, alone: bool = False) -> str:
        if self.process is None and self._launching is not None:
            await asyncio.wait([self._launching], timeout=budget_s)
            if not self._launching.done():
                return "its host may still come up"
            if self._launching.exception() is None:
                self._learn_process(self._launching.result())
        if self.process is None:
            return ""
        end = await self._site.ender.end(
            self.process, marker=self.order.marker, also=self.tree, budget_s=budget_s, alone=alone
        )
        return "" if end.gone else "not gone: " + ", ".join(str(each.pid) for each in end.left[:10])

    def _answer_stops(
        self,
        outcome: agent_pb2.StopOutcome.ValueType,
        checkpoint: agent_pb2.Checkpoint | None = None,
        detail: str = "",
    ) -> None:
        """Answer every stop command that waits."""
        if self._stop is None:
            return
        took_s = asyncio.get_running_loop().time() - self._stop.asked_at
        for command_id in self._stop.command_ids:
            stopped = agent_pb2.WorkerStopped(
                **self._ref,
                outcome=outcome,
                checkpoint=checkpoint,
                took_ms=round(took_s * 1000),
                detail=detail,
            )
            self._site.outbox.report(command_id, worker_stopped=stopped)
            _log.info(
                "worker_stopped",
                worker=self.order.launch.name,
                outcome=agent_pb2.StopOutcome.Name(outcome),
                ms=stopped.took_ms,
                why=self._stop.reason,
            )
        self._stop.command_ids.clear()


def _outcome(left: str, yielded: Yielded) -> agent_pb2.StopOutcome.ValueType:
    if left:
        return agent_pb2.STOP_OUTCOME_QUARANTINED
    if yielded.cooperative:
        return agent_pb2.STOP_OUTCOME_COOPERATIVE
    return agent_pb2.STOP_OUTCOME_KILLED
