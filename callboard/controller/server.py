"""The server: a controller's state, driver, sessions and services put together, started and ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from callboard.controller.core import Core
from callboard.controller.endings import Endings
from callboard.controller.journal.journal import Member, SqliteJournal
from callboard.controller.journal.state_dir import PACKAGES_NAME, StateDir, StoreFailed
from callboard.controller.logs import configure_logs
from callboard.controller.loop.collector import sparing_what_is_made
from callboard.controller.loop.questions import SWITCH_S
from callboard.controller.metrics.metrics import Metrics, MetricsPortTaken
from callboard.controller.metrics.traces import Traces, provider_for
from callboard.controller.options import ControllerOptions, split_address
from callboard.controller.package_store import Packages, SharedPackages
from callboard.controller.page.address import PageAddress, PageUnavailable, listen, missing_package
from callboard.controller.page.calls import Calls
from callboard.controller.record import remove_record, write_record
from callboard.controller.services.event import EventService
from callboard.controller.services.guard import Guard
from callboard.controller.services.job import JobService
from callboard.controller.services.node import NodeService
from callboard.controller.services.placement import PlacementService
from callboard.controller.services.placement_group import PlacementGroupService
from callboard.controller.services.pool import PoolService
from callboard.controller.services.scheduler import Lists, SchedulerService
from callboard.controller.views.stats import demand_page
from callboard.model.inputs.reading import build_inputs
from callboard.model.log import structlog
from callboard.scheduler.records.states import ENDED
from callboard.security.access import LOOK_EVERY_S, Access
from callboard.security.audit_log import AUDIT_NAME, AuditLog
from callboard.security.gate import ClientLimits, Gate
from callboard.security.joining import Joining
from callboard.security.places import UnsafeFile
from callboard.security.tls import ServerTls, TlsFiles
from callboard.security.tokens import TOKEN_NAME, Registration
from callboard.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    placement_group_pb2,
    placement_group_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from callboard.wire.refusals import ErrorReason, Unavailable

if TYPE_CHECKING:
    from callboard.controller.journal.shared import PostgresJournal
    from callboard.controller.page.server import PageServer  # needs packages of an extra

FINISH_S = 2.0
"""How long handlers may take to run their last lines once their calls are over (GC-01)."""

EXIT_FAILED = 1

SERVICES = (agent_pb2, node_pb2, pool_pb2, job_pb2, placement_group_pb2, placement_pb2, scheduler_pb2, event_pb2)
"""Modules whose services reflection tells of."""

log = structlog.get_logger(__name__)


class PortTaken(Exception):
    """Somebody listens there already."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} is in use or can't be listened on. Is another controller running there? "
            "Stop it, or choose another address with --listen."
        )
        self.address = address


