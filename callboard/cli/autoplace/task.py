"""The task of a search: an RLinf config or a workflow in the general form, on the cluster that was stated."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import copy
from typing import Any

from callboard.autoplace.problem.problem import Problem
from callboard.autoplace.rlinf.job import RLinfJob, rlinf_job
from callboard.cli.layouts.cluster_source import ClusterNode, ClusterSource
from callboard.cli.layouts.config_source import ConfigSource
from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be searched.

    Attributes:
        job: the RLinf job it is; None: a workflow in the general form.
        notes: about the cluster, one sentence each.
        facts: about the cluster, for programs.
    """

    problem: Problem
    job: RLinfJob | None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any]


def task_of(source: ConfigSource, cluster: ClusterSource | None, *, mixed: bool) -> Task:
    """The task of a config.

    Args:
        source: RLinf's config, or one with ``workflow`` or ``components``.
        cluster: the cluster that was stated; None: the config's own.
        mixed: allow layouts that RLinf's model-parallel placement refuses.

    Raises:
        InvalidInput: every fault.
        NoPlan: a component has no cost or no legal count.
    """
    config = source.config
    notes = cluster.notes if cluster is not None else ()
    if source.left_out:
        notes = (*notes, left_out_note(source))
    facts = {} if cluster is None or cluster.revision is None else {"inventory_revision": cluster.revision}
    if "workflow" in config or "components" in config:
        general = _plain(config)
        problem = Problem.from_mapping(general if cluster is None else _on(general, cluster))
        return Task(problem=problem, job=None, notes=notes, facts=facts)
    nodes = None if cluster is None else [node.gpus for node in cluster.nodes]
    if cluster is not None and len({node.group for node in cluster.nodes if node.gpus}) > 1:
        notes = (*notes, "the GPUs are of several kinds; profile_data is taken to hold on each of them")
    job = rlinf_job(config, nodes=nodes, mixed=mixed, located=source.own)
    return Task(problem=job.problem, job=job, notes=notes, facts=facts)


def left_out_note(source: ConfigSource) -> str:
    """What a reader of the answer must know if not all of the config was there."""
    return f"only {source.file} was read, without the files that its defaults name: {source.left_out}"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dictionary: OmegaConf's lists are none that anybody else knows."""
    if isinstance(config, dict):
        return config
    found: dict[str, Any] = importlib.import_module("omegaconf").OmegaConf.to_container(config, resolve=True)
    return found


def _on(config: dict[str, Any], cluster: ClusterSource) -> dict[str, Any]:
    """The config on another cluster than its own."""
    if "workflow" not in config:
        return {**config, "gpus": sum(node.gpus for node in cluster.nodes)}
    changed = copy(config)  # With the lines of what was written, for faults.
    changed["cluster"] = {"nodes": [_node(node) for node in cluster.nodes]}
    return changed


def _node(node: ClusterNode) -> dict[str, Any]:
    found: dict[str, Any] = {"gpus": node.gpus}
    if node.group:
        found["group"] = node.group
    if node.memory_gib is not None:
        found["memory_gib"] = node.memory_gib
    return found
