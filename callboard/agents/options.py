"""The options of an agent, and which of them are refused at once."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from callboard.model.names import OWN_LABELS, is_custom_resource, is_label, is_name

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

_OPTION_NAMES = {
    "cpu_milli": "--cpus",
    "memory_bytes": "--memory",
    "custom_milli": "--resource",
    "labels": "--label",
    "interpreters": "--interpreter",
    "object_store_bytes": "--object-store-memory",
    "output_worker_bytes": "--output-per-worker",
    "output_bytes": "--output-total",
    "ray_token_path": "--ray-token-file",
    "successor_s": "--successor",
    "notice_every_s": "--notice-every",
    "notice_timeout_s": "--notice-timeout",
    "notice_within_ms": "--notice-deadline",
    "leave_hooks_s": "--leave-hooks",
    "leave_s": "--leave-timeout",
}
"""Options of `callboard agent` that are not named like their field."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


class OptionError(ValueError):
    """An option can't be used as given."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option}: {why}")
        self.option = option
        self.why = why


def option_of(field_name: str) -> str:
    """The option of `callboard agent` that sets a field of :class:`AgentOptions`."""
    return _OPTION_NAMES.get(field_name, f"--{field_name.replace('_', '-')}")


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Everything an agent is started with. Raises `OptionError` for what can't be meant."""

    node_id: str
    """Stable id of the node."""
    controller: str = "127.0.0.1:7700"
    """Address "host:port" of the controller."""
    cluster: str = "default"
    """Name of the cluster; part of paths and markers, so that two clusters share a machine."""
    token_file: str = ""
    """File with the token that the agent shows to the controller; empty: it is found as by every program of this
    account."""
    rank: int | None = None
    """Rank asked for; None: the lowest free one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    node_group: str = ""

    runtime: Literal["ray", "process"] = "ray"
    """How workers are hosted."""
    gpus: int | None = None
    """Offer the first so many visible devices; None: all."""
    simulate_gpus: int | None = None
    """Offer so many ids without hardware instead."""
    cpu_milli: int | None = None
    """CPUs to offer, in milli-CPU; None: those this process may use."""
    memory_bytes: int | None = None
    """Memory to offer, in bytes; None: what the machine (or its container) has."""
    custom_milli: Mapping[str, int] = field(default_factory=dict)
    """Custom resources, in milli-units."""
    hardware: tuple[tuple[str, str], ...] = ()
    """(type, settings as JSON object or empty) of every piece of hardware that no driver knows: robots, cameras."""
    interpreters: tuple[str, ...] = ()
    """Python interpreters that jobs may name, absolute paths; the agent's own may always."""

    ray_head: bool = False
    """Start the head of a new Ray cluster here."""
    ray_address: str = ""
    """Join this existing Ray cluster ("host:port") instead of the one the controller tells of."""
    ray_token_path: str = ""
    """File with the authentication token of that cluster; empty: Ray's own rules."""
    ray_port: int = 6379
    """GCS port of the head; 0: any free one."""
    dashboard_port: int | None = None
    """Start Ray's dashboard on the head at this port; None: don't."""
    node_ip: str = ""
    """Address of the node's Ray services; empty: a loopback address of its own when the controller is on
    loopback, else what Ray finds. (Ray silently replaces 127.0.0.1 by an interface address.)"""
    port_base: int | None = None
    """First of ten ports for the node's own Ray services; None: any free ones."""
    object_store_bytes: int | None = None
    """Size of Ray's object store; None: Ray's default."""

    warm_spares: int = 1
    """Idle worker hosts kept ready while a job or a placement group is about; each takes about 90 MiB with Ray."""

    run_dir: str = ""
    """Directory for sockets, logs, records; empty: `$XDG_RUNTIME_DIR/callboard/{cluster}/{node_id}` or
    `/tmp/callboard-{uid}/{cluster}/{node_id}`."""
    output_worker_bytes: int = 64 << 20
    """Bytes of output kept of each stream of each worker; older output is discarded."""
    output_bytes: int = 2 << 30
    """Bytes of output kept of all workers together; that of workers which ended longest ago is discarded first."""
    exit_with_parent: int | None = None
    """Leave when the process with this pid, our parent, is gone; None: live on."""
    exit_with: tuple[int, int] | None = None
    """Leave when this process is gone, by pid and start time in clock ticks since boot; it need not be our parent."""
    successor_s: float | None = None
    """Seconds that plain worker processes live on without an agent, for the next one to find them; None: 60, or 0
    with `exit_with_parent` or `exit_with`, because nobody starts such an agent again. (Ray actors live as long as
    their Ray node.)"""
    notice_command: str = ""
    """A line for the shell that says whether this machine is about to go: exit code 0 with output is a notice, which
    drains the node. Empty: nobody looks."""
    notice_every_s: float = 5.0
    """Seconds between its runs."""
    notice_timeout_s: float = 10.0
    """Seconds that a run may take."""
    notice_within_ms: int = 0
    """Deadline of the drain that follows, in milliseconds; 0: what runs yields by its own timeouts."""
    leave_hooks_s: float = 2.0
    """Seconds that the hooks of workers may take when the agent leaves."""
    leave_s: float = 20.0
    """Seconds after which a leaving agent gives up on what is left and says so."""
    http_proxy: bool = False
    """Let proxy variables of the environment apply to the controller's address (GC-10)."""
    log_format: Literal["console", "json"] = "console"
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        self._check_names()
        self._check_amounts()
        self._check_ray()

    def _check_names(self) -> None:
        _need(
            self.log_level in LOG_LEVELS, "log_level", f"{self.log_level!r} is none of {', '.join(LOG_LEVELS).lower()}"
        )
        _need(self.log_format in ("console", "json"), "log_format", f"{self.log_format!r} is neither console nor json")
        _need(is_name(self.node_id), "node_id", f"{self.node_id!r} can't be a name")
        _need(is_name(self.cluster), "cluster", f"{self.cluster!r} can't be a name")
        group_fine = not self.node_group or is_name(self.node_group)
        _need(group_fine, "node_group", f"{self.node_group!r} can't be a name")
        for key, value in self.labels.items():
            _need(is_label(key), "labels", f"{key!r} can't be a label key")
            _need(key not in OWN_LABELS, "labels", f"{key} is a label that every node has of its own")
            _need(not value or is_label(value), "labels", f"{key}={value!r} can't be a label value")
        _need_address("controller", self.controller)
        _need(len(self.hardware) <= MAX_HARDWARE, "hardware", f"more than {MAX_HARDWARE} pieces")
        for kind, _ in self.hardware:
            _need(is_custom_resource(kind), "hardware", f"{kind!r} can't be the name of a type")
        for path in self.interpreters:
            _need(path.startswith("/"), "interpreters", f"{path!r} is not an absolute path")

    def _check_amounts(self) -> None:
        _need(0 <= self.warm_spares <= MAX_SPARES, "warm_spares", f"{self.warm_spares} is not 0 … {MAX_SPARES}")
        rank = self.rank if self.rank is not None else 0
        _need(0 <= rank < 1_000_000, "rank", f"{rank} is no rank")
        for name, count in (("gpus", self.gpus), ("simulate_gpus", self.simulate_gpus)):
            within = count is None or 0 <= count <= MAX_DEVICES
            _need(within, name, f"{count} is not 0 … {MAX_DEVICES}")
        cpu = self.cpu_milli if self.cpu_milli is not None else 0
        _need(0 <= cpu <= MAX_CPU_MILLI, "cpu_milli", f"{cpu} is not 0 … {MAX_CPU_MILLI}")
        memory = self.memory_bytes if self.memory_bytes is not None else 0
        _need(0 <= memory <= MAX_MEMORY_BYTES, "memory_bytes", f"{memory} is not 0 … 2^50")
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
            _need(math.isfinite(seconds) and seconds >= 0, name, f"{seconds} s is no time")

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
        raise OptionError("node_ip", f"{text!r} is no IP address; names are not looked up") from error
    one = not (ip.is_unspecified or ip.is_multicast)
    _need(one, "node_ip", f"{text} is not the address of one host")
    kept = text not in ("127.0.0.1", "::1")
    _need(kept, "node_ip", f"Ray replaces {text} by the address of an interface; on loopback take 127.0.0.2 or above")


def _need_address(option: str, address: str) -> None:
    try:
        split_address(address)
    except ValueError as error:
        raise OptionError(option, str(error)) from error
