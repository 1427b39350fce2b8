"""A settled job: what it asks for with the presets of its roles and its colocation groups fused.

The one place where both happen, for jobs from every edge: SDK, files and messages. A controller settles a job when it
is submitted (after its placement was resolved), `callboard plan` when it reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from callboard.model.colocation import fused, groups_of
from callboard.model.faults import guess
from callboard.model.inputs.located import Misfit, Misfits
from callboard.model.roles import PRESETS, RolePreset, filled_in
from callboard.model.specs import JobSpec


def settled(spec: JobSpec, presets: Mapping[str, RolePreset] = PRESETS) -> JobSpec:
    """The job as it is scheduled and journaled; asked again, the same.

    Raises:
        Misfits: components whose role has no preset, members of a colocation group with different places.
    """
    misfits = unknown_roles([component.role for component in spec.components], presets)
    misfits += [
        Misfit(
            ("components", index, "places"),
            f"differ from those of {spec.components[indexes[0]].name}, with which it shares a process",
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
