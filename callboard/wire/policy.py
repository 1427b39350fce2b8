"""Preemption policies as messages, for the cluster and for a pool."""

from __future__ import annotations

from typing import Any

from callboard.model.inputs.exact import Exact
from callboard.model.inputs.policy import PolicyInput
from callboard.model.policy import Aggressiveness, LabelRules, PolicyOverrides, PreemptionPolicy
from callboard.v1 import policy_pb2
from callboard.wire.enums import to_wire
from callboard.wire.reading import MessageReader, optional

_PLAIN = ("enable_label_preemption", "enable_cross_pool", "max_victims_per_round", "max_preemptions_per_job")
_MS = ("cancel_timeout", "kill_timeout", "min_runtime", "preemption_delay")


def policy_to_proto(policy: PreemptionPolicy) -> policy_pb2.PreemptionPolicy:
    """The cluster's policy, every field set."""
    return _to_proto(policy)


def policy_from_proto(message: policy_pb2.PreemptionPolicy, *, field: str = "policy") -> PreemptionPolicy:
    """The cluster's policy; absent fields take their defaults.

    Args:
        message: the message.
        field: path of ``message`` in its request, for faults.

    Raises:
        InvalidInput: every fault.
    """
    reader = MessageReader(field)
    return reader.validated(PolicyInput, policy_mapping(message, reader)).policy()


def overrides_to_proto(overrides: PolicyOverrides) -> policy_pb2.PreemptionPolicy:
    """A pool's overrides: what it states and nothing else."""
    return _to_proto(overrides)


def overrides_from_proto(message: policy_pb2.PreemptionPolicy, *, field: str = "preemption") -> PolicyOverrides:
    """A pool's overrides; absent fields leave the cluster's value.

    Raises:
        InvalidInput: every fault.
    """
    reader = MessageReader(field)
    return reader.validated(PolicyInput, policy_mapping(message, reader)).overrides()


def policy_mapping(
    message: policy_pb2.PreemptionPolicy, reader: MessageReader, *, place: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What ``message`` states, for :class:`PolicyInput`; ``place``: where in the reader's message it is."""
    stated: dict[str, Any] = {name: optional(message, name) for name in _PLAIN}
    stated |= {name: optional(message, f"{name}_ms", Exact) for name in _MS}
    stated["cross_pool_threshold"] = optional(message, "cross_pool_threshold_milli", Exact)
    stated["aggressiveness"] = reader.word(
        policy_pb2.Aggressiveness, message.aggressiveness, Aggressiveness, (*place, "aggressiveness")
    )
    if message.HasField("label_rules"):
        stated["label_rules"] = _rules_mapping(message.label_rules)
    if message.HasField("protected_pools"):
        stated["protected_pools"] = list(message.protected_pools.names)
    return {name: value for name, value in stated.items() if value is not None}


def _to_proto(policy: PreemptionPolicy | PolicyOverrides) -> policy_pb2.PreemptionPolicy:
    message = policy_pb2.PreemptionPolicy(
        cross_pool_threshold_milli=policy.cross_pool_threshold_milli,
        cancel_timeout_ms=policy.cancel_timeout_ms,
        kill_timeout_ms=policy.kill_timeout_ms,
        min_runtime_ms=policy.min_runtime_ms,
        preemption_delay_ms=policy.preemption_delay_ms,
        **{name: value for name in _PLAIN if (value := getattr(policy, name)) is not None},
    )
    if policy.aggressiveness is not None:
        message.aggressiveness = to_wire(policy_pb2.Aggressiveness, policy.aggressiveness)
    if policy.label_rules is not None:
        message.label_rules.CopyFrom(_rules_to_proto(policy.label_rules))
    if policy.protected_pools is not None:
        message.protected_pools.CopyFrom(policy_pb2.PoolNames(names=policy.protected_pools))
    return message


def _rules_to_proto(rules: LabelRules) -> policy_pb2.LabelRuleSet:
    message = policy_pb2.LabelRuleSet()
    for key, winners in rules:
        for winner, losers in winners:
            message.keys[key].winners[winner].values.extend(losers)
    return message


def _rules_mapping(message: policy_pb2.LabelRuleSet) -> dict[str, dict[str, list[str]]]:
    return {
        key: {winner: list(losers.values) for winner, losers in sorted(rules.winners.items())}
        for key, rules in sorted(message.keys.items())
    }
