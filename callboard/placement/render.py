"""A plan written down as a config with its nodes, from which the same plan comes again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import yaml

from callboard.model.cluster_text import NodeText, format_cluster
from callboard.model.quantities import format_milli
from callboard.placement.cluster.cluster import WHOLE_CLUSTER, Accelerator, Cluster, Node, NodeGroup
from callboard.placement.components import component_placement_for
from callboard.placement.config.config import Entry, PlacementConfig, is_further_rollout
from callboard.placement.layout.plan import PlacementPlan
from callboard.placement.source.fields import rank_list
from callboard.placement.source.tree import traps

_SHORT_MODEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def plan_placement(
    config: object, cluster: Cluster | None = None, *, gpu_components: Iterable[str] = ()
) -> PlacementPlan:
    """The plan of a config; :func:`~callboard.placement.component_placement_for` in one call.

    Args:
        config: an RLinf config, its ``cluster`` section or a job; text, mapping, ``DictConfig`` or
            :class:`~callboard.placement.PlacementConfig`.
        cluster: the nodes that are there; None: those that the config describes.
        gpu_components: components that are known to need GPUs.

    Raises:
        InvalidInput: every fault of the config.
    """
    return component_placement_for(config, cluster, gpu_components=gpu_components).plan


def parse(text: str, cluster: Cluster | None = None) -> PlacementPlan:
    """The plan of a YAML text; the inverse of :func:`render`.

    Raises:
        InvalidInput: every fault of the text.
    """
    return plan_placement(text, cluster)


def render(plan: PlacementPlan) -> str:
    """The plan as YAML: what was asked for, in its shortest form, and the nodes it was resolved against.

    Values of variables are written too, so keep the text as private as they are.
    """
    asked = as_asked(plan)
    asked["cluster"]["nodes"] = describe_nodes(plan.cluster.nodes)
    return yaml.dump(asked, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_asked(plan: PlacementPlan) -> dict[str, Any]:
    """What was asked for, in its shortest form, without the nodes; values of variables are in it."""
    config = plan.config
    section: dict[str, Any] = {}
    if config.num_nodes is not None:
        section["num_nodes"] = config.num_nodes
    if config.gpus_per_node is not None:
        section["num_gpus_per_node"] = config.gpus_per_node
    if config.auto_scheduler:
        section["auto_scheduler"] = True
    if config.pre_process:
        section["use_pre_process_policy"] = True
    section["component_placement"] = {entry.component: _entry(entry) for entry in config.entries}
    if config.groups:
        section["node_groups"] = [_group(group) for group in config.groups]
    return {"cluster": section, **_sizes(config)}


def describe_nodes(nodes: tuple[Node, ...]) -> str | list[dict[str, Any]]:
    """Nodes as ``nodes`` of a config describes them: a short text where it says everything."""
    short = tuple(
        NodeText(
            gpus=len(node.accelerators),
            cpu_milli=node.cpu_milli,
            memory_bytes=node.memory_bytes,
            gpu_model=_model(node.accelerators),
        )
        for node in nodes
    )
    text = format_cluster(short)
    if len(text) <= 200 and Cluster.from_nodes(text).nodes == nodes:
        return text
    return [_node(node) for node in nodes]


def _model(accelerators: tuple[Accelerator, ...]) -> str:
    kind = accelerators[0].type if accelerators else "gpu"
    return kind if kind != "gpu" and _SHORT_MODEL.fullmatch(kind) else ""


def _node(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {"node_id": node.node_id, "rank": node.rank}
    if node.accelerators:
        found["accelerators"] = [{"id": device.id, "type": device.type} for device in node.accelerators]
    if node.labels:
        found["labels"] = dict(node.labels)
    if node.node_group:
        found["node_group"] = node.node_group
    if node.hardware:
        found["hardware"] = [{"type": unit.type, **json.loads(unit.config_json)} for unit in node.hardware]
    if node.interpreters is not None:
        found["interpreters"] = list(node.interpreters)
    if node.cpu_milli is not None:
        found["cpu"] = format_milli(node.cpu_milli)
    if node.memory_bytes is not None:
        found["memory"] = f"{node.memory_bytes}B"
    if node.lost_accelerators:
        found["lost_accelerators"] = node.lost_accelerators
    return found


def _group(group: NodeGroup) -> dict[str, Any]:
    found: dict[str, Any] = {"label": group.label, "node_ranks": rank_list(group.node_ranks)}
    if group.ignore_hardware:
        found["ignore_hardware"] = True
    if group.hardware_type:
        configs = [{"node_rank": rank, **json.loads(unit.config_json)} for rank, unit in group.hardware]
        found["hardware"] = {"type": group.hardware_type, "configs": configs}
    if group.env_configs:
        found["env_configs"] = [
            {
                "node_ranks": rank_list(config.node_ranks),
                **({"python_interpreter_path": config.interpreter} if config.interpreter else {}),
                **({"env_vars": [{name: value} for name, value in config.env]} if config.env else {}),
            }
            for config in group.env_configs
        ]
    return found


def _entry(entry: Entry) -> str | dict[str, Any]:
    if entry.node_groups == (WHOLE_CLUSTER,) and not entry.share_milli and not entry.visible_all:
        return entry.text
    found: dict[str, Any] = {}
    if entry.node_groups != (WHOLE_CLUSTER,):
        found["node_group"] = entry.node_groups[0] if len(entry.node_groups) == 1 else list(entry.node_groups)
    found["placement"] = entry.text
    if entry.share_milli:
        found["share"] = f"{entry.share_milli}m"
    if entry.visible_all:
        found["visible"] = "all"
    return found


def _sizes(config: PlacementConfig) -> dict[str, Any]:
    """The parts of a reasoning config that change its placement."""
    if not config.task_type:
        return {}
    found: dict[str, Any] = {"runner": {"task_type": config.task_type}}
    if config.recompute_logprobs is not None:
        found["algorithm"] = {"recompute_logprobs": config.recompute_logprobs}
    for name, size in config.sizes:
        component, _, kind = name.rpartition(".")
        key = "tensor" if kind == "tp" else "pipeline"
        if component == "rollout" or is_further_rollout(component):
            found.setdefault(component, {})[f"{key}_parallel_size"] = size
        else:
            found.setdefault(component, {}).setdefault("model", {})[f"{key}_model_parallel_size"] = size
    return found


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever some reader of YAML would take it for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    trap = bool(traps(text)) or text.isdecimal()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if trap else None)


_Dumper.add_representer(str, _text)
