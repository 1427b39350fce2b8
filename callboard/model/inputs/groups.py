"""Settled jobs: presets filled in, groups fused, and the rules for sharing a process.

Where a process has one of something, the members of its group must agree. :func:`settled` is the one place where
presets are filled in and groups fused, for jobs from every edge (SDK, files, messages): a controller settles a job when
it is submitted, after its placement was resolved, and `callboard plan` when it reads the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from callboard.model.faults import guess
from callboard.model.inputs.located import Misfit, Misfits
from callboard.model.roles import PER_PROCESS, PRESETS, RolePreset, filled_in, fused, groups_of
from callboard.model.schema import declared_in
from callboard.model.specs import ComponentSpec, JobSpec


def faults_of_groups(components: Sequence[ComponentSpec]) -> list[Misfit]:
    """Every reason why the members of some group can't share a process."""
    return [
        misfit
        for group, indexes in groups_of(components).items()
        for misfit in (
            *_taken_name(group, components),
            *_uneven(group, [components[i] for i in indexes]),
            *_repeated_roles(indexes, components),
            *_disagreements(indexes, components),
            *_clashing_variables(indexes, components),
        )
    ]


def _taken_name(group: str, components: Sequence[ComponentSpec]) -> list[Misfit]:
    """Workers of a group carry its name, so no component beside it may have that name too."""
    return [
        Misfit(("components", index, "name"), f"{group} is the name of a colocation group too; rename one of them")
        for index, component in enumerate(components)
        if component.name == group and component.colocation_group != group
    ]


def _uneven(group: str, members: Sequence[ComponentSpec]) -> list[Misfit]:
    if len({(member.min_workers, member.max_workers) for member in members}) == 1:
        return []
    counts = {member.name: member.max_workers for member in members}
    message = f"All roles in colocation group '{group}' must have the same count. Got: {counts}"
    return [Misfit(("components",), message)]


def _repeated_roles(indexes: Sequence[int], components: Sequence[ComponentSpec]) -> list[Misfit]:
    """Members are addressed by name or role, so each word must mean one of them."""
    roles = Counter(components[i].role for i in indexes if components[i].role)
    names = {components[i].name: i for i in indexes}
    misfits = []
    for i in indexes:
        role = components[i].role
        if roles[role] > 1 and i != next(j for j in indexes if components[j].role == role):
            misfits.append(
                Misfit(
                    ("components", i, "role"),
                    f"{role} is registered twice in colocation group "
                    f"'{components[i].colocation_group}'; give one of them another role or group",
                )
            )
        elif role in names and names[role] != i:
            message = f"{role} is the name of components[{names[role]}] of the same colocation group"
            misfits.append(Misfit(("components", i, "role"), message))
    return misfits


def _disagreements(indexes: Sequence[int], components: Sequence[ComponentSpec]) -> list[Misfit]:
    """What one process has one of. What only some members state is meant for all of them, but for the pool."""
    misfits = []
    first = components[indexes[0]]
    for i in indexes[1:]:
        component = components[i]
        what = f"that of {first.name}, with which it shares a process in colocation group '{first.colocation_group}'"
        if component.pool != first.pool:
            misfits.append(Misfit(("components", i, "pool"), f"differs from {what}"))
    keys = {field.name: field.keys for field in declared_in(ComponentSpec)} | {"alias": ("ray_options", "name")}
    for field in PER_PROCESS:
        stated = [(i, getattr(components[i], field)) for i in indexes if getattr(components[i], field)]
        misfits.extend(
            Misfit(
                ("components", i, *keys[field]),
                f"differs from that of {components[stated[0][0]].name}, with which it "
                f"shares a process in colocation group '{first.colocation_group}'",
            )
            for i, value in stated[1:]
            if value != stated[0][1]
        )
    selecting = [i for i in indexes if components[i].node_selector]
    misfits.extend(
        Misfit(
            ("components", i, "node_selector_soft"),
            f"differs from that of {components[selecting[0]].name}, with which it shares a process",
        )
        for i in selecting[1:]
        if components[i].node_selector_soft != components[selecting[0]].node_selector_soft
    )
    return misfits


def _clashing_variables(indexes: Sequence[int], components: Sequence[ComponentSpec]) -> list[Misfit]:
    """One process has one environment, and runs on one node. Values may be secrets: none is shown (SE-04)."""
    misfits = []
    fields = (("env", "secret_env"), ("node_selector",))
    for kinds in fields:
        said: dict[str, tuple[str, str, str]] = {}
        for i in indexes:
            for kind in kinds:
                for name, value in getattr(components[i], kind):
                    other, other_kind, known = said.setdefault(name, (components[i].name, kind, value))
                    if (other_kind, known) != (kind, value):
                        message = f"differs from what {other} says, with which it shares a process"
                        misfits.append(Misfit(("components", i, kind, name), message))
    return misfits


def settled(spec: JobSpec, presets: Mapping[str, RolePreset] = PRESETS) -> JobSpec:
    """The job as it is scheduled and journaled; asked again, the same.

    Raises:
        Misfits: components whose role has no preset, members of a colocation group with different places.
    """
    misfits = unknown_roles([component.role for component in spec.components], presets)
    misfits += [
        Misfit(
            ("components", index, "component_placement" if spec.placement_config else "places"),
            f"differs from that of {spec.components[indexes[0]].name}, with which it shares a process; "
            "place them alike",
        )
        for indexes in groups_of(spec.components).values()
        for index in indexes[1:]
        if spec.components[index].places != spec.components[indexes[0]].places
    ]
    if misfits:
        raise Misfits(misfits)
    return fused(filled_in(spec, presets))


def unknown_roles(roles: Sequence[str], presets: Mapping[str, RolePreset]) -> list[Misfit]:
    """A misfit for each component, in the order of the job, whose role has no preset; "" names no role."""
    return [
        Misfit(("components", index, "role"), _unknown(role, presets))
        for index, role in enumerate(roles)
        if role and role not in presets
    ]


def _unknown(role: str, presets: Mapping[str, RolePreset]) -> str:
    return f"role {role} has no preset (`callboard controller --roles FILE` adds presets); {guess(role, presets)}"
