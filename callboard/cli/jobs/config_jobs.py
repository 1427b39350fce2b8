"""Jobs from RL configs: an RLinf config names components and where they run; the classes come from the caller.

The text is sent as it is, so that every fault is told with its line and column; what is no part of the placement is
not kept by the controller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from callboard.cli.layouts.config_source import COMPOSED
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.cli.show.file_faults import refuse
from callboard.model.faults import InvalidInput
from callboard.model.names import is_actor_path
from callboard.model.requests import fresh_name
from callboard.placement import placed_names

PROBE = "callboard.agents.probe:Probe"
"""What runs for a component that no class is named for: it reports where it is."""


def config_job(
    file: str, text: str, *, pool: str, name: str, priority: float | None, actors: Sequence[str], kwargs: Sequence[str]
) -> dict[str, Any]:
    """The job of an RLinf config.

    Args:
        name: name of the job; empty: the file's with a random end.
        priority: its priority; None: the default.
        actors: ``name=pkg.module:Class`` of each component that doesn't run the probe.
        kwargs: ``name={key: value}``: keyword arguments of the class of a component, as YAML.

    Raises:
        CommandFailed: it places nothing.
        typer.Exit: it is no YAML mapping, or its components have no names; every fault is shown.
        typer.BadParameter: ``actors`` names no component or no class.
    """
    components = _components(text, file)
    classes = _classes(actors, components)
    arguments = _arguments(kwargs, classes)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", "job" if file == "input" else Path(file.removesuffix(COMPOSED)).stem)
    job: dict[str, Any] = {
        "name": name or fresh_name(stem if stem[:1].isalpha() else f"job-{stem}"),
        "pool": pool,
        "components": [
            {"name": each, "actor": classes.get(each, PROBE), "kwargs": arguments.get(each, {})} for each in components
        ],
        "placement_config": text,
        "placement_source": file[-200:],
    }
    return job | ({"priority": priority} if priority is not None else {})


def _components(text: str, file: str) -> list[str]:
    """Names of the components that a config places, in the order of the text."""
    try:
        found = placed_names(text)
    except InvalidInput as error:
        refuse(file, text, error.faults)
    if not found:
        raise CommandFailed(
            f"{file} places no components.",
            "It has no cluster.component_placement with names in it.",
            "Name an RLinf config, or give a job file without --config.",
            BAD_INPUT,
        )
    return found


def _classes(actors: Sequence[str], components: Sequence[str]) -> dict[str, str]:
    classes: dict[str, str] = {}
    for text in actors:
        name, equals, path = text.partition("=")
        if not equals or not is_actor_path(path):
            raise typer.BadParameter(f"{text!r} reads COMPONENT=pkg.module:Class", param_hint="--actors")
        if name not in components:
            listed = ", ".join(components)
            raise typer.BadParameter(
                f"there is no component {name!r}; the config places {listed}", param_hint="--actors"
            )
        if name in classes:
            raise typer.BadParameter(f"component {name} is named twice", param_hint="--actors")
        classes[name] = path
    return classes


def _arguments(kwargs: Sequence[str], classes: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for text in kwargs:
        name, _, value = text.partition("=")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = None
        if not isinstance(read, Mapping):
            raise typer.BadParameter(f"{text!r} reads COMPONENT={{key: value}}", param_hint="--kwargs")
        if name not in classes:
            raise typer.BadParameter(f"name the class of {name!r}, too, with --actors", param_hint="--kwargs")
        found[name] = read
    return found
