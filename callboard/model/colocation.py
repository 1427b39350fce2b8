"""Colocation groups: their members become one component that shares a process, and apart again.

Where a job is submitted, the members of each group are fused into one component that has the name of the group
(docs/roles.md). Everything that counts workers (scheduler, ledger, journal, agents) then sees one worker per rank; what
people wrote is kept in ``members``, and is what they are shown.

Guaranteed: ``unfused(fused(job))`` asks for the same as ``job``, and each of both, asked again, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, Labels


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
    return replace(spec, components=tuple(chain.from_iterable(parts_of(component) for component in spec.components)))


def parts_of(component: ComponentSpec) -> tuple[ComponentSpec, ...]:
    """The members of a fused component; of any other itself."""
    return component.members or (component,)


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
    total = next((member.colocation_total for member in members if member.colocation_total), None)
    return ComponentSpec(
        name=group,
        actor=first.actor,
        entry=next((member.entry for member in members if member.entry), ""),
        min_workers=first.min_workers,
        max_workers=first.max_workers,
        resources=_most(member.resources for member in members) if total is None else total,
        max_concurrency=max(member.max_concurrency for member in members),
        env=_union(member.env for member in members),
        secret_env=_union(member.secret_env for member in members),
        pass_env=tuple(sorted({name for member in members for name in member.pass_env})),
        pool=first.pool,
        node_selector=_union(member.node_selector for member in members),
        node_selector_soft=any(member.node_selector_soft for member in members if member.node_selector),
        colocation_group=group,
        scaling=tuple(chain.from_iterable(member.scaling for member in members)),
        in_bundle=any(member.in_bundle for member in members),
        interpreter=next((member.interpreter for member in members if member.interpreter), ""),
        alias=next((member.alias for member in members if member.alias), ""),
        # The progress of the process stands still when that of every member does.
        progress_timeout_ms=min((each.progress_timeout_ms for each in members if each.progress_timeout_ms), default=0),
        placement=next((member.placement for member in members if member.placement), None),
        ports=max(member.ports for member in members),
        stop_signal=next((member.stop_signal for member in members if member.stop_signal), ""),
        working_dir=next((member.working_dir for member in members if member.working_dir), ""),
        places=first.places,
        members=tuple(members),
    )


def _most(amounts: Iterable[Resources]) -> Resources:
    """The greatest amount of each resource."""
    most: dict[str, int] = {}
    for resource, amount in chain.from_iterable(each.items() for each in amounts):
        most[resource] = max(amount, most.get(resource, 0))
    return Resources.from_items(most.items())


def _union(labels: Iterable[Labels]) -> Labels:
    return tuple(sorted(dict(chain.from_iterable(labels)).items()))
