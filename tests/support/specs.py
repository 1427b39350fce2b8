"""Hypothesis strategies for every spec that may exist, canonical as the readers make them."""

from __future__ import annotations

import json
import math
import string
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from callboard.model.inputs.pool import PolicyInput
from callboard.model.inputs.reading import read
from callboard.model.inputs.scalars import ENVIRONMENTS
from callboard.model.names import is_custom_resource, why_refused
from callboard.model.policy import Aggressiveness, LabelRules, PolicyOverrides, PreemptionPolicy, label_rules
from callboard.model.quantities import MAX_MEMORY_BYTES, MAX_MILLI, NOTHING, Resources
from callboard.model.specs import (
    NO_PG_POOL,
    ComponentSpec,
    Fencing,
    JobSpec,
    OnPreempt,
    PgPoolSpec,
    PoolSpec,
    RestartPolicy,
    ScalingAction,
    ScalingRule,
    StopPolicy,
    Strategy,
)

DAY_MS = 86_400_000
YEAR_MS = 366 * DAY_MS
_ALNUM = string.ascii_letters + string.digits

names = st.builds(
    lambda head, tail: head + tail,
    st.sampled_from(string.ascii_letters),
    st.text(_ALNUM + "_.-", max_size=12),
)
label_texts = st.builds(
    lambda head, middle, tail: head + middle + tail,
    st.sampled_from(_ALNUM),
    st.text(_ALNUM + "_./-", max_size=8),
    st.sampled_from(_ALNUM),
)
labels = st.dictionaries(label_texts, label_texts, max_size=4).map(lambda found: tuple(sorted(found.items())))
custom_names = names.filter(is_custom_resource)
milli = st.integers(0, MAX_MILLI)
memory = st.one_of(st.integers(0, MAX_MEMORY_BYTES), st.integers(0, 1 << 20).map(lambda mib: mib << 20))
gpu_asks = st.one_of(st.integers(0, 1000), st.integers(1, 64).map(lambda count: count * 1000))
resources = st.builds(
    lambda cpu, gpu, memory_bytes, custom, gpu_memory_bytes, model, least: replace(
        Resources.of(
            cpu_milli=cpu,
            gpu_milli=gpu,
            memory_bytes=memory_bytes,
            gpu_memory_bytes=gpu_memory_bytes,
            custom=custom,
        ),
        gpu_model=model,
        gpu_memory_min_bytes=least,
    ),
    milli,
    gpu_asks,
    memory,
    st.dictionaries(custom_names, milli, max_size=3),
    memory,
    st.sampled_from(["", "", "H200", "A100 80GB", "RTX 6000 Ada"]),
    st.one_of(st.just(0), memory),
)
timeouts = st.integers(0, DAY_MS)
positive_timeouts = st.integers(1, DAY_MS)
durations = st.integers(0, YEAR_MS)
priorities = st.integers(-1_000_000, 1_000_000)

variable_names = st.builds(
    lambda head, tail: head + tail, st.sampled_from(string.ascii_letters + "_"), st.text(_ALNUM + "_", max_size=10)
).filter(lambda name: why_refused(name) is None and name not in ENVIRONMENTS)
env = st.dictionaries(
    variable_names, st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=12)
).map(lambda found: tuple(sorted(found.items())))

_json_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda number: 0.0 if math.isclose(number, 0) else number),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    _json_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=6,
)


def _as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


gauges = st.integers(-MAX_MILLI, MAX_MILLI)


@st.composite
def scaling_rules(draw: st.DrawFn) -> ScalingRule:
    """A rule with one side of one threshold."""
    threshold, above = draw(gauges), draw(st.booleans())
    return ScalingRule(
        signal=draw(names),
        action=draw(st.sampled_from(ScalingAction)),
        above_milli=threshold if above else None,
        below_milli=None if above else threshold,
        step=draw(st.integers(1, 100_000)),
        cooldown_ms=draw(durations),
    )


@st.composite
def components(draw: st.DrawFn, name: str = "train") -> ComponentSpec:
    """One component; its counts equal or not."""
    low = draw(st.integers(1, 1000))
    high = draw(st.one_of(st.just(low), st.integers(low, 1000)))
    amounts, role, variables = draw(resources), draw(st.one_of(st.just(""), names)), draw(env)
    zeros = tuple(sorted({"cpu", "gpu", "memory"} - {resource for resource, _ in amounts.items()})) if role else ()
    return ComponentSpec(
        name=name,
        actor=draw(st.sampled_from(["pkg:Actor", "my_pkg.workers:Trainer", "a.b.c:D.E"])),
        role=role,
        args_json=draw(st.lists(json_values, max_size=3).map(_as_json)),
        kwargs_json=draw(st.dictionaries(st.text("xyz", max_size=3), json_values, max_size=3).map(_as_json)),
        entry=draw(st.sampled_from(["", "run", "train_loop"])),
        min_workers=low,
        max_workers=high,
        resources=amounts,
        zero_resources=zeros if draw(st.booleans()) else (),
        # 0: as the preset of the role says.
        max_concurrency=draw(st.integers(0 if role else 1, 10_000)),
        env=variables,
        secret_env=tuple(pair for pair in draw(env) if pair[0] not in dict(variables)),
        pass_env=draw(st.lists(variable_names, max_size=3).map(lambda found: tuple(sorted(set(found))))),
        pool=draw(st.one_of(st.just(""), names)),
        node_selector=draw(labels),
        node_selector_soft=draw(st.booleans()),
        scaling=tuple(draw(st.lists(scaling_rules(), max_size=3))) if high > low else (),
        in_bundle=draw(st.booleans()),
        interpreter=draw(st.sampled_from(["", "/usr/bin/python3"])),
        alias=draw(st.one_of(st.just(""), names)),
    )


