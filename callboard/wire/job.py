"""Jobs as messages."""

from __future__ import annotations

from typing import Any

from callboard.model.colocation import unfused
from callboard.model.describe import masked
from callboard.model.inputs.component import MAX_COMMAND, MAX_WORKERS
from callboard.model.inputs.compounds import MAX_ENTRIES
from callboard.model.inputs.exact import Exact, JsonText
from callboard.model.inputs.job import MAX_COMPONENTS, JobInput
from callboard.model.inputs.located import Misfit, Place
from callboard.model.inputs.scaling import MAX_RULES
from callboard.model.specs import (
    ComponentSpec,
    Fencing,
    JobSpec,
    OnPreempt,
    RestartScope,
    ScalingAction,
    ScalingRule,
    Strategy,
    WorkerPlace,
)
from callboard.v1 import common_pb2, job_pb2
from callboard.wire.amounts import resources_to_proto
from callboard.wire.enums import to_wire
from callboard.wire.reading import MessageReader, exact_or_none, given, optional


def job_spec_to_proto(spec: JobSpec, *, mask: bool = False) -> job_pb2.JobSpec:
    """The message of ``spec``, every field set that is not left to a preset; members of groups apart, as asked for.

    Args:
        spec: the job.
        mask: mask the values of secret variables, for everything that is shown (SE-04). A masked message must not be
            submitted again.
    """
    return job_pb2.JobSpec(
        name=spec.name,
        pool=spec.pool,
        priority_milli=spec.priority_milli,
        labels=dict(spec.labels),
        components=[component_to_proto(component, mask=mask) for component in unfused(spec).components],
        placement=to_wire(job_pb2.PlacementStrategy, spec.placement),
        gang=spec.gang,
        session_lease_ms=spec.session_lease_ms,
        preemptible=spec.preemptible,
        min_runtime_ms=spec.min_runtime_ms,
        grace_ms=spec.grace_ms,
        on_preempt=to_wire(job_pb2.OnPreempt, spec.on_preempt),
        restart=job_pb2.RestartPolicy(
            max_restarts=spec.restart.max_restarts,
            backoff_base_ms=spec.restart.backoff_base_ms,
            backoff_max_ms=spec.restart.backoff_max_ms,
            window_ms=spec.restart.window_ms,
            scope=to_wire(job_pb2.RestartScope, spec.restart.scope),
        ),
        ttl_after_finished_ms=spec.ttl_after_finished_ms,
        estimated_duration_ms=spec.estimated_duration_ms,
        wait_for_nodes_ms=spec.wait_for_nodes_ms,
        fencing=to_wire(job_pb2.Fencing, spec.fencing),
        node_selector=dict(spec.node_selector),
        node_selector_soft=spec.node_selector_soft,
        starvation_after_ms=spec.starvation_after_ms,
        start_timeout_ms=spec.start_timeout_ms,
        never_preempts=spec.never_preempts,
        require_checkpoint=spec.require_checkpoint,
        placement_config=spec.placement_config,
        placement_source=spec.placement_source,
        placement_revision=spec.placement_revision,
    )


