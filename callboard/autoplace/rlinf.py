"""Which problem is an RLinf config? Components with measured costs or RLinf's laws, on the cluster that is meant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from callboard.autoplace.candidates import Asked, Rules, component_of
from callboard.autoplace.configs import located_fault
from callboard.autoplace.costs import Scaling, interpolated
from callboard.autoplace.problem import Component, Edge, EdgeKind, Layout, Mode, NoPlan, Pool, Problem, Unplaceable
from callboard.autoplace.rlinf_config import (
    MAX_GPUS_PER_NODE,
    Embodied,
    Entry,
    Profile,
    Reasoning,
    RLinfConfig,
    read_rlinf_config,
)
from callboard.autoplace.rlinf_laws import envs_per_instance
from callboard.model.faults import Fault, InvalidInput
from callboard.placement.cluster import Cluster

ASSUMED_GPUS_PER_NODE = 8
"""When nothing tells: the machines that RLinf's configs are written for."""

DEFAULT_STAGES = 2
"""Parts in which environments and rollout take turns when the config doesn't say: what RLinf's own search assumes."""

WHOLE_CLUSTER = "cluster"
"""Label of the node group that is every node."""

_PLACEMENT = "cluster.component_placement"
_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RLinfJob:
    """An RLinf config as a problem, with what its answer has to fit into.

    Attributes:
        problem: what is searched.
        config: what was read.
        nodes: GPUs of each node of the cluster.
        group: label of the node group of the costed components; empty: the whole cluster.
    """

    problem: Problem
    config: RLinfConfig
    nodes: tuple[int, ...]
    group: str


def rlinf_job(
    source: Mapping[str, Any],
    *,
    nodes: Sequence[int] | None = None,
    mixed: bool = False,
    located: Mapping[str, Any] | None = None,
) -> RLinfJob:
    """The job that ``source`` configures.

    Args:
        source: RLinf's config, a mapping or OmegaConf's DictConfig.
        nodes: GPUs of each node; None: what the config itself says of its cluster.
        mixed: also allow layouts that RLinf's placement of model-parallel components refuses.
        located: the file that ``source`` was made of, read with its positions; faults get theirs from it.

    Raises:
        ProfileMissing: a cost that the workflow needs is missing.
        InvalidInput: every other fault, a current placement beyond the cluster included.
        NoPlan: a component has no cost or no legal number of GPUs on this cluster.
    """
    config = read_rlinf_config(source, located)
    notes: list[str] = []
    found = tuple(nodes) if nodes is not None else _own_nodes(config, source, notes)
    group = _group(config)
    pool = _pool(config, group, found)
    _refuse_beyond(config, group, pool, found, source if located is None else located)
    if nodes is not None and config.gpus_per_node not in {None, *nodes}:
        stated = ", ".join(map(str, sorted(set(nodes))))
        notes.append(f"the config says {config.gpus_per_node} GPUs per node and the nodes have {stated}; change it too")
    profiled = _profiled_gpus(config, pool, found, nodes is not None, notes)
    notes += [f"{key} is not used: the workflow has no such component" for key in config.unused_profiles]
    build = _reasoning_problem if isinstance(config.workload, Reasoning) else _embodied_problem
    problem = build(config.workload, pool, profiled, mixed=mixed, notes=tuple(notes))  # type: ignore[arg-type]
    return RLinfJob(problem=problem, config=config, nodes=found, group=group)


# The cluster.


def _own_nodes(config: RLinfConfig, source: Mapping[str, Any], notes: list[str]) -> tuple[int, ...]:
    """What the config says of its cluster: nodes are stated, GPUs per node perhaps."""
    if config.described:
        described = Cluster.from_mapping(source).nodes[: config.num_nodes]
        return tuple(len(node.accelerators) for node in described)
    count = config.num_nodes or 1
    if config.gpus_per_node is not None:
        return (config.gpus_per_node,) * count
    ranks = [
        (entry.highest_rank, len(_group_nodes(config, entry.group, count)))
        for entry in config.entries
        if entry.highest_rank is not None and _has_gpus(config, entry)
    ]
    if ranks:
        gpus = max(math.ceil((rank + 1) / nodes) for rank, nodes in ranks)
        notes.append(f"{gpus} GPUs per node: taken from the ranks of {_PLACEMENT}; --nodes states it")
    else:
        gpus = ASSUMED_GPUS_PER_NODE
        notes.append(f"{gpus} GPUs per node are assumed: the config doesn't say; --nodes states it")
    if gpus > MAX_GPUS_PER_NODE:
        why = f"its ranks mean {gpus} GPUs per node; {MAX_GPUS_PER_NODE} are allowed"
        raise InvalidInput([Fault(_PLACEMENT, why)])
    return (gpus,) * count