@st.composite
def restarts(draw: st.DrawFn) -> RestartPolicy:
    """A restart policy whose backoff rises."""
    base, longest = sorted((draw(positive_timeouts), draw(positive_timeouts)))
    return RestartPolicy(
        max_restarts=draw(st.integers(0, 10_000)),
        backoff_base_ms=base,
        backoff_max_ms=longest,
        window_ms=draw(durations),
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Any job that may exist."""
    found = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    # (Every component is in the group, so one may have its name.)
    group = draw(st.one_of(st.just(""), names))
    parts = [draw(components(name)) for name in found]
    if group:
        # What a process has only one of is equal,
        shared = {
            name: getattr(parts[0], name)
            for name in ("min_workers", "max_workers", "pool", "interpreter", "alias", "env", "secret_env")
        }
        shared |= {"node_selector": parts[0].node_selector, "scaling": parts[0].scaling}
        shared |= {"node_selector_soft": parts[0].node_selector_soft}
        total = draw(st.one_of(st.just(NOTHING), resources.filter(bool)))
        shared |= {"colocation_group": group, "colocation_total": total, "role": "", "zero_resources": ()}
        parts = [replace(part, max_concurrency=max(1, part.max_concurrency), **shared) for part in parts]
    gang = draw(st.booleans())
    if not gang:
        parts = [replace(part, min_workers=1) if part.min_workers == part.max_workers else part for part in parts]
    return JobSpec(
        name=draw(names),
        pool=draw(names),
        components=tuple(parts),
        priority_milli=draw(priorities),
        labels=draw(labels),
        placement=draw(st.sampled_from(Strategy)),
        gang=gang,
        session_lease_ms=draw(durations),
        preemptible=draw(st.booleans()),
        min_runtime_ms=draw(timeouts),
        grace_ms=draw(st.none() | timeouts),
        on_preempt=draw(st.sampled_from(OnPreempt)),
        restart=draw(st.one_of(st.just(RestartPolicy()), restarts())),
        ttl_after_finished_ms=draw(st.none() | durations),
        estimated_duration_ms=draw(durations),
        wait_for_nodes_ms=draw(st.none() | durations),
        fencing=draw(st.sampled_from(Fencing)),
        node_selector=draw(labels),
        node_selector_soft=draw(st.booleans()),
        starvation_after_ms=draw(durations),
        start_timeout_ms=draw(positive_timeouts),
        never_preempts=draw(st.booleans()),
    )


@st.composite
def rules(draw: st.DrawFn) -> LabelRules:
    """Label rules without a cycle: a value beats only values after it."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in draw(st.lists(label_texts, max_size=2, unique=True)):
        order = draw(st.lists(label_texts, min_size=2, max_size=4, unique=True))
        found[key] = {
            winner: draw(st.lists(st.sampled_from(order[index + 1 :]), max_size=3))
            for index, winner in enumerate(order[:-1])
        }
    return label_rules(found)


_policy_fields: dict[str, st.SearchStrategy[Any]] = {
    "enable_label_preemption": st.booleans(),
    "label_rules": rules(),
    "aggressiveness": st.sampled_from(Aggressiveness),
    "enable_cross_pool": st.booleans(),
    "cross_pool_threshold_milli": st.integers(0, 2_000_000),
    "protected_pools": st.lists(names, max_size=3).map(lambda found: tuple(sorted(set(found)))),
    "cancel_timeout_ms": timeouts,
    "kill_timeout_ms": timeouts,
    "min_runtime_ms": timeouts,
    "preemption_delay_ms": timeouts,
    "max_victims_per_round": st.integers(0, 1_000_000),
    "max_preemptions_per_job": st.integers(0, 1_000_000),
}
policies = st.builds(PreemptionPolicy, **_policy_fields)
overrides = st.builds(PolicyOverrides, **{name: st.none() | field for name, field in _policy_fields.items()})


def _quota(found: dict[str, int], memory_bytes: int | None) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((found | ({} if memory_bytes is None else {"memory": memory_bytes})).items()))


quotas = st.builds(
    _quota, st.dictionaries(st.one_of(st.sampled_from(["cpu", "gpu"]), custom_names), milli), st.none() | memory
)


@st.composite
def pg_pools(draw: st.DrawFn) -> PgPoolSpec:
    """A placement-group pool; one that keeps nothing reserves and reuses nothing."""
    enable = draw(st.booleans())
    return PgPoolSpec(
        enable=enable,
        reserved=tuple(draw(st.lists(resources.filter(bool), max_size=3))) if enable else (),
        dynamic=draw(st.booleans()),
        max_dynamic=draw(st.integers(0, 10_000)),
        reuse=draw(st.booleans()) if enable else False,
        reserved_min_priority_milli=draw(priorities),
        reserved_lendable=draw(st.booleans()),
        reuse_slack_milli=draw(st.integers(1000, 1_000_000)),
        idle_ttl_ms=draw(durations),
        charge_reserved=draw(st.booleans()),
        creation_timeout_ms=draw(positive_timeouts),
        retry_attempts=draw(st.integers(1, 1000)),
        retry_base_ms=draw(positive_timeouts),
    )


pools = st.builds(
    PoolSpec,
    name=names,
    nominal=quotas,
    borrow_limit=quotas,
    lend_limit=quotas,
    cohort=st.one_of(st.just(""), names),
    labels=labels,
    node_selector=labels,
    protected=st.booleans(),
    stop_policy=st.sampled_from(StopPolicy),
    pg_pool=st.one_of(st.just(NO_PG_POOL), pg_pools()),
    preemption=overrides,
)


def policy_overrides(mapping: object) -> PolicyOverrides:
    """What a pool's ``preemption`` says."""
    found: PolicyOverrides = read(PolicyInput, mapping).spec()
    return found
