"""Which placement text does a job carry? What a job says about places, put together as one YAML text.

A job says it as an RLinf config does, under ``cluster``, or short, with a ``component_placement`` at each component.
What the text means is decided where the nodes are known (:mod:`callboard.placement`), so nothing is checked here but
its form.

A job that was read from a file carries the file as it is: scalars stay as they were written (YAML 1.1 reads an unquoted
``1:0`` as the number 60, PS-01), and every fault is found at its line and column. What is no part of the placement is
not kept by the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from callboard.model.inputs.located import Refused, as_mapping
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
    """A job's mapping whose ``cluster`` and components' ``component_placement`` have become its ``placement_config``."""
    if not isinstance(source, Mapping):
        return source
    stated = source.get("components")
    components = [as_mapping(component) for component in stated] if isinstance(stated, list | tuple) else []
    if source.get("cluster") is None and not any(map(_placed, components)):
        return source
    plain = {key: value for key, value in source.items() if key != "cluster"}
    if components:
        plain["components"] = [_without_placement(component) for component in components]
    plain["placement_config"] = _text(source, components)
    return SourceMapping.like(source, plain) if isinstance(source, SourceMapping) else plain


def _placed(component: object) -> bool:
    return isinstance(component, Mapping) and component.get(KEY) is not None


def _text(source: Mapping[str, Any], components: Sequence[object]) -> str:
    """The file that the job is from; of a mapping that is from none, what concerns its placement."""
    if isinstance(source, SourceMapping) and source.text:
        return source.text
    found: dict[str, Any] = {} if source.get("cluster") is None else {"cluster": source["cluster"]}
    if any(map(_placed, components)):
        # In the places they have in the job, for the faults' fields.
        found["components"] = [
            {key: component[key] for key in ("name", KEY) if key in component}
            if isinstance(component, Mapping) and _placed(component)
            else {}
            for component in components
        ]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def _without_placement(component: object) -> object:
    if not isinstance(component, Mapping):
        return component
    return {key: value for key, value in component.items() if key != KEY}
