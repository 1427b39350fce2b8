"""The options of a controller, checked once, before anything starts."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from callboard.model.roles import PRESETS, RolePreset
from callboard.security.certificates import CERTS_NAME
from callboard.security.signed_tokens import SignedTokenRules
from callboard.security.tls import TlsFiles

DEFAULT_METRICS = "127.0.0.1:8080"
DEFAULT_LISTEN = "127.0.0.1:7700"
"""Where a controller listens unless told otherwise."""

_CHOICES = {
    "loop": ("auto", "uvloop", "asyncio"),
    "log_format": ("auto", "console", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}

STATE_DIR_VARIABLE = "CALLBOARD_STATE_DIR"


class BadOption(ValueError):
    """An option that can't be used.

    Attributes:
        option: its name as on the command line.
        why: what is wrong and what to do, as sentences.
    """

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option}: {why}")
        self.option = option
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what is kept in memory and on disk; each queue has one.

    Attributes:
        inbox: calls and reports that wait to be handled; more are refused (calls) or held back (reports).
        ended_jobs: ended jobs kept in the state; the oldest go first.
        events_in_memory: newest events kept for watchers; older ones are read from the journal.
        events_on_disk: events kept in the journal; older revisions are compacted.
        watchers: watch streams at one time.
        session_queue: messages that wait for one agent; one that reads slower is cut off and joins again.
        agents: agent sessions at one time.
        reports_remembered: ids of reports kept per node, so that one that is sent again is only acknowledged.
        changes_per_snapshot: changes in the log after which a snapshot replaces them.
        message_bytes: largest message of a client or agent.
        client_requests_s: calls of one client in a second; of the owner and of agents there may be any number.
        client_streams: watches and other streams of one client at one time.
        client_waiting_jobs: jobs that wait in one pool when a trainer submits another.
        page_bytes: a page of a list ends early rather than becoming larger; below the 4 MiB clients accept by default.
    """

    inbox: int = 10_000
    ended_jobs: int = 1_000
    events_in_memory: int = 10_000
    events_on_disk: int = 100_000
    watchers: int = 1_000
    session_queue: int = 10_000
    agents: int = 20_000
    reports_remembered: int = 1_024
    changes_per_snapshot: int = 20_000
    message_bytes: int = 4 << 20
    page_bytes: int = 2 << 20
    client_requests_s: int = 200
    client_streams: int = 50
    client_waiting_jobs: int = 1_000

    def __post_init__(self) -> None:
        for limit in fields(self):
            count = getattr(self, limit.name)
            if not 1 <= count <= MAX_LIMIT:
                raise BadOption("--limit", f"{limit.name}={count} is not 1 … {MAX_LIMIT}.")


MAX_LIMIT = 1 << 30
"""Above what a limit could usefully be; a larger number is a mistake, and gRPC takes 32 bits."""


