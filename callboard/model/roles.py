"""Roles: presets per worker, as data, and how a component takes them.

A component that names a role takes from its preset what it does not state itself (docs/roles.md). The presets below are
those of the framework in whose words roles are spoken of here; users add their own, or replace these, in a YAML file
(:func:`callboard.model.inputs.roles.read_role_file`). Presets are applied once, where a job is submitted, so that what
is shown and journaled is the filled-in job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec


@dataclass(frozen=True, slots=True)
class RolePreset:
    """What one worker of a role gets where its component doesn't say.

    Attributes:
        role: name of the role.
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
        spec: the job; every role it names has a preset (:mod:`callboard.model.inputs.settling` sees to that).
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
        resources=Resources.from_items(amounts.items()),
        zero_resources=tuple(sorted(name for name in names if not amounts.get(name))),
        max_concurrency=component.max_concurrency or preset.max_concurrency,
    )
