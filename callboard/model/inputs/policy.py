"""Preemption policies as input: known keys, levels and bounds; label rules without cycles."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator

from callboard.model.inputs.compounds import MAX_ENTRIES, each, entries, list_of, raise_any, sequence
from callboard.model.inputs.located import Misfit, Misfits
from callboard.model.inputs.reading import Input, read
from callboard.model.inputs.scalars import (
    Flag,
    PriorityGap,
    Timeout,
    choice,
    label,
    name,
    whole_or_unlimited,
)
from callboard.model.policy import (
    Aggressiveness,
    LabelRules,
    PolicyOverrides,
    PreemptionPolicy,
    label_rules,
    rule_cycle,
)

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


class PolicyInput(Input):
    """The keys of a preemption policy, for the cluster and for a pool alike."""

    enable_label_preemption: Flag | None = None
    label_rules: Annotated[LabelRules, PlainValidator(rules)] | None = None
    aggressiveness: Annotated[Aggressiveness, choice(Aggressiveness)] | None = None
    enable_cross_pool: Flag | None = None
    cross_pool_threshold_milli: PriorityGap | None = Field(None, alias="cross_pool_threshold")
    protected_pools: Annotated[tuple[str, ...], list_of(name, "e.g. [prod]", MAX_ENTRIES, distinct=True)] | None = None
    cancel_timeout_ms: Timeout | None = Field(None, alias="cancel_timeout")
    kill_timeout_ms: Timeout | None = Field(None, alias="kill_timeout")
    min_runtime_ms: Timeout | None = Field(None, alias="min_runtime")
    preemption_delay_ms: Timeout | None = Field(None, alias="preemption_delay")
    max_victims_per_round: Annotated[int, whole_or_unlimited(_MOST_COUNT)] | None = None
    max_preemptions_per_job: Annotated[int, whole_or_unlimited(_MOST_COUNT)] | None = None

    def policy(self) -> PreemptionPolicy:
        """The cluster's policy, every default filled in."""
        return PreemptionPolicy(**self.stated())

    def overrides(self) -> PolicyOverrides:
        """What a pool states for itself."""
        return PolicyOverrides(**self.stated())


def preemption_policy(mapping: object) -> PreemptionPolicy:
    """The cluster's policy from a mapping such as ``{"aggressiveness": "high", "cancel_timeout": "30s"}``.

    Raises:
        InvalidInput: every fault.
    """
    return read(PolicyInput, mapping).policy()


def policy_overrides(mapping: object) -> PolicyOverrides:
    """A pool's overrides from a mapping; keys that are absent or null leave the cluster's value.

    Raises:
        InvalidInput: every fault.
    """
    return read(PolicyInput, mapping).overrides()
