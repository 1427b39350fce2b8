"""One worker in one generation, from its start command to the proof that it is gone.

One task walks it through STARTING → READY → STOPPING → gone, or QUARANTINED before gone when proof takes too long.
A stop may come at any moment, also before the process exists (PC-13). Every way out ends the whole process
tree before a report says so (I4). An agent that takes over from one that was killed goes on where the record says.
"""

from __future__ import annotations

import asyncio

import structlog

from callboard.agents.runtime import Hosted, HostError
from callboard.agents.system.process_tree import ProcessId
from callboard.agents.worker.progress_watch import watch_progress
from callboard.agents.worker.stop_ladder import StopOrder, unasked_stop
from callboard.agents.worker.worker_end import end_alone, end_failed, end_quarantined, end_stopped
from callboard.agents.worker.worker_facts import WorkerFacts
from callboard.agents.worker.worker_order import Site, WorkerOrder
from callboard.agents.worker.worker_record import Stage, WorkerRecord
from callboard.agents.worker.worker_reports import NotStarted
from callboard.agents.worker.worker_signals import First
from callboard.agents.worker.worker_start import WorkerStart
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)


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
        self.gone = asyncio.Event()
        """Set once everything of the worker is proved gone."""
        self._facts = WorkerFacts(order, site)
        self._starting = WorkerStart(self._facts, predecessor)
        self._record = record
        self._claimed = asyncio.Event()
        if record is not None:
            self._facts.adopt(record)

    @property
    def order(self) -> WorkerOrder:
        """The newest start command for it."""
        return self._facts.order

    @property
    def process(self) -> ProcessId | None:
        """Its process, once that is known."""
        return self._facts.process

    @property
    def hosted(self) -> Hosted | None:
        """Its host, once that can be asked."""
        return self._facts.hosted

    @property
    def peak_bytes(self) -> int:
        """Most memory that its process tree was seen to hold."""
        return self._facts.peak_bytes

    @property
    def adopted(self) -> bool:
        """Whether an earlier agent began it."""
        return self._record is not None

    def report(self) -> agent_pb2.WorkerReport:
        """The worker as Hello shows it."""
        report = agent_pb2.WorkerReport(**self._facts.reports.ref, state=self._facts.state)
        if self.process is not None:
            report.pid = self.process.pid
            report.pid_start_ms = self._facts.site.processes.start_ms(self.process)
        return report

    def see_tree(self, tree: frozenset[ProcessId]) -> None:
        """Its process tree as it is now; an empty one means that it died just now."""
        self._facts.see_tree(tree)

    def see_memory(self) -> None:
        """Remember what its own process holds now."""
        self._facts.see_memory()

    def start_again(self, order: WorkerOrder) -> None:
        """The start command of an adopted worker came again: the controller hasn't heard what came of it."""
        self._facts.reports.order = order
        self._claimed.set()
        if self._facts.state == agent_pb2.AGENT_WORKER_STATE_READY:
            self._starting.tell_ready()

    def stop(self, order: StopOrder) -> None:
        """Stop the worker; orders while one runs join it."""
        if self._facts.stopping is None:
            self._facts.stopping = order
            self._facts.signals.ask_stop()
        else:
            self._facts.stopping.join(order)

    def host_lost(self, message: str) -> None:
        """What hosts the node's workers ended: this one can't go on either."""
        self._facts.signals.end(message)

    async def run(self) -> None:
        """The worker's whole life; returns when everything of it is proved gone."""
        facts = self._facts
        try:
            problem = await (self._starting.run() if self._record is None else self._go_on(self._record))
            if problem is None:
                facts.signals.watch(watch_progress(facts))
            if problem is not None:
                left = await end_failed(facts, problem)
            elif await facts.signals.first() is First.STOP or self._is_fenced() or self._has_yielded():
                left = await end_stopped(facts)
            else:
                left = await end_alone(facts)
            if left:
                await end_quarantined(facts)
        finally:
            facts.signals.close()
        if facts.hosted is not None:
            facts.hosted.release()
        facts.site.run_dir.drop("worker", self.order.launch.name)
        facts.site.ports.release(self.order.launch.name)
        self.gone.set()
        facts.answer_stops(agent_pb2.STOP_OUTCOME_ALREADY_GONE)
        if self._record is not None and self._record.stage is Stage.ENDING and self._claimed.is_set():
            why = "its agent was killed while the start was being given up"
            facts.reports.not_started(NotStarted(agent_pb2.START_FAILURE_STOPPED, why), "")

    def _is_fenced(self) -> bool:
        """Whether its process ended because its lease did: the fence was faster than this agent, which may have been
        stopped itself. That is no failure of the worker."""
        if not self.order.command.strict:
            return False
        self._facts.site.lease.check()
        stopping = self._facts.stopping
        return stopping is not None and not stopping.command_ids

    def _has_yielded(self) -> bool:
        """Whether its process ended because an earlier agent killed it after it had left its checkpoint."""
        return self._facts.stopping is not None and self._facts.site.checkpoints.find(self._facts.name) is not None

    # Taking over from an agent that was killed.

    async def _go_on(self, record: WorkerRecord) -> NotStarted | None:
        """Go on where the record says. What had not got far waits for its start command."""
        if record.process is not None:
            await self._attach(record.process, record.address)
        match record.stage:
            case Stage.READY:
                self._starting.watch_entry()
                return None
            case Stage.ENDING:
                self.stop(unasked_stop("its agent was killed while it was being ended"))
                return None
            case _:
                claimed = asyncio.ensure_future(self._claimed.wait())
                first = await self._facts.signals.first(claimed)
                claimed.cancel()
                return await self._starting.run() if first is First.WORK else self._unclaimed(first)

    async def _attach(self, process: ProcessId, address: str) -> None:
        try:
            hosted = await self._facts.site.runtime.attach(address, process)
            self._facts.learn_host(hosted)
            self._facts.signals.watch(self._learn_secrets(hosted))
        except HostError as error:
            away = "it ended while no agent was there"
            self._facts.signals.end(str(error) if self._facts.site.processes.is_living(process) else away)

    async def _learn_secrets(self, hosted: Hosted) -> None:
        """They stand in no record; only its process knows them."""
        try:
            self._facts.secrets = await hosted.control("secrets")
        except HostError as error:
            _log.info("secrets_unknown", worker=self.order.launch.name, why=str(error))

    def _unclaimed(self, first: First) -> NotStarted:
        if self._facts.process is None:
            # Whether a host is there is found out by launching it again: what is found then is ended.
            self._facts.bringing.begin(self.order)
        return self._facts.cut_short(first, "it was constructed")
