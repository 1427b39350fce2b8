"""The signals that elastic components report: the first rule that matches decides (docs/roles.md).

Only what a rule did is remembered, never what was reported: reports come often, and most change nothing. Whoever
sends :class:`SignalsReported` says every gauge of the job that is known, not only the newest.
"""

from __future__ import annotations

from collections.abc import Mapping

from callboard.model.quantities import format_milli
from callboard.model.specs import ComponentSpec, ScalingAction, ScalingRule
from callboard.scheduler.handlers import elastic
from callboard.scheduler.plan.complement import live_of
from callboard.scheduler.records.events import SignalsReported
from callboard.scheduler.records.job_records import JobRecord
from callboard.scheduler.records.states import JobState
from callboard.scheduler.state.transaction import Transaction


def reported(tx: Transaction, event: SignalsReported) -> tuple[tuple[str, int], ...]:
    """Scales what the signals ask for; returns (component, workers it should have) of what changed."""
    job = elastic.living(tx, event.uid)
    if job.state is not JobState.RUNNING:
        return ()
    gauges = dict(event.gauges)
    changed = []
    for component in tx.state.specs[job.uid].spec.components:
        index = _first_match(component, gauges)
        if index is not None and (workers := _act(tx, job.uid, component, index, gauges)):
            changed.append((component.name, workers))
    return tuple(changed)


def _first_match(component: ComponentSpec, gauges: Mapping[str, int]) -> int | None:
    matches = (
        index
        for index, rule in enumerate(component.scaling)
        if rule.signal in gauges and rule.holds(gauges[rule.signal])
    )
    return next(matches, None)


def _act(tx: Transaction, uid: str, component: ComponentSpec, index: int, gauges: Mapping[str, int]) -> int:
    """The number of workers that a rule asks for from now on; 0 when it changes nothing."""
    job, rule = tx.state.jobs[uid], component.scaling[index]
    if tx.now_ms < _cool_at(job, component, index, rule):
        return 0
    # Of those that are there: what a rule asked for in vain must not come when nobody needs it any more.
    live = len(live_of(tx.state, job, component))
    asked = live + rule.step if rule.action is ScalingAction.UP else live - rule.step
    workers = min(max(asked, component.min_workers), component.max_workers)
    if workers == live or (workers > live) is not (rule.action is ScalingAction.UP):
        return 0
    acted = {(name, number): at_ms for name, number, at_ms in job.scaled} | {(component.name, index): tx.now_ms}
    tx.change_job(uid, scaled=tuple((name, number, at_ms) for (name, number), at_ms in sorted(acted.items())))
    elastic.set_target(tx, tx.state.jobs[uid], component, workers, reason="signal", why=_why(rule, gauges[rule.signal]))
    return workers


def _cool_at(job: JobRecord, component: ComponentSpec, index: int, rule: ScalingRule) -> int:
    """When the rule may act again."""
    acted = (at for name, number, at in job.scaled if (name, number) == (component.name, index))
    return next((at + rule.cooldown_ms for at in acted), 0)


def _why(rule: ScalingRule, value_milli: int) -> str:
    if rule.above_milli is not None:
        return f"{rule.signal} is {format_milli(value_milli)}, above {format_milli(rule.above_milli)}"
    return f"{rule.signal} is {format_milli(value_milli)}, below {format_milli(rule.below_milli or 0)}"
