"""Specs as a person would write them: mappings in human units, the inverse of :mod:`callboard.model.inputs`.

What equals its default is left out unless asked for. Values of secret variables are masked unless asked for (SE-04):
what is shown must not be submitted again as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from callboard.model.colocation import unfused
from callboard.model.durations import format_duration_ms
from callboard.model.environment import is_secret
from callboard.model.policy import LabelRules, PolicyOverrides, PreemptionPolicy
from callboard.model.quantities import MILLI, Resources, format_memory
from callboard.model.specs import (
    COLOCATED_CONCURRENCY,
    NO_PG_POOL,
    PROGRAM_SIGNAL,
    ComponentSpec,
    JobSpec,
    Labels,
    PgPoolSpec,
    PoolSpec,
    RestartPolicy,
    ScalingRule,
    WorkerPlace,
)

MASK = "********"
"""What stands for the value of a secret variable."""


def job_to_mapping(spec: JobSpec, *, defaults: bool = False, secrets: bool = False) -> dict[str, Any]:
    """A job as ``job_spec`` reads it.

    Args:
        spec: the job.
        defaults: state defaults too.
        secrets: show the values of secret variables.
    """
    stated = _job(spec)
    if not defaults:
        stated = _differing(stated, _job(JobSpec(name="", pool="", components=())))
    components = [_component(item, defaults=defaults, secrets=secrets) for item in unfused(spec).components]
    return {"name": spec.name, "pool": spec.pool} | _without_none(stated) | {"components": components}


def pool_to_mapping(spec: PoolSpec, *, defaults: bool = False) -> dict[str, Any]:
    """A pool as ``pool_spec`` reads it; ``defaults``: state defaults too."""
    stated = {
        "name": spec.name,
        "nominal": amounts_to_mapping(spec.nominal),
        "borrow_limit": amounts_to_mapping(spec.borrow_limit),
        "lend_limit": amounts_to_mapping(spec.lend_limit),
        "cohort": spec.cohort or None,
        "labels": dict(spec.labels),
        "node_selector": dict(spec.node_selector),
        "protected": spec.protected,
        "stop_policy": spec.stop_policy.value,
        "pg_pool": None if spec.pg_pool == NO_PG_POOL else _pg_pool(spec.pg_pool, defaults=defaults),
        "preemption": policy_to_mapping(spec.preemption) or None,
        "members": list(spec.members) or None,
    }
    if not defaults:
        base = pool_to_mapping(PoolSpec(name=""), defaults=True)
        stated = {"name": spec.name} | _differing(stated, base)
    return _without_none(stated)


def policy_to_mapping(policy: PreemptionPolicy | PolicyOverrides) -> dict[str, Any]:
    """A policy as ``preemption_policy`` reads it, every default stated; of overrides what they state."""
    gap = policy.cross_pool_threshold_milli
    stated = {
        "enable_label_preemption": policy.enable_label_preemption,
        "label_rules": None if policy.label_rules is None else _rules(policy.label_rules),
        "aggressiveness": None if policy.aggressiveness is None else policy.aggressiveness.value,
        "enable_cross_pool": policy.enable_cross_pool,
        "cross_pool_threshold": None if gap is None else _number(gap),
        "protected_pools": None if policy.protected_pools is None else list(policy.protected_pools),
        "cancel_timeout": _span(policy.cancel_timeout_ms),
        "kill_timeout": _span(policy.kill_timeout_ms),
        "min_runtime": _span(policy.min_runtime_ms),
        "preemption_delay": _span(policy.preemption_delay_ms),
        "max_victims_per_round": _bound(policy.max_victims_per_round),
        "max_preemptions_per_job": _bound(policy.max_preemptions_per_job),
    }
    return _without_none(stated)


def amounts_to_mapping(amounts: Iterable[tuple[str, int]]) -> dict[str, int | float | str]:
    """Amounts as people write them: ``{"cpu": 1.5, "memory": "2GiB"}``, exact."""
    return {name: _memory(amount) if name == "memory" else _number(amount) for name, amount in amounts}


def masked(env: Labels, *, secrets: bool = False, declared: bool = False) -> dict[str, str]:
    """Variables with the values of secret ones masked; ``declared``: all of them are secret, whatever their names."""
    return {name: MASK if (declared or is_secret(name)) and not secrets else value for name, value in env}


def _job(spec: JobSpec) -> dict[str, Any]:
    return {
        "priority": _number(spec.priority_milli),
        "labels": dict(spec.labels),
        "placement": spec.placement.value,
        "gang": spec.gang,
        "owner": {"session": {"lease": format_duration_ms(spec.session_lease_ms)}}
        if spec.session_lease_ms
        else "detached",
        "preemptible": spec.preemptible,
        "min_runtime": format_duration_ms(spec.min_runtime_ms),
        "grace": _span(spec.grace_ms),
        "on_preempt": spec.on_preempt.value,
        "restart": _restart(spec.restart),
        "ttl_after_finished": _span(spec.ttl_after_finished_ms),
        "estimated_duration": format_duration_ms(spec.estimated_duration_ms),
        "wait_for_nodes": None
        if spec.wait_for_nodes_ms is None
        else {"timeout": format_duration_ms(spec.wait_for_nodes_ms)},
        "fencing": spec.fencing.value,
        "node_selector": dict(spec.node_selector),
        "node_selector_soft": spec.node_selector_soft,
        "starvation_after": format_duration_ms(spec.starvation_after_ms),
        "start_timeout": format_duration_ms(spec.start_timeout_ms),
        "never_preempts": spec.never_preempts,
        "require_checkpoint": spec.require_checkpoint,
        "placement_config": spec.placement_config or None,
        "placement_source": spec.placement_source or None,
        "placement_revision": spec.placement_revision or None,
    }


def _component(spec: ComponentSpec, *, defaults: bool, secrets: bool) -> dict[str, Any]:
    counts = (
        {"min_workers": spec.min_workers, "max_workers": spec.max_workers}
        if spec.elastic
        else {"workers": spec.min_workers}
    )
    work: dict[str, Any] = {"command": list(spec.command)} if spec.command else {"actor": spec.actor}
    work |= {"ray": True} if spec.ray else {}
    head = {"name": spec.name, **work, **counts}
    stated = {
        "role": spec.role or None,
        "args": json.loads(spec.args_json),
        "kwargs": json.loads(spec.kwargs_json),
        "entry": spec.entry or None,
        "resources": _resources(spec.resources) | dict.fromkeys(spec.zero_resources, 0),
        "max_concurrency": spec.max_concurrency or None,
        "env": masked(spec.env, secrets=secrets),
        "secret_env": masked(spec.secret_env, secrets=secrets, declared=True),
        "pass_env": list(spec.pass_env),
        "pool": spec.pool or None,
        "node_selector": dict(spec.node_selector),
        "node_selector_soft": spec.node_selector_soft,
        "colocation_group": spec.colocation_group or None,
        "colocation_total": _resources(spec.colocation_total) or None,
        "scaling": [_rule(rule) for rule in spec.scaling],
        "in_bundle": spec.in_bundle,
        "interpreter": spec.interpreter or None,
        "ray_options": {"name": spec.alias} if spec.alias else {},
        "progress_timeout": format_duration_ms(spec.progress_timeout_ms),
        "placement": spec.placement.value if spec.placement else None,
        "ports": spec.ports,
        "stop_signal": spec.stop_signal or None,
        "working_dir": spec.working_dir or None,
        "places": [_place(place, secrets=secrets) for place in spec.places],
    }
    if spec.command:
        for key in ("args", "kwargs", "entry", "max_concurrency"):
            del stated[key]
    if not defaults:
        # Without a role a component of a group has a default of its own; with one, whatever is stated is no default.
        base = ComponentSpec(name="", actor="", max_concurrency=_default_concurrency(spec))
        base = replace(base, stop_signal=PROGRAM_SIGNAL) if spec.command and not spec.ray else base
        stated = _differing(stated, _component(base, defaults=True, secrets=True))
    return head | _without_none(stated)


def _default_concurrency(spec: ComponentSpec) -> int:
    if spec.role:
        return 0
    return COLOCATED_CONCURRENCY if spec.colocation_group else ComponentSpec(name="", actor="").max_concurrency


def _rule(rule: ScalingRule) -> dict[str, Any]:
    default = ScalingRule(signal="", action=rule.action)
    stated = {
        "signal": rule.signal,
        "above": None if rule.above_milli is None else _number(rule.above_milli),
        "below": None if rule.below_milli is None else _number(rule.below_milli),
        "action": rule.action.value.lower(),
        "step": None if rule.step == default.step else rule.step,
        "cooldown": None if rule.cooldown_ms == default.cooldown_ms else format_duration_ms(rule.cooldown_ms),
    }
    return _without_none(stated)


def _place(place: WorkerPlace, *, secrets: bool) -> dict[str, Any]:
    devices = [index if milli == MILLI else {"index": index, "milli": milli} for index, milli in place.devices]
    stated = {
        "node": place.node_id,
        "devices": devices or None,
        "observes": place.observes or None,
        "env": masked(place.env, secrets=secrets) or None,
        "interpreter": place.interpreter or None,
        "node_group": place.node_group or None,
        "hardware_json": place.hardware_json or None,
        "hardware": dict(place.hardware) or None,
    }
    return _without_none(stated)


def _pg_pool(spec: PgPoolSpec, *, defaults: bool) -> dict[str, Any]:
    stated = {
        "enable": spec.enable,
        "reserved": [_resources(shape) for shape in spec.reserved],
        "dynamic": spec.dynamic,
        "max_dynamic": spec.max_dynamic,
        "reuse": spec.reuse,
        "reserved_min_priority": _number(spec.reserved_min_priority_milli),
        "reserved_lendable": spec.reserved_lendable,
        "reuse_slack": _number(spec.reuse_slack_milli),
        "idle_ttl": format_duration_ms(spec.idle_ttl_ms),
        "charge_reserved": spec.charge_reserved,
        "creation_timeout": format_duration_ms(spec.creation_timeout_ms),
        "retries": {"attempts": spec.retry_attempts, "base": format_duration_ms(spec.retry_base_ms)},
    }
    if defaults:
        return stated
    return {"enable": spec.enable} | _differing(stated, _pg_pool(PgPoolSpec(), defaults=True))


def _restart(policy: RestartPolicy) -> dict[str, Any]:
    return {
        "max_restarts": policy.max_restarts,
        "backoff_base": format_duration_ms(policy.backoff_base_ms),
        "backoff_max": format_duration_ms(policy.backoff_max_ms),
        "window": format_duration_ms(policy.window_ms),
        "scope": policy.scope.value.lower(),
    }


def _rules(rules: LabelRules) -> dict[str, dict[str, list[str]]]:
    return {key: {winner: list(losers) for winner, losers in winners} for key, winners in rules}


def _resources(amounts: Resources) -> dict[str, int | float | str]:
    return amounts_to_mapping(amounts.items())


def _number(milli: int) -> int | float:
    # Exact up to MAX_MILLI: the shortest text of the nearest float has at most 15 digits, and parse reads that text.
    return milli // MILLI if milli % MILLI == 0 else milli / MILLI


def _memory(amount_bytes: int) -> str:
    shortest = format_memory(amount_bytes)
    return f"{amount_bytes}B" if "." in shortest else shortest  # "1.5GiB" may be rounded


def _span(duration_ms: int | None) -> str | None:
    return None if duration_ms is None else format_duration_ms(duration_ms)


def _bound(count: int | None) -> int | str | None:
    return "unlimited" if count == 0 else count


def _differing(stated: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stated.items() if key not in base or base[key] != value}


def _without_none(stated: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stated.items() if value is not None}
