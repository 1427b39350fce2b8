"""The placement text of a job: all that it says about places, as one YAML text.

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

from callboard.model.inputs.located import Misfit, Misfits, OddNumber, Place, as_mapping, shown
from callboard.model.inputs.source import MAX_DEPTH, SourceMapping

KEY = "component_placement"
"""Key of a component that says where it runs."""

_BESIDE = ("node_groups", "num_nodes")
"""What a job without a ``cluster`` may state beside its components."""


def with_placement_config(source: object) -> object:
    """A job whose ``cluster`` and components' ``component_placement`` have become its ``placement_config``.

    Raises:
        Misfits: a placement is stated twice, or a mapping that was parsed elsewhere holds something whose text can't be
            told any more.
    """
    if not isinstance(source, Mapping):
        return source
    stated = source.get("components")
    components = [as_mapping(component) for component in stated] if isinstance(stated, list | tuple) else []
    if source.get("cluster") is None and not any(map(_placed, components)):
        return source
    if source.get("placement_config") is not None:
        raise Misfits([Misfit(("placement_config",), "the job states its placement beside it too; state one of them")])
    plain = {key: value for key, value in source.items() if key not in _keys(source)}
    if components:
        plain["components"] = [_without_placement(component) for component in components]
    plain["placement_config"] = _text(source, components)
    return SourceMapping.like(source, plain) if isinstance(source, SourceMapping) else plain


def _keys(source: Mapping[str, Any]) -> tuple[str, ...]:
    return ("cluster",) if source.get("cluster") is not None else _BESIDE


def _placed(component: object) -> bool:
    return isinstance(component, Mapping) and component.get(KEY) is not None


def _text(source: Mapping[str, Any], components: Sequence[object]) -> str:
    """The file that the job is from; of a mapping that is from none, what concerns its placement."""
    if isinstance(source, SourceMapping) and source.text:
        return source.text
    misfits: list[Misfit] = []
    found = {key: _plain(source[key], (key,), misfits) for key in _keys(source) if source.get(key) is not None}
    if any(map(_placed, components)):
        # In the places they have in the job, for the faults' fields.
        found["components"] = [
            {key: _plain(component[key], ("components", index, key), misfits) for key in ("name", KEY)}
            if isinstance(component, Mapping) and _placed(component) and "name" in component
            else {}
            for index, component in enumerate(components)
        ]
    if misfits:
        raise Misfits(misfits)
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def _plain(value: object, place: Place, misfits: list[Misfit]) -> Any:
    """What YAML can carry, of mappings and lists of whichever library."""
    if len(place) > MAX_DEPTH:
        misfits.append(Misfit(place, f"nested deeper than {MAX_DEPTH}"))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, (*place, str(key)), misfits) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner, (*place, index), misfits) for index, inner in enumerate(value)]
    if isinstance(value, OddNumber):
        return value.written
    if isinstance(value, int) and not isinstance(value, bool) and value >= 60 and _is_placement(place):
        # A reader of YAML makes 60 of 1:0, and nothing below 60 (PS-01).
        pair = f'"{value // 60}:{value % 60}"'
        misfits.append(
            Misfit(place, f'{value} may be what a YAML reader made of {pair}; quote it: "{value}" or {pair}')
        )
    elif value is not None and not isinstance(value, str | bool | int | float):
        misfits.append(Misfit(place, f"{shown(value)} is not a text, number, list or mapping"))
        return None
    return value


def _is_placement(place: Place) -> bool:
    """``cluster.component_placement.actor``, ``components[0].component_placement``, or the ``placement`` below."""
    match place:
        case ("cluster", key, _) | ("cluster", key, _, "placement"):
            return key == KEY
        case ("components", _, key) | ("components", _, key, "placement"):
            return key == KEY
        case _:
            return False


def _without_placement(component: object) -> object:
    if not isinstance(component, Mapping):
        return component
    return {key: value for key, value in component.items() if key != KEY}
