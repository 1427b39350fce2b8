"""What `callboard up` and `callboard down` do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.text import Text

from callboard.agents.ray.ray_command import free_port
from callboard.cli.cluster.checks import check_name, check_nodes, deal_gpus, shapes_of
from callboard.cli.cluster.start_progress import StartProgress
from callboard.cli.local.cluster import LocalCluster
from callboard.cli.local.interrupts import Interrupts, run_locally
from callboard.cli.local.plan import ClusterPlan, NodeShape, free_block
from callboard.cli.local.ports import usable_port
from callboard.cli.local.taking_down import take_down
from callboard.cli.options import Stated, read_stated, wishes
from callboard.cli.show import consoles
from callboard.cli.show.exits import BAD_INPUT, INTERRUPTED, CommandFailed
from callboard.cli.show.gpu_picture import GpuPicture
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import done, show_result, tell
from callboard.cli.show.verb_guard import failing_in_words
from callboard.client.client import Client
from callboard.client.clusters import ClusterRecord, cluster_directory, recorded_clusters, running_clusters
from callboard.model.cluster_text import NodeText, parse_cluster
from callboard.model.inputs.role_file import read_role_file
from callboard.model.roles import PRESETS, RoleFile
from callboard.model.specs import PoolSpec
from callboard.security.places import run_directory
from callboard.v1.node_pb2 import Node
from callboard.v1.scheduler_pb2 import Stats


def up(
    stated: Stated,
    *,
    nodes: str,
    counted: Sequence[str],
    roles: Path | None,
    machine_gpus: str,
    detach: bool,
    owned: bool,
    timeout_s: float,
) -> None:
    """Starts a cluster; without ``detach``, watches over it until a signal comes.

    Args:
        stated: the options of its plan, by field.
        nodes: what its nodes consist of, as text; empty: they are counted.
        counted: which of the number of nodes and of the GPUs of each somebody stated.
        roles: file with presets, pools and nodes.
        detach: return once it is ready.
        owned: it ends with the standard input.
        timeout_s: until it is ready, in seconds.
    """
    base = run_directory()
    check_name(stated["name"])
    wanted = ClusterPlan(directory=cluster_directory(stated["name"], base), **read_stated(ClusterPlan, stated))
    check_nodes(wanted)
    with failing_in_words():
        said = RoleFile(presets=PRESETS) if roles is None else read_role_file(roles)
    shapes = _shapes(nodes, said.nodes, roles, counted=counted, plan=wanted)
    agents = len(shapes) or wanted.agents
    dealt, agents, gpus = deal_gpus(machine_gpus, shapes, agents=agents, gpus=wanted.gpus, stated=counted)

    plan = replace(
        wanted,
        port=wanted.port or free_port(),
        agents=agents,
        gpus=gpus,
        shapes=shapes,
        roles="" if roles is None else str(roles.absolute()),
        machine_gpus=dealt.ids,
        real_gpus=dealt.real,
        dashboard_port=usable_port(wanted.dashboard_port, starts_head=wanted.own_ray, tell=tell),
        # Workers without Ray are at 127.0.0.1: nothing of theirs would show that a block is taken.
        block=free_block(record.block for record in recorded_clusters(base) if _runs(record))
        if wanted.runtime == "ray"
        else 0,
        detached=detach,
    )

    ready = False

    async def main(interrupts: Interrupts) -> None:
        nonlocal ready
        _end_with_input(interrupts, owned=owned)
        with StartProgress(plan.agents) as progress:
            cluster = LocalCluster(plan, progress, hurry=interrupts.hurry)
            keep = False
            try:
                there = await cluster.start(timeout_s)
                async with Client(plan.controller) as client:
                    for spec in said.pools:
                        await client.create_pool(spec)
                    stats = await client.stats()
                progress.finish()
                ready = True
                if owned:
                    typer.echo(json.dumps({"controller": plan.controller}))
                else:
                    _tell_ready(plan, there, said.pools, stats)
                keep = detach
                await (cluster.let_go() if detach else cluster.run())
            finally:
                if not keep:
                    with interrupts.cleaning():
                        await cluster.stop()
                    if interrupts.received is not None and not wishes.quiet:
                        consoles.stderr().print("Ended; nothing is left running.")

    # Ctrl-C is how a cluster that was ready is meant to end.
    run_locally(main, lambda: 0 if ready and not detach else INTERRUPTED)


def down(*, name: str, every: bool) -> None:
    async def main(interrupts: Interrupts) -> None:
        for record in _chosen(name, every=every):
            if not wishes.quiet:
                consoles.stderr().print(f"Ending cluster {record.name} at {record.controller} …")
            with interrupts.cleaning(hurry_at_once=True):
                await take_down(record, hurry=interrupts.hurry)
            ended.append(record.name)
        done({"ended": ended}, "Ended; nothing is left running.")

    ended: list[str] = []
    run_locally(main)


def _end_with_input(interrupts: Interrupts, *, owned: bool) -> None:
    """Ends a cluster that has an owner in order when the standard input ends: its owner is done, or is gone."""
    if not owned:
        return
    loop, owner = asyncio.get_running_loop(), sys.stdin.fileno()

    def look() -> None:
        if not os.read(owner, 4096):
            loop.remove_reader(owner)
            interrupts.take(signal.SIGTERM)

    loop.add_reader(owner, look)


def _chosen(name: str, *, every: bool) -> list[ClusterRecord]:
    base = run_directory()
    found = recorded_clusters(base)
    if every:
        return found
    if name:
        found = [record for record in found if record.name == name]
    if len(found) > 1:
        listed = ", ".join(f"{record.name} ({record.controller})" for record in found)
        raise CommandFailed(
            "It is not clear which cluster is meant.",
            f"{len(found)} are recorded on this machine: {listed}.",
            "Name one, or end all with --all.",
            BAD_INPUT,
        )
    if not found:
        which = f"cluster {name}" if name else "cluster"
        raise CommandFailed(
            f"There is no {which} to end.", f"None is recorded in {base}.", "`callboard up` starts one."
        )
    return found


def _shapes(
    nodes: str,
    of_file: Sequence[NodeText],
    roles: Path | None,
    *,
    counted: Sequence[str],
    plan: ClusterPlan,
) -> tuple[NodeShape, ...]:
    """What each node consists of, as the option describes them, else as the file does; empty: they are counted."""
    hint = "--nodes" if nodes else f"nodes of {roles}"
    with failing_in_words():
        texts = parse_cluster(nodes, "--nodes") if nodes else of_file
    if texts and counted:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in counted)
        raise typer.BadParameter(f"describes the nodes; leave out {options}", param_hint=hint)
    return shapes_of(texts, hint, plan)


def _runs(record: ClusterRecord) -> bool:
    return any(entry.process.is_running() for entry in record.processes)


def _tell_ready(plan: ClusterPlan, nodes: list[Node], pools: Sequence[PoolSpec], stats: Stats) -> None:
    if wishes.for_program:
        facts = {"name": plan.name, "controller": plan.controller, "directory": str(plan.directory)}
        facts |= {"page": stats.page_address} if stats.page_address else {}
        show_result({**facts, "nodes": [plain(node) for node in nodes]}, lambda _: "")
        return
    if wishes.quiet:
        return
    out = consoles.stdout()
    out.print(Text(f"Cluster {plan.name} is ready.", style="bold") + f" Controller at {plan.controller}.")
    out.print(GpuPicture(nodes))
    out.print(f"Logs: {plan.directory / 'logs'}")
    if stats.page_address:
        opens = "" if plan.page_open or plan.insecure else " (`callboard page` makes a link that logs you in)"
        out.print(f"Page: {stats.page_address}{opens}")
    # Said, because another controller may be the one that answers at the usual address.
    figures = stats.metrics_address
    asks = "" if plan.metrics_open or plan.insecure else f" (bearer token in {plan.token_path})"
    out.print(f"Figures: http://{figures}/metrics{asks}" if figures else "No figures are served: port 8080 is taken.")
    if plan.insecure:
        out.print("INSECURE: everybody who reaches the controller's port can run code as you.", style="bold red")
    if plan.own_ray and plan.ray_port:
        out.print(f"Ray at {plan.node_ip(0)}:{plan.ray_port}; its token is in {plan.ray_token_path()}.")
    if plan.dashboard_port is not None:
        out.print(
            f"Dashboard: http://localhost:{plan.dashboard_port}; it asks for the token in {plan.ray_token_path()}."
        )
    if plan.machine_gpus:
        free = plan.places - plan.agents
        out.print(f"`callboard add-worker` adds a node; GPUs are left for {free}." if free else "No GPU is left.")
    if pools:
        out.print(f"Pools: {', '.join(pool.name for pool in pools)}.")
        out.print("Next: callboard job submit FILE, callboard status.")
    else:
        out.print("Next: callboard pool create NAME, callboard job submit FILE, callboard status.")
    if len(running_clusters(plan.directory.parent)) > 1:
        out.print(f"It is not the only one here: name it with `export CALLBOARD_CONTROLLER={plan.controller}`.")
    if plan.detached:
        out.print(f"End it with `callboard down {plan.name}`.")
    else:
        out.print("Ctrl-C ends it.")
    sys.stdout.flush()
