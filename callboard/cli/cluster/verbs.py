"""`callboard up`, `down`, `agent`: start and stop clusters and their programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.agents.options import AgentOptions
from callboard.cli import actions
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.options import (
    MachineGpusOption,
    Stated,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    argument,
    counted_by,
    keep_tls,
    option,
    stating,
    takes,
    wishes,
)

app = typer.Typer()


@app.command(
    "up",
    epilog="Example: callboard up --agents 3 --gpus-per-node 2 --detach",
    short_help="Start a whole cluster on this machine.",
)
@takes("quiet", "output")
@stating(ClusterPlan)
def up(
    context: typer.Context,
    *,
    stated: Stated,
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "NODES",
            "Instead of --agents and --gpus-per-node: the nodes, e.g. 2x(2gpu,8cpu)+(16cpu). Those "
            "with GPUs are in the node group gpu, the others in cpu.",
        ),
    ] = "",
    roles: Annotated[
        Path | None,
        option(
            "--roles", "FILE", "YAML file with presets of further roles; its pools are made, and its nodes started."
        ),
    ] = None,
    detach: Annotated[
        bool, option("--detach", "-d", "Return once the cluster is ready; `callboard down` ends it.")
    ] = False,
    machine_gpus: MachineGpusOption = "",
    timeout: Annotated[
        float, option("--timeout", "SECONDS", "Give up if it is not ready after this time.", min=1)
    ] = 120.0,
    owned: Annotated[
        bool,
        option("--owned", "For a program: print JSON once it is ready; end when the standard input ends.", hidden=True),
    ] = False,
) -> None:
    """Start a whole cluster on this machine: controller, agents, Ray. Ctrl-C ends it and leaves nothing behind."""
    wishes.quiet = wishes.quiet or owned
    actions.local.up(
        stated,
        nodes=nodes,
        counted=counted_by(context),
        roles=roles,
        machine_gpus=machine_gpus,
        detach=detach and not owned,
        owned=owned,
        timeout_s=timeout,
    )


@app.command("down", epilog="Example: callboard down", short_help="End a cluster of this machine.")
@takes("quiet", "output")
def down(
    name: Annotated[str, argument("NAME", "Cluster to end. Default: the only one on this machine.")] = "",
    every: Annotated[bool, option("--all", "End every cluster of this user on this machine.")] = False,
) -> None:
    """End a cluster that `callboard up` started on this machine: exactly its own processes, and its files."""
    actions.local.down(name=name, every=every)


@app.command(
    "agent",
    epilog="Example: callboard agent --controller 10.0.0.1:7700 --node-id node-7",
    short_help="Run the agent of one node.",
)
@stating(AgentOptions)
def agent(
    controller: Annotated[
        str,
        option("--controller", "-c", "HOST:PORT", "Controller to join. Default: the same as for every other command."),
    ] = "",
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            "FILE",
            "Private file with the token for the controller. Default: $CALLBOARD_TOKEN_FILE, else the "
            "token of a controller that this account runs on this machine.",
        ),
    ] = None,
    join_token_file: Annotated[
        Path | None,
        option(
            "--join-token-file",
            "FILE",
            "Private file with a join token (`callboard node token create`): the agent exchanges it "
            "for credentials of its own and keeps those. Once it has some, the file is not read.",
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    *,
    stated: Stated,
) -> None:
    """Run the agent of one node: it joins the controller and hosts workers. Ctrl-C leaves the cluster."""
    keep_tls(tls_ca, tls_cert, tls_key)
    actions.agent.run(stated, controller=controller, token_file=token_file, join_token_file=join_token_file)
