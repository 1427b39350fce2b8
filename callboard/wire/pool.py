"""Pools as messages. The name travels beside the spec: ``CreatePoolRequest.pool_id``, ``Pool.name``."""

from __future__ import annotations

from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.exact import Exact
from callboard.model.inputs.pool import PoolInput
from callboard.model.policy import PolicyOverrides
from callboard.model.specs import NO_PG_POOL, PgPoolSpec, PoolSpec, StopPolicy
from callboard.v1 import pool_pb2
from callboard.wire.amounts import amounts_to_proto, resources_to_proto
from callboard.wire.enums import to_wire
from callboard.wire.policy import overrides_to_proto, policy_mapping
from callboard.wire.reading import MessageReader, given, optional

_PG_PLAIN = ("enable", "dynamic", "max_dynamic", "reuse", "reserved_lendable", "charge_reserved")


def pool_spec_to_proto(spec: PoolSpec) -> pool_pb2.PoolSpec:
    """The message of ``spec``, without its name. Parts that say nothing are absent."""
    message = pool_pb2.PoolSpec(
        nominal=amounts_to_proto(spec.nominal),
        limited=[name for name, _ in spec.nominal],
        borrow_limit=amounts_to_proto(spec.borrow_limit),
        borrow_limited=[name for name, _ in spec.borrow_limit],
        lend_limit=amounts_to_proto(spec.lend_limit),
        lend_limited=[name for name, _ in spec.lend_limit],
        cohort=spec.cohort,
        labels=dict(spec.labels),
        node_selector=dict(spec.node_selector),
        protected=spec.protected,
        members=spec.members,
        stop_policy=to_wire(pool_pb2.StopPolicy, spec.stop_policy),
    )
    if spec.pg_pool != NO_PG_POOL:
        message.pg_pool.CopyFrom(_pg_pool_to_proto(spec.pg_pool))
    if spec.preemption != PolicyOverrides():
        message.preemption.CopyFrom(overrides_to_proto(spec.preemption))
    return message


def pool_spec_from_proto(
    name: str, message: pool_pb2.PoolSpec, *, field: str = "spec", name_field: str = "pool_id"
) -> PoolSpec:
    """A pool, validated in full.

    Args:
        name: name of the pool, not yet checked.
        message: its spec.
        field: path of ``message`` in its request, for faults.
        name_field: path of ``name`` in the request.

    Raises:
        InvalidInput: every fault.
    """
    reader = MessageReader(field)
    mapping = {"name": name} | given(
        nominal=reader.limits(message.nominal, message.limited, ("nominal",), "limited"),
        borrow_limit=reader.limits(message.borrow_limit, message.borrow_limited, ("borrow_limit",), "borrow_limited"),
        lend_limit=reader.limits(message.lend_limit, message.lend_limited, ("lend_limit",), "lend_limited"),
        cohort=message.cohort,
        labels=dict(message.labels),
        node_selector=dict(message.node_selector),
        protected=message.protected,
        members=list(message.members),
        stop_policy=reader.word(pool_pb2.StopPolicy, message.stop_policy, StopPolicy, ("stop_policy",)),
    )
    if message.HasField("pg_pool"):
        mapping["pg_pool"] = _pg_pool_mapping(message.pg_pool, reader)
    if message.HasField("preemption"):
        mapping["preemption"] = policy_mapping(message.preemption, reader, place=("preemption",))
    try:
        return reader.validated(PoolInput, mapping).spec()
    except InvalidInput as invalid:
        raise InvalidInput([_moved(fault, f"{field}.name", name_field) for fault in invalid.faults]) from None


def _moved(fault: Fault, old: str, new: str) -> Fault:
    return Fault(new, fault.message) if fault.field == old else fault


def _pg_pool_to_proto(spec: PgPoolSpec) -> pool_pb2.PlacementGroupPool:
    return pool_pb2.PlacementGroupPool(
        enable=spec.enable,
        reserved=[resources_to_proto(shape) for shape in spec.reserved],
        dynamic=spec.dynamic,
        max_dynamic=spec.max_dynamic,
        reuse=spec.reuse,
        reserved_min_priority_milli=spec.reserved_min_priority_milli,
        reserved_lendable=spec.reserved_lendable,
        reuse_slack_milli=spec.reuse_slack_milli,
        idle_ttl_ms=spec.idle_ttl_ms,
        charge_reserved=spec.charge_reserved,
        creation_timeout_ms=spec.creation_timeout_ms,
        retry_attempts=spec.retry_attempts,
        retry_base_ms=spec.retry_base_ms,
    )


def _pg_pool_mapping(message: pool_pb2.PlacementGroupPool, reader: MessageReader) -> dict[str, Any]:
    stated: dict[str, Any] = {name: optional(message, name) for name in _PG_PLAIN}
    stated["reserved"] = [
        reader.amounts(shape, ("pg_pool", "reserved", index)) for index, shape in enumerate(message.reserved)
    ]
    stated |= {
        "reserved_min_priority": optional(message, "reserved_min_priority_milli", Exact),
        "reuse_slack": optional(message, "reuse_slack_milli", Exact),
        "idle_ttl": optional(message, "idle_ttl_ms", Exact),
        "creation_timeout": optional(message, "creation_timeout_ms", Exact),
        "retries": given(attempts=optional(message, "retry_attempts"), base=optional(message, "retry_base_ms", Exact)),
    }
    return {name: value for name, value in stated.items() if value not in (None, [], {})}
