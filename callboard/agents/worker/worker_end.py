"""The end of a worker, asked for or not, and its proof.

Every function returns what is left, as text: empty when everything of the worker is proved gone (I4).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace

import structlog

from callboard.agents.files.checkpoints import NOTHING_LEFT, Yielded
from callboard.agents.system.process_tree import NotOurProcess, ProcessId
from callboard.agents.system.processes import Processes
from callboard.agents.worker.stop_ladder import ENDED_FIRST, UNASKED_KILL_S, ask_to_yield
from callboard.agents.worker.worker_facts import WorkerFacts
from callboard.agents.worker.worker_record import Stage
from callboard.agents.worker.worker_reports import NotStarted
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

_CAUSE_S = 2.0
"""For Ray to say why an actor died: its answer is worth less than a report in time."""

QUARANTINE_RETRY_S = 1.0
"""Between attempts to end what is quarantined: mostly uninterruptible sleep, which ends by itself."""


async def end_failed(facts: WorkerFacts, problem: NotStarted) -> str:
    """It could not be started."""
    facts.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
    left = await _end_tree(facts, UNASKED_KILL_S if facts.stopping is None else facts.stopping.kill_s)
    facts.reports.not_started(problem, left, facts.stderr_tail())
    facts.answer_stops(_outcome(left, NOTHING_LEFT), detail=left)
    return left


async def end_stopped(facts: WorkerFacts) -> str:
    """It was asked to stop."""
    order = facts.stopping
    assert order is not None
    facts.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
    yielded = facts.site.checkpoints.find(facts.name) or Yielded()
    if yielded.checkpoint is None and facts.hosted is not None and not facts.signals.over.done():
        _continue(facts)
        signalling = Signalling(facts) if facts.order.command.stop_signal else None
        yielded = await ask_to_yield(facts.hosted, facts.hooks, order, facts.signals.over, signalling)
        if yielded.lost == ENDED_FIRST:
            yielded = replace(yielded, lost=f"{ENDED_FIRST}: {facts.exit_message()}")
        facts.site.checkpoints.keep(facts.name, yielded)
    elif yielded.checkpoint is None and order.checkpoint and "checkpoint" in facts.hooks:
        yielded = replace(yielded, lost=f"its process had ended before it was asked: {facts.exit_message()}")
    left = await _end_tree(facts, order.kill_s)
    unasked = ""
    if not order.command_ids:
        # The end of a lease, a leaving node, a worker not to be kept: no command, but a report.
        order.command_ids.append("")
        unasked = order.reason
    detail = "; ".join(text for text in (unasked, yielded.detail, left) if text)
    facts.answer_stops(_outcome(left, yielded), yielded, detail)
    return left


async def end_alone(facts: WorkerFacts) -> str:
    """It died, or lost its host."""
    facts.state = agent_pb2.AGENT_WORKER_STATE_STOPPING
    kills = facts.site.processes.oom_kills()
    died_s = asyncio.get_running_loop().time()
    left = await _end_tree(facts, UNASKED_KILL_S, alone=True)
    message = facts.exit_message()
    if facts.hosted is not None:
        facts.peak_bytes = max(facts.peak_bytes, facts.hosted.peak_bytes)
    verdict = facts.verdict(
        message,
        facts.signals.code if not facts.signals.over.done() or not facts.signals.over.result() else None,
        oom_kills_then=kills,
        ray_says=await _oom_of(facts),
    )
    ago_s = asyncio.get_running_loop().time() - died_s
    facts.reports.exited(verdict, left, facts.stderr_tail(), ago_s)
    return left


def _continue(facts: WorkerFacts) -> None:
    """Wake what somebody stopped (SIGSTOP): it could not answer, and its time would pass in vain."""
    for process in facts.tree | ({facts.process} if facts.process is not None else set()):
        _sent(facts.site.processes, process, signal.SIGCONT)


class Signalling:
    """The signal that a stop of a worker begins with, for what it started; its own process gets it from its host,
    which knows whether the user's code handles it: where nothing does, it would end before its hooks."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.name = facts.order.command.stop_signal
        self._facts = facts

    async def send(self) -> Sequence[ProcessId]:
        """Send it; returns the processes that got it."""
        process = self._facts.process
        if process is None or self.name not in signal.Signals.__members__:
            return ()
        processes = self._facts.site.processes
        trees = await processes.trees([process])
        number = signal.Signals[self.name]
        return [each for each in sorted(trees[process] - {process}) if _sent(processes, each, number)]

    async def gone(self, process: ProcessId) -> None:
        """Return once it has ended."""
        await self._facts.site.processes.exited(process)


def _sent(processes: Processes, process: ProcessId, number: signal.Signals) -> bool:
    try:
        return processes.send_signal(process, number)
    except (NotOurProcess, PermissionError) as error:
        _log.info("stop_signal_not_sent", pid=process.pid, why=str(error))
        return False


async def _oom_of(facts: WorkerFacts) -> str:
    if facts.hosted is None:
        return ""
    asked = asyncio.ensure_future(facts.site.runtime.oom_of(facts.hosted))
    await asyncio.wait([asked], timeout=_CAUSE_S)
    asked.cancel()
    return asked.result() if asked.done() and not asked.cancelled() else ""


async def end_quarantined(facts: WorkerFacts) -> None:
    """Try until it is gone, then say so a second time."""
    facts.state = agent_pb2.AGENT_WORKER_STATE_QUARANTINED
    while left := await _end_tree(facts, QUARANTINE_RETRY_S):
        facts.answer_stops(agent_pb2.STOP_OUTCOME_QUARANTINED, detail=left)
    facts.reports.out_of_quarantine()


async def _end_tree(facts: WorkerFacts, budget_s: float, *, alone: bool = False) -> str:
    if facts.process is None and facts.bringing.begun:
        hosted = await facts.bringing.settled(budget_s)
        if isinstance(hosted, str):
            return hosted
        if hosted is not None:
            facts.learn_host(hosted)
    if facts.process is None:
        return ""
    facts.write(Stage.ENDING)
    end = await facts.site.processes.end(
        facts.process, marker=facts.order.marker, also=facts.tree, budget_s=budget_s, alone=alone
    )
    return "" if end.gone else "not gone: " + ", ".join(str(each.pid) for each in end.left[:10])


def _outcome(left: str, yielded: Yielded) -> agent_pb2.StopOutcome.ValueType:
    if left:
        return agent_pb2.STOP_OUTCOME_QUARANTINED
    if yielded.cooperative:
        return agent_pb2.STOP_OUTCOME_COOPERATIVE
    return agent_pb2.STOP_OUTCOME_KILLED
