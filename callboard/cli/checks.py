"""Which options of a local cluster are refused before anything starts?"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from callboard.cli.failing import CommandFailed, Failure
from callboard.cli.local.machine_gpus import BadGpus, MachineGpus, machine_gpus
from callboard.cli.session import failing_in_words
from callboard.model.names import is_name
from callboard.model.quantities import MILLI, QuantityError, parse_memory, parse_milli


def check_name(name: str) -> None:
    """Raises BadParameter for what can't name a cluster."""
    if not is_name(name):
        raise typer.BadParameter(f"{name!r} is no name: a letter, then letters, digits, _ . -", param_hint="--name")


def check_gpus(stated: str, *, agents: int, per_node: int) -> MachineGpus:
    """The GPUs to deal out. Raises BadParameter for what can't be meant; ends the program when there are too few."""
    try:
        found = machine_gpus(stated)
    except BadGpus as error:
        raise typer.BadParameter(str(error), param_hint="--machine-gpus") from error
    needed = agents * per_node
    if stated and not per_node:
        raise typer.BadParameter("nodes without GPUs are dealt none", param_hint="--gpus-per-node")
    if found.ids and needed > len(found.ids):
        with failing_in_words():
            raise CommandFailed(
                Failure(
                    f"GPU {len(found.ids)} is not available.",
                    f"{agents} nodes of {per_node} GPUs need {needed}; this machine has "
                    f"{'' if found.real else 'simulated '}{', '.join(found.ids)}.",
                    "Start fewer nodes; `nvidia-smi -L` lists real GPUs, --machine-gpus N simulates N.",
                )
            )
    return found


def check_nodes(*, cpus: str, memory: str, runtime: str, resources: Sequence[str] = ()) -> None:
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
    for resource in resources:
        name, _, amount = resource.partition("=")
        try:
            parse_milli(amount)
        except QuantityError as error:
            raise typer.BadParameter(f"{resource!r}: {error}", param_hint="--resource") from error
        if not is_name(name):
            raise typer.BadParameter(f"{name!r} is no name", param_hint="--resource")
