"""The contents of a file of roles: presets, pools and nodes (:mod:`callboard.model.inputs.roles` reads it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from callboard.model.cluster_text import NodeText
from callboard.model.roles import RolePreset
from callboard.model.specs import PoolSpec


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
