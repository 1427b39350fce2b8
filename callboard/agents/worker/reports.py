"""Reports to the controller about one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from callboard.agents.files.checkpoints import NOTHING_LEFT, Yielded
from callboard.agents.link.outbox import Outbox
from callboard.agents.worker.order import WorkerOrder
from callboard.agents.worker.stop_ladder import StopOrder
from callboard.agents.worker.verdict import ExitVerdict
from callboard.model.log import structlog
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class NotStarted:
    """Why a worker could not be started."""

    failure: agent_pb2.StartFailure.ValueType
    message: str
    traceback: str = ""


def outcome_of(left: str, yielded: Yielded = NOTHING_LEFT) -> agent_pb2.StopOutcome.ValueType:
    """How a stop ended: `left` names what isn't proved gone."""
    if left:
        return agent_pb2.STOP_OUTCOME_QUARANTINED
    return agent_pb2.STOP_OUTCOME_COOPERATIVE if yielded.cooperative else agent_pb2.STOP_OUTCOME_KILLED


@dataclass
class Reports:
    """Speaks for one worker in one generation."""

    order: WorkerOrder
    """The newest order for it: what is said of a start answers that one."""
    outbox: Outbox

    @property
    def ref(self) -> dict[str, Any]:
        """Which worker and generation."""
        return {"worker": self.order.command.worker, "generation": self.order.command.generation}

    def ready(self, **facts: Any) -> None:
        """It was constructed and answered."""
        ready = agent_pb2.WorkerReady(**self.ref, **facts)
        self.outbox.report(self.order.command_id, worker_ready=ready)
        _log.info(
            "worker_ready",
            worker=self.order.launch.name,
            pid=ready.pid,
            ms=ready.start_ms,
            cold=ready.cold_reason or None,
        )

    def progress(self, message: str) -> None:
        """Its start takes long; `message` is the end of a sentence that begins with the node."""
        self.outbox.report("", worker_progress=agent_pb2.WorkerProgress(**self.ref, message=message))

    def not_started(self, problem: NotStarted, left: str, stderr_tail: str = "", *, asked: bool = False) -> None:
        """It could not be started; `left` names what isn't proved gone.

        A stop that nobody `asked` for, as of a node that leaves, is no failure of it: its job starts again elsewhere.
        """
        if problem.failure == agent_pb2.START_FAILURE_STOPPED and not asked:
            detail = "; ".join(text for text in (problem.message, left) if text)
            stopped = agent_pb2.WorkerStopped(**self.ref, outcome=outcome_of(left), detail=detail)
            self.outbox.report(self.order.command_id, worker_stopped=stopped)
        else:
            failed = agent_pb2.WorkerStartFailed(
                **self.ref,
                failure=problem.failure,
                message=problem.message,
                traceback=problem.traceback,
                quarantined=bool(left),
                stderr_tail=stderr_tail,
            )
            self.outbox.report(self.order.command_id, worker_start_failed=failed)
        _log.info("worker_not_started", worker=self.order.launch.name, why=problem.message)

    def finished(self, answer: dict[str, Any], stderr_tail: str) -> None:
        """Its entry method ended."""
        finished = agent_pb2.WorkerFinished(**self.ref, **answer, stderr_tail=stderr_tail)
        self.outbox.report("", worker_finished=finished)

    def exited(self, verdict: ExitVerdict, left: str, stderr_tail: str, ago_s: float) -> None:
        """It died without being asked, `ago_s` seconds ago."""
        text = "; ".join(each for each in (verdict.message, left) if each)
        _log.warning("worker_exited", worker=self.order.launch.name, why=text)
        dead = agent_pb2.WorkerExited(**self.ref, message=text, quarantined=bool(left), stderr_tail=stderr_tail)
        dead.ago_ms = round(ago_s * 1000)
        dead.out_of_memory, dead.peak_memory_bytes = verdict.out_of_memory, verdict.peak_bytes
        self.outbox.report("", worker_exited=dead)

    def stopped(
        self,
        order: StopOrder,
        now: float,
        outcome: agent_pb2.StopOutcome.ValueType,
        yielded: Yielded,
        detail: str = "",
    ) -> list[agent_pb2.Report]:
        """Answer every stop command that waits; `now` is loop time in seconds. Returns the answers."""
        answers: list[agent_pb2.Report] = []
        for command_id in order.command_ids:
            stopped = agent_pb2.WorkerStopped(
                **self.ref,
                outcome=outcome,
                checkpoint=yielded.checkpoint,
                checkpoint_lost=yielded.lost,
                took_ms=round((now - order.asked_at) * 1000),
                detail=detail,
            )
            answers.append(self.outbox.report(command_id, worker_stopped=stopped))
            _log.info(
                "worker_stopped",
                worker=self.order.launch.name,
                outcome=agent_pb2.StopOutcome.Name(outcome),
                ms=stopped.took_ms,
                why=order.reason,
            )
        order.command_ids.clear()
        return answers

    def out_of_quarantine(self) -> None:
        """What could not be proved gone is gone at last."""
        gone = agent_pb2.WorkerStopped(**self.ref, outcome=agent_pb2.STOP_OUTCOME_KILLED, detail="out of quarantine")
        self.outbox.report("", worker_stopped=gone)
