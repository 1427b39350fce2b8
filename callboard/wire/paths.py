"""Paths of fields: places of the models → paths of the protos, for ``BadRequest``.

``components[0].resources.gpu`` is ``spec.components[0].resources.gpu_milli`` in a message.
"""

from __future__ import annotations

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import Misfit, Place, path_of
from callboard.model.inputs.reading import MAX_FAULTS
from callboard.wire.amounts import FIXED_FIELDS

_MILLI = ("priority", "reserved_min_priority", "reuse_slack", "cross_pool_threshold")
_MS = (
    "min_runtime",
    "grace",
    "ttl_after_finished",
    "estimated_duration",
    "starvation_after",
    "start_timeout",
    "backoff_base",
    "backoff_max",
    "window",
    "idle_ttl",
    "creation_timeout",
    "cancel_timeout",
    "kill_timeout",
    "preemption_delay",
    "progress_timeout",
)
_RENAMED = (
    {name: f"{name}_milli" for name in _MILLI}
    | {name: f"{name}_ms" for name in _MS}
    | {"args": "args_json", "kwargs": "kwargs_json"}
)
_WHOLE: dict[Place, Place] = {
    ("owner", "session", "lease"): ("session_lease_ms",),
    ("owner", "session"): ("session_lease_ms",),
    ("owner",): ("session_lease_ms",),
    ("wait_for_nodes", "timeout"): ("wait_for_nodes_ms",),
    ("wait_for_nodes",): ("wait_for_nodes_ms",),
    ("retries", "attempts"): ("retry_attempts",),
    ("retries", "base"): ("retry_base_ms",),
}
_AMOUNTS = frozenset({"resources", "colocation_total", "reserved", "nominal", "borrow_limit", "lend_limit"})
_KEYED = frozenset({"labels", "env", "secret_env", "node_selector", "ray_options"})


def wire_fault(misfit: Misfit, field: str) -> Fault:
    """The fault of a message whose spec is at ``field``. An empty place is the spec itself."""
    return Fault(path_of((*field.split("."), *_translated(misfit.place))), misfit.message)


def refuse(misfits: list[Misfit], field: str) -> InvalidInput:
    """The refusal of a message with these faults, at most :data:`MAX_FAULTS` of them spelt out."""
    faults = [wire_fault(misfit, field) for misfit in misfits[:MAX_FAULTS]]
    if len(misfits) > MAX_FAULTS:
        faults.append(Fault(field, f"and {len(misfits) - MAX_FAULTS} more faults"))
    return InvalidInput(faults)


def _translated(place: Place) -> Place:
    """``place`` in the words of the message; below a map of the user's, keys stay as they are."""
    for index, part in enumerate(place):
        whole = next((new for old, new in _WHOLE.items() if place[index:] == old), None)
        if whole is not None:
            return (*place[:index], *whole)
        rest = place[index + 1 :]
        if part in _AMOUNTS:
            return (*place[:index], part, *_amount(rest))
        if part == "label_rules":
            return (*place[:index], part, *_rule(rest))
        if part == "protected_pools":
            return (*place[:index], part, "names", *rest)
        if part in _KEYED:
            return place
        if isinstance(part, str) and part in _RENAMED:
            return (*place[:index], _RENAMED[part], *rest)
    return place


def _amount(rest: Place) -> Place:
    """Below an amount: an index where it is one of a list, then the resource."""
    head = rest[:1] if rest and isinstance(rest[0], int) else ()
    tail = rest[len(head) :]
    if not tail:
        return head
    if tail[0] == "custom_milli" and len(tail) > 1:
        return (*head, *tail)
    name = str(tail[0])
    return (*head, FIXED_FIELDS[name]) if name in FIXED_FIELDS else (*head, "custom_milli", name)


def _rule(rest: Place) -> Place:
    """Below label rules: key, winner, index of the loser."""
    steps = ("keys", "winners", "values")
    return tuple(word for step, part in zip(steps, rest, strict=False) for word in (step, part))
