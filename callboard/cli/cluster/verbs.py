"""`callboard up`, `down`, `controller`, `agent`: start and stop clusters and their programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import (
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    keep_tls,
    takes,
    wishes,
)


class Runtime(StrEnum):
    """How agents host workers."""

    RAY = "ray"
    PROCESS = "process"


RuntimeOption = Annotated[
    Runtime, typer.Option("--runtime", help="Host workers as Ray actors, or as plain processes without Ray.")
]
WarmSparesOption = Annotated[
    int,
    typer.Option(
        "--warm-spares",
        metavar="N",
        help="Idle worker processes kept ready on each node while any job or placement group exists.",
        min=0,
        max=64,
    ),
]
InterpreterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--interpreter",
        metavar="PATH",
        help="Python interpreter that jobs may name, besides the agent's own; may be repeated.",
    ),
]
ObjectStoreOption = Annotated[
    str,
    typer.Option(
        "--object-store-memory",
        metavar="SIZE",
        help="Size of Ray's object store on each node. Default: Ray's own choice.",
        show_default=False,
    ),
]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the cluster on this machine.")]
MetricsOpenOption = Annotated[
    bool, typer.Option("--metrics-open", help="Show the Prometheus figures to callers without the token, too.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Answer every caller without asking for a token. Everybody who reaches the port can then run code here.",
    ),
]
ExitWithParentOption = Annotated[
    int | None,
    typer.Option(
        "--exit-with-parent", metavar="PID", help="End when this program, which started it, ends.", hidden=True
    ),
]
ExitWithOption = Annotated[
    str,
    typer.Option(
        "--exit-with", metavar="PID:TICKS", help="End when this program, which watches over it, ends.", hidden=True
    ),
]


app = typer.Typer()


@app.command(
    "up",
    epilog="Example: callboard up --agents 3 --gpus-per-node 2 --detach",
    short_help="Start a whole cluster on this machine.",
)
@takes("quiet", "output")
def up(
    context: typer.Context,
    agents: Annotated[int, typer.Option("--agents", "-n", metavar="N", help="Nodes to start.", min=1, max=64)] = 3,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="N", help="GPUs of each node.", min=0, max=64)
    ] = 2,
    cpus_per_node: Annotated[
        str, typer.Option("--cpus-per-node", metavar="N", help="CPUs of each node for jobs.")
    ] = "3",
    memory_per_node: Annotated[
        str, typer.Option("--memory-per-node", metavar="SIZE", help="Memory of each node for jobs.")
    ] = "4GiB",
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="TEXT",
            help="Instead of --agents and --gpus-per-node: the nodes, e.g. 2x(2gpu,8cpu)+(16cpu). Those with GPUs are "
            "in the node group gpu, the others in cpu.",
            show_default=False,
        ),
    ] = "",
    roles: Annotated[
        Path | None,
        typer.Option(
            "--roles",
            metavar="FILE",
            help="YAML file with presets of further roles; its pools are made, and its nodes started.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the cluster is ready; `callboard down` ends it.")
    ] = False,
    warm_spares: WarmSparesOption = 1,
    runtime: RuntimeOption = Runtime.RAY,
    resource: Annotated[
        list[str] | None,
        typer.Option("--resource", metavar="NAME=N", help="Custom resource of each node; may be repeated."),
    ] = None,
    interpreter: InterpreterOption = None,
    object_store_memory: ObjectStoreOption = "",
    machine_gpus: Annotated[
        str,
        typer.Option(
            "--machine-gpus",
            metavar="auto|N",
            help="Deal out this machine's GPUs, each to one node: auto, the real ones (8 simulated where there are "
            "none), or N simulated ones. Without --agents or --gpus-per-node they are shared equally, by at most 3 "
            "nodes. Default: every node has simulated GPUs of its own.",
            show_default=False,
        ),
    ] = "",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="Port of the controller; 0: any free one.", min=0, max=65535)
    ] = 7700,
    ray_port: Annotated[
        int, typer.Option("--ray-port", metavar="PORT", help="Port of Ray's head; 0: any free one.", min=0, max=65535)
    ] = 0,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            "--dashboard-port", metavar="PORT", help="Start Ray's dashboard there, if installed.", min=1, max=65535
        ),
    ] = None,
    port_base: Annotated[
        int | None,
        typer.Option(
            "--port-base",
            metavar="PORT",
            help="First port of the nodes' own Ray services, ten for each node. Default: any free ones.",
            min=1024,
            max=65535 - 2450,
        ),
    ] = None,
    ray_address: Annotated[
        str, typer.Option("--ray-address", metavar="HOST:PORT", help="Join this Ray cluster instead of starting one.")
    ] = "",
    name: NameOption = "local",
    metrics_open: MetricsOpenOption = False,
    insecure: InsecureOption = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up if it is not ready after this time.", min=1)
    ] = 120.0,
    owned: Annotated[
        bool,
        typer.Option(
            "--owned", help="For a program: print JSON once it is ready; end when the standard input ends.", hidden=True
        ),
    ] = False,
) -> None:
    """Start a whole cluster on this machine: controller, agents, Ray. Ctrl-C ends it and leaves nothing behind."""
    wishes.quiet = wishes.quiet or owned
    sources = {name: context.get_parameter_source(name) for name in ("agents", "gpus_per_node")}
    actions.local.up(
        nodes=nodes,
        counted=[name for name, source in sources.items() if source is not None and source.name != "DEFAULT"],
        roles=roles,
        name=name,
        port=port,
        agents=agents,
        cpus=cpus_per_node,
        memory=memory_per_node,
        gpus=gpus_per_node,
        machine_gpus=machine_gpus,
        resources=resource or [],
        interpreters=interpreter or [],
        object_store=object_store_memory,
        warm_spares=warm_spares,
        runtime=runtime.value,
        ray_address=ray_address,
        ray_port=ray_port,
        dashboard_port=dashboard_port,
        port_base=port_base,
        metrics_open=metrics_open,
        insecure=insecure,
        detach=detach and not owned,
        owned=owned,
        timeout_s=timeout,
    )


@app.command("down", epilog="Example: callboard down", short_help="End a cluster of this machine.")
@takes("quiet", "output")
def down(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Cluster to end. Default: the only one on this machine.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="End every cluster of this user on this machine.")] = False,
) -> None:
    """End a cluster that `callboard up` started on this machine: exactly its own processes, and its files."""
    actions.local.down(name=name, every=every)


@app.command(
    "controller",
    epilog="Example: callboard controller --listen 127.0.0.1:7700",
    short_help="Run the controller: one per cluster.",
)
def controller(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on.")
    ] = "127.0.0.1:7700",
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="DIR", help="Where the journal is kept. Default: $CALLBOARD_STATE_DIR."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="Folder for the file with the controller's address and pid."),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            help="Address of the Prometheus figures; none: no figures. Default: 127.0.0.1:8080 if it is free.",
        ),
    ] = "",
    roles: Annotated[
        Path | None,
        typer.Option(
            "--roles", metavar="FILE", help="YAML file with presets of further roles, e.g. roles: {sim: ...}."
        ),
    ] = None,
    metrics_open: MetricsOpenOption = False,
    insecure: InsecureOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    jwt_key: Annotated[
        Path | None,
        typer.Option(
            "--jwt-key",
            metavar="FILE",
            help="Public keys (PEM or JWKS) of a login whose signed tokens count; needs --jwt-issuer, --jwt-audience.",
        ),
    ] = None,
    jwt_issuer: Annotated[str, typer.Option("--jwt-issuer", metavar="URL", help="Issuer of signed tokens.")] = "",
    jwt_audience: Annotated[
        str, typer.Option("--jwt-audience", metavar="NAME", help="Audience that signed tokens must be for.")
    ] = "",
    jwt_name_claim: Annotated[
        str, typer.Option("--jwt-name-claim", metavar="CLAIM", help="Claim with the client's name.")
    ] = "sub",
    jwt_role_claim: Annotated[
        str, typer.Option("--jwt-role-claim", metavar="CLAIM", help="Claim with its role or groups, e.g. realm.roles.")
    ] = "role",
    jwt_role: Annotated[
        list[str] | None,
        typer.Option(
            "--jwt-role",
            metavar="GROUP=ROLE",
            help="Role of a group; may be repeated. Default: groups that are named like roles.",
        ),
    ] = None,
    token_listen: Annotated[
        str,
        typer.Option(
            "--token-listen",
            metavar="HOST:PORT",
            help="With --tls-ca: where callers with a token and without a certificate connect; none: nowhere. "
            "Default: the port after --listen's.",
        ),
    ] = "",
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="How long an agent may act without hearing from it.")
    ] = "15s",
    heartbeat: Annotated[
        str, typer.Option("--heartbeat", metavar="TIME", help="Time between heartbeats of an agent.")
    ] = "5s",
    orphan_grace: Annotated[
        str,
        typer.Option(
            "--orphan-grace",
            metavar="TIME",
            help="How long workers keep running without a controller after the lease has ended.",
        ),
    ] = "1h",
    reconcile_grace: Annotated[
        str,
        typer.Option(
            "--reconcile-grace", metavar="TIME", help="How long a restarted controller waits for the nodes it knows."
        ),
    ] = "20s",
    stop_grace: Annotated[
        str,
        typer.Option(
            "--stop-grace", metavar="TIME", help="Time for calls in progress to finish when the controller stops."
        ),
    ] = "3s",
    call_timeout: Annotated[
        str, typer.Option("--call-timeout", metavar="TIME", help="Time limit of one call of a client.")
    ] = "1m",
    progress: Annotated[
        str, typer.Option("--progress", metavar="TIME", help="Time between marks of progress on an idle watch.")
    ] = "10s",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=N",
            help="Limit of a queue or a history, e.g. ended_jobs=5000; may "
            "be repeated. An unknown name lists them all.",
        ),
    ] = None,
    loop: Annotated[str, typer.Option("--loop", help="Event loop: auto, uvloop or asyncio.")] = "auto",
    log_format: Annotated[str, typer.Option("--log-format", help="auto, console or json.")] = "auto",
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    exit_with_parent: ExitWithParentOption = None,
) -> None:
    """Run the controller: one per cluster. Ctrl-C ends it; what runs goes on and is found again."""
    actions.controller.run(
        listen=listen,
        metrics=metrics,
        state_dir=state_dir,
        run_dir=run_dir,
        roles=roles,
        metrics_open=metrics_open,
        insecure=insecure,
        tls=(tls_ca, tls_cert, tls_key),
        token_listen=token_listen,
        jwt=(jwt_key, jwt_issuer, jwt_audience, jwt_name_claim, jwt_role_claim, jwt_role or []),
        times={
            "lease_ms": lease,
            "heartbeat_ms": heartbeat,
            "orphan_grace_ms": orphan_grace,
            "reconcile_grace_ms": reconcile_grace,
            "stop_grace_ms": stop_grace,
            "call_timeout_ms": call_timeout,
            "progress_ms": progress,
        },
        limits=limit or [],
        loop=loop,
        log_format=log_format,
        log_level=log_level,
        exit_with_parent=exit_with_parent,
    )


@app.command(
    "agent",
    epilog="Example: callboard agent --controller 10.0.0.1:7700 --node-id node-7",
    short_help="Run the agent of one node.",
)
def agent(
    controller: Annotated[
        str,
        typer.Option(
            "--controller",
            "-c",
            metavar="HOST:PORT",
            help="Controller to join. Default: the same as for every other command.",
        ),
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="Name of the cluster, for paths on this machine.")
    ] = "default",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Private file with the token for the controller. Default: $CALLBOARD_TOKEN_FILE, else the token of a "
            "controller that this account runs on this machine.",
        ),
    ] = None,
    join_token_file: Annotated[
        Path | None,
        typer.Option(
            "--join-token-file",
            metavar="FILE",
            help="Private file with a join token (`callboard node token create`): the agent exchanges it for "
            "credentials of its own and keeps those. Once it has some, the file is not read.",
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    node_id: Annotated[
        str, typer.Option("--node-id", metavar="ID", help="Stable id of the node. Default: the host name.")
    ] = "",
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="Rank of the node. Default: the lowest free.", min=0)
    ] = None,
    cpus: Annotated[
        str, typer.Option("--cpus", metavar="N", help="CPUs for jobs. Default: all that the agent may use.")
    ] = "",
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory for jobs. Default: all that the agent may use, minus Ray's object store.",
        ),
    ] = "",
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="GPUs for jobs. Default: all that are visible.", min=0)
    ] = None,
    simulate_gpus: Annotated[
        int | None, typer.Option("--simulate-gpus", metavar="N", help="Number of simulated GPUs.", min=0)
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label of the node; may be repeated.")
    ] = None,
    resource: Annotated[
        list[str] | None, typer.Option("--resource", metavar="NAME=N", help="Custom resource; may be repeated.")
    ] = None,
    node_group: Annotated[str, typer.Option("--node-group", metavar="NAME", help="Node group of the node.")] = "",
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            "--hardware",
            metavar="TYPE=N",
            help='Hardware that no driver knows, e.g. Franka=2, or one with its settings, Franka={"robot_ip": "…"}; '
            "may be repeated.",
        ),
    ] = None,
    interpreter: InterpreterOption = None,
    object_store_memory: ObjectStoreOption = "",
    output_per_worker: Annotated[
        str,
        typer.Option(
            "--output-per-worker",
            metavar="SIZE",
            help="Output to keep of each stream of a worker; the oldest is deleted first.",
        ),
    ] = "64MiB",
    output_total: Annotated[
        str,
        typer.Option(
            "--output-total",
            metavar="SIZE",
            help="Output to keep of all workers; the workers that ended first lose theirs first.",
        ),
    ] = "2GiB",
    warm_spares: WarmSparesOption = 1,
    runtime: RuntimeOption = Runtime.RAY,
    ray_head: Annotated[bool, typer.Option("--ray-head", help="Start Ray's head on this node.")] = False,
    ray_address: Annotated[str, typer.Option("--ray-address", metavar="HOST:PORT", help="Join this Ray cluster.")] = "",
    ray_token_file: Annotated[
        Path | None,
        typer.Option(
            "--ray-token-file", metavar="FILE", help="File with that cluster's token. Default: where Ray looks for it."
        ),
    ] = None,
    ray_port: Annotated[
        int | None,
        typer.Option("--ray-port", metavar="PORT", help="Port of Ray's head; 0: any free one.", min=0, max=65535),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option("--dashboard-port", metavar="PORT", help="Port of Ray's dashboard, on the head.", max=65535),
    ] = None,
    port_base: Annotated[
        int | None, typer.Option("--port-base", metavar="PORT", help="First of ten ports of the Ray node.")
    ] = None,
    node_ip: Annotated[str, typer.Option("--node-ip", metavar="IP", help="Address of the node's own services.")] = "",
    notice_command: Annotated[
        str,
        typer.Option(
            "--notice-command",
            metavar="COMMAND",
            help="Command that reports an upcoming shutdown of this machine: exit code 0 with output "
            "drains the node and gives the output as the reason.",
            show_default=False,
        ),
    ] = "",
    notice_every: Annotated[
        str, typer.Option("--notice-every", metavar="TIME", help="Time between runs of that command.")
    ] = "5s",
    notice_timeout: Annotated[
        str, typer.Option("--notice-timeout", metavar="TIME", help="Time limit of that command.")
    ] = "10s",
    notice_deadline: Annotated[
        str,
        typer.Option(
            "--notice-deadline",
            metavar="TIME",
            help="Deadline for running work to leave in that case. Default: each job's own timeouts.",
            show_default=False,
        ),
    ] = "0s",
    leave_hooks: Annotated[
        str,
        typer.Option(
            "--leave-hooks",
            metavar="TIME",
            help="Time for the hooks of workers (cancel, checkpoint) when the agent leaves.",
        ),
    ] = "2s",
    leave_timeout: Annotated[
        str,
        typer.Option(
            "--leave-timeout", metavar="TIME", help="Time limit for leaving; then the agent gives up on the rest."
        ),
    ] = "20s",
    successor: Annotated[
        str,
        typer.Option(
            "--successor",
            metavar="TIME",
            help="How long plain worker processes keep running after their agent "
            "died, waiting for the next agent. Default: 60s.",
            show_default=False,
        ),
    ] = "",
    http_proxy: Annotated[
        bool, typer.Option("--http-proxy", help="Reach the controller through the proxy set in the environment.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder for the agent's files.")
    ] = None,
    log_format: Annotated[str, typer.Option("--log-format", help="auto, console or json.")] = "auto",
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    exit_with_parent: ExitWithParentOption = None,
    exit_with: ExitWithOption = "",
) -> None:
    """Run the agent of one node: it joins the controller and hosts workers. Ctrl-C leaves the cluster."""
    keep_tls(tls_ca, tls_cert, tls_key)
    actions.agent.run(
        controller=controller,
        cluster=cluster,
        token_file=token_file,
        join_token_file=join_token_file,
        node_id=node_id,
        rank=rank,
        cpus=cpus,
        memory=memory,
        gpus=gpus,
        simulate_gpus=simulate_gpus,
        labels=label or [],
        resources=resource or [],
        node_group=node_group,
        hardware=hardware or [],
        interpreters=interpreter or [],
        object_store=object_store_memory,
        output_per_worker=output_per_worker,
        output_total=output_total,
        warm_spares=warm_spares,
        runtime=runtime.value,
        ray_head=ray_head,
        ray_address=ray_address,
        ray_token_file=ray_token_file,
        ray_port=ray_port,
        dashboard_port=dashboard_port,
        port_base=port_base,
        node_ip=node_ip,
        notice_command=notice_command,
        notice_every=notice_every,
        notice_timeout=notice_timeout,
        notice_deadline=notice_deadline,
        leave_hooks=leave_hooks,
        leave_timeout=leave_timeout,
        successor=successor,
        http_proxy=http_proxy,
        run_dir=run_dir,
        log_format=log_format,
        log_level=log_level,
        exit_with_parent=exit_with_parent,
        exit_with=exit_with,
    )
