"""A settled job: what it asks for with the presets of its roles and its colocation groups fused.

The one place where both happen, for jobs from every edge: SDK, files and messages. A controller settles a job when it
is submitted (after its placement was resolved), `callboard plan` when it reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    misfits = [
        Misfit(("components", index, "role"), _unknown(component.role, presets))
        for index, component in enumerate(spec.components)
        if component.role and component.role not in presets
    ]
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


def _unknown(role: str, presets: Mapping[str, RolePreset]) -> str:
    add = "start the controller with `callboard controller --roles FILE` to add presets"
    return f"there is no preset for role {role}; {guess(role, presets)}; or {add}"
