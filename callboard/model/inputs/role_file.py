"""Files of roles as input: presets of further roles, and the pools and nodes to start or plan a cluster by.

::

    roles:
      simulator: {cpu: 2, memory: 4GiB, max_concurrency: 20, profile: physics}
      trainer: {cpu: 8, gpu: 2, max_concurrency: 1}     # takes the place of the preset that is always there
    pools:
      cpu_pool: {nominal: {cpu: 64}, node_selector: {node_group: cpu}}
    nodes: 2x(2gpu,32cpu)+(64cpu)

Every key of a role but ``max_concurrency`` and ``profile`` is a resource, and those of a pool are the keys of a pool.
Nothing may stand in the file twice, and at least one of the three must. ``callboard controller --roles FILE`` takes the
presets, ``callboard plan`` also the nodes, ``callboard up`` all of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from callboard.model.cluster_text import NodeText, parse_cluster
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.compounds import resources, table
from callboard.model.inputs.located import Misfit, Misfits, Refused, each, raise_any, shown, shown_text
from callboard.model.inputs.pool import PoolInput
from callboard.model.inputs.reading import Input, check, read
from callboard.model.inputs.scalars import text, whole
from callboard.model.inputs.source import read_yaml, why_unreadable
from callboard.model.quantities import Resources
from callboard.model.roles import PRESETS, RoleFile, RolePreset
from callboard.model.schema import Kind
from callboard.model.specs import PoolSpec

MAX_ROLES = 1_000
"""Most roles of a file."""

MAX_POOLS = 1_000
"""Most pools of a file."""

DEFAULT_CONCURRENCY = 100
"""Of a role that doesn't say: that of a component without a role."""


def role_file(mapping: object) -> RoleFile:
    """What a mapping ``{"roles": {"simulator": {"cpu": 2, …}}, "pools": {…}, "nodes": "4x(2gpu,32cpu)"}`` says.

    Raises:
        InvalidInput: every fault.
    """
    found = read(_RolesInput, mapping)
    return RoleFile(presets=dict(PRESETS) | (found.roles or {}), pools=found.pools or (), nodes=found.nodes or ())


def read_role_file(path: Path) -> RoleFile:
    """What a file says; see :func:`role_file`.

    Raises:
        InvalidInput: it can't be read, or has faults.
    """
    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput([Fault("roles", f"{path} can't be read: {why_unreadable(error)}")]) from error
    return role_file(read_yaml(written))


def _roles(value: object) -> dict[str, RolePreset]:
    found = table(value, "e.g. {simulator: {cpu: 2, max_concurrency: 20}}", _preset, MAX_ROLES)
    return {role: replace(preset, role=role) for role, preset in found.items()}


def _preset(stated: Any) -> RolePreset:
    """The preset that these keys make, without its name."""
    if not isinstance(stated, Mapping):
        raise Refused(f"{shown(stated)} is not a mapping; write e.g. {{cpu: 2, gpu: 1, max_concurrency: 1}}")
    own = ("max_concurrency", "profile")
    amounts: Resources | None = None
    strange = {key: _unlike_amounts(key, own) for key in stated if isinstance(key, str) and key not in own}
    misfits = [Misfit((key,), why) for key, why in strange.items() if why]
    try:
        amounts = resources({key: value for key, value in stated.items() if key not in own and not strange.get(key)})
    except Misfits as error:
        misfits.extend(error.found)
    limit = each("max_concurrency", whole(1, 10_000).read, stated.get("max_concurrency", DEFAULT_CONCURRENCY), misfits)
    profile = each("profile", text, stated.get("profile", ""), misfits)
    if amounts is None or limit is None or profile is None or misfits:
        raise Misfits(misfits)
    return RolePreset("", amounts, limit, profile)


def _unlike_amounts(key: str, own: Sequence[str]) -> str:
    """Why a key of a role is no resource, where it would be one of its own that no node has."""
    if key == "resources":
        return "is not a resource; a role holds its amounts itself, as in {cpu: 2, gpu: 1}"
    near = difflib.get_close_matches(key[:80].lower(), own, n=1, cutoff=0.8)
    return f"unknown key {shown_text(key)}; did you mean {near[0]}?" if near else ""


def _pools(value: object) -> tuple[PoolSpec, ...]:
    found = table(value, "e.g. {cpu_pool: {nominal: {cpu: 64}}}", _pool, MAX_POOLS)
    return tuple(replace(spec, name=pool) for pool, spec in found.items())


def _pool(stated: Any) -> PoolSpec:
    """The pool that these keys make, without its name."""
    if not isinstance(stated, Mapping):
        raise Refused(f"{shown(stated)} is not a mapping; write e.g. {{nominal: {{cpu: 64}}}}")
    misfits = [Misfit(("name",), "is the key of the pool; leave it out")] if "name" in stated else []
    try:
        spec: PoolSpec = check(PoolInput, {**stated, "name": "unnamed"}).spec()
    except Misfits as error:
        raise Misfits([*misfits, *error.found]) from None
    raise_any(misfits)
    return spec


def _nodes(value: object) -> tuple[NodeText, ...]:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Refused(f"{shown(value)} is not a text; write e.g. 4x(2gpu,32cpu)")
    try:
        return parse_cluster(str(value))
    except InvalidInput as error:
        raise Misfits([Misfit((), f"{fault.message} (column {fault.column})") for fault in error.faults]) from None


class _RolesInput(Input):
    """The keys of a file of roles."""

    roles: Annotated[dict[str, RolePreset], Kind(_roles)] | None = None
    pools: Annotated[tuple[PoolSpec, ...], Kind(_pools)] | None = None
    nodes: Annotated[tuple[NodeText, ...], Kind(_nodes)] | None = None

    def consistent(self) -> list[Misfit]:
        """It says something."""
        return [] if self.stated() else [Misfit((), "the file says nothing; state roles, pools or nodes")]