def _group(config: RLinfConfig) -> str:
    """The one node group in which the costed components are."""
    costed = set(config.workload.profiles)
    groups = {entry.group for entry in config.entries if costed & set(entry.names)}
    if len(groups) > 1:
        named = ", ".join(sorted(label or WHOLE_CLUSTER for label in groups))
        why = (
            f"the costed components are in several node groups ({named}), and profile_data doesn't say on which GPUs "
            "it was measured; describe the workflow in the general form, with a cost per pool"
        )
        raise InvalidInput([Fault(_PLACEMENT, why)])
    return groups.pop() if groups else ""


def _pool(config: RLinfConfig, group: str, nodes: Sequence[int]) -> Pool:
    offsets = [0, *accumulate(nodes)]
    ranks = _group_nodes(config, group, len(nodes))
    return Pool(
        name=group or WHOLE_CLUSTER,
        gpu_ranks=tuple(rank for node in ranks for rank in range(offsets[node], offsets[node + 1])),
        node_ranks=ranks,
    )


def _group_nodes(config: RLinfConfig, group: str, nodes: int) -> tuple[int, ...]:
    """Ranks of the nodes of a group (or of several, joined with commas), in its order.

    Those that the cluster doesn't have are left out; a label that nobody defined means the whole cluster here, and is
    told by whoever places components in it.
    """
    labels = [label for part in group.split(",") if (label := part.strip()) in config.groups]
    ranks = [rank for label in labels for rank in _label_nodes(label, config.groups[label], nodes)]
    return tuple(dict.fromkeys(ranks)) if labels else tuple(range(nodes))


def _label_nodes(label: str, text: str, nodes: int) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        match = _RANKS.fullmatch(part)
        if part.lower() == "all":
            yield from range(nodes)
        elif match is None:
            where = f"cluster.node_groups[{label}].node_ranks"
            raise InvalidInput([Fault(where, f"'{part}' is no rank of a node; write e.g. 0-3")])
        else:
            yield from range(int(match[1]), min(int(match[2] or match[1]), nodes - 1) + 1)


def _has_gpus(config: RLinfConfig, entry: Entry) -> bool:
    """Whether the entry's ranks are GPUs: those of a robot group or of nodes are not."""
    return not any(label.strip() in config.hardware_groups for label in entry.group.split(","))


def _refuse_beyond(config: RLinfConfig, group: str, pool: Pool, nodes: Sequence[int], located: object) -> None:
    """A current placement that the cluster can't hold means that the wrong cluster was stated, or the wrong file."""
    faults = []
    for entry in config.entries:
        rank = entry.highest_rank
        if rank is None or not _has_gpus(config, entry):
            continue
        own = pool if entry.group == group else _pool(config, entry.group, nodes)
        if rank >= own.gpus:
            where = "cluster" if not entry.group else f"node group {entry.group}"
            has = f"0 to {own.gpus - 1}" if own.gpus else "none"
            why = f"rank {rank} doesn't exist: the {where} has {own.gpus} GPUs (ranks {has}) on {len(nodes)} nodes"
            faults.append(located_fault(located, ("cluster", "component_placement", entry.key), why))
    if faults:
        raise InvalidInput(faults)


def _profiled_gpus(config: RLinfConfig, pool: Pool, nodes: Sequence[int], stated: bool, notes: list[str]) -> int:
    """W: on how many GPUs the single figures were measured. "All" is meant of the cluster that the config is for."""
    if config.profiled_gpus is not None:
        return config.profiled_gpus
    own_nodes = config.num_nodes
    if not stated or own_nodes is None or own_nodes == len(nodes):
        return pool.gpus
    per_node = config.gpus_per_node or max(nodes, default=0)
    profiled = own_nodes * per_node
    notes.append(
        f"profile_data is taken as measured on the {own_nodes} × {per_node} = {profiled} GPUs that the config is "
        "written for (cluster.num_nodes); profile_data.num_gpus states another number"
        + ("; larger counts have no cost" if profiled < pool.gpus else "")
    )
    return profiled


# The workflow.


def _reasoning_problem(job: Reasoning, pool: Pool, profiled: int, *, mixed: bool, notes: tuple[str, ...]) -> Problem:
    # Whole groups of each minibatch go to each data-parallel rank.
    groups = job.batch_size // job.n_minibatches
    asked = [
        Asked(
            name=name,
            seconds_by_gpus=_points(profile, profiled),
            scaling=_law(job, name) if profile.seconds is not None else None,
            rules=Rules(
                multiple_of=job.model_parallel[name],
                least=1,
                data_parallel_divides=None if name == "rollout" else groups,
            ),
        )
        for name, profile in job.profiles.items()
    ]
    names = tuple(job.profiles)
    components = _placeable(component_of(one, (pool,)) for one in asked)
    return Problem(
        components=components,
        edges=tuple(Edge(source=source, target=target) for source, target in pairwise(names)),
        pools=(pool,),
        chunks=job.batch_size,
        layout=Layout.ANY if mixed else Layout.UNIFORM,
        inside=(("inference", "actor"),) if "inference" in names else (),
        notes=(*notes, *_illegal_full_sizes(job, components, profiled, pool)),
    )


