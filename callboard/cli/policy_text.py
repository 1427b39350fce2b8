"""A policy as the mapping that sets it: `policy get -o yaml` can be given to `policy set`."""

from __future__ import annotations

from typing import Any

from callboard.model.durations import format_duration_ms
from callboard.model.policy import PreemptionPolicy
from callboard.model.quantities import MILLI


def policy_mapping(policy: PreemptionPolicy) -> dict[str, Any]:
    """``policy`` in the words and human units of its input."""
    return {
        "enable_label_preemption": policy.enable_label_preemption,
        "label_rules": {
            key: {winner: list(losers) for winner, losers in winners} for key, winners in policy.label_rules
        },
        "aggressiveness": str(policy.aggressiveness),
        "enable_cross_pool": policy.enable_cross_pool,
        "cross_pool_threshold": _number(policy.cross_pool_threshold_milli),
        "protected_pools": list(policy.protected_pools),
        "cancel_timeout": format_duration_ms(policy.cancel_timeout_ms),
        "kill_timeout": format_duration_ms(policy.kill_timeout_ms),
        "min_runtime": format_duration_ms(policy.min_runtime_ms),
        "preemption_delay": format_duration_ms(policy.preemption_delay_ms),
        "max_victims_per_round": policy.max_victims_per_round or "unlimited",
        "max_preemptions_per_job": policy.max_preemptions_per_job or "unlimited",
    }


def _number(milli: int) -> int | float:
    return milli // MILLI if milli % MILLI == 0 else milli / MILLI
