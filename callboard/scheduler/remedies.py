"""What is the smallest change that would let a job start?"""

from __future__ import annotations

from collections.abc import Sequence

from callboard.model.quantities import Resources
from callboard.model.specs import JobSpec, Strategy
from callboard.scheduler.asks import Ask, asks_of
from callboard.scheduler.blockers import group_reasons, lacks, node_reasons
from callboard.scheduler.grouping import charged_beside, node_filter, reuse
from callboard.scheduler.pinned import place_reasons, place_remedies
from callboard.scheduler.quota import shortages
from callboard.scheduler.records import (
    NodeRecord,
)
from callboard.scheduler.state import State
from callboard.scheduler.view import View
from callboard.scheduler.wording import change, shown


def remedies(state: State, spec: JobSpec, view: View) -> tuple[str, ...]:
    """Smallest changes, each of which removes one thing that is in the way; all together let the job start."""
    changes: list[str] = []
    asks = asks_of(spec)
    for ask in asks:
        pool = state.pools.get(ask.pool)
        if pool is None:
            changes.append(f"create pool {ask.pool}")
            continue
        for short in shortages(state.pools, charged_beside(view, asks, ask), pool.spec, ask.resources):
            more = change(short.resource, short.asked - short.available)
            changes.append(f"raise pool {ask.pool} {short.resource} by {more}")
        group_rules = group_reasons(state, view, ask)
        if group_rules and reuse(state, view, spec, ask) is None:
            changes.append(f"raise pool {ask.pool} max_dynamic by 1")
        changes += _node_change(state, view, spec, ask)
    return tuple(dict.fromkeys(changes))


def _node_change(state: State, view: View, spec: JobSpec, ask: Ask) -> list[str]:
    wanted = node_filter(spec, state.pools[ask.pool].spec)
    if reuse(state, view, spec, ask) is not None or not node_reasons(state, view, spec, ask):
        return []
    missing_places = place_reasons(state, view, wanted, ask.slots)
    if missing_places:
        return place_remedies(state, missing_places)
    fitting = [node for node in state.nodes.values() if wanted.admits(node)]
    cordoned = [node for node in fitting if node.cordoned and not lacks(view.room(node), ask.slots[0].resources)]
    if cordoned:
        return [f"uncordon {min(cordoned, key=lambda node: node.rank).node_id}"]
    usable = [node for node in fitting if node.usable]
    if not usable:
        return ["add a node" + "".join(f" with the label {key}={value}" for key, value in wanted.required)]
    ask_here = ask.resources if spec.placement is not Strategy.STRICT_SPREAD else ask.slots[0].resources

    def shortage(node: NodeRecord) -> tuple[int, int, int]:
        short = lacks(view.room(node), ask_here)
        return (len(short), sum(asked - have for _, asked, have in short), node.rank)

    best = min(_unlike(usable) if view.assumption.empty else usable, key=shortage)
    return [
        f"{change(resource, asked - have)} more {shown(resource)} on {best.node_id}"
        for resource, asked, have in lacks(view.room(best), ask_here)
    ]


def _unlike(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Of nodes that are alike while empty, the one with the lowest rank."""
    first: dict[tuple[Resources, int], NodeRecord] = {}
    for node in nodes:
        kind = (node.capacity, len(node.devices))
        if kind not in first or node.rank < first[kind].rank:
            first[kind] = node
    return list(first.values())
