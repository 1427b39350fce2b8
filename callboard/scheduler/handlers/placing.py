"""Placements that wait for nodes: jobs whose text places them on more nodes than have joined.

Until enough nodes are there, its workers have places on nodes that are still to come, so that it waits, counts as
demand and is accounted for like any other job. Once they are there, the text is resolved against them: by whoever
drives the scheduler, since that may take long, and what comes of it is an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import yaml

from callboard.model.faults import InvalidInput
from callboard.model.inputs.located import Misfits
from callboard.model.roles import fused, unfused
from callboard.model.specs import ComponentSpec, JobSpec
from callboard.placement import Accelerator, Cluster, HardwareUnit, Node
from callboard.placement.cluster.cluster import RESERVED_LABELS
from callboard.placement.jobs import place_job
from callboard.scheduler.records.asks import AWAITED
from callboard.scheduler.records.events import PlacementResolved
from callboard.scheduler.records.job_records import SpecRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.state.roster import GONE
from callboard.scheduler.state.transaction import Transaction

MAX_AWAITED = 10_000
"""Most nodes that a placement waits for."""

MOST_GUESSED = 64
"""Most nodes to come that are tried for a text that doesn't say how many it needs."""

_LIKELY_GPUS = (0, 1, 2, 4, 8, 16)
"""GPUs of the nodes to come, where a text doesn't fit on such as are there: the fewest that it fits on."""


def cluster_of(nodes: Iterable[NodeRecord]) -> Cluster:
    """The nodes that a placement may use: all that are there and have something to give (PG-11).

    A cordoned or silent node counts: what a text's ranks mean must not change with it; a job on it waits.
    """
    return Cluster(
        nodes=tuple(
            Node(
                node_id=node.node_id,
                rank=node.rank,
                accelerators=tuple(
                    Accelerator(device.id, "gpu" if node.simulated or not device.model else device.model.lower())
                    for device in node.devices
                ),
                labels=node.labels,
                node_group=node.node_group,
                hardware=tuple(HardwareUnit(item.type, item.config_json or "{}") for item in node.hardware),
                interpreters=node.interpreters,
                cpu_milli=node.capacity.cpu_milli,
                memory_bytes=node.capacity.memory_bytes,
                lost_accelerators=node.lost_devices,
            )
            for node in sorted(nodes, key=lambda node: node.rank)
            if node.state not in GONE and node.capacity
        )
    )


def awaiting(spec: JobSpec, nodes: Iterable[NodeRecord]) -> JobSpec | None:
    """The job with places on the nodes that are there and on those that its text needs beside them. None: it needs no
    more than there are, or has another fault."""
    cluster = cluster_of(nodes)
    here, stated = len(cluster.nodes), _nodes_of(spec.placement_config)
    for wanted in (stated,) if stated else range(here + 1, here + 1 + MOST_GUESSED):
        if not here < wanted <= MAX_AWAITED:
            break
        models = _padded(cluster, wanted, _absent_groups(spec.placement_config, cluster))
        for padded in models if stated or not here else islice(models, 1):
            try:
                found = place_job(spec, padded)
            except (InvalidInput, Misfits):
                continue
            return replace(found, placement_nodes=wanted)
    return None


def _nodes_of(text: str) -> int:
    """``num_nodes`` of a placement text; 0: it doesn't say."""
    found = _section(text).get("num_nodes")
    return found if type(found) is int else 0


