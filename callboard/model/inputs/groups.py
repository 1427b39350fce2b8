"""Rules for sharing a process: where a process has one of something, members of a group must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from callboard.model.colocation import groups_of
from callboard.model.inputs.located import Misfit
from callboard.model.specs import ComponentSpec


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
    for field in ("interpreter", "colocation_total", "alias", "stop_signal", "placement", "ports", "working_dir"):
        stated = [(i, getattr(components[i], field)) for i in indexes if getattr(components[i], field)]
        key = ("ray_options", "name") if field == "alias" else (field,)
        misfits.extend(
            Misfit(
                ("components", i, *key),
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
