"""Observations: counts and durations, from what was decided and journaled.

What a restart forgets is only what Prometheus expects to be forgotten: counters begin again at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from callboard.controller.loop.driver import Listener
from callboard.scheduler import State
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.states import JobState, WorkerState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Buckets of everything that people wait for."""

SHORT_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Buckets of what the controller does by itself."""


class Observations(Listener):
    """Follows the driver. Everything here runs on its loop."""

    def __init__(self, registry: CollectorRegistry, state: Callable[[], State]) -> None:
        self._state = state
        self._next_preemption = 0
        self._yielding: set[int] = set()
        self._starting: dict[str, list[int]] = {}
        self._series: set[tuple[str, tuple[str, ...]]] = set()
        counter, seconds = partial(Counter, registry=registry), partial(Histogram, buckets=SECONDS, registry=registry)
        short = partial(Histogram, buckets=SHORT_SECONDS, registry=registry)
        self.preemptions = counter("callboard_preemptions", "Victims that yielded.", ["pool", "reason", "outcome"])
        self.execution = seconds(
            "callboard_preemption_execution_seconds", "From the decision until the victim's room was free."
        )
        self.to_start = seconds(
            "callboard_preemption_to_start_seconds", "From the decision to preempt until the preemptor ran."
        )
        self.schedule = seconds(
            "callboard_task_schedule_seconds", "From submit until every worker answered, first start only.", ["pool"]
        )
        self.worker_start = seconds(
            "callboard_worker_start_seconds", "From the start command until the worker answered.", ["spare"]
        )
        self.scaling = counter("callboard_scaling_events", "Changes of elastic components.", ["direction", "reason"])
        self.restarts = counter("callboard_worker_restarts", "Workers started again.")
        self.decision = short("callboard_decision_seconds", "One event decided.")
        self.commit = short("callboard_journal_commit_seconds", "One batch on disk.")
        self.calls = seconds("callboard_call_seconds", "Calls of the API, by method and status.", ["method", "code"])

    # ---- Listener ----

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - nothing is counted twice
        """A term began: what was counted before it is not counted again."""
        self._next_preemption = self._state().meta.next_preemption
        self._yielding = {n for n, record in self._state().preemptions.items() if record.outcome is None}

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Counts what happened."""
        for event in events:
            kind, _, what = event.type.partition(".")
            if kind == "job" and what == JobState.RUNNING.value.lower():
                self._job_runs(dict(event.facts).get("uid", ""), event.at_ms)
            elif kind == "worker" and what == WorkerState.READY.value.lower():
                self._worker_ready(int(dict(event.facts).get("generation", 0)))
            elif event.type == "job.scaled":
                facts = dict(event.facts)
                self.scaling.labels(facts.get("direction", ""), facts.get("reason", "")).inc()
        self._preemptions()

    # ---- what others measured ----

    def took(self, what: str, seconds: float) -> None:
        """A "decision" or a "commit" took so long."""
        (self.decision if what == "decision" else self.commit).observe(seconds)

    def called(self, method: str, code: str, seconds: float) -> None:
        """A unary call ended."""
        self.calls.labels(method, code).observe(seconds)

    # ---- what happened ----

    def _job_runs(self, uid: str, at_ms: int) -> None:
        state = self._state()
        job, spec = state.jobs.get(uid), state.specs.get(uid)
        if job is None or spec is None:
            return
        if job.attempt == 1:
            self._series.add((spec.spec.pool, (spec.spec.pool,)))
            self.schedule.labels(spec.spec.pool).observe(max(0, at_ms - job.submit_ms) / 1000)
        for decided_ms in self._starting.pop(uid, []):
            self.to_start.observe(max(0, at_ms - decided_ms) / 1000)

    def _worker_ready(self, generation: int) -> None:
        worker = self._state().workers.get(generation)
        if worker is None:
            return
        self.worker_start.labels("preloaded" if worker.preloaded else "hit" if worker.warm else "miss").observe(
            worker.start_ms / 1000
        )
        if worker.attempt > 1:
            self.restarts.inc()

    def _preemptions(self) -> None:
        known, end = self._state().preemptions, self._state().meta.next_preemption
        for number in range(self._next_preemption, end):
            record = known.get(number)
            if record is None:
                continue
            self._yielding.add(number)
            if record.preemptor:
                self._starting.setdefault(record.preemptor, []).append(record.decided_ms)
        self._next_preemption = max(self._next_preemption, end)
        for number in sorted(self._yielding):
            record = known.get(number)
            if record is None:
                self._yielding.discard(number)
            elif record.outcome is not None:
                self._yielding.discard(number)
                labels = (record.pool, record.rule.value, record.outcome.value)
                self._series.add((record.pool, labels))
                self.preemptions.labels(*labels).inc()
                self.execution.observe(max(0, record.yield_ms) / 1000)
        if self._starting:
            self._starting = {uid: times for uid, times in self._starting.items() if uid in self._state().jobs}

    def forget_gone(self) -> None:
        """Drops the series of pools that no longer exist."""
        pools = self._state().pools
        for pool, labels in sorted(self._series):
            if pool in pools:
                continue
            self._series.discard((pool, labels))
            (self.preemptions if len(labels) > 1 else self.schedule).remove(*labels)