def _section(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)["cluster"]
    except (yaml.YAMLError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _absent_groups(text: str, cluster: Cluster) -> list[str]:
    """Node groups that a text names, gives no nodes, and with which no node has joined."""
    section = _section(text)
    named = list(_labels(section.get("component_placement")))
    defined = section.get("node_groups")
    for group in defined if isinstance(defined, list) else ():
        if isinstance(group, dict) and isinstance(label := group.get("label"), str):
            if group.get("node_ranks") is None:
                named.append(label)
            else:
                named = [each for each in named if each != label]
    known = {*RESERVED_LABELS, *(node.node_group for node in cluster.nodes)}
    return [label for label in dict.fromkeys(named) if label and label not in known]


def _labels(placement: object) -> Iterator[str]:
    """What stands at ``node_group`` in placements: a label, several with commas between them, or a list."""
    if isinstance(placement, dict):
        said = placement.get("node_group")
        for each in said if isinstance(said, list) else [said]:
            if isinstance(each, str):
                yield from (label.strip() for label in each.split(","))
        placement = list(placement.values())
    for inner in placement if isinstance(placement, list) else ():
        yield from _labels(inner)


def _padded(cluster: Cluster, wanted: int, absent: Sequence[str]) -> Iterator[Cluster]:
    """The cluster with as many nodes as are wanted; the first guess is that those to come are as the largest there.
    They join with the node groups that are absent, in turn."""
    taken = {node.rank for node in cluster.nodes}
    ranks = [rank for rank in range(wanted) if rank not in taken][: wanted - len(cluster.nodes)]
    largest = max(cluster.nodes, key=lambda node: len(node.accelerators), default=None)
    likely = [] if largest is None else [largest]
    likely += [
        Node(node_id="", rank=0, accelerators=tuple(Accelerator(str(index), "gpu") for index in range(count)))
        for count in _LIKELY_GPUS
    ]
    for model in likely:
        to_come = (
            replace(model, node_id=f"{AWAITED}{rank}", rank=rank, node_group=label)
            for rank, label in zip(ranks, cycle(absent or [model.node_group]))
        )
        yield Cluster(nodes=(*cluster.nodes, *to_come), groups=cluster.groups)


def on_nodes(waiting: Iterable[tuple[str, JobSpec]], nodes: Iterable[NodeRecord]) -> list[tuple[str, JobSpec]]:
    """With their uids the jobs among those that wait whose nodes are there now, each with its places."""
    cluster = cluster_of(nodes)
    placed = []
    for uid, spec in waiting:
        if len(cluster.nodes) < _nodes_of(spec.placement_config):
            continue
        open_spec = unfused(spec)
        bare = tuple(replace(component, places=()) for component in open_spec.components)
        try:
            text = _without_variables(spec.placement_config)
            found = place_job(replace(open_spec, components=bare, placement_config=text, placement_nodes=0), cluster)
        except (InvalidInput, Misfits):
            continue  # other nodes than it needs; its wait goes on, and ends with the reason
        components = tuple(map(_with_env, found.components, open_spec.components))
        found = replace(
            found, components=components, placement_config=spec.placement_config, placement_digest=spec.placement_digest
        )
        placed.append((uid, fused(found)))
    return placed


def resolved(tx: Transaction, event: PlacementResolved) -> None:
    """Gives a job that waited for nodes its places on them."""
    if event.uid not in tx.state.unplaced:
        return  # cancelled meanwhile, or resolved by an earlier one
    wanted = tx.state.specs[event.uid].spec.placement_nodes
    tx.put(SpecRecord(uid=event.uid, spec=event.spec))
    job = tx.change_job(event.uid, deadline_ms=0)
    tx.event("job.placed", f"jobs/{job.name}", job.state.value, f"its {wanted} nodes are there")
    tx.fresh.append(event.uid)


def _without_variables(text: str) -> str:
    """A text in the normal form without the variables of its node groups, whose values it has only masked."""
    config = yaml.safe_load(text)
    for group in config["cluster"].get("node_groups", ()):
        settings = [{key: each[key] for key in each if key != "env_vars"} for each in group.pop("env_configs", ())]
        if kept := [each for each in settings if each.keys() - {"node_ranks"}]:
            group["env_configs"] = kept
    changed: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return changed


def _with_env(found: ComponentSpec, before: ComponentSpec) -> ComponentSpec:
    """A component with the variables that its places had: the text that is kept has them masked."""
    if len(found.places) != len(before.places):
        return found
    places = tuple(replace(place, env=earlier.env) for place, earlier in zip(found.places, before.places, strict=True))
    return replace(found, places=places)


def waited_in_vain(nodes: Iterable[NodeRecord], spec: JobSpec) -> str:
    """Which nodes joined of those that a placement waits for, and how many did not; empty: all did."""
    cluster = cluster_of(nodes)
    there = [node.node_id for node in cluster.nodes]
    absent = _absent_groups(spec.placement_config, cluster)
    short = spec.placement_nodes - len(there)
    if short <= 0:
        return f"its placement needs the node group {', '.join(absent)}, with which no node joined" if absent else ""
    more = f" and {len(there) - 20} more" if len(there) > 20 else ""
    joined = f"{', '.join(there[:20])}{more} joined" if there else "none joined"
    return (
        f"its placement needs {spec.placement_nodes} nodes; {joined}, {short} {'is' if short == 1 else 'are'} missing"
    )
