"""Checks of the options of a local cluster, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import typer

from callboard.agents.options import AgentOptions
from callboard.cli.local.machine_gpus import MachineGpus, machine_gpus, shares
from callboard.cli.local.plan import ClusterPlan, NodeShape
from callboard.cli.options import reading
from callboard.cli.show.exits import CommandFailed
from callboard.cli.show.verb_guard import failing_in_words
from callboard.controller.options import page_address, split_address
from callboard.model.cluster_text import NodeText
from callboard.model.names import is_custom_resource, is_name
from callboard.model.options import OptionError
from callboard.model.quantities import MILLI, QuantityError, format_milli, parse_memory, parse_milli

MAX_STARTED = 64
"""Most nodes of a cluster on one machine."""


def check_name(name: str) -> None:
    """Raises BadParameter for what can't name a cluster."""
    if not is_name(name):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: names start with a letter, followed by letters, digits, _ . -",
            param_hint="--name",
        )


def deal_gpus(
    option: str, shapes: Sequence[NodeShape], *, agents: int, gpus: int, stated: Collection[str]
) -> tuple[MachineGpus, int, int]:
    """The GPUs to deal out, to how many nodes, and how many to each. Raises BadParameter for what can't be meant; ends
    the program when there are too few.

    Args:
        shapes: of the nodes; empty: there are ``agents`` of ``gpus`` GPUs.
        stated: which of the two somebody asked for.
    """
    found = machine_gpus(option)
    if not found.ids:
        return found, agents, gpus
    if not shapes:
        agents, gpus = shares(len(found.ids), agents=agents, gpus=gpus, stated=stated)
    needed = sum(shape.gpus for shape in shapes) if shapes else agents * gpus
    if not needed:
        raise typer.BadParameter("nodes without GPUs are dealt none", param_hint="--machine-gpus")
    if needed > len(found.ids):
        here = _counted(len(found.ids), "GPU" if found.real else "simulated GPU")
        wanted = "The nodes" if shapes else f"{_counted(agents, 'node')} of {_counted(gpus, 'GPU')}"
        with failing_in_words():
            raise CommandFailed(
                f"GPU {len(found.ids)} is not available: this machine has {here}.",
                f"{wanted} would take {needed}; the ids of those that are there: {', '.join(found.ids)}.",
                "Start fewer nodes (--agents), or with fewer GPUs each (--gpus-per-node); `nvidia-smi -L` lists "
                "real GPUs, --machine-gpus N simulates N.",
            )
    return found, agents, gpus


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def check_nodes(plan: ClusterPlan) -> None:
    """Raises BadParameter for amounts that no node can have."""
    with reading("--cpus-per-node"):
        cpu_milli = parse_milli(plan.cpus)
    if cpu_milli <= 0:
        raise typer.BadParameter(f"{plan.cpus} is not above 0", param_hint="--cpus-per-node")
    if plan.runtime == "ray" and cpu_milli % MILLI:
        raise typer.BadParameter(
            f"{plan.cpus} is not a whole number; a Ray node has whole CPUs", param_hint="--cpus-per-node"
        )
    if plan.ray_address and plan.runtime != "ray":
        raise typer.BadParameter(
            "is for nodes with Ray; leave it out, or say --runtime ray", param_hint="--ray-address"
        )
    with reading("--memory-per-node"):
        parse_memory(plan.memory)
    _check_resources(plan.resources)
    for path in plan.interpreters:
        if not (path.startswith("/") and os.access(path, os.X_OK)):
            why = f"{path} is not the absolute path of a program on this machine"
            raise typer.BadParameter(why, param_hint="--interpreter")
    if plan.object_store:
        _check_object_store(plan)
    if plan.page not in ("", "none"):
        try:
            split_address(page_address(plan.page), "--page")
        except OptionError as error:
            raise typer.BadParameter(error.why, param_hint="--page") from error


def _check_resources(resources: Sequence[str]) -> None:
    named: set[str] = set()
    for resource in resources:
        name, _, amount = resource.partition("=")
        try:
            negative = parse_milli(amount) < 0
        except QuantityError as error:
            raise typer.BadParameter(f"{resource!r}: {error}", param_hint="--resource") from error
        if not is_custom_resource(name):
            raise typer.BadParameter(f"{name!r} can't be the name of a custom resource", param_hint="--resource")
        if negative or name in named:
            why = "is negative" if negative else f"states {name} again"
            raise typer.BadParameter(f"{resource!r} {why}", param_hint="--resource")
        named.add(name)


def _check_object_store(plan: ClusterPlan) -> None:
    try:
        with reading("--object-store-memory"):
            AgentOptions(node_id="any", runtime=plan.runtime, object_store_bytes=parse_memory(plan.object_store))
    except OptionError as error:
        raise typer.BadParameter(error.why, param_hint="--object-store-memory") from error


def shapes_of(texts: Sequence[NodeText], hint: str, plan: ClusterPlan) -> tuple[NodeShape, ...]:
    """What the nodes that a text describes consist of here. Raises BadParameter for nodes that can't be started.

    Args:
        hint: the option, or the file, that describes them.
        plan: what nodes have of which the text doesn't say, and how they host workers.
    """
    if len(texts) > MAX_STARTED:
        raise typer.BadParameter(f"{len(texts)} nodes are too many; {MAX_STARTED} are allowed", param_hint=hint)
    models = sorted({text.gpu_model for text in texts if text.gpu_model})
    if models:
        what = f"GPUs are simulated or this machine's own, of no other model: leave out :{', :'.join(models)}"
        raise typer.BadParameter(what, param_hint=hint)
    if plan.runtime == "ray" and any((text.cpu_milli or 0) % MILLI for text in texts):
        raise typer.BadParameter("a Ray node has whole CPUs", param_hint=hint)
    if any(text.cpu_milli == 0 for text in texts):
        raise typer.BadParameter("a node has more than 0 CPUs", param_hint=hint)
    return tuple(
        NodeShape(
            cpus=plan.cpus if text.cpu_milli is None else format_milli(text.cpu_milli),
            memory=plan.memory if text.memory_bytes is None else f"{text.memory_bytes}B",
            gpus=text.gpus,
            node_group=text.node_group,
        )
        for text in texts
    )
