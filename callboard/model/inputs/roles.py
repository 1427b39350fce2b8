"""Which presets may users add? A YAML file of roles, for ``callboard controller --roles FILE``.

::

    roles:
      simulator: {cpu: 2, memory: 4GiB, max_concurrency: 20, profile: physics}
      trainer: {cpu: 8, gpu: 2, max_concurrency: 1}     # takes the place of the preset that is always there

Every key of a role but ``max_concurrency`` and ``profile`` is a resource. A role that stands in the file twice is a
fault, as every key is that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.compounds import each, entries, resources
from callboard.model.inputs.located import Misfit, Misfits, Refused, shown
from callboard.model.inputs.reading import Input, read
from callboard.model.inputs.scalars import name, text, whole
from callboard.model.inputs.source import read_yaml
from callboard.model.quantities import Resources
from callboard.model.roles import PRESETS, RolePreset

MAX_ROLES = 1_000
"""Most roles of a file."""

DEFAULT_CONCURRENCY = 100
"""Of a role that doesn't say: that of a component without a role."""


def role_presets(mapping: object) -> dict[str, RolePreset]:
    """The presets of a mapping ``{"roles": {"simulator": {"cpu": 2, …}}}``, beside those that are always there.

    Raises:
        InvalidInput: every fault.
    """
    return dict(PRESETS) | read(_RolesInput, mapping).roles


def read_role_file(path: Path) -> dict[str, RolePreset]:
    """The presets of a file; see :func:`role_presets`.

    Raises:
        InvalidInput: it can't be read, or has faults.
    """
    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput([Fault("roles", f"{path} can't be read: {error}")]) from error
    return role_presets(read_yaml(written))


def _roles(value: object) -> dict[str, RolePreset]:
    misfits: list[Misfit] = []
    found: dict[str, RolePreset] = {}
    for role, stated in entries(value, "e.g. {simulator: {cpu: 2, max_concurrency: 20}}", MAX_ROLES):
        each(role, name, role, misfits)
        preset = each(role, lambda given, role=role: _preset(role, given), stated, misfits)  # type: ignore[misc]
        if preset is not None:
            found[role] = preset
    if misfits:
        raise Misfits(misfits)
    return found


def _preset(role: str, stated: Any) -> RolePreset:
    if not isinstance(stated, Mapping):
        raise Refused(f"{shown(stated)} is not a mapping; write e.g. {{cpu: 2, gpu: 1, max_concurrency: 1}}")
    misfits: list[Misfit] = []
    amounts: Resources | None = None
    try:
        amounts = resources({key: value for key, value in stated.items() if key not in ("max_concurrency", "profile")})
    except Misfits as error:
        misfits.extend(error.found)
    limit = each("max_concurrency", _concurrency, stated.get("max_concurrency", DEFAULT_CONCURRENCY), misfits)
    profile = each("profile", text, stated.get("profile", ""), misfits)
    if amounts is None or limit is None or profile is None or misfits:
        raise Misfits(misfits)
    return RolePreset(role, amounts, limit, profile)


def _concurrency(value: object) -> int:
    validate: Any = whole(1, 10_000).func
    return int(validate(value))


class _RolesInput(Input):
    """The keys of a file of roles."""

    roles: Annotated[dict[str, Any], BeforeValidator(_roles)]
