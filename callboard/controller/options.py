"""The options of a controller, checked once, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from callboard.model.frozen import dataclass
from callboard.model.options import OptionError, option, option_of
from callboard.security.places import CERTS_NAME
from callboard.security.tls import TlsFiles, is_loopback

if TYPE_CHECKING:
    from callboard.model.roles import RolePreset
    from callboard.security.signed_tokens import SignedTokenRules

DEFAULT_METRICS = "127.0.0.1:8080"
DEFAULT_PAGE = "127.0.0.1:8780"
DEFAULT_LISTEN = "127.0.0.1:7700"
"""Where a controller listens unless told otherwise."""

_CHOICES = {
    "loop": ("auto", "uvloop", "asyncio"),
    "log_format": ("auto", "console", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}

STATE_DIR_VARIABLE = "CALLBOARD_STATE_DIR"


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
        client_requests_s: calls of one client in a second, one that changes something for four; of the owner and of
            agents there may be any number.
        client_streams: watches and other streams of one client at one time.
        page_streams: browsers that follow the page at one time.
        client_refusals_s: refusals in a second of one caller whose requests are not valid or whom nobody knows; more
            wait up to a second each, those of the owner and of agents, too.
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
    client_refusals_s: int = 50
    client_waiting_jobs: int = 1_000
    page_streams: int = 200

    def __post_init__(self) -> None:
        for limit in fields(self):
            count = getattr(self, limit.name)
            if not 1 <= count <= MAX_LIMIT:
                raise OptionError("--limit", f"{limit.name}={count} is not 1 … {MAX_LIMIT}.")


MAX_LIMIT = 1 << 30
"""Above what a limit could usefully be; a larger number is a mistake, and gRPC takes 32 bits."""


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the journal is kept unless told otherwise: CALLBOARD_STATE_DIR, or the user's state directory."""
    if stated := environ.get(STATE_DIR_VARIABLE):
        return Path(stated).absolute()
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "callboard" / "controller"


