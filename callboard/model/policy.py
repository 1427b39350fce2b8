"""The preemption policy as data; the rules that read it are in the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LabelRules = tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]
"""(key, ((winner, (loser, …)), …)) sorted by key and winner; losers sorted."""


class Aggressiveness(StrEnum):
    """How large the gap of priorities must be."""

    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"

    @property
    def label_threshold_milli(self) -> int:
        """Gap from which a label rule lets the winner preempt, inclusive, in milli."""
        return {"LOW": 1000, "MEDIUM": 500, "HIGH": 100}[self.value]

    @property
    def same_pool_threshold_milli(self) -> int:
        """Gap from which a job preempts within its pool, inclusive, in milli."""
        return {"LOW": 3000, "MEDIUM": 1000, "HIGH": 500}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy:
    """The cluster's rules, every default filled in (docs/scheduling.md, The policy)."""

    enable_label_preemption: bool = True
    label_rules: LabelRules = ()
    aggressiveness: Aggressiveness = Aggressiveness.MEDIUM
    enable_cross_pool: bool = True
    cross_pool_threshold_milli: int = 5000
    protected_pools: tuple[str, ...] = ()
    cancel_timeout_ms: int = 30_000
    kill_timeout_ms: int = 10_000
    min_runtime_ms: int = 0
    preemption_delay_ms: int = 0
    max_victims_per_round: int = 0
    max_preemptions_per_job: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverrides:
    """What a pool states for itself; None leaves the cluster's value."""

    enable_label_preemption: bool | None = None
    label_rules: LabelRules | None = None
    aggressiveness: Aggressiveness | None = None
    enable_cross_pool: bool | None = None
    cross_pool_threshold_milli: int | None = None
    protected_pools: tuple[str, ...] | None = None
    cancel_timeout_ms: int | None = None
    kill_timeout_ms: int | None = None
    min_runtime_ms: int | None = None
    preemption_delay_ms: int | None = None
    max_victims_per_round: int | None = None
    max_preemptions_per_job: int | None = None

    def over(self, base: PreemptionPolicy) -> PreemptionPolicy:
        """``base`` with what is stated here."""
        stated = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if not stated:
            return base
        merged = {name: getattr(base, name) for name in base.__slots__} | stated
        return PreemptionPolicy(**merged)


def label_rules(rules: dict[str, dict[str, list[str]]]) -> LabelRules:
    """The sorted form of ``{key: {winner: [losers]}}``, without empty entries."""
    return tuple(
        (key, tuple((winner, tuple(sorted(set(losers)))) for winner, losers in sorted(winners.items()) if losers))
        for key, winners in sorted(rules.items())
        if any(winners.values())
    )


def rule_cycle(rules: LabelRules) -> tuple[str, ...] | None:
    """A cycle such as ``("role", "train", "reward", "train")``, or None. With one, jobs evict each other for ever."""
    for key, winners in rules:
        beats = dict(winners)
        for start in beats:
            path = _cycle_from(start, beats)
            if path:
                return (key, *path)
    return None


def _cycle_from(start: str, beats: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    stack: list[tuple[str, tuple[str, ...]]] = [(start, (start,))]
    seen: set[str] = set()
    while stack:
        value, path = stack.pop()
        for loser in beats.get(value, ()):
            if loser == start:
                return (*path, start)
            if loser not in seen:
                seen.add(loser)
                stack.append((loser, (*path, loser)))
    return None
