"""The fields of an RLinf config that decide a placement, checked, every fault at once.

Keys that decide nothing here are not looked at: a config of RLinf has hundreds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from callboard.autoplace.problem.problem import MAX_CHUNKS
from callboard.autoplace.rlinf.values import Config
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown
from callboard.placement.config.config import OLD_NAMES

REASONING, EMBODIED = "reasoning", "embodied"

MAX_NODES, MAX_GPUS_PER_NODE = 100_000, 1024

_OLD_KEYS = {"profile_data.actor_cost": "trainer_cost"}  # of RLinf's first releases

_RANKS = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?(?::[\s\d-]*)?")


class ProfileMissing(InvalidInput):
    """The config has no profile data, or not all that its workflow needs.

    Attributes:
        keys: what is missing, as paths from the top of the config.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.keys = tuple(fault.field for fault in faults)
        super().__init__(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured seconds per iteration of one component.

    Attributes:
        seconds: on all GPUs of the profiled cluster; None: ``points`` are stated instead.
        points: by number of GPUs, or of environments per instance.
    """

    seconds: float | None = None
    points: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A reasoning job: rollout → inference → actor.

    Attributes:
        batch_size: prompts of one iteration.
        group_size: sequences per prompt.
        n_minibatches: optimizer steps of one iteration.
        max_running_requests: sequences that one engine runs at once.
        recompute_logprobs: whether inference computes log-probabilities anew.
        model_parallel: tensor × pipeline parallel size by component.
        tensor_parallel: tensor parallel size by component.
        profiles: by component, in the order of the workflow.
    """

    batch_size: int
    group_size: int
    n_minibatches: int
    max_running_requests: int
    recompute_logprobs: bool
    model_parallel: Mapping[str, int]
    tensor_parallel: Mapping[str, int]
    profiles: Mapping[str, Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embodied:
    """An embodied job: env ⇄ rollout → actor.

    Attributes:
        env_num: parallel environments.
        stages: parts in which environments and rollout take turns; None: not stated.
        global_batch_size: samples of an optimizer step, split over the actor's ranks; None: not stated.
        model_parallel: tensor × pipeline parallel size by component.
        profiles: ``env`` and ``rollout`` by environments per instance, ``actor`` by GPUs.
    """

    env_num: int
    stages: int | None
    global_batch_size: int | None
    model_parallel: Mapping[str, int]
    profiles: Mapping[str, Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of ``component_placement``.

    Attributes:
        key: as written, e.g. ``actor,rollout``.
        names: the components in it.
        text: its placement as text.
        group: label of its node group; empty: the whole cluster.
    """

    key: str
    names: tuple[str, ...]
    value: Any
    text: str
    group: str

    @property
    def highest_rank(self) -> int | None:
        """The highest resource rank that it names; None for ``all`` and what can't be read."""
        ranks = [_RANKS.fullmatch(segment) for segment in self.text.split(",")]
        named = [int(match[2] or match[1]) for match in ranks if match is not None]
        return max(named, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLinfConfig:
    """What decides a placement.

    Attributes:
        task_type: ``reasoning`` or ``embodied``.
        num_nodes: nodes of the cluster that it was written for; None: not stated.
        gpus_per_node: GPUs of each of them; None: not stated.
        described: whether it describes its nodes one by one (``cluster.nodes``).
        auto_scheduler: whether RLinf moves GPUs between components while the job runs.
        pre_process: whether it lends the actor's to the rollout first.
        profiled_gpus: GPUs that single figures were measured on; None: all.
        entries: the current placement.
        groups: node ranks by label of the node groups that have GPUs.
        hardware_groups: labels of node groups whose ranks are no GPUs.
        node_groups: every node group as it was written.
        workload: the rest, by kind of job.
        unused_profiles: keys of ``profile_data`` that the workflow has no component for.
    """

    task_type: str
    num_nodes: int | None
    gpus_per_node: int | None
    described: bool
    auto_scheduler: bool
    pre_process: bool
    profiled_gpus: int | None
    entries: tuple[Entry, ...]
    groups: Mapping[str, str]
    hardware_groups: frozenset[str]
    node_groups: tuple[Mapping[str, Any], ...]
    workload: Reasoning | Embodied
    unused_profiles: tuple[str, ...]


def read_rlinf_config(source: Mapping[str, Any], located: Mapping[str, Any] | None = None) -> RLinfConfig:
    """The config in ``source``: a mapping or OmegaConf's DictConfig; ``located`` is the file that it was made of.

    Raises:
        ProfileMissing: a cost that the workflow needs is missing, and nothing else is wrong.
        InvalidInput: every fault.
    """
    config = Config(source, located)
    missing: list[Fault] = []
    old = OLD_NAMES.get(str(config.find("runner.task_type")))
    task_type = old or config.choice("runner.task_type", (REASONING, EMBODIED))
    workload = _reasoning(config, missing) if task_type == REASONING else _embodied(config, missing)
    read = RLinfConfig(
        task_type=task_type,
        num_nodes=config.whole("cluster.num_nodes", default=0, high=MAX_NODES) or None,
        gpus_per_node=config.whole("cluster.num_gpus_per_node", default=0, high=MAX_GPUS_PER_NODE)
        or config.whole("cluster.gpus_per_node", default=0, high=MAX_GPUS_PER_NODE)
        or None,
        described=config.find("cluster.nodes") is not None,
        auto_scheduler=config.flag("cluster.auto_scheduler", default=False),
        pre_process=config.flag("cluster.use_pre_process_policy", default=False),
        profiled_gpus=config.whole("profile_data.num_gpus", default=0, high=MAX_NODES * MAX_GPUS_PER_NODE) or None,
        entries=tuple(_entries(config)),
        groups=dict(_groups(config, with_hardware=False)),
        hardware_groups=frozenset({"node", *(label for label, _ in _groups(config, with_hardware=True))}),
        node_groups=tuple(_plain(group) for group in _group_mappings(config)),
        workload=workload,
        unused_profiles=tuple(_unused(config, workload)),
    )
    if config.faults:
        raise InvalidInput([*missing, *config.faults])
    if missing:
        raise ProfileMissing(tuple(missing))
    return read


def _reasoning(config: Config, missing: list[Fault]) -> Reasoning:
    recompute = config.flag("algorithm.recompute_logprobs", default=True)
    sizes = {
        "rollout": _parallel(config, "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"),
        "actor": _parallel(
            config, "actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"
        ),
    }
    sizes["inference"] = _parallel(
        config,
        "inference.model.tensor_model_parallel_size",
        "inference.model.pipeline_model_parallel_size",
        default=sizes["actor"],
    )
    names = ("rollout", "inference", "actor") if recompute else ("rollout", "actor")
    batch_size = config.whole("data.rollout_batch_size", high=MAX_CHUNKS)
    group_size = config.whole("algorithm.group_size")
    n_minibatches = config.whole("algorithm.n_minibatches", default=1)
    if not config.faults and batch_size % n_minibatches:
        config.fault(
            "algorithm.n_minibatches",
            f"{n_minibatches} minibatches don't split {batch_size} groups (data.rollout_batch_size) evenly; "
            "data-parallel ranks take whole groups of each minibatch",
        )
    return Reasoning(
        batch_size=batch_size,
        group_size=group_size,
        n_minibatches=n_minibatches,
        # Not stated: engines take what comes, so nothing waits for a slot and time follows the GPUs.
        max_running_requests=config.whole("rollout.max_running_requests", default=0) or 1,
        recompute_logprobs=recompute,
        model_parallel={name: tensor * pipeline for name, (tensor, pipeline) in sizes.items()},
        tensor_parallel={name: tensor for name, (tensor, _) in sizes.items()},
        profiles={name: _profile(config, f"{name}_cost", "GPUs", missing) for name in names},
    )


def _embodied(config: Config, missing: list[Fault]) -> Embodied:
    env_num = "env.train.total_num_envs" if config.find("data.env_num") is None else "data.env_num"
    if config.find(env_num) is None:
        env_num = "data.env_num"
    return Embodied(
        env_num=config.whole(env_num),
        stages=config.whole("rollout.pipeline_stage_num", default=0, high=1024) or None,
        global_batch_size=config.whole("actor.global_batch_size", default=0) or None,
        model_parallel={
            "env": 1,
            "rollout": math.prod(_parallel(config, "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size")),
            "actor": math.prod(
                _parallel(config, "actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size")
            ),
        },
        profiles={
            "env": _profile(config, "env_profile_data", "environments per instance", missing, table=True),
            "rollout": _profile(config, "rollout_profile_data", "environments per instance", missing, table=True),
            "actor": _profile(config, "actor_cost", "GPUs", missing),
        },
    )


def _parallel(config: Config, tensor: str, pipeline: str, *, default: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Tensor and pipeline parallel size."""
    if config.find(tensor) is None and config.find(pipeline) is None:
        return default
    return config.whole(tensor, default=1, high=4096), config.whole(pipeline, default=1, high=4096)


def _profile(config: Config, key: str, what: str, missing: list[Fault], *, table: bool = False) -> Profile:
    """One cost: a number of seconds (but for environments, whose cost depends on their number), or a table of them."""
    path = f"profile_data.{key}"
    found = config.find(path)
    if path in config.misspelt or not isinstance(config.find("profile_data") or {}, Mapping):
        return Profile(points={})  # told
    if found is None:
        missing.append(Fault(path, _why_missing(config, path)))
        return Profile(points={})
    if isinstance(found, Mapping):
        return Profile(points=config.table(path, found, what))
    if table:
        config.fault(path, f"{shown(found)} is not a table; write {{{what}: seconds per iteration}}")
        return Profile(points={})
    return Profile(seconds=config.seconds(path, found), points={})


def _why_missing(config: Config, path: str) -> str:
    if config.find("profile_data") is None:
        return "profile data not provided: there is no profile_data section"
    near = config.near(path) or _OLD_KEYS.get(path, "")
    if config.find(f"profile_data.{near}") is None:
        near = ""
    return "profile data not provided: it is missing" + (f"; is {near} meant?" if near else "")


def _unused(config: Config, workload: Reasoning | Embodied) -> Iterator[str]:
    known = {"num_gpus"} | {f"{name}_cost" for name in workload.profiles}
    if isinstance(workload, Embodied):
        known = {"num_gpus", "actor_cost", "env_profile_data", "rollout_profile_data"}
    yield from (f"profile_data.{key}" for key in config.section("profile_data") if str(key) not in known)


def _entries(config: Config) -> Iterator[Entry]:
    path = "cluster.component_placement"
    for key in config.section(path):
        value = config.find(f"{path}.{key}") if "." not in str(key) else None
        names = tuple(name.strip() for name in str(key).split(","))
        if isinstance(value, Mapping):
            group, text = value.get("node_group", ""), value.get("placement", "all")
            yield Entry(key=str(key), names=names, value=dict(value), text=str(text), group=_label(group))
        elif value is not None:
            yield Entry(key=str(key), names=names, value=value, text=str(value), group="")


def labels_of(group: Any) -> tuple[str, ...]:
    """The labels of an entry's ``node_group``: a text with commas, or a list."""
    parts = group if isinstance(group, Sequence) and not isinstance(group, str) else str(group or "").split(",")
    return tuple(str(part).strip() for part in parts)


def _label(group: Any) -> str:
    text = ",".join(labels_of(group))
    return "" if text == "cluster" else text


def _group_mappings(config: Config) -> Iterator[Mapping[str, Any]]:
    found = config.find("cluster.node_groups")
    for group in found if isinstance(found, Sequence) and not isinstance(found, str) else ():
        if isinstance(group, Mapping):
            yield group


def _groups(config: Config, *, with_hardware: bool) -> Iterator[tuple[str, str]]:
    """(label, node ranks) of node groups; what is wrong with others is told by whoever places components in them."""
    for group in _group_mappings(config):
        if "label" in group:
            no_gpus = bool(group.get("hardware")) or bool(group.get("ignore_hardware"))
            if no_gpus == with_hardware:
                yield str(group["label"]), str(group.get("node_ranks", "all"))


def _plain(value: Any) -> Any:
    """Mappings and lists of any library as those that every writer of YAML and JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
