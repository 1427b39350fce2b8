"""The problem of an RLinf config: components with measured costs or RLinf's laws, on its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from callboard.autoplace.problem.costs import Scaling, envs_per_instance, interpolated
from callboard.autoplace.problem.modes import Asked, Rules, component_of, placeable
from callboard.autoplace.problem.problem import (
    Component,
    Edge,
    EdgeKind,
    Layout,
    Mode,
    ModelParallel,
    Pool,
    Problem,
    Unplaceable,
)
from callboard.autoplace.rlinf.cluster import group_of, own_nodes, pool_of, profiled_gpus, refuse_beyond
from callboard.autoplace.rlinf.config import Embodied, Profile, Reasoning, RLinfConfig, read_rlinf_config
from callboard.model.frozen import dataclass

DEFAULT_STAGES = 2
"""Parts in which environments and rollout take turns when the config doesn't say: what RLinf's own search assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLinfJob:
    """An RLinf config as a problem, with what its answer has to fit into.

    Attributes:
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
    found = tuple(nodes) if nodes is not None else own_nodes(config, source, notes)
    group = group_of(config)
    pool = pool_of(config, group, found)
    refuse_beyond(config, group, pool, found, source if located is None else located)
    if nodes is not None and config.gpus_per_node not in {None, *nodes}:
        stated = ", ".join(map(str, sorted(set(nodes))))
        notes.append(f"the config says {config.gpus_per_node} GPUs per node and the nodes have {stated}; change it too")
    profiled = profiled_gpus(config, pool, found, nodes is not None, notes)
    notes += [f"{key} is not used: the workflow has no such component" for key in config.unused_profiles]
    workload = config.workload
    if isinstance(workload, Reasoning):
        rules = ModelParallel(
            node_gpus=tuple(found[rank] for rank in pool.node_ranks),
            group_gpus=workload.model_parallel,
            tensor_gpus=workload.tensor_parallel,
            auto_scheduler=config.auto_scheduler,
            pre_process=config.pre_process,
        )
        problem = _reasoning_problem(workload, pool, profiled, None if mixed else rules, tuple(notes))
    else:
        problem = _embodied_problem(workload, pool, profiled, notes=tuple(notes))
    return RLinfJob(problem=problem, config=config, nodes=found, group=group)


def _reasoning_problem(
    job: Reasoning, pool: Pool, profiled: int, rules: ModelParallel | None, notes: tuple[str, ...]
) -> Problem:
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
    components = placeable(component_of(one, (pool,)) for one in asked)
    return Problem(
        components=components,
        edges=tuple(Edge(source=source, target=target) for source, target in pairwise(names)),
        pools=(pool,),
        chunks=job.batch_size,
        layout=Layout.ANY if rules is None else Layout.UNIFORM,
        model_parallel=rules,
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


def _embodied_problem(job: Embodied, pool: Pool, profiled: int, *, notes: tuple[str, ...]) -> Problem:
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
        components=placeable(
            (_by_environments("env", job, pool), _by_environments("rollout", job, pool), component_of(asked, (pool,)))
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
