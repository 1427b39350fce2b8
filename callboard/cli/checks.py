"""Which options of a local cluster are refused before anything starts?"""

from __future__ import annotations

import typer

from callboard.model.names import is_name
from callboard.model.quantities import MILLI, QuantityError, parse_memory, parse_milli


def check_name(name: str) -> None:
    """Raises BadParameter for what can't name a cluster."""
    if not is_name(name):
        raise typer.BadParameter(f"{name!r} is no name: a letter, then letters, digits, _ . -", param_hint="--name")


def check_nodes(*, cpus: str, memory: str, runtime: str) -> None:
    """Raises BadParameter for amounts that no node can have."""
    try:
        cpu_milli = parse_milli(cpus)
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint="--cpus-per-node") from error
    if cpu_milli <= 0:
        raise typer.BadParameter(f"{cpus} is not above 0", param_hint="--cpus-per-node")
    if runtime == "ray" and cpu_milli % MILLI:
        raise typer.BadParameter(f"{cpus} is no whole number; a Ray node has whole CPUs", param_hint="--cpus-per-node")
    try:
        parse_memory(memory)
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint="--memory-per-node") from error
