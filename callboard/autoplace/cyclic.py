"""How short can the period of a steady state be? Difference constraints in the start times and the period.

Batch b runs every task T later than batch b − 1. Everything that is asked of the times is x_v ≥ x_u + w − c·T: the
stream and barrier rules of one batch (c = 0), and those that let two batches meet nowhere (c ≠ 0). For a given T such
a system holds unless a cycle is positive, and the cycle itself tells the T at which it isn't (Newton's method for the
maximum cycle ratio, Cochet-Terrasson et al. 1998): a few rounds give the least period exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        rules: all of them.
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
