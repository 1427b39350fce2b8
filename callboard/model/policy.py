"""The preemption policy as data; the rules that read it are in the scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from callboard.model.frozen import dataclass
from callboard.model.inputs.compounds import MAX_ENTRIES, entries, list_of, sequence
from callboard.model.inputs.located import Misfit, Misfits, each, raise_any
from callboard.model.inputs.scalars import Flag, PriorityGap, Timeout, choice, label, name, whole_or_unlimited
from callboard.model.schema import Form, Kind

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


_EXAMPLE = "e.g. {role: {train: [reward, rollout]}}"
_MOST_LOSERS = 256
_MOST_COUNT = 1_000_000


def rules(value: object) -> LabelRules:
    """``{key: {winner: [losers]}}``. Nobody beats himself, and nobody his own beater: they would evict each other."""
    misfits: list[Misfit] = []
    plain: dict[str, dict[str, list[str]]] = {}
    for key, winners in entries(value, _EXAMPLE):
        each(key, label, key, misfits)
        plain[key] = each(key, _winners, winners, misfits) or {}
    raise_any(misfits)
    found = label_rules(plain)
    cycle = rule_cycle(found)
    if cycle:
        key, *values = cycle
        raise Misfits([Misfit((key,), f"the rules go in a circle: {' beats '.join(values)}")])
    return found


def _winners(value: object) -> dict[str, list[str]]:
    misfits: list[Misfit] = []
    found: dict[str, list[str]] = {}
    for winner, losers in entries(value, _EXAMPLE):
        each(winner, label, winner, misfits)
        read_losers = each(winner, _losers, losers, misfits) or []
        if winner in read_losers:
            misfits.append(Misfit((winner,), f"{winner} can't beat itself"))
        found[winner] = read_losers
    raise_any(misfits)
    return found


def _losers(value: object) -> list[str]:
    misfits: list[Misfit] = []
    found = sequence(value, "e.g. [reward, rollout]", _MOST_LOSERS)
    for index, loser in enumerate(found):
        each(index, label, loser, misfits)
    raise_any(misfits)
    return found


def _show_rules(rules: LabelRules) -> dict[str, dict[str, list[str]]]:
    return {key: {winner: list(losers) for winner, losers in winners} for key, winners in rules}


Rules = Annotated[LabelRules, Kind(rules, _show_rules, Form.RULES)]
Level = Annotated[Aggressiveness, choice(Aggressiveness)]
PoolNames = Annotated[
    tuple[str, ...], Kind(list_of(name, "e.g. [prod]", MAX_ENTRIES, distinct=True).read, list, Form.NAMES)
]
CountOrUnlimited = Annotated[int, whole_or_unlimited(_MOST_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy:
    """The cluster's rules, every default filled in (docs/scheduling.md, The policy)."""

    enable_label_preemption: Flag = True
    label_rules: Rules = ()
    aggressiveness: Level = Aggressiveness.MEDIUM
    enable_cross_pool: Flag = True
    cross_pool_threshold_milli: PriorityGap = 5000
    protected_pools: PoolNames = ()
    cancel_timeout_ms: Timeout = 30_000
    kill_timeout_ms: Timeout = 10_000
    min_runtime_ms: Timeout = 0
    preemption_delay_ms: Timeout = 0
    max_victims_per_round: CountOrUnlimited = 0
    max_preemptions_per_job: CountOrUnlimited = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverrides:
    """What a pool states for itself; None leaves the cluster's value."""

    enable_label_preemption: Flag | None = None
    label_rules: Rules | None = None
    aggressiveness: Level | None = None
    enable_cross_pool: Flag | None = None
    cross_pool_threshold_milli: PriorityGap | None = None
    protected_pools: PoolNames | None = None
    cancel_timeout_ms: Timeout | None = None
    kill_timeout_ms: Timeout | None = None
    min_runtime_ms: Timeout | None = None
    preemption_delay_ms: Timeout | None = None
    max_victims_per_round: CountOrUnlimited | None = None
    max_preemptions_per_job: CountOrUnlimited | None = None

    def over(self, base: PreemptionPolicy) -> PreemptionPolicy:
        """``base`` with what is stated here."""
        stated = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if not stated:
            return base
        merged = {name: getattr(base, name) for name in base.__slots__} | stated
        return PreemptionPolicy(**merged)