def job_spec_from_proto(message: job_pb2.JobSpec, *, field: str = "spec") -> JobSpec:
    """A job, validated in full.

    Args:
        message: the message.
        field: path of ``message`` in its request, for faults.

    Raises:
        InvalidInput: every fault.
    """
    reader = MessageReader(field)
    mapping: dict[str, Any] = {"name": message.name, "pool": message.pool} | given(
        priority=optional(message, "priority_milli", Exact),
        labels=dict(message.labels),
        placement=reader.word(job_pb2.PlacementStrategy, message.placement, Strategy, ("placement",)),
        gang=optional(message, "gang"),
        owner={"session": {"lease": Exact(message.session_lease_ms)}} if message.session_lease_ms else None,
        preemptible=optional(message, "preemptible"),
        min_runtime=exact_or_none(message.min_runtime_ms),
        grace=optional(message, "grace_ms", Exact),
        on_preempt=reader.word(job_pb2.OnPreempt, message.on_preempt, OnPreempt, ("on_preempt",)),
        restart=_restart_mapping(message.restart, reader) if message.HasField("restart") else None,
        ttl_after_finished=optional(message, "ttl_after_finished_ms", Exact),
        estimated_duration=exact_or_none(message.estimated_duration_ms),
        wait_for_nodes=optional(message, "wait_for_nodes_ms", lambda ms: {"timeout": Exact(ms)}),
        fencing=reader.word(job_pb2.Fencing, message.fencing, Fencing, ("fencing",)),
        node_selector=dict(message.node_selector),
        node_selector_soft=message.node_selector_soft,
        starvation_after=exact_or_none(message.starvation_after_ms),
        start_timeout=optional(message, "start_timeout_ms", Exact),
        never_preempts=message.never_preempts,
        require_checkpoint=message.require_checkpoint,
        placement_config=message.placement_config,
        placement_source=message.placement_source,
        placement_revision=message.placement_revision or None,
    )
    # One beyond the bound is enough for the models to refuse the list; the rest of a huge message is not read.
    components = message.components[: MAX_COMPONENTS + 1]
    mapping["components"] = [_component_mapping(item, reader, index) for index, item in enumerate(components)]
    return reader.validated(JobInput, mapping).spec()


def component_to_proto(spec: ComponentSpec, *, mask: bool = False) -> job_pb2.ComponentSpec:
    """The message of one component; see :func:`job_spec_to_proto`."""
    counts: dict[str, Any] = (
        {"min_workers": spec.min_workers, "max_workers": spec.max_workers}
        if spec.elastic
        else {"workers": spec.min_workers}
    )
    work: dict[str, Any] = {
        "actor": spec.actor,
        "args_json": spec.args_json,
        "kwargs_json": spec.kwargs_json,
        "entry": spec.entry,
        "max_concurrency": spec.max_concurrency or None,
    }
    return job_pb2.ComponentSpec(
        name=spec.name,
        role=spec.role,
        **({"command": spec.command, "ray": spec.ray} if spec.command else work),
        resources=resources_to_proto(spec.resources),
        zero_resources=spec.zero_resources,
        env=masked(spec.env, secrets=not mask),
        secret_env=masked(spec.secret_env, secrets=not mask, declared=True),
        pass_env=spec.pass_env,
        pool=spec.pool,
        node_selector=dict(spec.node_selector),
        node_selector_soft=spec.node_selector_soft,
        colocation_group=spec.colocation_group,
        colocation_total=resources_to_proto(spec.colocation_total) if spec.colocation_total else None,
        scaling=[_rule_to_proto(rule) for rule in spec.scaling],
        in_bundle=spec.in_bundle,
        interpreter=spec.interpreter,
        ray_options={"name": spec.alias} if spec.alias else {},
        progress_timeout_ms=spec.progress_timeout_ms,
        placement=to_wire(job_pb2.PlacementStrategy, spec.placement)
        if spec.placement
        else job_pb2.PLACEMENT_STRATEGY_UNSPECIFIED,
        ports=spec.ports,
        stop_signal=spec.stop_signal,
        working_dir=spec.working_dir,
        places=[place_to_proto(place, mask=mask) for place in spec.places],
        **counts,
    )


def _rule_to_proto(rule: ScalingRule) -> job_pb2.ScalingRule:
    return job_pb2.ScalingRule(
        signal=rule.signal,
        above_milli=rule.above_milli,
        below_milli=rule.below_milli,
        action=to_wire(job_pb2.ScalingAction, rule.action),
        step=rule.step,
        cooldown_ms=rule.cooldown_ms,
    )


def place_to_proto(place: WorkerPlace, *, mask: bool = False) -> common_pb2.WorkerPlace:
    """The message of where one worker must run; ``mask`` as in :func:`job_spec_to_proto`."""
    return common_pb2.WorkerPlace(
        node_id=place.node_id,
        devices=[common_pb2.DeviceShare(index=index, milli=milli) for index, milli in place.devices],
        observes=place.observes,
        env=masked(place.env, secrets=not mask),
        interpreter=place.interpreter,
        node_group=place.node_group,
        hardware_json=place.hardware_json,
        hardware_milli=dict(place.hardware),
    )


