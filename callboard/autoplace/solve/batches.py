"""The batches of a steady state: rules on their starts and ends, and the shortest period that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from callboard.autoplace.instance.tasks import Instance
from callboard.autoplace.solve.groups import Split
from callboard.model.frozen import dataclass


def batch_rules(instance: Instance, split: Split, sync: int, staleness: float) -> list[Rule]:
    """What is asked of one batch, of two batches of one task, and of the latency."""
    rules: list[Rule] = []
    options = {task: option for group in split for task, option in zip(group.members, group.options, strict=True)}
    tails = {task: tail for group in split for task, tail in zip(group.members, group.tails, strict=True)}
    for group in split:
        for task, span in zip(group.members, group.spans, strict=True):
            rules += [
                Rule(0, start_of(task), 0.0, 0.0),
                Rule(start_of(task), end_of(task), float(span), 0.0),
                Rule(end_of(task), start_of(task), 0.0, 1.0),  # done before its next batch
                # The whole batch, its weight sync included, within (η + 1) periods of variable 0.
                Rule(end_of(task), 0, float(tails[task] + sync), staleness + 1.0),
            ]
    for arc in instance.arcs:
        i, j = arc.source, arc.target
        whole, piece = arc.delay(options[i], options[j])
        if arc.barrier:
            rules.append(Rule(end_of(i), start_of(j), float(tails[i] + whole), 0.0))
            continue
        # What hides under the next batch still has to arrive: the end of j's span plus its own tail.
        rules += [
            Rule(start_of(i), start_of(j), float(options[i].piece + piece), 0.0),
            Rule(end_of(i), end_of(j), float(tails[i] + piece + options[j].piece - tails[j]), 0.0),
        ]
        if whole:
            rules.append(Rule(start_of(i), end_of(j), float(options[i].piece + whole + options[j].piece), 0.0))
    return rules


def turn_rules(i: int, j: int, shift: int) -> list[Rule]:
    """What is asked of two tasks that take turns, ``shift`` periods apart."""
    # i ends before the turn of j, `shift` periods on; j before that of i, 1 − `shift` periods on.
    return [Rule(end_of(i), start_of(j), 0.0, float(shift)), Rule(end_of(j), start_of(i), 0.0, float(1 - shift))]


def start_of(task: int) -> int:
    """The variable of a task's start."""
    return 2 * task + 1


def end_of(task: int) -> int:
    """The variable of a task's end."""
    return 2 * task + 2


EPSILON = 1e-3
"""Of a time unit: what floating point may hide."""


@dataclass(frozen=True, slots=True)
class Rule:
    """x[target] ≥ x[source] + weight − periods · T."""

    source: int
    target: int
    weight: float
    periods: float


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady state.

    Attributes:
        period: T, in units.
        times: a value for each variable at that period, the least ones.
    """

    period: float
    times: tuple[float, ...]


def least_period(size: int, rules: Sequence[Rule], least: float, below: float) -> Steady | None:
    """The least period in [``least``, ``below``) under which all rules hold, with variable 0 at time 0.

    Args:
        size: number of variables.
        least: a lower bound.
        below: only shorter periods are of interest.
    """
    period = least
    while period < below:
        times, cycle = _longest(size, rules, period)
        if cycle is None:
            return Steady(period, tuple(times))
        weight = sum(rule.weight for rule in cycle)
        periods = sum(rule.periods for rule in cycle)
        if periods <= 0:
            return None
        period = max(weight / periods, period + EPSILON)
    return None


def _longest(size: int, rules: Sequence[Rule], period: float) -> tuple[list[float], list[Rule] | None]:
    """(longest paths from variable 0, None), or some positive cycle."""
    times = [0.0] * size
    last: list[Rule | None] = [None] * size
    changed = -1
    for _ in range(size + 1):
        changed = -1
        for rule in rules:
            value = times[rule.source] + rule.weight - rule.periods * period
            if value > times[rule.target] + EPSILON:
                times[rule.target] = value
                last[rule.target] = rule
                changed = rule.target
        if changed < 0:
            return times, None
    return times, list(_cycle(changed, last))


def _cycle(start: int, last: Sequence[Rule | None]) -> Iterator[Rule]:
    """The rules of the cycle that is reached by going back from ``start``."""
    at = start
    for _ in last:
        rule = last[at]
        assert rule is not None
        at = rule.source
    first = at
    while True:
        rule = last[at]
        assert rule is not None
        yield rule
        at = rule.source
        if at == first:
            return
