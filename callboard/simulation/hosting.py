"""What happens to one worker? Its process tree from the start command to the proof that it is gone.

The rules of ``callboard.agents.worker`` and its stop ladder: every way out ends the whole tree before a report says so
(I4); what can't be ended in time is QUARANTINED, tried again, and reported a second time.
"""

from __future__ import annotations

from asyncio import TimerHandle as Timer
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from callboard.agents.lease import Lease
from callboard.agents.outbox import Outbox
from callboard.simulation.behaviour import draw
from callboard.simulation.fence import guard
from callboard.simulation.machines import Key, Machine, Tree
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2

LEASE_LOOK_MS = 100
"""How soon a start that waits for its node's lease looks again."""

UNASKED_KILL_MS = 10_000
"""For the end of a tree that nobody gave a time for."""


@dataclass(slots=True, eq=False)
class StopOrder:
    """A stop; later ones join it and only shorten it. Times in virtual milliseconds."""

    asked_ms: int
    hooks_until_ms: int
    kill_ms: int
    checkpoint: bool
    command_ids: list[str] = field(default_factory=list)

    def join(self, other: StopOrder) -> None:
        """Answers the other order too, by the earlier of both deadlines."""
        self.command_ids.extend(other.command_ids)
        self.checkpoint = self.checkpoint or other.checkpoint
        self.kill_ms = min(self.kill_ms, other.kill_ms)
        self.hooks_until_ms = min(self.hooks_until_ms, other.hooks_until_ms)


