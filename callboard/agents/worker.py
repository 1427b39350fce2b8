"""What happens to one worker in one generation, from its start command to the proof that it is gone?

One task walks it through STARTING → READY → STOPPING → gone, or QUARANTINED before gone when proof takes too long.
A stop may come at any moment, also before the process exists (PC-13). Every way out ends the whole process
tree before a report says so (I4). An agent that takes over from one that was killed goes on where the record says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from callboard.agents.framing import Json
from callboard.agents.process_tree import ProcessId, start_ms
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.stop_ladder import UNASKED_KILL_S, StopOrder, Yielded, ask_to_yield, unasked_stop
from callboard.agents.worker_host_up import Bringing
from callboard.agents.worker_order import Site, WorkerOrder
from callboard.agents.worker_record import Stage, WorkerRecord, write_record
from callboard.agents.worker_reports import NotStarted, WorkerReports
from callboard.agents.worker_signals import First, Signals
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

QUARANTINE_RETRY_S = 1.0
"""Between attempts to end what is quarantined: mostly uninterruptible sleep, which ends by itself."""

_EXIT_SETTLE_S = 1.0
"""The socket of a dying process closes before its pidfd says so; a host that hangs up without dying is broken."""


class Worker:
    """One worker in one generation."""

    def __init__(
        self, order: WorkerOrder, site: Site, *, predecessor: Worker | None = None, record: WorkerRecord | None = None
    ) -> None:
        """
        Args:
            order: its start command; of an adopted worker what is recorded of it.
            site: what the node's workers share.
            predecessor: an older generation that has to be gone first.
            record: what an earlier agent wrote of it, for a worker that goes on under this one.
        """
        self.state: agent_pb2.AgentWorkerState.ValueType = agent_pb2.AGENT_WORKER_STATE_STARTING
        self.process: ProcessId | None = None
        self.tree: frozenset[ProcessId] = frozenset()
        """The process tree as last seen, for the day the worker dies alone."""
        self.gone = asyncio.Event()
        """Set once everything of the worker is proved gone."""
        self.adopted = record is not None
        self._site = site
        self._predecessor = predecessor
        self._reports = WorkerReports(order, site.outbox)
        self._bringing = Bringing(site)
        self._hosted: Hosted | None = None
        self._hooks: frozenset[str] = frozenset()
        self._told: dict[str, Any] = {}
        self._stop: StopOrder | None = None
        self._signals = Signals()
        self._record = record
        self._claimed = asyncio.Event()
        if record is not None:
            self.process = record.process
            self._hooks = record.hooks
            self._told = dict(record.told)
            if record.stage is Stage.READY:
                self.state = agent_pb2.AGENT_WORKER_STATE_READY
            elif record.stage is Stage.ENDING:
                self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING

    @property
    def order(self) -> WorkerOrder:
        """The newest start command for it."""
        return self._reports.order

    def report(self) -> agent_pb2.WorkerReport:
        """The worker as Hello shows it."""
        report = agent_pb2.WorkerReport(**self._reports.ref, state=self.state)
        if self.process is not None:
            report.pid = self.process.pid
            report.pid_start_ms = start_ms(self.process)
        return report

    def start_again(self, order: WorkerOrder) -> None:
        """The start command of an adopted worker came again: the controller hasn't heard what came of it."""
        self._reports.order = order
        self._claimed.set()
        if self.state == agent_pb2.AGENT_WORKER_STATE_READY:
            self._tell_ready()

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
        problem: NotStarted | None = None
        try:
            problem = await (self._start() if self._record is None else self._go_on(self._record))
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
        self._site.run_dir.drop("worker", self.order.launch.name)
        self.gone.set()
        if self._stop is not None:
            self._answer_stops(agent_pb2.STOP_OUTCOME_ALREADY_GONE)
        if self._record is not None and self._record.stage is Stage.ENDING and self._claimed.is_set():
            why = "its agent was killed while the start was being given up"
            self._reports.not_started(NotStarted(agent_pb2.START_FAILURE_STOPPED, why), "")

    # Starting.

    async def _start(self) -> NotStarted | None:
        """Bring the worker up; on a problem its caller ends what there is."""
        # The bound counts from the command, so that the controller's own deadline can be set above it.
        deadline = self.order.received_at + self.order.command.start_timeout_ms / 1000
        with self._site.spares.starting():
            try:
                return await self._succeed(deadline) or await self._bring_up(deadline) or await self._assign(deadline)
            except HostError as error:
                await asyncio.wait([self._signals.over], timeout=_EXIT_SETTLE_S if self.process else 0)
                if self._signals.over.done():
                    return self._cut_short(First.EXIT, "it was constructed")
                return NotStarted(agent_pb2.START_FAILURE_HOST, str(error))

    async def _go_on(self, record: WorkerRecord) -> NotStarted | None:
        """Take over from an agent that was killed. What had not got far waits for its start command."""
        if record.process is not None:
            try:
                self._learn_host(await self._site.runtime.attach(record.address, record.process))
            except HostError as error:
                self._signals.watch_process(record.process)
                self._signals.end("" if self._signals.over.done() else str(error))
        match record.stage:
            case Stage.READY:
                self._watch_entry()
                return None
            case Stage.ENDING:
                self.stop(unasked_stop("its agent was killed while it was being ended"))
                return None
            case _:
                claimed = asyncio.ensure_future(self._claimed.wait())
                first = await self._signals.first(claimed)
                claimed.cancel()
                if first is not First.WORK:
                    return await self._unclaimed(first, record)
                return await self._start()

    async def _unclaimed(self, first: First, record: WorkerRecord) -> NotStarted:
        if record.process is None:
            # Whether a host is there is found out by launching it again: what is found then is ended.
            self._bringing.begin(self.order)
        return self._cut_short(first, "it was constructed")

    async def _succeed(self, deadline: float) -> NotStarted | None:
        if self._predecessor is not None:
            gone = asyncio.ensure_future(self._predecessor.gone.wait())
            first = await self._signals.first(gone, deadline=deadline)
            if first is not First.WORK:
                gone.cancel()
                return self._cut_short(first, "its older generation was gone")
            self._predecessor = None
        return None

    async def _bring_up(self, deadline: float) -> NotStarted | None:
        if self._hosted is not None:
            return None
        self._write(Stage.LAUNCHING)
        self._bringing.begin(self.order)
        first = await self._signals.first(self._bringing.host, deadline=deadline)
        if first is not First.WORK:
            self._bringing.abandon()
            return self._cut_short(first, "its process was brought up")
        self._learn_host(self._bringing.host.result())
        self._write(Stage.HOSTED)
        return None

    async def _assign(self, deadline: float) -> NotStarted | None:
        assert self._hosted is not None
        assigned = asyncio.ensure_future(self._hosted.control("assign", self.order.plan))
        first = await self._signals.first(assigned, deadline=deadline)
        if first is not First.WORK:
            assigned.cancel()
            return self._cut_short(first, "it was constructed")
        answer = assigned.result()
        if not answer["ok"]:
            failure = agent_pb2.StartFailure.Value(f"START_FAILURE_{answer['failure']}")
            return NotStarted(failure, answer["message"], answer["traceback"])
        self._become_ready(answer)
        return None

    def _learn_host(self, hosted: Hosted) -> None:
        self._hosted = hosted
        self.process = hosted.process
        self._signals.watch_process(hosted.process)

    def _cut_short(self, first: First, during: str) -> NotStarted:
        match first:
            case First.STOP:
                return NotStarted(agent_pb2.START_FAILURE_STOPPED, f"stopped before {during}")
            case First.DEADLINE:
                limit = self.order.command.start_timeout_ms / 1000
                return NotStarted(agent_pb2.START_FAILURE_DEADLINE, f"not ready after {limit:g} s: not before {during}")
            case _:
                return NotStarted(agent_pb2.START_FAILURE_DIED, f"{self._exit_message()} before {during}")

    def _become_ready(self, answer: Json) -> None:
        self.state = agent_pb2.AGENT_WORKER_STATE_READY
        self._hooks = frozenset(answer["hooks"])
        took_s = asyncio.get_running_loop().time() - self.order.received_at
        self._told = {
            "start_ms": round(took_s * 1000),
            "warm": not self._bringing.cold_reason,
            "cold_reason": self._bringing.cold_reason,
            "visible_devices": answer["visible_devices"] or "",
        }
        self._tell_ready()
        self._write(Stage.READY)
        self._watch_entry()

    def _tell_ready(self) -> None:
        assert self.process is not None
        self._reports.ready(
            pid=self.process.pid,
            pid_start_ms=start_ms(self.process),
            actor_name=self._hosted.actor_name if self._hosted is not None else "",
            **self._told,
        )

    def _watch_entry(self) -> None:
        if self.order.command.entry and self._hosted is not None:
            self._signals.watch(self._report_entry(self._hosted))

    async def _report_entry(self, hosted: Hosted) -> None:
        try:
            answer = await hosted.control("report")
        except HostError as error:
            # How the process ended is told by the one who watches it.
            _log.info("entry_end_unknown", worker=self.order.launch.name, why=str(error))
            return
        self._reports.finished(answer)

    def _exit_message(self) -> str:
        if self._signals.over.done() and self._signals.over.result():
            return self._signals.over.result()
        return "ended" if self._hosted is None else self._hosted.exit_message()

    def _write(self, stage: Stage) -> None:
        record = WorkerRecord(
            command_id=self.order.command_id,
            command=self.order.command,
            stage=stage,
            process=self.process,
            address=self._hosted.address if self._hosted is not None else "",
            hooks=self._hooks,
            told=self._told,
        )
        self._site.run_dir.put(write_record(self.order.launch.name, record))
        self._bringing.settle_spare()

    # Ending. What these return is what is left, as text: empty when all is proved gone.

    async def _end_failed(self, problem: NotStarted) -> str:
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
        left = await self._end_tree(UNASKED_KILL_S if self._stop is None else self._stop.kill_s)
        self._reports.not_started(problem, left)
        self._answer_stops(_outcome(left, Yielded()), detail=left)
        return left

    async def _end_stopped(self) -> str:
        order = self._stop
        assert order is not None
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
        yielded = Yielded()
        if self._hosted is not None:
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
        self._reports.exited(self._exit_message(), left)
        return left

    async def _end_quarantined(self) -> None:
        """Try until it is gone, then say so a second time."""
        self.state = agent_pb2.AGENT_WORKER_STATE_QUARANTINED
        while left := await self._end_tree(QUARANTINE_RETRY_S):
            self._answer_stops(agent_pb2.STOP_OUTCOME_QUARANTINED, detail=left)
        self._reports.out_of_quarantine()

    async def _end_tree(self, budget_s: float, *, alone: bool = False) -> str:
        if self.process is None and self._bringing.begun:
            hosted = await self._bringing.settled(budget_s)
            if isinstance(hosted, str):
                return hosted
            if hosted is not None:
                self._learn_host(hosted)
        if self.process is None:
            return ""
        self._write(Stage.ENDING)
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
        if self._stop is not None:
            self._reports.stopped(self._stop, asyncio.get_running_loop().time(), outcome, checkpoint, detail)


def _outcome(left: str, yielded: Yielded) -> agent_pb2.StopOutcome.ValueType:
    if left:
        return agent_pb2.STOP_OUTCOME_QUARANTINED
    if yielded.cooperative:
        return agent_pb2.STOP_OUTCOME_COOPERATIVE
    return agent_pb2.STOP_OUTCOME_KILLED
