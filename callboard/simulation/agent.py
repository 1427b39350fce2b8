"""What does an agent do? Sessions, commands, workers and its part in Ray, by the rules of ``callboard.agents``.

One object is one run of the agent program: a crash throws it away with all it remembers, and what it had
started lives on until the next run finds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from callboard._version import __version__
from callboard.simulation.hosting import UNASKED_KILL_MS, StopOrder, Worker
from callboard.simulation.lease import Lease
from callboard.simulation.machines import Key, Machine
from callboard.simulation.network import Message, Stream
from callboard.simulation.outbox import Outbox
from callboard.simulation.site import Site
from callboard.simulation.tasks import GroupTasks
from callboard.simulation.timeline import Timer
from callboard.v1 import agent_pb2, common_pb2

WELCOME_MS = 20_000
BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 5_000

GONE_WITH_ITS_SESSION = "the Ray session ended"


class Agent:
    """One run of the agent of one node.

    Args:
        is_head: starts Ray's head.
        on_refused: called when the controller doesn't want this agent.
        on_session_lost: called when the head's session ended.
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
        self.ray = agent_pb2.RayNode()
        self.workers: dict[tuple[Key, int], Worker] = {}
        self._instance = instance
        self._is_head = is_head
        self._on_refused = on_refused
        self._frozen = False
        self._deferred: list[Callable[[], None]] = []
        self._groups = GroupTasks(self)
        self._lease = Lease(site.timeline, self.later, on_expired=self._end_strict, on_orphaned=self._end_all)
        self._newest: dict[Key, int] = {}
        self._epoch = self._term = 0
        self.stream: Stream | None = None
        self._welcomed = False
        self._backoff_ms = BACKOFF_FIRST_MS
        self._sequence = 0
        self._ray_told = agent_pb2.RayNode()
        self._bootstrap: agent_pb2.RayBootstrap | None = None
        self._joining_ray = False

    def start(self) -> None:
        """Connects, and brings up Ray."""
        self._connect()
        if self._is_head:
            self.later(self.site.chance.agents.randint(500, 1_500), self._start_head)

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
        for tree in self.machine.trees.values():
            tree.unfenced_until_ms = self.site.timeline.now_ms + for_ms + UNASKED_KILL_MS
        self.site.timeline.after(for_ms, self._thaw)

    def _thaw(self) -> None:
        self._frozen = False
        deferred, self._deferred = self._deferred, []
        for do in deferred:
            self._act(do)

    def leave(self, then: Callable[[], None]) -> None:
        """Leaves on purpose: ends its workers, says goodbye, ends."""
        self.leaving = True
        self._beat_once()
        for worker in list(self.workers.values()):
            worker.stop(self._unasked(hooks_ms=2_000))
        self._wait_left(self.site.timeline.now_ms + 15_000, then)

    def _wait_left(self, until_ms: int, then: Callable[[], None]) -> None:
        over = self.site.timeline.now_ms >= until_ms
        if not over and (self.workers or not self.outbox.empty):
            self.later(100, lambda: self._wait_left(until_ms, then))
            return
        if not self.workers and self.stream is not None and self._welcomed:
            self.site.network.send(self.stream, "up", ("goodbye", "leaves"))
        self.drop_ray()
        self.later(50, then)

    # ---- Ray ----

    def _start_head(self) -> None:
        self.site.ray.start_head()
        self._become(head=True)

    def _become(self, *, head: bool) -> None:
        ray_node_id = self.site.ray.add_raylet(self.machine.gpus * 1_000)
        self.ray = agent_pb2.RayNode(
            gcs_address="head:6379", session=self.site.ray.session, ray_node_id=ray_node_id, head=head
        )
        self._beat_once()

    def raylet_died(self, message: str) -> None:
        """The node's raylet is gone, and every actor with it."""
        if not self.ray.ray_node_id:
            return
        self.drop_ray()
        self.say("", ray_node_exited=agent_pb2.RayNodeExited(message=message, head=self._is_head))
        for worker in list(self.workers.values()):
            worker.die(GONE_WITH_ITS_SESSION)
        self._beat_once()
        wait_ms = self.site.chance.agents.randint(500, 5_000)
        self.later(wait_ms, self._start_head if self._is_head else self._join_ray)

    def drop_ray(self) -> None:
        """Ends the node's part in Ray; with the head, everybody's."""
        if not self.ray.ray_node_id:
            return
        if self._is_head:
            self.site.ray.stop_head()
        else:
            self.site.ray.drop_raylet(self.ray.ray_node_id)
        self.ray = agent_pb2.RayNode()

    def notice_session(self) -> None:
        """Looks whether its raylet's session still lives."""
        if self.ray.ray_node_id and self.ray.session != self.site.ray.session:
            self.raylet_died(GONE_WITH_ITS_SESSION)

    def _offer(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        self._bootstrap = bootstrap
        if not self._is_head and not self.ray.ray_node_id and not self._joining_ray:
            self._joining_ray = True
            self.later(self.site.chance.agents.randint(300, 2_000), self._join_ray)

    def _join_ray(self) -> None:
        self._joining_ray = False
        if self._is_head or self.ray.ray_node_id or self._bootstrap is None:
            return
        if self._bootstrap.session != self.site.ray.session:
            # Nobody answers there; a new address comes when there is one.
            self._joining_ray = True
            self.later(2_000, self._join_ray)
            return
        self._become(head=False)

    # ---- session ----

    def _connect(self) -> None:
        assert self.site.controller is not None
        stream = self.stream = self.site.network.open(self.machine.node_id, self, self.site.controller)
        self._welcomed = False
        self._ray_told = copy.deepcopy(self.ray)
        self.site.network.send(stream, "up", ("hello", self._hello()))
        self.later(WELCOME_MS, lambda: None if self._welcomed else self._lose(stream, "no Welcome"))

    def _hello(self) -> agent_pb2.Hello:
        machine = self.machine
        return agent_pb2.Hello(
            node_id=machine.node_id,
            version=__version__,
            epoch_seen=self._epoch,
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
        self._lease.renew()
        if kind == "command":
            self._command(content)
        elif kind == "ack":
            self.outbox.acknowledge(content)
        elif kind == "ray_bootstrap":
            self._offer(content)

    def _welcome(self, stream: Stream, welcome: agent_pb2.Welcome) -> None:
        if self._welcomed or welcome.epoch <= self._epoch or welcome.term < self._term:
            self._lose(stream, "a stale Welcome")
            return
        self._lease.check()
        self._epoch, self._term = welcome.epoch, welcome.term
        self._welcomed = True
        self._backoff_ms = BACKOFF_FIRST_MS
        self._lease.grant(welcome.lease_ms, welcome.orphan_grace_ms)
        self.outbox.acknowledge(welcome.known_report_ids)
        self.outbox.start_over()
        kept = {(_key(ref.worker), ref.generation) for ref in welcome.keep}
        for name, worker in list(self.workers.items()):
            if name not in kept:
                worker.stop(self._unasked())
        if welcome.HasField("ray_bootstrap"):
            self._offer(welcome.ray_bootstrap)
        self._beat(stream)
        self.said()

    def _beat(self, stream: Stream) -> None:
        if stream is not self.stream:
            return
        self._beat_once()
        wait_ms = self.site.options.heartbeat_ms * self.site.chance.agents.uniform(0.9, 1.1)

        def again() -> None:
            if stream is self.stream and not self._lease.check():
                self._lose(stream, "the controller was silent for the whole lease")
            self._beat(stream)

        self.later(wait_ms, again)

    def _beat_once(self) -> None:
        if self.stream is None or not self._welcomed:
            return
        self._sequence += 1
        beat = agent_pb2.Heartbeat(sequence=self._sequence, leaving=self.leaving)
        if self.ray != self._ray_told:
            self._ray_told = copy.deepcopy(self.ray)
            beat.ray.CopyFrom(self.ray)
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

    # ---- commands ----

    def _command(self, command: agent_pb2.Command) -> None:
        if self.outbox.begin(command.command_id):
            self._begin(command)
        self.said()

    def _begin(self, command: agent_pb2.Command) -> None:
        if command.term < self._term:
            self._refuse(command, f"term {command.term} is over, {self._term} is current")
            return
        self._term = command.term
        match command.WhichOneof("action"):
            case "start_worker":
                self._start_worker(command)
            case "stop_worker":
                self._stop_worker(command.command_id, command.stop_worker)
            case "create_placement_group":
                self._groups.create(command.command_id, command.create_placement_group)
            case "remove_placement_group":
                self._groups.remove(command.command_id, command.remove_placement_group)
            case _:
                self._refuse(command, "unknown")

    def _start_worker(self, command: agent_pb2.Command) -> None:
        start = command.start_worker
        key, generation = _key(start.worker), start.generation
        newest = self._newest.get(key, 0)
        if self.leaving:
            self._refuse(command, "this node is leaving")
            return
        if generation <= newest:
            self._refuse(command, f"generation {generation} is not newer than {newest}")
            return
        self._newest[key] = generation
        holder = self._holder_of_devices(start)
        if holder:
            self.site.count("start refused by its agent: device held")
            failed = agent_pb2.WorkerStartFailed(
                worker=start.worker,
                generation=generation,
                failure=agent_pb2.START_FAILURE_HOST,
                message=f"a device of it is still held by {holder}",
            )
            self.say(command.command_id, worker_start_failed=failed)
            return
        older = [worker for (other, _), worker in self.workers.items() if other == key]
        for worker in older:
            worker.stop(self._unasked())
        self.workers[key, generation] = Worker(self, command.command_id, start, older[-1] if older else None)

    def _stop_worker(self, command_id: str, stop: agent_pb2.StopWorker) -> None:
        key = _key(stop.worker)
        self._newest[key] = max(stop.generation, self._newest.get(key, 0))
        worker = self.workers.get((key, stop.generation))
        if worker is None or worker.gone:
            gone = agent_pb2.WorkerStopped(
                worker=stop.worker, generation=stop.generation, outcome=agent_pb2.STOP_OUTCOME_ALREADY_GONE
            )
            self.say(command_id, worker_stopped=gone)
            return
        now_ms = self.site.timeline.now_ms
        worker.stop(
            StopOrder(now_ms, now_ms + stop.cancel_timeout_ms, stop.kill_timeout_ms, stop.checkpoint, [command_id])
        )

    def _holder_of_devices(self, start: agent_pb2.StartWorker) -> str:
        key = _key(start.worker)
        for share in start.allocation.devices:
            used = share.milli
            for (other, generation), worker in self.workers.items():
                if other != key:
                    used += sum(held.milli for held in worker.command.allocation.devices if held.id == share.id)
                    if used > 1_000:
                        return f"{other[0]} g{generation}"
        return ""

    def _refuse(self, command: agent_pb2.Command, why: str) -> None:
        self.site.count("command refused by its agent")
        self.say(command.command_id, command_refused=agent_pb2.CommandRefused(message=why))

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""
        self.workers.pop((worker.key, worker.generation), None)

    def _end_strict(self) -> None:
        for worker in list(self.workers.values()):
            if worker.command.strict:
                worker.stop(self._unasked())

    def _end_all(self) -> None:
        self.site.count("orphans ended")
        for worker in list(self.workers.values()):
            worker.stop(self._unasked())

    def _unasked(self, hooks_ms: int = 0) -> StopOrder:
        now_ms = self.site.timeline.now_ms
        return StopOrder(now_ms, now_ms + hooks_ms, UNASKED_KILL_MS, hooks_ms > 0)


def _key(worker: common_pb2.WorkerKey) -> Key:
    return (worker.job_id, worker.component, worker.rank)