def _presets() -> Mapping[str, RolePreset]:
    from callboard.model.roles import PRESETS  # noqa: PLC0415 - help comes without what specs need

    return PRESETS


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """How a controller runs: its options, and how `callboard controller` calls them."""

    listen: str = option(DEFAULT_LISTEN, "Address to listen on.", metavar="HOST:PORT")
    """Port 0 takes a free one (see ``controller.json``)."""
    state_dir: Path = option(
        default_state_dir, "Where the journal is kept. Default: $CALLBOARD_STATE_DIR.", metavar="DIR"
    )
    """Journal, secrets and lock; mode 0700, one controller at a time."""
    store: str = option(
        "",
        "PostgreSQL with the journal, shared by several controllers: one leads, the others stand by. "
        "Default: $CALLBOARD_STORE, else a file in the state directory.",
        metavar="URL",
        shown=False,
    )
    advertise: str = option(
        "",
        "With --store: where clients and agents reach this controller. Default: --listen's.",
        metavar="HOST:PORT",
        shown=False,
    )
    store_lease_ms: int = option(4_000, "With --store: silence of the leader after which another one leads.")
    """It stops a quarter before."""
    run_dir: Path | None = option(None, "Folder for the file with the controller's address and pid.", metavar="DIR")
    """None: the state directory."""
    metrics: str = option(
        "",
        "Address of the Prometheus figures; none: no figures. Default: 127.0.0.1:8080 if it is free.",
        metavar="HOST:PORT",
    )
    """Here, empty is none; port 0 takes a free one."""
    metrics_required: bool = option(True, "", "--metrics")
    """End if that address can't be listened on, instead of going without."""
    roles: Mapping[str, RolePreset] = option(_presets)
    """Presets of the roles that components may name."""
    metrics_open: bool = option(False, "Show the Prometheus figures to callers without the token, too.")
    otlp: str = option("", "Send traces of jobs to this OpenTelemetry collector (gRPC).", metavar="URL")
    page: str = option(
        "",
        "Address of the web page; none: no page. Default: 127.0.0.1:8780, or a free port if that is taken.",
        "--page",
        "--page-port",
        metavar="[HOST:]PORT",
        shown=False,
    )
    """Here, empty is none; port 0 takes a free one."""
    page_required: bool = option(True, "", "--page")
    """End if that address can't be listened on, instead of taking a free port."""
    page_open: bool = option(
        False, "Show the web page to everybody who can reach it; without a token they can change nothing."
    )
    page_names: tuple[str, ...] = option(
        (),
        "Name by which browsers may call the page, besides addresses and this machine's; may be repeated.",
        "--page-name",
        metavar="NAME",
    )
    insecure: bool = option(
        False, "Answer every caller without asking for a token. Everybody who reaches the port can then run code here."
    )
    tls: TlsFiles = option(TlsFiles(), "", "--tls-cert")
    """What it listens with; none: what lies in ``certs`` of the state directory, if something does. With an authority,
    callers of ``listen`` must show a certificate of it."""
    jwt: SignedTokenRules | None = option(None, "", "--jwt-key")
    """Which signed tokens of a company's login count; None: none do."""
    token_listen: str = option(
        "",
        "With --tls-ca: address for callers that have a token but no certificate; none: no such address. "
        "Default: the port after --listen's.",
        metavar="HOST:PORT",
    )
    lease_ms: int = option(15_000, "How long an agent may act without hearing from the controller.")
    """Three heartbeats, so that one lost message costs nothing."""
    heartbeat_ms: int = option(5_000, "Time between heartbeats of an agent.")
    orphan_grace_ms: int = option(
        3_600_000, "How long workers keep running without a controller after the lease has ended."
    )
    reconcile_grace_ms: int = option(20_000, "How long a restarted controller waits for the nodes it knows.")
    """Above the agents' longest reconnect backoff, so that running work is counted before anything is admitted
    (QL-03)."""
    stop_grace_ms: int = option(3_000, "Time for calls in progress to finish when the controller stops.")
    call_timeout_ms: int = option(60_000, "Time limit of one call of a client.")
    """For callers without a deadline."""
    progress_ms: int = option(10_000, "Time between marks of progress on an idle watch.")
    limits: Limits = option(Limits, "", "--limit")
    loop: Literal["auto", "uvloop", "asyncio"] = option("auto", "Event loop to use.")
    """``auto`` takes uvloop where it is installed."""
    log_format: Literal["auto", "console", "json"] = option(
        "auto", "Format of the log; auto: console on a terminal, else json."
    )
    """``console`` for people, ``json`` for machines, ``auto``: console on a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least important messages that are logged."
    )
    exit_with_parent: bool = False
    """Stop when the process that started this one is gone."""

    def __post_init__(self) -> None:
        self._check_tls()
        self._check_store()
        for name in ("lease_ms", "heartbeat_ms", "stop_grace_ms", "call_timeout_ms", "progress_ms"):
            if getattr(self, name) <= 0:
                raise OptionError(option_of(ControllerOptions, name), "must be longer than nothing")
        for name in ("orphan_grace_ms", "reconcile_grace_ms"):
            if getattr(self, name) < 0:
                raise OptionError(option_of(ControllerOptions, name), "must not be negative")
        for name in ("loop", "log_format", "log_level"):
            known = _CHOICES[name]
            if getattr(self, name) not in known:
                raise OptionError(
                    option_of(ControllerOptions, name), f"{getattr(self, name)!r} is none of {', '.join(known)}"
                )
        if self.loop == "uvloop" and find_spec("uvloop") is None:
            raise OptionError("--loop", "uvloop is not installed; install it with pip, or choose auto")
        if self.otlp and not self.otlp.startswith(("http://", "https://")):
            raise OptionError("--otlp", f"{self.otlp!r} is not a URL; write e.g. http://127.0.0.1:4317")
        if self.otlp and find_spec("opentelemetry") is None:
            raise OptionError("--otlp", "OpenTelemetry is not installed; install callboard[otel], or leave it out")
        # Fewer than two heartbeats in a lease and one lost message would end it.
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise OptionError(
                "--lease", f"{self.lease_ms} ms is shorter than two heartbeats of {self.heartbeat_ms} ms; raise it"
            )

    def _check_store(self) -> None:
        if self.advertise:
            split_address(self.advertise, "--advertise")
        if not self.store:
            return
        if find_spec("psycopg") is None:
            raise OptionError("--store", "needs a library; install it with `pip install 'callboard[postgres]'`")
        if not 1_000 <= self.store_lease_ms <= 600_000:
            raise OptionError("--store-lease", f"{self.store_lease_ms} ms is not 1 s … 10 min")
        if not self.advertise and split_address(self.listen)[0] in {"0.0.0.0", "::"}:  # noqa: S104 - to be refused
            raise OptionError("--advertise", "is missing: other controllers tell clients where this one is, HOST:PORT")

    def _check_tls(self) -> None:
        if (self.tls.cert is None) != (self.tls.key is None) or (self.tls.ca is not None and self.tls.cert is None):
            raise OptionError("--tls-cert", "name a certificate and its key; an authority only besides them")
        open_ones = {"--listen": self.listen, "--metrics": self.metrics, "--page": self.page}
        if self.tokens_at:
            open_ones["--token-listen"] = self.tokens_at
        for stated, address in open_ones.items():
            if stated in ("--metrics", "--page") and not address:
                continue
            if not is_loopback(split_address(address, stated)[0]) and not self.insecure and not self.secure:
                raise OptionError(
                    stated,
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
        OptionError: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: which colon starts the port?
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise OptionError(option, f"{address!r} is not an address; write host:port, e.g. {DEFAULT_LISTEN}")
    return host, int(port)


def page_address(text: str) -> str:
    """What ``--page`` says, as an address: a port alone is one of this machine."""
    return f"127.0.0.1:{text}" if text.isdecimal() else text
