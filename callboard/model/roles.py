"""Roles and colocation groups: what the components of a job take from presets, and which of them share a process.

A component that names a role takes from its preset what it does not state itself (docs/roles.md). The presets below are
those of the framework in whose words roles are spoken of here; users add their own, or replace these, in a YAML file
(:func:`callboard.model.inputs.role_file.read_role_file`).

The members of each colocation group become one component that has the name of the group. Everything that counts workers
(scheduler, ledger, journal, agents) then sees one worker per rank; what people wrote is kept in ``members``, and is
what they are shown. Guaranteed: ``unfused(fused(job))`` asks for the same as ``job``, and each of both, asked again,
changes nothing.

Both happen once, where a job is submitted (:func:`callboard.model.inputs.groups.settled`), so that what is shown and
journaled is the settled job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from callboard.model.cluster_text import NodeText
from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, Labels, PoolSpec


@dataclass(frozen=True, slots=True)
class RolePreset:
    """What one worker of a role gets where its component doesn't say.

    Attributes:
        resources: per worker.
        max_concurrency: calls that may run at once in one worker.
        profile: what such a worker spends its time on, for people.
    """

    role: str
    resources: Resources
    max_concurrency: int
    profile: str = ""


def _preset(role: str, cpus: int, gpus: int, max_concurrency: int, profile: str) -> RolePreset:
    return RolePreset(role, Resources(cpu_milli=cpus * 1000, gpu_milli=gpus * 1000), max_concurrency, profile)


PRESETS: Mapping[str, RolePreset] = MappingProxyType(
    {
        preset.role: preset
        for preset in (
            _preset("rollout_worker", 1, 0, 100, "many requests to an inference service; scale out"),
            _preset("trainer", 4, 1, 1, "one training step at a time"),
            _preset("trainer_remote", 1, 0, 10, "waits for an API"),
            _preset("trajectory_pool", 1, 0, 100, "memory; many writers"),
            _preset("data_loader", 1, 0, 10, "disk"),
            _preset("weight_sync", 1, 0, 10, "checkpoint and network"),
            _preset("validator", 1, 0, 10, "memory, now and then"),
            _preset("inference", 4, 1, 100, "an engine serving rollouts"),
            _preset("environment", 1, 0, 10, "simulators"),
        )
    }
)
"""The presets that are always there, by role (docs/roles.md, Presets)."""


def filled_in(spec: JobSpec, presets: Mapping[str, RolePreset] = PRESETS) -> JobSpec:
    """The job with what its components' roles say where they say nothing; asked again, the same.

    Args:
        spec: the job; every role it names has a preset (:mod:`callboard.model.inputs.groups` sees to that).
        presets: by role.
    """
    components = tuple(
        _filled_in(component, presets[component.role]) if component.role else component for component in spec.components
    )
    return replace(spec, components=components)


def _filled_in(component: ComponentSpec, preset: RolePreset) -> ComponentSpec:
    stated = dict(component.resources.items()) | dict.fromkeys(component.zero_resources, 0)
    # What a placed worker holds of its devices is what its place says.
    given = {name: amount for name, amount in preset.resources.items() if name != "gpu" or not component.places}
    amounts = given | stated
    names = {"cpu", "gpu"} | given.keys() if not component.places else {"cpu"} | given.keys()
    return replace(
        component,
        resources=Resources.from_items(amounts.items()).on_gpus_of(component.resources),
        zero_resources=tuple(sorted(name for name in names if not amounts.get(name))),
        max_concurrency=component.max_concurrency or preset.max_concurrency,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFile:
    """A file of roles.

    Attributes:
        presets: its presets beside those that are always there, by role.
        pools: its pools, in the order written.
        nodes: the cluster it describes; empty: it describes none.
    """

    presets: Mapping[str, RolePreset]
    pools: tuple[PoolSpec, ...] = ()
    nodes: tuple[NodeText, ...] = ()


def fused(spec: JobSpec) -> JobSpec:
    """The job with one component for each colocation group, where its first member stood.

    Nothing is checked here: :mod:`callboard.model.inputs.groups` knows what keeps components from sharing a process.
    """
    groups = groups_of(spec.components)
    if not groups:
        return spec
    components = tuple(
        _fused(component.colocation_group, [spec.components[i] for i in groups[component.colocation_group]])
        if _is_open(component)
        else component
        for index, component in enumerate(spec.components)
        if not _is_open(component) or groups[component.colocation_group][0] == index
    )
    return replace(spec, components=components)


def unfused(spec: JobSpec) -> JobSpec:
    """The job with the components that were asked for."""
    if not any(component.members for component in spec.components):
        return spec
    return replace(spec, components=tuple(chain.from_iterable(part.members or (part,) for part in spec.components)))


def member_names(component: ComponentSpec) -> tuple[str, ...]:
    """Names of the members of a fused component; none for any other."""
    return tuple(member.name for member in component.members)


def groups_of(components: Sequence[ComponentSpec]) -> dict[str, list[int]]:
    """Colocation group → indexes of its members."""
    groups: dict[str, list[int]] = {}
    for index, component in enumerate(components):
        if _is_open(component):
            groups.setdefault(component.colocation_group, []).append(index)
    return groups


def _is_open(component: ComponentSpec) -> bool:
    return bool(component.colocation_group) and not component.members


def _fused(group: str, members: Sequence[ComponentSpec]) -> ComponentSpec:
    first = members[0]
    joined = {name: join([getattr(member, name) for member in members]) for name, join in _JOINED.items()}
    shared = {
        name: _first_stated(members, name) for name in (*PER_PROCESS, "entry", "min_workers", "max_workers", "pool")
    }
    total = shared.pop("colocation_total")
    return ComponentSpec(
        name=group,
        actor=first.actor,
        resources=(total or _most(member.resources for member in members)).on_gpus_of(
            *(asked for member in members for asked in (member.resources, member.colocation_total))
        ),
        node_selector_soft=any(member.node_selector_soft for member in members if member.node_selector),
        colocation_group=group,
        places=first.places,
        members=tuple(members),
        **joined,
        **shared,
    )


def _first_stated(members: Sequence[ComponentSpec], name: str) -> Any:
    default = _DEFAULTS[name]
    return next((value for member in members if (value := getattr(member, name)) != default), default)


def _most(amounts: Iterable[Resources]) -> Resources:
    """The greatest amount of each resource."""
    most: dict[str, int] = {}
    for resource, amount in chain.from_iterable(each.items() for each in amounts):
        most[resource] = max(amount, most.get(resource, 0))
    return Resources.from_items(most.items())


def _union(labels: Iterable[Labels]) -> Labels:
    return tuple(sorted(dict(chain.from_iterable(labels)).items()))


_JOINED: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {
        "max_concurrency": max,
        "env": _union,
        "secret_env": _union,
        "pass_env": lambda names: tuple(sorted(set(chain.from_iterable(names)))),
        "node_selector": _union,
        "scaling": lambda rules: tuple(chain.from_iterable(rules)),
        "in_bundle": any,
        "limit_gpu_memory": any,
        "cpu_affinity": any,
        # The progress of the process stands still when that of every member does.
        "progress_timeout_ms": lambda spans: min(filter(None, spans), default=0),
    }
)
"""Fields in which each member adds to what the process has."""

_OF_MEMBERS = frozenset({"name", "actor", "role", "args_json", "kwargs_json", "entry", "resources", "zero_resources"})
_OF_GROUPS = frozenset(
    {"min_workers", "max_workers", "pool", "node_selector_soft", "colocation_group", "places", "members"}
)
_DEFAULTS = {field.name: field.default for field in fields(ComponentSpec)}

PER_PROCESS = tuple(name for name in _DEFAULTS if name not in _OF_MEMBERS | _OF_GROUPS | _JOINED.keys())
"""Fields of which a process has one: those members that state it agree, and it counts for all. A new field is one of
them unless it is named above."""
