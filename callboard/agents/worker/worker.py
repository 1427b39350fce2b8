"""One worker in one generation, from its start command to the proof that it is gone.

`Worker` lives the life that `life` lays down: it tells its `Life` what happens and carries out what follows, by one
method for each effect. What takes time is a task (the worker is at one *work* at a time, which ends when its state
does), and ends by telling the life what came of it. A stop may come at any moment, also before the process exists
(PC-13). Every way out ends the whole process tree before a report says so (I4). An agent that takes over from one that
was killed goes on where the record says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from callboard.agents.files.checkpoints import NOTHING_LEFT, Yielded
from callboard.agents.host.framing import Json
from callboard.agents.host.worker_secrets import hiding
from callboard.agents.runtime import Hosted, HostError
from callboard.agents.system.tasks import answer_within
from callboard.agents.worker.life import Effect, Event, Life, State
from callboard.agents.worker.order import Site, Stage, WorkerOrder, WorkerRecord, prepare, tidy, write_record
from callboard.agents.worker.progress import being_built, until_stalled
from callboard.agents.worker.reports import NotStarted, Reports, outcome_of
from callboard.agents.worker.spares import Bringing
from callboard.agents.worker.stop_ladder import (
    ENDED_FIRST,
    EXIT_SETTLE_S,
    UNASKED_KILL_S,
    Signal,
    StopOrder,
    ask_to_yield,
    unasked_stop,
    wake,
)
from callboard.agents.worker.verdict import Footprint, how_it_ended, usual_causes
from callboard.model.log import structlog
from callboard.model.specs import ENVIRONMENT_MS
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

_SIGNALLED = 128
"""Exit code of a command that a signal ended, less its number."""

_CAUSE_S = 2.0
"""For Ray to say why an actor died: its answer is worth less than a report in time."""

QUARANTINE_RETRY_S = 1.0
"""Between attempts to end what is quarantined: mostly uninterruptible sleep, which ends by itself."""

_NOT_BEFORE = {
    State.UNCLAIMED: "it was constructed",
    State.WAITING: "its older generation was gone",
    State.GUARDING: "the node's fence watched",
    State.LEASING: "the node's lease was renewed",
    State.UNPACKING: "its code was there",
    State.HOSTING: "its process was brought up",
    State.BUILDING: "it was constructed",
}
"""What had not happened yet when a start was cut short."""

_SHOWN = {
    **dict.fromkeys(_NOT_BEFORE, agent_pb2.AGENT_WORKER_STATE_STARTING),
    State.READY: agent_pb2.AGENT_WORKER_STATE_READY,
    State.QUARANTINED: agent_pb2.AGENT_WORKER_STATE_QUARANTINED,
}
"""States as Hello shows them; the others are ends."""

_STAGES = {State.HOSTING: Stage.LAUNCHING, State.BUILDING: Stage.HOSTED, State.READY: Stage.READY}
"""States as the record tells them; the others are ends."""


@dataclass(frozen=True)
class _Happened:
    """What happened to a worker: in which state, and what is known of it.

    Of an exit that is the reason (empty: its process ended) and its exit code, if known; of a proof what is left, as
    text, and what is to be told of the end.
    """

    was: State
    event: Event
    fact: Any


class Worker:
    """One worker in one generation.

    Attributes:
        gone: set once everything of the worker is proved gone.
        hosted: its host, once that can be asked.
        footprint: what its processes were seen to hold.
        adopted: whether an earlier agent began it.
    """

    def __init__(
        self,
        order: WorkerOrder,
        site: Site,
        on_end: Callable[[Worker, BaseException | None], None],
        *,
        predecessor: Worker | None = None,
        record: WorkerRecord | None = None,
    ) -> None:
        """
        Args:
            order: its start command; of an adopted worker what is recorded of it.
            site: what the node's workers share.
            on_end: called when it is gone, or with the error of a bug.
            predecessor: an older generation that has to be gone first.
            record: what an earlier agent wrote of it, for a worker that goes on under this one.
        """
        self.gone = asyncio.Event()
        self.process: ProcessId | None = None
        self.hosted: Hosted | None = None
        self.footprint = Footprint(order.command, site.processes, site.memory)
        self.adopted = record is not None
        self._site = site
        self._on_end = on_end
        self._predecessor = predecessor
        self._found = record
        self._life = Life(adopted=self.adopted)
        self._carry_out: Mapping[Effect, Callable[[_Happened], Coroutine[Any, Any, None] | None]] = {
            effect: getattr(self, f"_{effect.name.lower()}") for effect in Effect
        }
        self._reports = Reports(order, site.outbox)
        self._bringing = Bringing(site.runtime, site.run_dir, site.spares, site.interpreters)
        self._work: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._claimed = False
        self._stopping: StopOrder | None = None
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set when the process ended or lost its host; the text is the reason, empty for the former."""
        self._code: int | None = None
        """Exit code of the process, negative for a signal, once it has ended and if that is known."""
        self._hooks: frozenset[str] = frozenset()
        self._told: Mapping[str, Any] = {}
        """Fields of WorkerReady that are known only once."""
        self._yielded = NOTHING_LEFT
        self._secrets: list[str] | None = None
        """What is masked in what it wrote, of one that was taken over; None: not known."""
        if record is not None:
            self.process, self._hooks, self._told = record.process, record.hooks, record.told
            self._bringing.begun_before = True

    # ---- what others see of it, and ask ----

    @property
    def order(self) -> WorkerOrder:
        """The newest start command for it: what is said of a start answers that one."""
        return self._reports.order

    @property
    def name(self) -> str:
        """`{job}/{component}/{rank}/g{generation}`."""
        return self.order.launch.name

    def report(self) -> agent_pb2.WorkerReport:
        """The worker as Hello shows it."""
        state = self._life.state
        if self._found is not None and state is State.ADOPTED:
            state = {Stage.READY: State.READY, Stage.ENDING: State.KILLING}.get(self._found.stage, State.UNCLAIMED)
        shown = _SHOWN.get(state, agent_pb2.AGENT_WORKER_STATE_STOPPING)
        report = agent_pb2.WorkerReport(**self._reports.ref, state=shown)
        if self.process is not None:
            report.pid = self.process.pid
            report.pid_start_ms = self._site.processes.start_ms(self.process)
        return report

    def begin(self) -> None:
        """Begin its life: start it, or look for what an earlier agent began."""
        if self._found is None:
            self._start()
        else:
            self._be_at(self._look_for(self._found))

    def start_again(self, order: WorkerOrder) -> None:
        """The start command of an adopted worker came again: the controller hasn't heard what came of it."""
        self._happens(Event.ORDER, order)

    def stop(self, order: StopOrder) -> None:
        """Stop the worker; orders while one runs join it."""
        self._happens(Event.STOP, order)

    def host_lost(self, message: str) -> None:
        """What hosts the node's workers ended: this one can't go on either."""
        self._exits(message)

    # ---- its life ----

    def _happens(self, event: Event, fact: Any = None) -> None:
        happened = _Happened(self._life.state, event, fact)
        effects = self._life.on(event)
        self._keep(event, fact)
        for effect in effects:
            work = self._carry_out[effect](happened)
            if work is not None:
                self._be_at(work)

    def _exits(self, reason: str, code: int | None = None) -> None:
        if self._life.state is State.READY and self.order.command.strict:
            # The fence may have been faster than this agent, which may have been stopped itself: then its lease is
            # over, its stop is asked for now, and this is no failure of the worker.
            self._site.lease.check()
        self._happens(Event.EXIT, (reason, code))

    def _be_at(self, work: Coroutine[Any, Any, None]) -> None:
        """Be at this work, and no more at the one before."""
        self._stop_clock()
        if self._work is not None and self._work is not asyncio.current_task():
            self._work.cancel()
        self._watch(work)
        self._work = next(reversed(self._tasks))

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside its work, until it is gone."""
        task = asyncio.create_task(work, name=f"worker {self.name}")
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _end(self, error: BaseException | None = None) -> None:
        self._stop_clock()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._on_end(self, error)

    def _keep(self, event: Event, fact: Any) -> None:
        """Keep what something that happened tells, in whichever state it does."""
        match event:
            case Event.ORDER:
                self._reports.order = fact
                self._claimed = True
            case Event.STOP | Event.FOUND_ENDING:
                if self._stopping is None:
                    self._stopping = fact
                elif fact is not self._stopping:
                    self._stopping.join(fact)
            case Event.EXIT:
                reason, code = fact
                self._code = self._code if code is None else code
                if not self._over.done():
                    self._over.set_result(reason)
            case Event.HOSTED if self.hosted is None:
                self.hosted, self.process = fact, fact.process
                self._watch(self._notice_exit(fact.process))
            case Event.YIELDED:
                self._yielded = fact
            case _:
                pass

    async def _notice_exit(self, process: ProcessId) -> None:
        self._exits("", await self._site.processes.exited(process))

    # ---- taking over from an agent that was killed ----

    async def _look_for(self, record: WorkerRecord) -> None:
        """Find out what became of it. What had not got far waits for its start command."""
        if record.process is not None:
            try:
                self._happens(Event.HOSTED, await self._site.runtime.attach(record.address, record.process))
                self._watch(self._learn_secrets())
            except HostError as error:
                away = "it ended while no agent was there"
                self._exits(str(error) if self._site.processes.is_living(record.process) else away)
        if record.stage is Stage.READY:
            self._happens(Event.FOUND_READY)
        elif record.stage is not Stage.ENDING:
            self._happens(Event.FOUND_UNFINISHED)
        elif self._over.done() and not self._ended_by_its_stop():
            self._happens(Event.FOUND_ENDED)
        else:
            self._happens(Event.FOUND_ENDING, unasked_stop("its agent was killed while it was being ended"))

    async def _learn_secrets(self) -> None:
        """They stand in no record; only its process knows them."""
        assert self.hosted is not None
        try:
            self._secrets = await self.hosted.control("secrets")
        except HostError as error:
            _log.info("secrets_unknown", worker=self.name, why=str(error))

    def _heed(self, _: _Happened) -> None:
        if self._claimed:
            self._happens(Event.ORDER, self.order)
        if self._stopping is not None and (not self._over.done() or self._ended_by_its_stop()):
            self._happens(Event.STOP, self._stopping)
        elif self._over.done():
            self._exits(self._over.result(), self._code)

    def _ended_by_its_stop(self) -> bool:
        """Whether its process ended because its lease did, or because an earlier agent killed it after it had left its
        checkpoint."""
        if self._site.checkpoints.find(self.name) is not None:
            return True
        return self.order.command.strict and not (self._stopping is not None and self._stopping.command_ids)

    # ---- the start: older generation gone, lease held, code there, host up, assignment answered ----

    def _start(self, _: _Happened | None = None) -> None:
        self._be_at(self._come_up())
        # The bound counts from the command, so that the controller's own deadline can be set above it.
        self._set_clock(self.order.received_at + (ENVIRONMENT_MS / 1000 if self.order.is_supplied else 0))

    def _set_clock(self, from_s: float) -> None:
        until_s = from_s + self.order.command.start_timeout_ms / 1000
        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_at(until_s, self._happens, Event.DEADLINE)

    async def _come_up(self) -> None:
        site, command = self._site, self.order.command
        with site.spares.starting():
            if self._predecessor is not None:
                await self._predecessor.gone.wait()
                self._predecessor = None
            self._happens(Event.SUCCEEDED)
            # No code of a strict job runs without a lease, nor before somebody besides this agent sees to its end (R5).
            if command.strict:
                await site.fence.watching()
            self._happens(Event.GUARDED)
            if command.strict:
                await site.lease.held()
            self._happens(Event.LEASED)
            try:
                if self.hosted is None:
                    self._reports.order = await prepare(self.order, site, self._reports.progress)
                    if self.order.is_supplied:
                        self._set_clock(_now_s())
                self._happens(Event.UNPACKED)
                hosted = self.hosted
                if hosted is None:
                    coming = self._bringing.begin(self.order.launch, self.order.why_cold, self.order.wish)
                    # Not awaited itself: it goes on when this start is given up, and what comes up late is ended.
                    await asyncio.wait([coming])
                    hosted = coming.result()
                self._happens(Event.HOSTED, hosted)
                answer = await self._build()
            except HostError as error:
                if self.process is not None:
                    await asyncio.sleep(EXIT_SETTLE_S)
                answer = NotStarted(agent_pb2.START_FAILURE_HOST, str(error))
            self._happens(Event.FAILED if isinstance(answer, NotStarted) else Event.BUILT, answer)

    async def _build(self) -> Json | NotStarted:
        assert self.hosted is not None
        # Looked at again: this agent may have been stopped while the process came up, and another copy runs by now.
        if self.order.command.strict and not self._site.lease.holds():
            return NotStarted(agent_pb2.START_FAILURE_STOPPED, "the lease of its node ended before it was constructed")
        answer = await self.hosted.control("assign", self.order.plan)
        if answer["ok"]:
            return answer
        failure = agent_pb2.StartFailure.Value(f"START_FAILURE_{answer['failure']}")
        return NotStarted(failure, answer["message"], answer["traceback"])

    def _become_ready(self, happened: _Happened) -> None:
        self._stop_clock()
        answer = happened.fact
        self._hooks = frozenset(answer["hooks"])
        self._told = {
            "start_ms": round((_now_s() - self.order.received_at) * 1000),
            **self._bringing.told,
            "visible_devices": answer["visible_devices"] or "",
        }
        self._tell_ready(happened)

    def _tell_ready(self, _: _Happened) -> None:
        assert self.process is not None
        self._reports.ready(
            pid=self.process.pid,
            pid_start_ms=self._site.processes.start_ms(self.process),
            actor_name=self.hosted.actor_name if self.hosted is not None else "",
            hooks=sorted(self._hooks),
            **self._told,
        )

    # ---- while it is ready ----

    def _follow(self, _: _Happened) -> None:
        if self.hosted is None:
            return
        if self.order.command.entry:
            self._watch(self._notice_end_of_entry(self.hosted))
        if self.order.command.progress_timeout_ms:
            self._watch(self._notice_stall(self.hosted, self.order.command.progress_timeout_ms / 1000))

    async def _notice_end_of_entry(self, hosted: Hosted) -> None:
        try:
            answer = await hosted.control("report")
        except HostError as error:
            # How the process ended is told by the one who watches it.
            _log.info("entry_end_unknown", worker=self.name, why=str(error))
        else:
            self._happens(Event.ENTRY_ENDED, answer)

    async def _notice_stall(self, hosted: Hosted, timeout_s: float) -> None:
        self._exits(await until_stalled(hosted, self.name, timeout_s))

    def _report_entry(self, happened: _Happened) -> None:
        answer = happened.fact
        if code := answer.get("exit_code", 0):
            if self._stopping is not None:
                return  # A command that was asked to end may do so as it likes.
            killed = _SIGNALLED - code if code > _SIGNALLED else None
            kills = self._site.processes.oom_kills()
            verdict = self.footprint.verdict(answer["traceback"], killed, kills, is_command=True)
            answer = {**answer, "traceback": verdict.message}
        self._reports.finished(answer, "" if answer["succeeded"] else self._stderr_tail())

    # ---- the end, asked for or not, and its proof ----

    def _abandon_host(self, _: _Happened) -> None:
        self._bringing.abandon()

    def _problem(self, happened: _Happened, member: str) -> NotStarted:
        if happened.event is Event.FAILED:
            problem: NotStarted = happened.fact
            return problem
        during = f"its member {member} was constructed" if member else _NOT_BEFORE[happened.was]
        if happened.event is Event.STOP:
            why = "stopped" if self._stopping is None or self._stopping.command_ids else f"{self._stopping.reason},"
            return NotStarted(agent_pb2.START_FAILURE_STOPPED, f"{why} before {during}")
        if happened.event is Event.DEADLINE:
            limit = self.order.command.start_timeout_ms / 1000
            return NotStarted(agent_pb2.START_FAILURE_DEADLINE, f"not ready after {limit:g} s, before {during}")
        causes = usual_causes(self._code)
        message = f"{self._exit_message()} before {during}" + (f"; {causes}" if causes else "")
        return NotStarted(agent_pb2.START_FAILURE_DIED, message)

    async def _give_up(self, happened: _Happened) -> None:
        member = ""
        if happened.event is Event.DEADLINE and happened.was is State.BUILDING:
            assert self.hosted is not None
            member = await being_built(self.hosted)
        problem = self._problem(happened, member)
        if self.process is None and self.adopted and self._bringing.host is None:
            # Whether a host is there is found out by launching it again: what is found then is ended.
            _ = self._bringing.begin(self.order.launch, self.order.why_cold)
        left = await self._end_tree(UNASKED_KILL_S if self._stopping is None else self._stopping.kill_s)
        self._prove(left, problem)

    async def _ask_to_yield(self, _: _Happened) -> None:
        order = self._stopping
        assert order is not None
        yielded = self._site.checkpoints.find(self.name) or Yielded()
        if yielded.checkpoint is None and self.hosted is not None and not self._over.done():
            wake([self.hosted.process, *self.footprint.tree], self._site.processes)
            name = self.order.command.stop_signal
            sign = Signal(name, self.hosted.process, self._site.processes) if name else None
            yielded = await ask_to_yield(
                self.hosted,
                self._hooks,
                order,
                self._over,
                sign=sign,
                on_cancelled=lambda: self._happens(Event.CANCELLED),
            )
            if yielded.lost == ENDED_FIRST:
                yielded = replace(yielded, lost=f"{ENDED_FIRST}: {self._exit_message()}")
            self._site.checkpoints.keep(self.name, yielded)
        elif yielded.checkpoint is None and order.checkpoint and "checkpoint" in self._hooks:
            yielded = replace(yielded, lost=f"its process had ended before it was asked: {self._exit_message()}")
        self._happens(Event.YIELDED, yielded)

    async def _kill(self, _: _Happened) -> None:
        assert self._stopping is not None
        self._prove(await self._end_tree(self._stopping.kill_s))

    async def _reap(self, _: _Happened) -> None:
        kills, died_s = self._site.processes.oom_kills(), _now_s()
        left = await self._end_tree(UNASKED_KILL_S, alone=True)
        message = self._exit_message()
        code = None if self._over.result() else self._code
        says = None if self.hosted is None else await answer_within(self._site.runtime.oom_of(self.hosted), _CAUSE_S)
        verdict = self.footprint.verdict(message, code, kills, self.hosted, says or "")
        self._prove(left, (verdict, _now_s() - died_s))

    async def _try_again(self, _: _Happened) -> None:
        self._prove(await self._end_tree(QUARANTINE_RETRY_S))

    def _prove(self, left: str, told: Any = None) -> None:
        self._happens(Event.LEFT if left else Event.PROVED, (left, told))

    async def _end_tree(self, budget_s: float, *, alone: bool = False) -> str:
        """End everything of it; what is left, as text: empty when everything is proved gone (I4)."""
        if self.process is None:
            hosted = await self._bringing.settled(budget_s)
            if isinstance(hosted, str):
                return hosted
            if hosted is not None:
                self._happens(Event.HOSTED, hosted)
        if self.process is None:
            return ""
        self._record()
        end = await self._site.processes.end(
            self.process, marker=self.order.marker, also=self.footprint.tree, budget_s=budget_s, alone=alone
        )
        return "" if end.gone else "not gone: " + ", ".join(str(each.pid) for each in end.left[:10])

    def _report_not_started(self, happened: _Happened) -> None:
        left, problem = happened.fact
        asked = self._stopping is not None and bool(self._stopping.command_ids)
        self._reports.not_started(problem, left, self._stderr_tail(), asked=asked)
        self._answer_stops(outcome_of(left), detail=left)

    def _report_stopped(self, happened: _Happened) -> None:
        assert self._stopping is not None
        unasked = ""
        if not self._stopping.command_ids:
            # The end of a lease, a leaving node, a worker not to be kept: no command, but a report.
            self._stopping.command_ids.append("")
            unasked = self._stopping.reason
        left, _ = happened.fact
        detail = "; ".join(text for text in (unasked, self._yielded.detail, left) if text)
        self._answer_stops(outcome_of(left, self._yielded), self._yielded, detail)

    def _report_exited(self, happened: _Happened) -> None:
        left, (verdict, ago_s) = happened.fact
        self._reports.exited(verdict, left, self._stderr_tail(), ago_s)

    def _report_stuck(self, happened: _Happened) -> None:
        left, _ = happened.fact
        self._answer_stops(outcome_of(left), detail=left)

    def _report_freed(self, _: _Happened) -> None:
        self._reports.out_of_quarantine()

    def _bury(self, _: _Happened) -> None:
        if self.hosted is not None:
            self.hosted.release()
        self._site.run_dir.drop("worker", self.name)
        self._site.ports.release(self.name)
        tidy(self.order, self._site)
        self.gone.set()
        self._answer_stops(agent_pb2.STOP_OUTCOME_ALREADY_GONE)
        if self._found is not None and self._found.stage is Stage.ENDING and self._claimed:
            why = "its agent was killed while the start was being given up"
            self._reports.not_started(NotStarted(agent_pb2.START_FAILURE_STOPPED, why), "")
        self._end()

    def _answer_stops(
        self, outcome: agent_pb2.StopOutcome.ValueType, yielded: Yielded = NOTHING_LEFT, detail: str = ""
    ) -> None:
        """Answer every stop command that waits."""
        if self._stopping is None:
            return
        for report in self._reports.stopped(self._stopping, _now_s(), outcome, yielded, detail):
            if yielded.checkpoint is not None:
                self._site.outbox.when_acknowledged(report, lambda: self._site.checkpoints.drop(self.name))

    # ---- what is written and told of it ----

    def _record(self, _: _Happened | None = None) -> None:
        """Record it for the next agent."""
        stage = _STAGES.get(self._life.state, Stage.ENDING)
        if stage is Stage.LAUNCHING and self.hosted is not None:
            stage = Stage.HOSTED  # an earlier agent brought it up
        record = WorkerRecord(
            command_id=self.order.command_id,
            command=self.order.command,
            stage=stage,
            process=self.process,
            address=self.hosted.address if self.hosted is not None else "",
            hooks=self._hooks,
            told=self._told,
            ports=self._site.ports.facts(self.name),
            marker=self.order.marker,
        )
        self._site.run_dir.put(write_record(self.name, record))
        self._bringing.settle_spare()

    def _exit_message(self) -> str:
        """Why or how its process ended."""
        if self._over.done() and self._over.result():
            return self._over.result()
        told = "ended" if self.hosted is None else self.hosted.exit_message()
        return how_it_ended(self._code) if self._code is not None else told

    def _stderr_tail(self) -> str:
        """The end of what it wrote to stderr, its secrets masked, also where a child of it wrote them. Empty where they
        aren't known: of a worker that ended before the agent which took it over could ask."""
        plan = self.order.plan
        secrets = [plan["env"][name] for name in plan.get("secrets", ())] if plan else self._secrets
        return "" if secrets is None else self._site.outputs.stderr_tail(self.order.output, hiding(secrets))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