def _illegal_full_sizes(job: Reasoning, components: tuple[Component, ...], full: int, pool: Pool) -> Iterator[str]:
    """The size that was measured passes the filter like any other; who measured there wants to know why it is out."""
    for component in components:
        single = job.profiles[component.name].seconds is not None
        if single and full <= pool.gpus and all(mode.gpus != full for mode in component.modes):
            size = job.model_parallel[component.name]
            why = (
                f"{full} is no multiple of its {size} model-parallel GPUs"
                if full % size
                else f"{full // size} data-parallel ranks don't share the "
                f"{job.batch_size // job.n_minibatches} groups of a minibatch evenly"
            )
            yield f"{component.name} is not placed on the {full} GPUs that it was measured on: {why}"


def _embodied_problem(job: Embodied, pool: Pool, profiled: int, *, mixed: bool, notes: tuple[str, ...]) -> Problem:
    del mixed  # Embodied components may lie on any GPUs as it is.
    assumed = (
        ()
        if job.stages is not None
        else (
            f"environments and rollout take turns in {DEFAULT_STAGES} parts: rollout.pipeline_stage_num isn't stated",
        )
    )
    actor = job.profiles["actor"]
    asked = Asked(
        name="actor",
        seconds_by_gpus=_points(actor, profiled),
        scaling=Scaling("megatron") if actor.seconds is not None else None,
        rules=Rules(multiple_of=job.model_parallel["actor"], least=1, data_parallel_divides=job.global_batch_size),
    )
    return Problem(
        components=_placeable(
            (
                _by_environments("env", job, pool),
                _by_environments("rollout", job, pool),
                component_of(asked, (pool,)),
            )
        ),
        edges=(
            Edge(source="env", target="rollout"),
            Edge(source="rollout", target="env"),
            # RLinf's embodied runner waits for all trajectories before it trains.
            Edge(source="rollout", target="actor", kind=EdgeKind.BARRIER),
        ),
        pools=(pool,),
        chunks=job.stages or DEFAULT_STAGES,
        notes=(*notes, *assumed),
    )


def _points(profile: Profile, profiled: int) -> Mapping[int, float]:
    return profile.points if profile.seconds is None else {profiled: profile.seconds}


def _law(job: Reasoning, name: str) -> Scaling:
    if name != "rollout":
        return Scaling("megatron")
    return Scaling(
        "rollout",
        {
            "requests": job.batch_size * job.group_size,
            "max_running_requests": job.max_running_requests,
            "instance_gpus": job.model_parallel[name],
        },
    )


def _by_environments(name: str, job: Embodied, pool: Pool) -> Component | Unplaceable:
    """A component whose cost follows the environments of its fullest instance."""
    points, size = job.profiles[name].points, job.model_parallel[name]
    modes: list[Mode] = []
    counts = tuple(range(size, pool.gpus + 1, size))
    for gpus in counts:
        envs = envs_per_instance(job.env_num, gpus // size)
        seconds = interpolated(points, envs) if envs is not None else None
        if envs is not None and seconds is not None:
            modes.append(
                Mode(pool=pool.name, gpus=gpus, seconds=seconds, held_seconds=seconds, estimated=envs not in points)
            )
    if modes:
        return Component(name=name, modes=tuple(modes))
    measured = ", ".join(map(str, points))
    needed = sorted({envs for gpus in counts if (envs := envs_per_instance(job.env_num, gpus // size)) is not None})
    reason = (
        f"{job.env_num} environments on 1 to {pool.gpus // size} instances mean {_span(needed)} environments each, and "
        f"{measured} were measured; measure fewer and more"
        if counts
        else f"an instance takes {size} GPUs and there are {pool.gpus}"
    )
    return Unplaceable(component=name, gpus=counts, reason=reason)


def _span(numbers: Sequence[int]) -> str:
    return "no" if not numbers else f"{numbers[0]} to {numbers[-1]}"


def _placeable(found: Iterator[Component | Unplaceable] | tuple[Component | Unplaceable, ...]) -> tuple[Component, ...]:
    parts = list(found)
    causes = tuple(part for part in parts if isinstance(part, Unplaceable))
    if causes:
        raise NoPlan(causes)
    return tuple(part for part in parts if isinstance(part, Component))
