"""The controller's machine: production's controller on the virtual loop, killed and started again with its disk.

Everything that decides is ``callboard.controller.core`` as it ships, behind the interceptor that ends its calls. Here
are its surroundings: streams that come off the simulated network, calls of clients, and the program's lives.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from callboard.agents.link.session import REFUSALS
from callboard.controller.core import Core
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.loop.clock import Clock
from callboard.controller.options import ControllerOptions, Limits
from callboard.controller.services.guard import Guard
from callboard.scheduler import Outcome, Refusal, Scheduler, State
from callboard.scheduler.records.events import Event, Make
from callboard.scheduler.records.job_records import Change
from callboard.security.caller_roles import ANYBODY
from callboard.security.gate import Gate
from callboard.simulation.checks.witness import ANSWER_MS, Witness
from callboard.simulation.world.disk import Disk, SimulatedJournal
from callboard.simulation.world.network import REFUSED, Message, Stream
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site
from callboard.simulation.world.virtual_time import Process
from callboard.v1 import agent_pb2
from callboard.wire.refusals import CallboardError, Unavailable

Fail = Callable[[Exception], None]
"""Told why there is no answer."""

HISTORY = 40
"""Ended jobs kept: fewer than in production, so that being forgotten is met, and a crash costs less to replay."""

EVENTS_IN_MEMORY = 200

SUPERVISOR_MS = 1_000
"""Until a controller that could not start is started again."""


class Watcher(Protocol):
    """Who checks what is decided."""

    def started(self, scheduler: Scheduler) -> None:
        """A state was rebuilt from the journal."""

    def before(self, scheduler: Scheduler, event: Event) -> None:
        """An event is about to be decided."""

    def decided(self, scheduler: Scheduler, event: Event, outcome: Outcome) -> None:
        """It was."""

    def committed(self, changes: Sequence[Change]) -> None:
        """These are on disk, and nobody was told yet."""


class Controller:
    """One controller, through all its lives."""

    def __init__(self, site: Site, disk: Disk, watcher: Watcher) -> None:
        self.disk = disk
        self.alive = False
        self.started_at_ms = 0
        """When it was started last, or went on after it had been stopped."""
        self.handle_ns = 0
        """Nanoseconds of real time inside the scheduler; nothing depends on it."""
        self.make_scheduler: type[Scheduler] = Scheduler
        self._site = site
        self._watcher = watcher
        options = site.options
        self._options = ControllerOptions(
            state_dir=Path("simulated"),
            lease_ms=options.lease_ms,
            heartbeat_ms=options.heartbeat_ms,
            orphan_grace_ms=options.orphan_grace_ms,
            reconcile_grace_ms=options.reconcile_grace_ms,
            limits=Limits(ended_jobs=HISTORY, events_in_memory=EVENTS_IN_MEMORY),
        )
        self._causes = itertools.count(1)
        self._process = Process("controller")
        self._scheduler = Scheduler()
        self._core: Core | None = None
        self._streams: dict[Stream, _Call] = {}
        self._waiting: dict[asyncio.Task[Any], Fail] = {}
        self.witness = Witness(site, lambda: self._scheduler.state)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of this life, or of the last one."""
        return self._scheduler

    def now_ms(self) -> int:
        """The controller's time in milliseconds since 1970."""
        return self._core.driver.now_ms() if self._core is not None else 0

    # ---- life ----

    def start(self) -> None:
        """Starts the program, unless it runs."""
        if self.alive:
            return
        self.alive = True
        self.started_at_ms = self._site.timeline.now_ms
        self._process = Process("controller")
        self._process.run(self._boot)

    def freeze(self, for_ms: int) -> None:
        """Stopped by SIGSTOP, or with its whole machine, for a while; what it is told waits in its sockets."""
        process = self._process
        if process.frozen:
            return
        process.freeze()

        def go_on() -> None:
            if self._process is process and self.alive:
                self.started_at_ms = self._site.timeline.now_ms
                self.witness.started(stopped_ms=for_ms)
            process.thaw()

        self._site.timeline.after(for_ms, go_on)

    def lose_power(self, in_ms: int, then: Callable[[], object]) -> None:
        """Lets the power of its machine fail, when it writes next after so long.

        Args:
            then: done when it did.
        """

        def failed() -> None:
            self._site.count("controller lost power while it wrote")
            self.crash()
            then()

        timeline = self._site.timeline
        self.disk.lose_power(timeline.now_ms + in_ms, lambda: timeline.after(0, failed))

    def crash(self) -> None:
        """Kills the program. A batch on its way is lost, or on disk without anybody having been told."""
        if not self.alive:
            return
        self.alive = False
        self._process.kill()
        self.disk.crashed()
        for stream in self._streams:
            self.witness.closed(stream)
        self._streams.clear()
        self._site.network.break_all("the controller died")
        waiting, self._waiting = self._waiting, {}
        for fail in waiting.values():
            fail(Unavailable("the controller died"))

    def _boot(self) -> None:
        timeline = self._site.timeline
        journal = SimulatedJournal(self._site, self.disk, self._committed)
        self._core = Core(
            self._options,
            journal,
            identity=lambda: "simulated",
            set_health=_nobody_asks,
            new_clock=lambda not_before_ms: Clock(
                not_before_ms, wall_ns=lambda: timeline.wall_ms * 1_000_000, monotonic_ns=lambda: timeline.now_ns
            ),
            new_cause=lambda source: f"{source}-{next(self._causes)}",
            new_scheduler=self._new_scheduler,
            threads=False,
        )
        self._guard = Guard(gate=Gate(lambda *_: ANYBODY), call_timeout_s=self._options.call_timeout_ms / 1000)
        self._process.start(timeline, self._live(self._core)).add_done_callback(self._ended)

    def _ended(self, done: asyncio.Task[None]) -> None:
        """The program ended by itself: it could not start on a full disk, or else by a defect."""
        error = None if done.cancelled() else done.exception()
        if isinstance(error, StoreFailed):
            self._site.count("controller could not start")
            self.crash()
            self._site.timeline.after(SUPERVISOR_MS, self.start)
            return
        self._site.timeline.fail(error or RuleBroken("defect", "the controller ended by itself"))

    async def _live(self, core: Core) -> None:
        await core.driver.start()
        await core.driver.run()

    def _committed(self, changes: Sequence[Change]) -> None:
        self.witness.committed(changes)
        self._watcher.committed(changes)

    def look(self) -> None:
        """Looks at what time makes wrong."""
        if not self.alive or self._core is None or self._process.frozen:
            self.witness.away()
            return
        serving = True
        try:
            self._core.driver.check_serving()
        except Unavailable:
            serving = False
        self.witness.look(
            serving=serving,
            well_ms=max(self.started_at_ms, self.disk.full_until_ms),
            tasks=self._process.tasks,
            calls=len(self._waiting),
        )
        self.witness.check_history(self._options.limits.ended_jobs)

    def _new_scheduler(self, state: State, ended_jobs: int) -> Scheduler:
        controller, watcher = self, self._watcher

        class Watched(self.make_scheduler):  # type: ignore[misc, name-defined]
            """The scheduler, with somebody who looks at each decision."""

            def handle(self, event: Event) -> Outcome:
                return controller.watch(self, event, super().handle)

        scheduler: Scheduler = Watched(state, ended_jobs)
        self._scheduler = scheduler
        self.witness.started()
        watcher.started(scheduler)
        return scheduler

    def watch(self, scheduler: Scheduler, event: Event, handle: Callable[[Event], Outcome]) -> Outcome:
        """Has an event decided under the eyes of the watcher.

        The driver answers defects and goes on, as it should; here each ends the simulation.
        """
        try:
            self.witness.deciding(event)
            self._watcher.before(scheduler, event)
            begun_ns = time.perf_counter_ns()
            outcome = handle(event)
            self.handle_ns += time.perf_counter_ns() - begun_ns
            self._watcher.decided(scheduler, event, outcome)
        except (Refusal, CallboardError):
            raise
        except Exception as error:
            self._site.timeline.fail(error)
            raise
        return outcome

    # ---- what reaches it ----

    def ask(self, make: Make, then: Callable[[Outcome], None], fail: Fail, *, source: str) -> None:
        """Has an event decided, as a call of a client does; ``then`` is called once that is journaled."""
        core = self._core
        if not self.alive or core is None:
            fail(Unavailable("the controller is away"))
            return

        async def call() -> None:
            me = asyncio.current_task()
            assert me is not None
            try:
                outcome = await core.driver.ask(make, lambda outcome: outcome, source=source)
            except (Refusal, CallboardError) as refusal:
                if not isinstance(refusal, Unavailable):
                    self._site.count("calls refused")
                self._waiting.pop(me)(refusal)
            else:
                del self._waiting[me]
                then(outcome)

        task = self._process.start(self._site.timeline, call())
        self._waiting[task] = fail
        self._site.timeline.after(ANSWER_MS, lambda: self._check_answered(task, source))

    def _check_answered(self, task: asyncio.Task[Any], source: str) -> None:
        if task not in self._waiting:
            return
        # A program that is stopped answers nobody.
        now_ms = self._site.timeline.now_ms
        since_ms = now_ms if self._process.frozen else self.started_at_ms
        if now_ms - since_ms < ANSWER_MS:
            wait_ms = since_ms + ANSWER_MS - now_ms
            self._site.timeline.after(wait_ms, lambda: self._check_answered(task, source))
        else:
            raise RuleBroken("R7", f"a {source} has been waiting for its answer for {ANSWER_MS} ms")

    def receive(self, stream: Stream, message: Message) -> None:
        if not self.alive:
            self._site.network.close(stream, "down", "nobody listens")
            return
        call = self._streams.get(stream)
        if call is None:
            call = self._streams[stream] = _Call(self._site, stream, self.witness)
            call.task = self._process.start(self._site.timeline, self._serve(call))
        self.witness.received(stream, message)
        call.requests.put_nowait(agent_pb2.SessionRequest(**{message[0]: message[1]}))

    def broken(self, stream: Stream, why: str) -> None:  # noqa: ARG002 - a server isn't told why
        """The connection of a stream is gone: gRPC cancels its handler."""
        self.witness.closed(stream)
        call = self._streams.pop(stream, None)
        if call is not None and call.task is not None:
            call.over = True
            call.task.cancel()

    async def _serve(self, call: _Call) -> None:
        core = self._core
        assert core is not None

        async def found(_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.stream_stream_rpc_method_handler(core.agents.Session)

        handler = await self._guard.intercept_service(found, _SESSION)
        assert handler is not None
        try:
            await handler.stream_stream(call.messages(), call)  # type: ignore[misc, arg-type]
        except grpc.aio.AbortError:
            pass  # it is said in `why`
        finally:
            self._streams.pop(call.stream, None)
            self.witness.closed(call.stream)
        call.over = True
        self._site.network.close(call.stream, "down", call.why)


class _Details(grpc.HandlerCallDetails):
    method = "/callboard.v1.AgentService/Session"
    invocation_metadata = ()


_SESSION = _Details()


class _Call:
    """One stream as its handler sees it: what ``grpc.aio.ServicerContext`` offers, as far as it is used."""

    def __init__(self, site: Site, stream: Stream, witness: Witness) -> None:
        self.stream = stream
        self.requests: asyncio.Queue[agent_pb2.SessionRequest] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.over = False
        self.why = "ended"
        self._network = site.network
        self._witness = witness

    async def messages(self) -> AsyncIterator[agent_pb2.SessionRequest]:
        while True:
            request = await self.requests.get()
            self._witness.read(self.stream)
            if request.HasField("goodbye"):
                self._witness.bid_farewell(self.stream)
            yield request

    async def write(self, response: agent_pb2.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        assert kind is not None
        message = (kind, getattr(response, kind))
        self._witness.sent(self.stream, message)
        self._network.send(self.stream, "down", message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:  # noqa: ARG002
        """Ends the call with a status."""
        self.why = f"{REFUSED}{details}" if code in REFUSALS else details
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Nothing: tokens are not simulated."""
        return ()

    def peer(self) -> str:
        return f"ipv4:{self.stream.node_id}:1"

    def cancelled(self) -> bool:
        return self.over

    def done(self) -> bool:
        return self.over


def _nobody_asks(*, serving: bool) -> None:
    """Nobody asks for the health of a simulated controller."""