class Controller:
    """One controller, from :meth:`start` to :meth:`stop`."""

    def __init__(self, options: ControllerOptions) -> None:
        self.options = options
        limits = options.limits
        self._directory = StateDir(options.state_dir)
        self._shared = self._shared_journal() if options.store else None
        self._journal = self._shared or SqliteJournal(
            self._directory, events_kept=limits.events_on_disk, changes_per_snapshot=limits.changes_per_snapshot
        )
        self._identity = ""
        core = Core(
            options,
            self._journal,
            identity=lambda: self._identity,
            set_health=self._set_health,
            measured=lambda what, s: self.metrics.observations.took(what, s),  # noqa: PLW0108 - they are made below
        )
        self.driver, self.events, self.sessions, self.agents = core.driver, core.events, core.sessions, core.agents
        self.outputs = core.outputs
        self._health = health.aio.HealthServicer()
        self.metrics = Metrics(self.driver, self.sessions.liveness.ages_s)
        self.traces = Traces(provider_for(options.otlp), lambda: self.driver.state) if options.otlp else None
        if self.traces is not None:
            self.driver.subscribe(self.traces)
        self.audit = AuditLog(options.state_dir / AUDIT_NAME)
        tls = options.secure
        self._certs = tls.ca.parent if tls is not None and tls.ca is not None else None
        self.access = Access(options.state_dir, insecure=options.insecure, certs=self._certs, jwt=options.jwt)
        self._tls: ServerTls | None = None
        self.tokens_at = ""
        """Where callers without a certificate connect, if not at :attr:`address`."""
        self._registration: Registration | None = None
        self._guard = Guard(
            certified=self._certs is not None,
            gate=Gate(
                self.access.identify,
                limits=ClientLimits(
                    requests_s=limits.client_requests_s,
                    streams=limits.client_streams,
                    refusals_s=limits.client_refusals_s,
                ),
                audit=self.audit,
            ),
            call_timeout_s=options.call_timeout_ms / 1000,
            called=self.metrics.observations.called,
            standby=self._standby,
        )
        self._calls = Calls(self._guard)
        self._page_at: PageAddress | None = None
        self._page: PageServer | None = None
        self._page_loading: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self._reviewing: asyncio.Task[None]
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = options.listen

    async def start(self) -> None:
        """Locks the state, replays it, begins a term and listens. With a shared journal: listens, and begins a term
        once it leads.

        Raises:
            StoreFailed: the state can't be used.
            PortTaken: the address can't be listened on.
        """
        self._directory.open()
        try:
            self._identity = await self._shared.prepare() if self._shared else self._directory.identity
            # The port before the state: a second controller ends at once, without a new term.
            self._server = self._new_server()
            self._page_at = self._listen_for_browsers()
            self._open_access()
            if self._shared is None:
                await self.driver.start()
            await self._server.start()
            self.metrics.start(
                self.options.metrics,
                required=self.options.metrics_required,
                pages={"/demand": lambda: self.driver.question(lambda scheduler: demand_page(scheduler.state))},
                admits=None if self.options.metrics_open else self.access.may_read_figures,
                tls=self._tls,
            )
            write_record(
                self.options.record_path,
                address=self.address,
                started_ms=self.driver.started_ms,
                term=self.driver.state.meta.term,
                tokens_at=self.tokens_at,
            )
        except BaseException:
            await self._journal.close()
            self._directory.close()
            self._close_access()
            await self.metrics.stop()
            if self._page_at is not None:
                self._page_at.listening.close()
            if self._server is not None:
                await self._server.stop(0)
            raise
        self._running = asyncio.create_task(self.driver.run(started=self._shared is None))
        if self._page_at is not None:
            # Beside it: what serves the page takes a fifth of a second to load, which programs need not wait for.
            self._page_loading = asyncio.create_task(self._serve_page(self._page_at))
        reviewing = asyncio.create_task(self._review())
        self._tasks.add(reviewing)
        self._reviewing = reviewing

    async def stop(self, hurried: asyncio.Event | None = None) -> None:
        """Ends calls, sessions and watches, takes a snapshot and lets go of everything.

        Args:
            hurried: when it is set, calls in flight are not waited for.
        """
        server, running = self._server, self._running
        assert server is not None
        assert running is not None
        self._set_health(serving=False)
        remove_record(self.options.record_path)
        self.driver.stop()
        stopping = Unavailable("the controller is stopping", reason=ErrorReason.STOPPING)
        self.sessions.close_all(stopping)
        self.events.close(stopping)
        self.outputs.close(stopping)
        if self._page_loading is not None:
            await asyncio.wait({self._page_loading})  # where it failed, it is logged
        if self._page is not None:
            self._page.close(stopping)
        ended = asyncio.create_task(server.stop(self.options.stop_grace_ms / 1000))
        if hurried is not None:
            hurrying = asyncio.create_task(hurried.wait())
            await asyncio.wait({ended, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            if not ended.done():
                await server.stop(0)
        await ended
        await self.metrics.stop()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        if self._page is not None:
            await self._page.stop()
        if not await self._guard.idle(FINISH_S):
            log.error("handlers still run at the end")
        await self.sessions.shut_down()
        await running
        self._reviewing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._directory.close()
        self._close_access()
        log.info("stopped")

    async def ended(self) -> None:
        """Waits for the driver, which ends by itself only by a defect."""
        assert self._running is not None
        await asyncio.shield(self._running)

    def _shared_journal(self) -> PostgresJournal:
        from callboard.controller.journal.shared import PostgresJournal  # noqa: PLC0415 - an extra

        limits = self.options.limits
        return PostgresJournal(
            self.options.store,
            lambda: Member(self.options.advertise or self.address, self.tokens_at),
            self.options.state_dir,
            lease_ms=self.options.store_lease_ms,
            events_kept=limits.events_on_disk,
            changes_per_snapshot=limits.changes_per_snapshot,
        )

    def _standby(self) -> str:
        """What answers are marked with: as of when they are."""
        following = self.driver.following
        if following is None:
            return ""
        revision, age_ms = self.driver.state.meta.revision, self.driver.age_ms()
        return f"leader={following.leader.address}; revision={revision}; age_ms={age_ms}"

    async def _review(self) -> None:
        """Ends the streams of clients that were revoked, and makes a rotated token known."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._guard.review()
            await asyncio.to_thread(self.audit.sync)
            if self._registration is not None and self._registration.token != self.access.token:
                self._registration.close()
                self._registration = self._registered()

    @property
    def page_address(self) -> str:
        """What to open in a browser; empty: no page is served."""
        return self._page_at.url if self._page_at is not None else ""

    def _listen_for_browsers(self) -> PageAddress | None:
        if not self.options.page:
            return None
        if missing := missing_package():
            if self.options.page_required:
                raise PageUnavailable(
                    "the web page needs more packages. Install them with pip install 'callboard[page]', or choose "
                    "--page none."
                )
            log.info("no page is served", missing=missing)
            return None
        return listen(self.options)

    async def _serve_page(self, at: PageAddress) -> None:
        try:
            module = await asyncio.to_thread(import_module, "callboard.controller.page.server")
            page: PageServer = module.PageServer(self.driver, self.events, self._calls, self.access, self.options)
            await page.start(at, self._tls, controller=self.address)
        except Exception:
            log.exception("the page can't be served")
            at.listening.close()
            self._page_at = None  # nobody is sent there
        else:
            self._page = page

    def _registered(self) -> Registration:
        tls = None
        if self._tls is not None:
            own = [self.options.certs / name for name in ("local.pem", "local.key")]
            ca = self._tls.files.ca or self._tls.files.cert
            tls = TlsFiles(ca, *own) if own[0].exists() else TlsFiles(ca)
        return Registration(self.address, self.access.token, tls=tls)

    def _open_access(self) -> None:
        """Makes the token known to the programs of this account."""
        try:
            self.audit.open()
            self.access.open()
        except (OSError, UnsafeFile) as error:
            path = self.options.state_dir / TOKEN_NAME
            remedy = "Remove it for a new one, or make it private."
            raise StoreFailed(path, f"can't be used ({error})", remedy) from error
        if self.access.token:
            self._registration = self._registered()
            for why in self._registration.refused:
                log.warning("programs of this account may need CALLBOARD_TOKEN_FILE to find the token", why=why)

    def _close_access(self) -> None:
        if self._registration is not None:
            self._registration.close()
        self.audit.close()

    def _new_server(self) -> grpc.aio.Server:
        limits = self.options.limits
        server = grpc.aio.server(
            interceptors=(self._guard,),
            options=(
                # Two servers on one port would share its calls (NJ-04).
                ("grpc.so_reuseport", 0),
                # A peer that is gone is noticed within 15 s (docs/agents.md); clients ping every 10 s, so half of that
                # is no attack (GC-05).
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_receive_message_length", limits.message_bytes),
                # Our own answers are bounded by their content; pages by page_bytes (GC-09).
                ("grpc.max_send_message_length", 64 << 20),
            ),
        )
        self._add_services(server)
        try:
            self._tls = ServerTls(self.options.secure) if self.options.secure is not None else None
        except UnsafeFile as error:
            raise StoreFailed(error.path, error.why, "See `callboard certs`.") from error
        asks = self._tls is not None and self._tls.files.ca is not None
        self.address = self._listen(server, self.options.listen, asks=asks)
        if self.options.tokens_at:
            self.tokens_at = self._listen(server, self.options.tokens_at, asks=False)
        return server

    def _listen(self, server: grpc.aio.Server, address: str, *, asks: bool) -> str:
        """Listens at an address, and returns it with the port that it got."""
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._tls.credentials(ask=asks))
        except RuntimeError as error:
            raise PortTaken(address) from error
        host, _ = split_address(address)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _add_services(self, server: grpc.aio.Server) -> None:
        driver, options = self.driver, self.options
        jobs = JobService(driver, self.outputs, options)
        jobs.traces = self.traces
        jobs.execs = self.agents.execs
        shared = SharedPackages(options.store) if options.store else None
        packages = Packages(options.state_dir / PACKAGES_NAME, self._needed_packages, shared=shared)
        jobs.packages = self.agents.packages = packages
        self.agents.joining = Joining(options.state_dir, self._certs, self.access)
        nodes, pools = NodeService(driver, options, self.sessions.live), PoolService(driver, options)
        events = EventService(self.events, driver, options)
        figures = SchedulerService(
            driver,
            self.events,
            self.metrics,
            self.audit,
            Lists(pools, nodes, jobs),
            page_address=lambda: self.page_address,
            members=lambda: self._shared.members if self._shared is not None else (),
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.agents, server)
        pool_pb2_grpc.add_PoolServiceServicer_to_server(pools, server)
        placement_group_pb2_grpc.add_PlacementGroupServiceServicer_to_server(
            PlacementGroupService(driver, options), server
        )
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementService(driver), server)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(figures, server)
        called_by_the_page: Any = self._calls
        for each in (server, called_by_the_page):
            job_pb2_grpc.add_JobServiceServicer_to_server(jobs, each)
            node_pb2_grpc.add_NodeServiceServicer_to_server(nodes, each)
            event_pb2_grpc.add_EventServiceServicer_to_server(events, each)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [
            module.DESCRIPTOR.services_by_name[name].full_name
            for module in SERVICES
            for name in module.DESCRIPTOR.services_by_name
        ]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    def _needed_packages(self) -> dict[str, set[str]]:
        """Packages of the jobs that live, by pool."""
        state, needed = self.driver.state, dict[str, set[str]]()
        for job in state.jobs.values():
            if job.state not in ENDED:
                spec = state.specs[job.uid].spec
                needed.setdefault(spec.pool, set()).update(chain.from_iterable(e.packages for e in spec.components))
        return needed

    def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        task = asyncio.create_task(self._health.set("", status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve_controller(options: ControllerOptions, listening: Callable[[str], None] | None = None) -> int:
    """Runs a controller until it is told to end; returns the program's exit code.

    Args:
        listening: is called with its address once it listens: with port 0 nobody knows it before.
    """
    if options.insecure:
        log.warning(
            "INSECURE: everybody who reaches this address controls the cluster and runs code on its nodes; "
            "leave out --insecure to ask callers for a token",
            address=options.listen,
        )
    endings = Endings(exit_with_parent=options.exit_with_parent)
    endings.watch()
    controller = Controller(options)
    try:
        with sparing_what_is_made():
            await controller.start()
    except (StoreFailed, PortTaken, MetricsPortTaken, PageUnavailable) as error:
        log.critical("the controller can't start", why=str(error))
        print(f"callboard controller: {error}", file=sys.stderr)  # noqa: T201 - for whoever reads no JSON
        endings.unwatch()
        return EXIT_FAILED
    if listening is not None:
        listening(controller.address)
    more = {"tokens_at": controller.tokens_at} if controller.tokens_at else {}
    log.info(
        "listening", address=controller.address, state_dir=str(options.state_dir), tls=bool(options.secure), **more
    )
    asked = asyncio.create_task(endings.asked.wait())
    ended = asyncio.create_task(controller.ended())
    try:
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        crashed = ended.done()
        if crashed:
            log.error("the driver ended by itself", error=repr(ended.exception()))
        with contextlib.suppress(Exception) if crashed else contextlib.nullcontext():
            await controller.stop(endings.hurried)
        return EXIT_FAILED if crashed else 0
    finally:
        asked.cancel()
        ended.cancel()
        endings.unwatch()


def run_controller(options: ControllerOptions, listening: Callable[[str], None] | None = None) -> int:
    """Runs a controller in this thread, on the event loop that the options name, until it is told to end.

    Args:
        listening: is called with its address once it listens.

    Returns:
        Exit code: 0 it stopped as asked, 1 it could not start or ended by itself.
    """
    configure_logs(options.log_format, options.log_level)
    build_inputs()
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner:
        main: Coroutine[Any, Any, int] = serve_controller(options, listening)
        return runner.run(main)


def _loop_factory(choice: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if choice == "asyncio":
        return None
    try:
        import uvloop  # noqa: PLC0415 - an extra, and absent on some platforms
    except ImportError:
        if choice == "uvloop":
            raise
        return None
    return uvloop.new_event_loop
