"""The options of an agent, and which of them are refused at once."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from callboard.model.names import OWN_LABELS, is_custom_resource, is_label, is_name
from callboard.model.options import OptionError, option

MAX_DEVICES = 1024
MAX_CPU_MILLI = 100_000 * 1000
MAX_MEMORY_BYTES = 1 << 50
MIN_OBJECT_STORE_BYTES = 75 << 20
"""Ray's own minimum (OBJECT_STORE_MINIMUM_MEMORY_BYTES)."""
MIN_OUTPUT_BYTES = 64 << 10
MAX_CUSTOM_MILLI = 10**12
MAX_SPARES = 64
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MAX_HARDWARE = 256
"""Above any machine; a node that claims more is a mistake or a lie (SE-07)."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Everything an agent is started with: its options, and how `callboard agent` calls them. Raises `OptionError` for
    what can't be meant."""

    node_id: str = option("", "Stable id of the node. Default: the host name.", metavar="ID")
    controller: str = option("127.0.0.1:7700")
    """Address "host:port" of the controller; of several of which one leads, all, with commas between them."""
    cluster: str = option("default", "Name of the cluster, for paths on this machine.", metavar="NAME")
    token_file: str = option("")
    """File with the token that the agent shows to the controller; empty: it is found as by every program of this
    account."""
    rank: int | None = option(None, "Rank of the node. Default: the lowest free.", metavar="N", bounds=(0, None))
    cpu_milli: int | None = option(None, "CPUs for jobs. Default: all that the agent may use.", "--cpus")
    memory_bytes: int | None = option(
        None, "Memory for jobs. Default: all that the agent may use, minus Ray's object store."
    )
    gpus: int | None = option(None, "GPUs for jobs. Default: all that are visible.", metavar="N", bounds=(0, None))
    simulate_gpus: int | None = option(None, "Number of simulated GPUs.", metavar="N", bounds=(0, None))
    labels: Mapping[str, str] = option(dict, "Label of the node; may be repeated.", "--label", metavar="KEY=VALUE")
    custom_milli: Mapping[str, int] = option(dict, "Custom resource; may be repeated.", "--resource", metavar="NAME=N")
    node_group: str = option("", "Node group of the node.", metavar="NAME")
    hardware: tuple[tuple[str, str], ...] = option(
        (),
        'Hardware that no driver knows, e.g. Franka=2, or one with its settings, Franka={"robot_ip": "…"}; '
        "may be repeated.",
        metavar="TYPE=N",
    )
    """(type, settings as JSON object or empty) of every piece."""
    interpreters: tuple[str, ...] = option(
        (),
        "Python interpreter that jobs may name, besides the agent's own; may be repeated.",
        "--interpreter",
        metavar="PATH",
    )
    object_store_bytes: int | None = option(
        None,
        "Size of Ray's object store on each node. Default: Ray's own choice.",
        "--object-store-memory",
        shown=False,
    )
    output_worker_bytes: int = option(
        64 << 20, "Output to keep of each stream of a worker; the oldest is deleted first.", "--output-per-worker"
    )
    output_bytes: int = option(
        2 << 30,
        "Output to keep of all workers; the workers that ended first lose theirs first.",
        "--output-total",
    )
    warm_spares: int = option(
        1,
        "Idle worker processes kept ready on each node while any job or placement group exists.",
        metavar="N",
        bounds=(0, MAX_SPARES),
    )
    """Each takes about 90 MiB with Ray."""
    preload_bytes: int = option(
        0,
        "Memory for all idle workers with preloaded modules. Default: a tenth of the node's memory.",
        "--preload-memory",
    )
    foreign_gpu_use: Literal["avoid", "warn", "ignore"] = option(
        "avoid",
        "What to do about a GPU whose memory another program holds: place no new work there, warn, or ignore it.",
    )
    foreign_gpu_bytes: int = option(1 << 30, "Memory of a GPU that such processes may hold.", "--foreign-gpu-memory")
    runtime: Literal["ray", "process"] = option("ray", "Host workers as Ray actors, or as plain processes without Ray.")
    ray_head: bool = option(False, "Start Ray's head on this node.")
    ray_address: str = option("", "Join this Ray cluster.", metavar="HOST:PORT")
    """Empty: the one that the controller tells of."""
    ray_token_path: str = option(
        "", "File with that cluster's token. Default: where Ray looks for it.", "--ray-token-file", metavar="FILE"
    )
    ray_port: int = option(6379, "Port of Ray's head; 0: any free one.", metavar="PORT", bounds=(0, 65535))
    dashboard_port: int | None = option(
        None, "Port of Ray's dashboard, on the head.", metavar="PORT", bounds=(None, 65535)
    )
    port_base: int | None = option(None, "First of ten ports of the Ray node.", metavar="PORT")
    """None: any free ones."""
    node_ip: str = option("", "Address of the node's own services.", metavar="IP")
    """Empty: a loopback address of its own when the controller is on loopback, else what Ray finds. (Ray silently
    replaces 127.0.0.1 by an interface address.)"""
    notice_command: str = option(
        "",
        "Command that reports an upcoming shutdown of this machine: exit code 0 with output "
        "drains the node and gives the output as the reason.",
        metavar="COMMAND",
    )
    notice_every_s: float = option(5.0, "Time between runs of that command.")
    notice_timeout_s: float = option(10.0, "Time limit of that command.")
    notice_within_ms: int = option(
        0, "Deadline for running work to leave in that case. Default: each job's own timeouts.", "--notice-deadline"
    )
    leave_hooks_s: float = option(2.0, "Time for the hooks of workers (cancel, checkpoint) when the agent leaves.")
    leave_s: float = option(20.0, "Time limit for leaving; then the agent gives up on the rest.", "--leave-timeout")
    successor_s: float | None = option(
        None,
        "How long plain worker processes keep running after their agent died, waiting for the next agent. "
        "Default: 60s.",
    )
    """None: 0 with `exit_with_parent` or `exit_with`, because nobody starts such an agent again. (Ray actors live as
    long as their Ray node.)"""
    http_proxy: bool = option(False, "Reach the controller through the proxy set in the environment.")
    """Else proxy variables of the environment don't apply to its address (GC-10)."""
    run_dir: str = option("", "Folder for the agent's files.", metavar="DIR")
    """Empty: `$XDG_RUNTIME_DIR/callboard/{cluster}/{node_id}` or `/tmp/callboard-{uid}/{cluster}/{node_id}`."""
    log_format: Literal["console", "json"] = option(
        "console",
        "Format of the log; auto: console on a terminal, else json.",
        written="auto",
        metavar="<auto|console|json>",
    )
    log_level: str = option(
        "INFO", "Least important messages that are logged.", written="info", metavar="<debug|info|warning|error>"
    )
    exit_with_parent: int | None = option(
        None, "End when this program, which started it, ends.", metavar="PID", hidden=True
    )
    exit_with: tuple[int, int] | None = option(
        None, "End when this program, which watches over it, ends.", metavar="PID:TICKS", written="", hidden=True
    )
    """Its pid and start time in clock ticks since boot; it need not be our parent."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_amounts()
        self._check_ray()

    def _check_names(self) -> None:
        _need(
            self.log_level in LOG_LEVELS, "log_level", f"{self.log_level!r} is none of {', '.join(LOG_LEVELS).lower()}"
        )
        known = self.foreign_gpu_use in ("avoid", "warn", "ignore")
        _need(known, "foreign_gpu_use", f"{self.foreign_gpu_use!r} is none of avoid, warn, ignore")
        _need(self.log_format in ("console", "json"), "log_format", f"{self.log_format!r} is neither console nor json")
        _need(is_name(self.node_id), "node_id", f"{self.node_id!r} can't be a name")
        _need(is_name(self.cluster), "cluster", f"{self.cluster!r} can't be a name")
        group_fine = not self.node_group or is_name(self.node_group)
        _need(group_fine, "node_group", f"{self.node_group!r} can't be a name")
        for key, value in self.labels.items():
            _need(is_label(key), "labels", f"{key!r} can't be a label key")
            _need(key not in OWN_LABELS, "labels", f"{key} is a label that every node has of its own")
            _need(not value or is_label(value), "labels", f"{key}={value!r} can't be a label value")
        for address in self.controller.split(","):
            _need_address("controller", address)
        _need(len(self.hardware) <= MAX_HARDWARE, "hardware", f"more than {MAX_HARDWARE} pieces")
        for kind, _ in self.hardware:
            _need(is_custom_resource(kind), "hardware", f"{kind!r} can't be the name of a type")
        for path in self.interpreters:
            _need(path.startswith("/"), "interpreters", f"{path!r} is not an absolute path")

    def _check_amounts(self) -> None:
        _need(0 <= self.warm_spares <= MAX_SPARES, "warm_spares", f"{self.warm_spares} is not 0 … {MAX_SPARES}")
        rank = self.rank if self.rank is not None else 0
        _need(0 <= rank < 1_000_000, "rank", f"{rank} is not a rank")
        for name, count in (("gpus", self.gpus), ("simulate_gpus", self.simulate_gpus)):
            within = count is None or 0 <= count <= MAX_DEVICES
            _need(within, name, f"{count} is not 0 … {MAX_DEVICES}")
        cpu = self.cpu_milli if self.cpu_milli is not None else 0
        _need(0 <= cpu <= MAX_CPU_MILLI, "cpu_milli", f"{cpu} is not 0 … {MAX_CPU_MILLI}")
        memory = self.memory_bytes if self.memory_bytes is not None else 0
        _need(0 <= memory <= MAX_MEMORY_BYTES, "memory_bytes", f"{memory} is not 0 … 2^50")
        within = 0 <= self.foreign_gpu_bytes <= MAX_MEMORY_BYTES
        _need(within, "foreign_gpu_bytes", f"{self.foreign_gpu_bytes} is not 0 … 2^50")
        _need(0 <= self.preload_bytes <= MAX_MEMORY_BYTES, "preload_bytes", f"{self.preload_bytes} is not 0 … 2^50")
        store = self.object_store_bytes
        fine = store is None or MIN_OBJECT_STORE_BYTES <= store <= MAX_MEMORY_BYTES
        _need(fine, "object_store_bytes", f"{store} bytes is not 75 MiB … 2^50; Ray starts with no less")
        for name, kept in (("output_worker_bytes", self.output_worker_bytes), ("output_bytes", self.output_bytes)):
            _need(MIN_OUTPUT_BYTES <= kept <= MAX_MEMORY_BYTES, name, f"{kept} is not 64 KiB … 2^50")
        for name, amount in self.custom_milli.items():
            _need(is_custom_resource(name), "custom_milli", f"{name!r} can't be the name of a custom resource")
            within = 0 <= amount <= MAX_CUSTOM_MILLI
            _need(within, "custom_milli", f"{name}={amount} is not 0 … {MAX_CUSTOM_MILLI}")
        times = {"leave_hooks_s": self.leave_hooks_s, "leave_s": self.leave_s, "successor_s": self.successor_s or 0.0}
        times |= {"notice_every_s": self.notice_every_s, "notice_timeout_s": self.notice_timeout_s}
        _need(self.notice_every_s > 0, "notice_every_s", "must be above 0")
        _need(
            0 <= self.notice_within_ms <= 86_400_000, "notice_within_ms", f"{self.notice_within_ms} ms is not 0 … 24 h"
        )
        for name, seconds in times.items():
            _need(math.isfinite(seconds) and seconds >= 0, name, f"{seconds} s is not a time")

    def _check_ray(self) -> None:
        wants_ray = self.ray_head or bool(self.ray_address)
        _need(not (self.ray_head and self.ray_address), "ray_head", "excludes ray_address")
        _need(self.runtime == "ray" or not wants_ray, "runtime", "process has no part in a Ray cluster")
        store = self.object_store_bytes
        _need(self.runtime == "ray" or store is None, "object_store_bytes", "a node without Ray has no object store")
        whole = self.runtime != "ray" or (self.cpu_milli or 0) % 1000 == 0
        _need(whole, "cpu_milli", "a Ray node has whole CPUs only")
        if self.ray_address:
            _need_address("ray_address", self.ray_address)
        ports = {"ray_port": self.ray_port, "dashboard_port": self.dashboard_port}
        for name, port in ports.items():
            fine = port is None or port == 0 or 1024 <= port <= 65535
            _need(fine, name, f"{port} is not 0 or 1024 … 65535")
        if self.node_ip:
            _need(self.runtime == "ray", "node_ip", "a node without Ray listens on no address")
            _need_node_ip(self.node_ip)
        base = self.port_base
        fine = base is None or 1024 <= base <= 65535 - 10
        _need(fine, "port_base", f"{base} is not 1024 … 65525")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return match["host"].strip("[]"), int(match["port"])


def _need(condition: bool, option: str, why: str) -> None:
    if not condition:
        raise OptionError(option, why)


def _need_node_ip(text: str) -> None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError as error:
        raise OptionError("node_ip", f"{text!r} is not an IP address; names are not looked up") from error
    one = not (ip.is_unspecified or ip.is_multicast)
    _need(one, "node_ip", f"{text} is not the address of one host")
    kept = text not in ("127.0.0.1", "::1")
    _need(kept, "node_ip", f"Ray replaces {text} by the address of an interface; on loopback take 127.0.0.2 or above")


def _need_address(option: str, address: str) -> None:
    try:
        split_address(address)
    except ValueError as error:
        raise OptionError(option, str(error)) from error