class Keeper(Protocol):
    """The agent, as its workers see it."""

    site: Site
    machine: Machine
    outbox: Outbox
    lease: Lease

    def later(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in a while, if the agent still lives."""

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""


class Worker:
    """One worker in one generation."""

    def __init__(self, keeper: Keeper, command_id: str, command: agent_pb2.StartWorker, older: Worker | None) -> None:
        self.command = command
        self.key: Key = (command.worker.job_id, command.worker.component, command.worker.rank)
        self.generation = command.generation
        self.state: agent_pb2.AgentWorkerState.ValueType = agent_pb2.AGENT_WORKER_STATE_STARTING
        self.gone = False
        self.when_gone: list[Callable[[], None]] = []
        self.tree: Tree | None = None
        self._keeper = keeper
        self._site = keeper.site
        self._command_id = command_id
        self._behaviour = draw(keeper.site, command)
        self._stop: StopOrder | None = None
        self._phase = 0
        start = self._in_phase(self._launch)
        self._later(command.start_timeout_ms, lambda: self._fail(agent_pb2.START_FAILURE_DEADLINE, "not ready in time"))
        if older is not None and not older.gone:
            older.when_gone.append(start)
        else:
            start()

    # ---- what the agent asks ----

    def report(self) -> agent_pb2.WorkerReport:
        """The worker as Hello shows it."""
        return agent_pb2.WorkerReport(
            worker=self.command.worker,
            generation=self.generation,
            state=self.state,
            pid=10_000 + self.generation if self.tree else 0,
        )

    def stop(self, order: StopOrder) -> None:
        """Stops the worker."""
        if self._stop is not None:
            self._stop.join(order)
            if self.state == agent_pb2.AGENT_WORKER_STATE_STOPPING and self._asking:
                self._ask_to_yield()
            return
        self._stop = order
        if self.state == agent_pb2.AGENT_WORKER_STATE_STARTING:
            self._fail(agent_pb2.START_FAILURE_STOPPED, "stopped while starting")
        elif self.state == agent_pb2.AGENT_WORKER_STATE_READY:
            self._begin_stopping()
            self._ask_to_yield()

    def die(self, message: str) -> None:
        """The worker's process ends by itself, or with its Ray session; children may live on."""
        if self.tree is None or self.gone:
            return
        self.tree.living = max(1, self.tree.living - 1)
        if self.state == agent_pb2.AGENT_WORKER_STATE_STARTING:
            self._fail(agent_pb2.START_FAILURE_DIED, message)
        elif self.state == agent_pb2.AGENT_WORKER_STATE_READY:
            self._begin_stopping()
            self._end_tree(UNASKED_KILL_MS, lambda left: self._exited(message, left))

    # ---- starting ----

    def _launch(self) -> None:
        self._later(self._behaviour.launch_ms, self._spawn)

    def _spawn(self) -> None:
        now_ms, plan, command = self._site.timeline.now_ms, self._behaviour, self.command
        if command.strict and not self._keeper.lease.holds():
            # Another copy may run by now: it waits for a new lease, or for the controller to end it.
            self._later(LEASE_LOOK_MS, self._spawn)
            return
        self.tree = Tree(
            generation=self.generation,
            key=self.key,
            devices=tuple((share.index, share.milli) for share in command.allocation.devices),
            strict=command.strict,
            kill_ms=plan.kill_ms,
            living=1 + plan.children,
        )
        self._site.machines.spawn(self._keeper.machine, self.tree, now_ms)
        if command.strict:
            guard(self._site, self._keeper.machine, self.tree, plan.stuck_ms)
        self._later(plan.construct_ms, self._constructed)

    def _constructed(self) -> None:
        plan = self._behaviour
        if plan.problem != agent_pb2.START_FAILURE_UNSPECIFIED:
            self._fail(plan.problem, "the constructor raised ValueError")
            return
        self._phase += 1
        self.state = agent_pb2.AGENT_WORKER_STATE_READY
        devices = ",".join(share.id for share in self.command.allocation.devices)
        ready = agent_pb2.WorkerReady(**self._ref, pid=10_000 + self.generation, visible_devices=devices)
        self._say(self._command_id, worker_ready=ready)
        self._later(plan.life_ms, lambda: self.die("killed by signal 11"))
        if self.command.entry:
            self._later(plan.entry_ms, self._returned)

    def _returned(self) -> None:
        works = self._behaviour.entry_works
        finished = agent_pb2.WorkerFinished(**self._ref, succeeded=works, traceback="" if works else "ValueError: no")
        self._say("", worker_finished=finished)

    def _fail(self, failure: agent_pb2.StartFailure.ValueType, message: str) -> None:
        self._begin_stopping()

        def ended(left: bool) -> None:
            failed = agent_pb2.WorkerStartFailed(**self._ref, failure=failure, message=message, quarantined=left)
            self._say(self._command_id, worker_start_failed=failed)
            self._close(agent_pb2.STOP_OUTCOME_KILLED, left)

        self._end_tree(UNASKED_KILL_MS if self._stop is None else self._stop.kill_ms, ended)

    # ---- ending ----

    _asking = False

    def _begin_stopping(self) -> None:
        self._phase += 1
        self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING

    def _ask_to_yield(self) -> None:
        """Hooks, until they return or their time is over."""
        assert self._stop is not None
        self._phase += 1
        self._asking = True
        order, now_ms = self._stop, self._site.timeline.now_ms
        returns_ms = order.asked_ms + self._behaviour.hook_ms
        willing = returns_ms <= order.hooks_until_ms
        at_ms = returns_ms if willing else order.hooks_until_ms
        self._later(at_ms - now_ms, lambda: self._kill_after_hooks(cooperative=willing))

    def _kill_after_hooks(self, *, cooperative: bool) -> None:
        assert self._stop is not None
        self._asking = False
        self._phase += 1
        outcome = agent_pb2.STOP_OUTCOME_COOPERATIVE if cooperative else agent_pb2.STOP_OUTCOME_KILLED
        saved = cooperative and self._stop.checkpoint and self._behaviour.leaves_checkpoint
        checkpoint = agent_pb2.Checkpoint(data=b"step %d" % self.generation) if saved else None
        if not self._stop.command_ids:
            # The end of a lease, a leaving node, a worker not to be kept: no command, but a report.
            self._stop.command_ids.append("")
        self._end_tree(self._stop.kill_ms, lambda left: self._close(outcome, left, checkpoint))

    def _exited(self, message: str, left: bool) -> None:
        self._say("", worker_exited=agent_pb2.WorkerExited(**self._ref, message=message, quarantined=left))
        self._close(agent_pb2.STOP_OUTCOME_ALREADY_GONE, left)

    def _close(
        self,
        outcome: agent_pb2.StopOutcome.ValueType,
        left: bool,
        checkpoint: agent_pb2.Checkpoint | None = None,
    ) -> None:
        """Answers the stops, and is done or quarantined."""
        self._answer_stops(agent_pb2.STOP_OUTCOME_QUARANTINED if left else outcome, checkpoint)
        if left:
            self._phase += 1
            self.state = agent_pb2.AGENT_WORKER_STATE_QUARANTINED
            self._retry()
        else:
            self._be_gone()

    def _retry(self) -> None:
        def tried(left: bool) -> None:
            if left:
                self._answer_stops(agent_pb2.STOP_OUTCOME_QUARANTINED)
                self._retry()
                return
            gone = agent_pb2.WorkerStopped(
                **self._ref, outcome=agent_pb2.STOP_OUTCOME_KILLED, detail="out of quarantine"
            )
            self._say("", worker_stopped=gone)
            self._be_gone()

        self._end_tree(1_000, tried)

    def _end_tree(self, budget_ms: int, then: Callable[[bool], None]) -> None:
        """Kills the tree and proves it gone; ``then(True)`` when something is left after ``budget_ms``."""
        tree, now_ms = self.tree, self._site.timeline.now_ms
        if tree is None:
            then(False)
            return
        if self._behaviour.stuck_ms and not tree.stuck_until_ms:
            tree.stuck_until_ms = now_ms + self._behaviour.stuck_ms
        gone_ms = max(now_ms + tree.kill_ms, tree.stuck_until_ms)
        if gone_ms > now_ms + budget_ms:
            self._later(budget_ms, lambda: then(True))
            return

        def gone() -> None:
            self._site.machines.end(self._keeper.machine, tree)
            then(False)

        self._later(gone_ms - now_ms, gone)

    def _be_gone(self) -> None:
        self._phase += 1
        self.gone = True
        self._keeper.forget(self)
        self._answer_stops(agent_pb2.STOP_OUTCOME_ALREADY_GONE)
        for do in self.when_gone:
            do()

    def _answer_stops(
        self, outcome: agent_pb2.StopOutcome.ValueType, checkpoint: agent_pb2.Checkpoint | None = None
    ) -> None:
        if self._stop is None:
            return
        took_ms = self._site.timeline.now_ms - self._stop.asked_ms
        for command_id in self._stop.command_ids:
            stopped = agent_pb2.WorkerStopped(**self._ref, outcome=outcome, checkpoint=checkpoint, took_ms=took_ms)
            self._say(command_id, worker_stopped=stopped)
        self._stop.command_ids.clear()

    # ---- inside ----

    @property
    def _ref(self) -> dict[str, Any]:
        return {"worker": self.command.worker, "generation": self.generation}

    def _say(self, command_id: str, **content: Any) -> None:
        self._keeper.outbox.report(command_id, **content)

    def _later(self, wait_ms: float, do: Callable[[], None]) -> None:
        self._keeper.later(wait_ms, self._in_phase(do))

    def _in_phase(self, do: Callable[[], None]) -> Callable[[], None]:
        """``do``, unless the worker has gone on meanwhile."""
        phase = self._phase

        def guarded() -> None:
            if self._phase == phase:
                do()

        return guarded