def option_of(field_name: str) -> str:
    """The option of `callboard controller` that sets a field of :class:`ControllerOptions`."""
    named_otherwise = {"limits": "--limit", "metrics_required": "--metrics", "tls": "--tls-cert", "jwt": "--jwt-key"}
    if field_name in named_otherwise:
        return named_otherwise[field_name]
    return f"--{field_name.removesuffix('_ms').replace('_', '-')}"


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the journal is kept unless told otherwise: CALLBOARD_STATE_DIR, or the user's state directory."""
    if stated := environ.get(STATE_DIR_VARIABLE):
        return Path(stated).absolute()
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "callboard" / "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """How a controller runs. Times in milliseconds.

    Attributes:
        listen: address "host:port"; port 0 takes a free one (see ``controller.json``).
        state_dir: journal, secrets and lock; mode 0700, one controller at a time.
        run_dir: where ``controller.json`` goes; None: the state directory.
        metrics: address "host:port" of the Prometheus figures; port 0 takes a free one; empty: none.
        metrics_required: end if that address can't be listened on, instead of going without.
        tls: what it listens with; none: what lies in ``certs`` of the state directory, if something does. With an
            authority, callers of ``listen`` must show a certificate of it.
        token_listen: address "host:port" of the port for callers that show a token and no certificate, where those of
            ``listen`` must show one; empty: the port after ``listen``'s; "none": there is none.
        jwt: which signed tokens of a company's login count; None: none do.
        metrics_open: show the figures to callers without a token.
        insecure: answer every caller, with or without a token, at any address.
        lease_ms: how long an agent may act without hearing from the controller. Three heartbeats, so that one lost
            message costs nothing.
        heartbeat_ms: time between heartbeats of an agent.
        orphan_grace_ms: how long workers run on without a controller once the lease ended.
        reconcile_grace_ms: how long a restarted controller waits for known nodes before it admits anything. Above
            the agents' longest reconnect backoff, so that running work is counted first (QL-03).
        stop_grace_ms: time for calls in flight when the controller stops.
        call_timeout_ms: bound of one unary call inside the controller, for callers without a deadline.
        progress_ms: time between marks of progress on an idle watch.
        loop: event loop; ``auto`` takes uvloop where it is installed.
        exit_with_parent: stop when the process that started this one is gone.
        log_format: ``console`` for people, ``json`` for machines, ``auto``: console on a terminal.
        log_level: least severe level that is logged.
        limits: bounds of queues and histories.
        roles: presets of the roles that components may name.
    """

    listen: str = DEFAULT_LISTEN
    state_dir: Path = field(default_factory=default_state_dir)
    run_dir: Path | None = None
    metrics: str = ""
    metrics_required: bool = True
    tls: TlsFiles = TlsFiles()
    token_listen: str = ""
    jwt: SignedTokenRules | None = None
    metrics_open: bool = False
    insecure: bool = False
    lease_ms: int = 15_000
    heartbeat_ms: int = 5_000
    orphan_grace_ms: int = 3_600_000
    reconcile_grace_ms: int = 20_000
    stop_grace_ms: int = 3_000
    call_timeout_ms: int = 60_000
    progress_ms: int = 10_000
    loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    exit_with_parent: bool = False
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = field(default_factory=Limits)
    roles: Mapping[str, RolePreset] = field(default_factory=lambda: PRESETS)

    def __post_init__(self) -> None:
        self._check_tls()
        for name in ("lease_ms", "heartbeat_ms", "stop_grace_ms", "call_timeout_ms", "progress_ms"):
            if getattr(self, name) <= 0:
                raise BadOption(option_of(name), "must be longer than nothing")
        for name in ("orphan_grace_ms", "reconcile_grace_ms"):
            if getattr(self, name) < 0:
                raise BadOption(option_of(name), "must not be negative")
        for name in ("loop", "log_format", "log_level"):
            known = _CHOICES[name]
            if getattr(self, name) not in known:
                raise BadOption(option_of(name), f"{getattr(self, name)!r} is none of {', '.join(known)}")
        if self.loop == "uvloop" and find_spec("uvloop") is None:
            raise BadOption("--loop", "uvloop is not installed; install it with pip, or choose auto")
        # Fewer than two heartbeats in a lease and one lost message would end it.
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise BadOption(
                "--lease", f"{self.lease_ms} ms is shorter than two heartbeats of {self.heartbeat_ms} ms; raise it"
            )

    def _check_tls(self) -> None:
        if (self.tls.cert is None) != (self.tls.key is None) or (self.tls.ca is not None and self.tls.cert is None):
            raise BadOption("--tls-cert", "name a certificate and its key; an authority only besides them")
        open_ones = {"--listen": self.listen, "--metrics": self.metrics}
        if self.tokens_at:
            open_ones["--token-listen"] = self.tokens_at
        for option, address in open_ones.items():
            if option == "--metrics" and not address:
                continue
            if not is_loopback(split_address(address, option)[0]) and not self.insecure and not self.secure:
                raise BadOption(
                    option,
                    f"{address} can be reached from other machines, and what is sent there can be read on the way. "
                    "Make certificates with `callboard certs init` or name them with --tls-cert, listen on 127.0.0.1, "
                    "or give up all protection with --insecure.",
                )

    @property
    def certs(self) -> Path:
        """Directory where an authority is looked for."""
        return self.state_dir / CERTS_NAME

    @property
    def secure(self) -> TlsFiles | None:
        """What it listens with by TLS; None: without. --insecure turns off what is found, not what is named."""
        if self.tls.cert is not None:
            return self.tls
        found = TlsFiles(*(self.certs / name for name in ("ca.pem", "server.pem", "server.key")))
        return None if self.insecure or found.cert is None or not found.cert.exists() else found

    @property
    def tokens_at(self) -> str:
        """Where callers without a certificate connect; empty: nowhere else."""
        if self.secure is None or self.secure.ca is None or self.token_listen == "none":  # noqa: S105
            return ""
        host, port = split_address(self.listen)
        return self.token_listen or f"{f'[{host}]' if ':' in host else host}:{port + 1 if port else 0}"

    @property
    def record_path(self) -> Path:
        """Where ``controller.json`` is written."""
        return (self.run_dir or self.state_dir) / "controller.json"


def split_address(address: str, option: str = "--listen") -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port", stated by ``option``.

    Raises:
        BadOption: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: which colon starts the port?
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise BadOption(option, f"{address!r} is no address; write host:port, e.g. {DEFAULT_LISTEN}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost is not trusted to be one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
