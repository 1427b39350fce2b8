"""The command, ports and settings that a Ray node starts with.

The facts behind each choice were measured on Ray 2.60 (docs/agents.md).
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from callboard.agents.ray.ray_faults import PortTaken
from callboard.agents.ray.ray_start import CLIENT_PORT

SETTINGS = {
    # Gone in 0.2 s instead of up to 30 s (m); our workers have ended before.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # A killed node is noticed in 1.06 s instead of 15 s (m).
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    # No idle workers: Ray's own don't refill and can't be relied on (m).
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Frameworks must not be told to ask Ray for device ids that aren't ours.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray refuses another patch of Python unless told otherwise; the handshake warns of it.
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}


MONITOR_SETTINGS = {
    # Its figures would be on every address at port 44217, without a token; with a number that is no port it has none.
    "AUTOSCALER_METRIC_PORT": "65536",
}
"""What the process that answers `ray status` is started with."""

DASHBOARD_HOST = "127.0.0.1"
"""Where Ray's dashboard listens, whatever the node's own address is: it can start jobs, and speaks without TLS."""


@dataclass(frozen=True, kw_only=True)
class RayNodeSpec:
    """How to start the node."""

    node_id: str
    gcs_address: str
    """ "host:port" of the cluster to join, or to listen on when `head`."""
    head: bool
    node_ip: str
    """Address of the node's services; unique on the machine."""
    cpu_milli: int
    gpus: int
    memory_bytes: int
    custom_milli: Mapping[str, int]
    object_store_bytes: int | None
    port_base: int | None
    dashboard_port: int | None
    temp_dir: Path
    log: Path
    environment: Mapping[str, str] = field(repr=False)
    monitor: bool = False
    """Of a head: a process more (0.4 s of CPU, 84 MiB), by which `ray status` has something to say."""


def ray_start(spec: RayNodeSpec) -> list[str]:
    port, services = gcs_port(spec), service_ports(spec)
    command = [sys.executable, "-m", "callboard.agents.ray.ray_start", "start", "--block", "--disable-usage-stats"]
    if spec.head:
        command += ["--head", f"--port={port}", *(() if spec.monitor else ("--no-monitor",))]
        command += [f"--include-dashboard={'true' if spec.dashboard_port is not None else 'false'}"]
        # Even without a dashboard Ray starts its server process, and it takes the port it is told.
        dashboard = spec.dashboard_port or free_port(DASHBOARD_HOST, {port, *services.values()})
        command += [f"--dashboard-host={DASHBOARD_HOST}", f"--dashboard-port={dashboard}"]
    else:
        command += [f"--address={spec.gcs_address}"]
    if spec.object_store_bytes is not None:
        command += [f"--object-store-memory={spec.object_store_bytes}"]
    custom = {name: milli / 1000 for name, milli in spec.custom_milli.items()}
    command += [
        f"--node-ip-address={spec.node_ip}",
        f"--num-cpus={spec.cpu_milli // 1000}",
        # Always given: Ray's own count need not be what the node offers.
        f"--num-gpus={spec.gpus}",
        f"--memory={spec.memory_bytes}",
        f"--resources={json.dumps(custom)}",
        f"--labels=callboard-node={spec.node_id}",
        f"--temp-dir={spec.temp_dir}",
        "--include-log-monitor=false",
        # Workers take any free port: a range shared by several nodes of one machine would collide.
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    return command + [f"--{option}={port}" for option, port in services.items()]


_SERVICES = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)


def service_ports(spec: RayNodeSpec) -> dict[str, int]:
    """Ports of the node's own services: its block of ten, or none said so that Ray takes free ones."""
    ports: dict[str, int] = {}
    if spec.port_base is not None:
        ports = {name: spec.port_base + index for index, name in enumerate(_SERVICES)}
        if spec.head:
            # The server of Ray Client, which starts where somebody can know its port.
            ports[CLIENT_PORT.removeprefix("--")] = spec.port_base + len(_SERVICES)
    return ports


def check_ports(spec: RayNodeSpec) -> None:
    """Raise `PortTaken` when a port we ask for is in use: Ray would report success (NJ-04)."""
    own = set(service_ports(spec).values())
    asked = {(spec.node_ip, port) for port in own}
    if spec.head:
        asked.add((spec.node_ip, gcs_port(spec)))
        if spec.dashboard_port:
            asked.add((DASHBOARD_HOST, spec.dashboard_port))
    for host, port in sorted(asked):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise PortTaken(f"port {port} on {host} is in use ({error.strerror})") from error


def gcs_port(spec: RayNodeSpec) -> int:
    return int(spec.gcs_address.rsplit(":", 1)[1])


def free_port(ip: str = "127.0.0.1", given: Collection[int] = ()) -> int:
    """A port that is free at this moment, and none of those that are given to others and not in use yet: the kernel may
    name one twice, and Ray refuses to start then, whatever their addresses are. Somebody may take it all the same."""
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port if port not in given else free_port(ip, given)
