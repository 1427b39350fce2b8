"""What does an agent do? Sessions, commands, workers and its part in Ray, by the rules of ``callboard.agents``.

One object is one run of the agent program: a crash throws it away with all it remembers, and what it had
started lives on until the next run finds it.
"""

from __future__ import annotations

import copy
from asyncio import TimerHandle as Timer
from collections.abc import Callable
from typing import Any

from callboard._version import __version__
from callboard.simulation.commands import Commands
from callboard.simulation.hosting import Worker
from callboard.simulation.lease import Lease
from callboard.simulation.machines import Key, Machine
from callboard.simulation.membership import Membership
from callboard.simulation.network import Message, Stream
from callboard.simulation.outbox import Outbox
from callboard.simulation.site import Site
from callboard.simulation.tasks import GroupTasks
from callboard.v1 import agent_pb2, common_pb2

WELCOME_MS = 20_000
BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 5_000


class Agent:
    """One run of the agent of one node.

    Args:
        is_head: starts Ray's head.
        on_refused: called when the controller doesn't want this agent.
    """

    def __init__(
        self,
        site: Site,
        machine: Machine,
        instance: str,
        *,
        is_head: bool,
        on_refused: Callable[[], None],
    ) -> None:
        self.site = site
        self.machine = machine
        self.outbox = Outbox(instance)
        self.alive = True
        self.leaving = False
        self.membership = Membership(self, is_head=is_head)
        self.groups = GroupTasks(self)
        self._instance = instance
        self._on_refused = on_refused
        self._frozen = False
        self._deferred: list[Callable[[], None]] = []
        self._commands = Commands(self)
        self._lease = Lease(
            site.timeline, self.later, on_expired=self._end_strict, on_orphaned=self._end_all, write=self._write_lease
        )
        self._epoch = 0
        self._hellos = 0
        self.stream: Stream | None = None
        self._welcomed = False
        self._backoff_ms = BACKOFF_FIRST_MS
        self._sequence = 0
        self._hello_ms = 0
        self._beats: dict[int, int] = {}
        self._ray_told = agent_pb2.RayNode()

    def start(self) -> None:
        """Connects, and brings up Ray."""
        self._connect()
        self.membership.start()

    @property
    def ray(self) -> agent_pb2.RayNode:
        """The node's part in Ray."""
        return self.membership.node

    @property
    def workers(self) -> dict[tuple[Key, int], Worker]:
        """The workers it answers for, by key and generation."""
        return self._commands.workers

    def later(self, wait_ms: float, do: Callable[[], None]) -> Timer:
        """Does something in a while, if this run of the agent still lives; once it is thawed, if it is frozen."""
        return self.site.timeline.after(wait_ms, lambda: self._act(do))

    def _act(self, do: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self._frozen:
            self._deferred.append(do)
        else:
            do()

    # ---- what happens to it ----

    def crash(self) -> None:
        """Killed: nothing is said, nothing is remembered, what it started lives on."""
        self.alive = False
        if self.stream is not None:
            self.site.network.close(self.stream, "up", "the agent died")

    def freeze(self, for_ms: int) -> None:
        """Stopped by SIGSTOP for a while; messages wait in its sockets."""
        self._frozen = True
        self.site.timeline.after(for_ms, self._thaw)

    def _thaw(self) -> None:
        self._frozen = False
        deferred, self._deferred = self._deferred, []
        for do in deferred:
            self._act(do)

    def leave(self, then: Callable[[], None]) -> None:
        """Leaves on purpose: ends its workers, says goodbye, ends."""
        self.leaving = True
        self.beat_once()
        self._commands.end(hooks_ms=2_000)
        self._wait_left(self.site.timeline.now_ms + 15_000, then)

    def _wait_left(self, until_ms: int, then: Callable[[], None]) -> None:
        over = self.site.timeline.now_ms >= until_ms
        if not over and (self.workers or not self.outbox.empty):
            self.later(100, lambda: self._wait_left(until_ms, then))
            return
        if not self.workers and self.stream is not None and self._welcomed:
            self.site.network.send(self.stream, "up", ("goodbye", agent_pb2.Goodbye(reason="leaves")))
        self.membership.drop()
        self.later(50, then)

    # ---- session ----

    def _connect(self) -> None:
        assert self.site.controller is not None
        stream = self.stream = self.site.network.open(self.machine.node_id, self, self.site.controller)
        self._welcomed = False
        self._hellos += 1
        self._ray_told = copy.deepcopy(self.ray)
        self._hello_ms = self.site.timeline.now_ms
        self.site.network.send(stream, "up", ("hello", self._hello()))
        self.later(WELCOME_MS, lambda: None if self._welcomed else self._lose(stream, "no Welcome"))

    def _hello(self) -> agent_pb2.Hello:
        machine = self.machine
        return agent_pb2.Hello(
            node_id=machine.node_id,
            version=__version__,
            epoch_seen=self._epoch,
            number=self._hellos,
            labels=machine.labels,
            inventory=agent_pb2.Inventory(
                capacity=common_pb2.Resources(
                    cpu_milli=machine.cpu_milli, memory_bytes=machine.memory_bytes, gpu_milli=machine.gpus * 1_000
                ),
                devices=[common_pb2.Device(index=index, id=str(index)) for index in range(machine.gpus)],
                simulated=machine.simulated,
            ),
            ray=self.ray,
            workers=[worker.report() for worker in self.workers.values()],
            instance=self._instance,
            runtime=agent_pb2.RUNTIME_RAY,
            hostname=machine.node_id,
            clock_ms=self.site.timeline.wall_ms,
        )

    def _lose(self, stream: Stream, why: str) -> None:
        """The session is over; another one is opened."""
        if self.stream is not stream:
            return
        if stream.agent_open:
            self.site.network.close(stream, "up", why)
        self.stream = None
        wait_ms = self._backoff_ms * self.site.chance.agents.uniform(0.5, 1)
        self._backoff_ms = min(BACKOFF_MAX_MS, self._backoff_ms * 2)
        self.later(wait_ms, lambda: None if self.stream is not None else self._connect())

    def reconnect(self) -> None:
        """Opens its session anew."""
        if self.stream is not None and not self._frozen:
            self._lose(self.stream, "asked to")

    def broken(self, stream: Stream, why: str) -> None:
        """The stream ended."""
        self._act(lambda: self._refused(stream) if why.startswith("refused") else self._lose(stream, why))

    def _refused(self, stream: Stream) -> None:
        if self.stream is stream:
            self.stream = None
            self._on_refused()

    def receive(self, stream: Stream, message: Message) -> None:
        """A message of the controller."""
        self._act(lambda: self._take(stream, message))

    def _take(self, stream: Stream, message: Message) -> None:
        if stream is not self.stream or not stream.agent_open:
            return
        kind, content = message
        if kind == "welcome":
            self._welcome(stream, content)
            return
        if not self._welcomed:
            self._lose(stream, "the first message was no Welcome")
            return
        # First act on what ran out while nothing was heard (it may have been frozen).
        self._lease.check()
        self._lease.heard()
        if kind == "heartbeat_reply":
            if content.sequence in self._beats:
                self._lease.renew(self._beats.pop(content.sequence))
        elif kind == "command":
            self._commands.handle(content)
        elif kind == "ack":
            self.outbox.acknowledge(content.report_ids)
        elif kind == "ray_bootstrap":
            self.membership.offer(content)

    def _welcome(self, stream: Stream, welcome: agent_pb2.Welcome) -> None:
        if self._welcomed or welcome.epoch <= self._epoch or welcome.term < self._commands.term:
            self._lose(stream, "a stale Welcome")
            return
        self._lease.check()
        self._epoch, self._commands.term = welcome.epoch, welcome.term
        self._welcomed = True
        self._backoff_ms = BACKOFF_FIRST_MS
        self._lease.grant(welcome.lease_ms, welcome.orphan_grace_ms, self._hello_ms)
        self._beats.clear()
        self.outbox.acknowledge(welcome.known_report_ids)
        self.outbox.start_over()
        self._commands.keep_only(list(welcome.keep))
        if welcome.HasField("ray_bootstrap"):
            self.membership.offer(welcome.ray_bootstrap)
        self._beat(stream)
        self.said()

    def _beat(self, stream: Stream) -> None:
        if stream is not self.stream:
            return
        self.beat_once()
        wait_ms = self.site.options.heartbeat_ms * self.site.chance.agents.uniform(0.9, 1.1)

        def again() -> None:
            if stream is self.stream and not self._lease.check():
                self._lose(stream, "the controller was silent for the whole lease")
            self._beat(stream)

        self.later(wait_ms, again)

    def beat_once(self) -> None:
        """Sends a heartbeat now."""
        if self.stream is None or not self._welcomed:
            return
        self._sequence += 1
        beat = agent_pb2.Heartbeat(sequence=self._sequence, leaving=self.leaving)
        if self.ray != self._ray_told:
            self._ray_told = copy.deepcopy(self.ray)
            beat.ray.CopyFrom(self.ray)
        self._beats[self._sequence] = self.site.timeline.now_ms
        self.site.network.send(self.stream, "up", ("heartbeat", beat))

    def say(self, command_id: str, **content: Any) -> None:
        """Reports something."""
        self.outbox.report(command_id, **content)
        self.said()

    def said(self) -> None:
        """Sends what waits to be sent."""
        if self.stream is not None and self._welcomed:
            for report in self.outbox.take():
                self.site.network.send(self.stream, "up", ("report", report))

    # ---- workers ----

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""
        self._commands.forget(worker)

    def end_actors(self, message: str) -> None:
        """Every actor of the node is dead."""
        for worker in list(self.workers.values()):
            worker.die(message)

    def _write_lease(self, until_ms: int) -> None:
        self.machine.lease_until_ms = until_ms

    def _end_strict(self) -> None:
        self._commands.end(lambda worker: worker.command.strict)

    def _end_all(self) -> None:
        self.site.count("orphans ended")
        self._commands.end()
