"""A policy as the mapping that sets it: `policy get -o yaml` can be given to `policy set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callboard.cli.jobs.actions import read_file
from callboard.cli.options import wishes
from callboard.cli.show import consoles, tables
from callboard.cli.show.changes import changed, is_file, read_changes
from callboard.cli.show.printing import show_result
from callboard.cli.show.verb_guard import connected
from callboard.client.client import Client
from callboard.model.durations import format_duration_ms
from callboard.model.inputs.scalars import plain_number
from callboard.model.policy import PreemptionPolicy


@connected
async def show(client: Client) -> None:
    _print(await client.get_policy())


@connected
async def change(client: Client, changes: Sequence[str], *, validate: bool) -> None:
    """Sets the policy from a file, or changes single fields of it."""
    if is_file(changes):
        wanted: Mapping[str, Any] = read_file(Path(changes[0]))
    else:
        wanted = changed(policy_mapping(await client.get_policy()), read_changes(changes))
    policy = await client.set_policy(wanted, validate_only=validate)
    if validate:
        consoles.stderr().print("The policy could be set.")
    elif not wishes.quiet:
        _print(policy)


def _print(policy: PreemptionPolicy) -> None:
    mapping = policy_mapping(policy)
    show_result(mapping, lambda _: tables.facts((name, _words(value)) for name, value in mapping.items()))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        rules = [
            f"{key}: {winner} beats {', '.join(losers)}"
            for key, winners in value.items()
            for winner, losers in winners.items()
        ]
        return "\n".join(rules) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def policy_mapping(policy: PreemptionPolicy) -> dict[str, Any]:
    """``policy`` in the words and human units of its input."""
    return {
        "enable_label_preemption": policy.enable_label_preemption,
        "label_rules": {
            key: {winner: list(losers) for winner, losers in winners} for key, winners in policy.label_rules
        },
        "aggressiveness": str(policy.aggressiveness),
        "enable_cross_pool": policy.enable_cross_pool,
        "cross_pool_threshold": plain_number(policy.cross_pool_threshold_milli),
        "protected_pools": list(policy.protected_pools),
        "cancel_timeout": format_duration_ms(policy.cancel_timeout_ms),
        "kill_timeout": format_duration_ms(policy.kill_timeout_ms),
        "min_runtime": format_duration_ms(policy.min_runtime_ms),
        "preemption_delay": format_duration_ms(policy.preemption_delay_ms),
        "max_victims_per_round": policy.max_victims_per_round or "unlimited",
        "max_preemptions_per_job": policy.max_preemptions_per_job or "unlimited",
    }
