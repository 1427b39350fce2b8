"""The wording of amounts and lists in texts for people."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.quantities import MAX_MEMORY_BYTES, MILLI, format_amount
from callboard.model.specs import Labels
from callboard.scheduler.records.asks import INTERPRETER
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState


def missing(resource: str, asked: int, have: int) -> str:
    return f"{format_amount(resource, asked - have)} {shown(resource)}"


def shown(resource: str) -> str:
    return resource.upper() if resource in ("cpu", "gpu") else resource


def asked(resource: str, amounts: Sequence[int]) -> str:
    """What several workers ask, each and together: ``3 workers of 1 CPU each, 3 CPU together``."""
    together = f"{format_amount(resource, sum(amounts))} {shown(resource)}"
    several = workers(resource, amounts)
    return f"{several}, {together} together" if several else together


def workers(resource: str, amounts: Sequence[int]) -> str:
    """Several workers and what each asks: ``3 workers of 1 CPU each``, ``3 workers of 1 to 2 CPU each``; empty: at most
    one asks anything."""
    asking = [amount for amount in amounts if amount]
    if len(asking) < 2:
        return ""
    least, most = format_amount(resource, min(asking)), format_amount(resource, max(asking))
    each = least if least == most else f"{least} to {most}"
    return f"{len(asking)} workers of {each} {shown(resource)} each"


def a_card(model: str, memory_bytes: int) -> str:
    """What a GPU is: "NVIDIA H200 with 141GiB"."""
    size = f" with {format_amount('gpu_memory', memory_bytes)}" if 0 < memory_bytes < MAX_MEMORY_BYTES else ""
    return f"{model or 'a GPU of an unknown model'}{size}"


def change(resource: str, amount: int) -> str:
    if resource in ("cpu", "gpu") and amount % MILLI:
        return f"{amount}m"
    return format_amount(resource, amount)


def time_left(ms: int) -> str:
    """A time to come, rounded up as far as people care: ``850 ms``, ``9 s``, ``29 min 59 s``, ``3 h``."""
    if ms < 1_000:
        return f"{ms} ms"
    seconds = -(-ms // 1000)
    parts = [(seconds // 3600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    return " ".join([f"{count} {unit}" for count, unit in parts if count][:2])


def labelled(labels: Labels) -> str:
    """What is asked of a node: its labels, and the interpreter it must allow."""
    return ", ".join(f"the interpreter {value}" if key == INTERPRETER else f"{key}={value}" for key, value in labels)


def join(parts: Sequence[str]) -> str:
    shown = list(dict.fromkeys(parts))
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return "; ".join(shown[:5]) + more


def unusable(node: NodeRecord) -> str:
    """Why nothing new is placed on a node, behind its name: "is JOINING: no Ray head: …"."""
    if node.ghosts and node.state is NodeState.READY:
        return "still ends unwanted workers"
    return f"is {node.state}: {node.ray_fault.message}" if node.ray_fault is not None else f"is {node.state}"


def bring_back(node: NodeRecord) -> str:
    """What makes a node that is away take work."""
    if node.ray_fault is not None:
        return node.ray_fault.remedy(node.node_id)
    match node.state:
        case NodeState.JOINING:
            return f"wait until {node.node_id} has joined"
        case NodeState.LEFT:
            return f"start an agent with the node id {node.node_id}"
        case _:
            return f"bring {node.node_id} back"