def _component_mapping(message: job_pb2.ComponentSpec, reader: MessageReader, index: int) -> dict[str, Any]:
    place = ("components", index)
    foreign = sorted(set(message.ray_options) - {"name"})
    for key in foreign:
        why = "is refused: memory and max_concurrency have their own fields, the scheduler decides about the rest"
        reader.misfits.append(Misfit((*place, "ray_options", key), why))
    return {"name": message.name} | given(
        actor=message.actor,
        command=list(message.command[: MAX_COMMAND + 1]),
        ray=message.ray or None,
        role=message.role,
        args=JsonText(message.args_json) if message.args_json else None,
        kwargs=JsonText(message.kwargs_json) if message.kwargs_json else None,
        entry=message.entry,
        workers=optional(message, "workers"),
        min_workers=optional(message, "min_workers"),
        max_workers=optional(message, "max_workers"),
        resources=_amounts_mapping(message, reader, place),
        max_concurrency=optional(message, "max_concurrency"),
        env=dict(message.env),
        secret_env=dict(message.secret_env),
        pass_env=list(message.pass_env),
        pool=message.pool,
        node_selector=dict(message.node_selector),
        node_selector_soft=message.node_selector_soft,
        colocation_group=message.colocation_group,
        colocation_total=reader.amounts(message.colocation_total, (*place, "colocation_total"))
        if message.HasField("colocation_total")
        else None,
        scaling=[
            _rule_mapping(item, reader, (*place, "scaling", i))
            for i, item in enumerate(message.scaling[: MAX_RULES + 1])
        ],
        in_bundle=message.in_bundle,
        interpreter=message.interpreter,
        ray_options={"name": message.ray_options["name"]} if "name" in message.ray_options else None,
        progress_timeout=exact_or_none(message.progress_timeout_ms),
        placement=reader.word(job_pb2.PlacementStrategy, message.placement, Strategy, (*place, "placement")),
        ports=message.ports,
        stop_signal=message.stop_signal,
        working_dir=message.working_dir,
        places=[_place_mapping(item) for item in message.places[: MAX_WORKERS + 1]],
    )


def _amounts_mapping(message: job_pb2.ComponentSpec, reader: MessageReader, place: Place) -> dict[str, Exact]:
    """The amounts that are stated; of those that are 0 the ones that say so."""
    amounts = reader.amounts(message.resources, (*place, "resources"))
    for name in message.zero_resources[: MAX_ENTRIES + 1]:
        if name in amounts:
            reader.misfits.append(Misfit((*place, "zero_resources"), f"names {name}, of which resources has some"))
        amounts.setdefault(name, Exact(0))
    return amounts


def _rule_mapping(message: job_pb2.ScalingRule, reader: MessageReader, place: Place) -> dict[str, Any]:
    return {"signal": message.signal} | given(
        above=optional(message, "above_milli", Exact),
        below=optional(message, "below_milli", Exact),
        action=reader.word(job_pb2.ScalingAction, message.action, ScalingAction, (*place, "action")),
        step=optional(message, "step"),
        cooldown=optional(message, "cooldown_ms", Exact),
    )


def _place_mapping(message: common_pb2.WorkerPlace) -> dict[str, Any]:
    return {"node": message.node_id} | given(
        devices=[{"index": share.index} | given(milli=share.milli or None) for share in message.devices],
        observes=message.observes or None,
        env=dict(message.env),
        interpreter=message.interpreter,
        node_group=message.node_group,
        hardware_json=message.hardware_json,
        hardware=dict(message.hardware_milli),
    )


def _restart_mapping(message: job_pb2.RestartPolicy, reader: MessageReader) -> dict[str, Any]:
    return {"max_restarts": message.max_restarts, "window": Exact(message.window_ms)} | given(
        scope=reader.word(job_pb2.RestartScope, message.scope, RestartScope, ("restart", "scope")),
        backoff_base=optional(message, "backoff_base_ms", Exact),
        backoff_max=optional(message, "backoff_max_ms", Exact),
    )
