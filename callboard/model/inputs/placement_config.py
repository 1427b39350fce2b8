"""Which placement text does a job carry? What a job says about places, put together as one YAML text.

A job says it as an RLinf config does, under ``cluster``, or short, with a ``component_placement`` at each component.
What the text means is decided where the nodes are known (:mod:`callboard.placement`), so nothing is checked here but
its form.

Scalars are passed on as they were written: YAML 1.1 reads an unquoted ``1:0`` as the number 60 (PS-01).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from callboard.model.inputs.located import Misfit, Misfits, Place, Refused, as_mapping
from callboard.model.inputs.source import SourceMapping

KEY = "component_placement"
"""Key of a component that says where it runs."""

MAX_BYTES = 1 << 20
"""Longest text."""


def placement_text(value: object) -> str:
    """A text that is no longer than allowed."""
    if not isinstance(value, str):
        raise Refused("is not a text; write the placement as YAML with a cluster: key")
    if len(value.encode("utf-8", "replace")) > MAX_BYTES:
        raise Refused(f"{len(value.encode('utf-8', 'replace'))} bytes are too many; {MAX_BYTES} are allowed")
    return value


def with_placement_config(source: object) -> object:
    """A job's mapping whose ``cluster`` and components' ``component_placement`` have become its ``placement_config``.

    Raises:
        Misfits: a component has its placement in both, or ``cluster`` is no mapping.
    """
    if not isinstance(source, Mapping):
        return source
    components = source.get("components")
    stated = {
        str(component["name"]): (("components", index, KEY), component[KEY])
        for index, component in enumerate(map(as_mapping, components) if isinstance(components, list | tuple) else ())
        if isinstance(component, Mapping) and "name" in component and component.get(KEY) is not None
    }
    if source.get("cluster") is None and not stated:
        return source
    config = _section(source) if not stated else None
    if config is None:
        config = yaml.safe_dump({"cluster": _together(source, stated)}, sort_keys=False, allow_unicode=True)
    plain = {key: value for key, value in source.items() if key != "cluster"}
    if isinstance(components, list | tuple):
        plain["components"] = [_without_placement(as_mapping(component)) for component in components]
    plain["placement_config"] = config
    return SourceMapping.like(source, plain) if isinstance(source, SourceMapping) else plain


def _section(source: Mapping[str, Any]) -> str | None:
    """The text of the file's own ``cluster``, at its lines and columns, so that faults are found there."""
    return source.section("cluster") if isinstance(source, SourceMapping) else None


def _together(source: Mapping[str, Any], stated: Mapping[str, tuple[Place, Any]]) -> dict[str, Any]:
    cluster = source.get("cluster")
    if cluster is not None and not isinstance(cluster, Mapping):
        raise Misfits(
            [Misfit(("cluster",), "is not a mapping; its keys are num_nodes, component_placement, node_groups")]
        )
    written = _as_written(source, ("cluster",), cluster) if cluster is not None else {}
    placements = written.get("component_placement") or {}
    if not isinstance(placements, dict):
        raise Misfits([Misfit(("cluster", "component_placement"), "is not a mapping of components to placements")])
    twice = [name for key in placements for name in str(key).split(",") if name.strip() in stated]
    if twice:
        raise Misfits(
            [
                Misfit(stated[name.strip()][0], f"cluster.component_placement places {name.strip()} too; state one")
                for name in twice
            ]
        )
    added = {name: _as_written(source, place, value) for name, (place, value) in stated.items()}
    return {**written, "component_placement": {**placements, **added}}


def _as_written(source: Mapping[str, Any], place: Place, value: Any) -> Any:
    """A value with its scalars as the file has them; what never was in a file, as it is."""
    if isinstance(value, Mapping):
        return {str(key): _as_written(source, (*place, str(key)), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_written(source, (*place, index), item) for index, item in enumerate(value)]
    written = source.written(place) if isinstance(source, SourceMapping) else None
    return value if written is None or value is None else written


def _without_placement(component: object) -> object:
    if not isinstance(component, Mapping):
        return component
    return {key: value for key, value in component.items() if key != KEY}
