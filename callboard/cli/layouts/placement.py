"""What `callboard placement …` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from callboard.cli.layouts import placement_svg, placement_views
from callboard.cli.layouts.config_source import rl_config
from callboard.cli.layouts.placed_plan import describes_nodes
from callboard.cli.options import wishes
from callboard.cli.show import consoles, printing
from callboard.cli.show.exits import BAD_INPUT, UNREACHABLE, CommandFailed
from callboard.cli.show.file_faults import refuse, warn
from callboard.cli.show.verb_guard import failing_in_words, with_client
from callboard.client.calls.cluster_calls import GONE, id_of
from callboard.client.client import Client
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import read_yaml
from callboard.model.inputs.job import is_job_file, job_of_file
from callboard.placement import Accelerator, Cluster, HardwareUnit, Node, PlacementPlan, plan_placement
from callboard.placement.source.diagnostics import Report
from callboard.placement.source.document import open_document
from callboard.placement.source.tree import Items
from callboard.v1 import node_pb2


def show(
    file: str, *, overrides: Sequence[str], config_path: Path | None, nodes: str, controller: str, svg: Path | None
) -> None:
    """Shows the placement of a file; ends with 2 and every fault if it has some."""
    with failing_in_words():
        if nodes and controller:
            why = "--nodes describes them, --controller asks for them."
            raise CommandFailed("It is not clear which nodes are meant.", why, "Leave one out.", BAD_INPUT)
        name, text = rl_config(file, config_path, overrides)
    try:
        cluster = Cluster.from_nodes(nodes, "--nodes") if nodes else None
    except InvalidInput as error:
        refuse("--nodes", nodes, error.faults)
    try:
        known = cluster is not None or (not controller and describes_nodes(text))
    except InvalidInput as error:
        refuse(name, text, error.faults)
    faults = _job_faults(text)
    if not known:
        if faults:
            refuse(name, text, faults)
        try:
            cluster = with_client(live_cluster)
        except typer.Exit as ended:
            if ended.exit_code == UNREACHABLE:
                consoles.stderr().print("   or: Describe the nodes, as in --nodes 8+8.")
            raise
    try:
        plan = plan_placement(text, cluster)
    except InvalidInput as error:
        places = {(fault.line, fault.column) for fault in faults}
        refuse(name, text, faults + [one for one in error.faults if (one.line, one.column) not in places])
    if faults:
        refuse(name, text, faults)
    if svg is not None:
        with failing_in_words():
            _write(svg, placement_svg.draw(plan, title=name))
    warn(name, text, plan.warnings)
    _print(plan)


async def refuse_placement(client: Client, name: str, text: str) -> None:
    """Shows every fault of a placement that the controller refused and ends with 2; returns if it has none here. A
    status carries the first few kilobytes of faults only."""
    try:
        plan_placement(text, await live_cluster(client))
    except InvalidInput as error:
        refuse(name, text, error.faults)


async def show_warnings(client: Client, name: str, text: str) -> None:
    """Shows what a placement that was accepted may not mean, such as nodes without GPUs that are left out."""
    try:
        plan = plan_placement(text, await live_cluster(client))
    except InvalidInput:
        return  # The nodes have changed since: what was accepted is not looked at again.
    warn(name, text, plan.warnings)


def _job_faults(text: str) -> list[Fault]:
    """What is wrong with a job file besides its placements, all of which is read: a key that is misspelt is none."""
    is_job = False
    try:
        is_job = isinstance(open_document(text, Report()).value("components"), Items)
        source = read_yaml(text)
    except InvalidInput as error:
        # A trainer's config is read piece by piece, and may have elsewhere what a job may not.
        return list(error.faults) if is_job else []
    try:
        if is_job_file(source):
            job_of_file(source)
    except InvalidInput as error:
        return list(error.faults)
    return []


async def live_cluster(client: Client) -> Cluster:
    """The nodes of a controller, as its agents joined: those that have something to give (PG-11)."""
    return Cluster(
        tuple(
            Node(
                node_id=id_of(node),
                rank=node.rank,
                accelerators=tuple(Accelerator(use.device.id, _type(node, use.device.model)) for use in node.devices),
                labels=tuple(sorted(node.labels.items())),
                node_group=node.node_group,
                hardware=tuple(HardwareUnit(unit.type, unit.config_json or "{}") for unit in node.hardware),
                interpreters=tuple(node.interpreters),
                lost_accelerators=node.lost_devices,
            )
            for node in await client.list_nodes()
            if node.state not in GONE and _gives(node)
        )
    )


def _gives(node: node_pb2.Node) -> bool:
    has = node.capacity
    return bool(node.devices or has.cpu_milli or has.gpu_milli or has.memory_bytes or has.custom_milli)


def _type(node: node_pb2.Node, model: str) -> str:
    """What an accelerator is, as the controller compares it."""
    return "gpu" if node.simulated or not model else model.lower()


def _print(plan: PlacementPlan) -> None:
    if wishes.for_program:
        printing.print_data(placement_views.plain(plan))
        return
    console = consoles.stdout(wide=wishes.wide)
    for part in placement_views.plan_view(plan, width=console.width, wide=wishes.wide):
        console.print(part)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror or error}."
        raise CommandFailed(f"{file} can't be written.", why, "Name another file.", BAD_INPUT) from error
