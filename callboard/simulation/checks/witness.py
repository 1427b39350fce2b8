"""A witness of everything that is said: acknowledgements, answers, silence and goodbyes, against what must hold.

:mod:`audit` looks at decisions; this looks at messages, at the time that passes between them, and at how much is kept.
It believes only what it saw on the wire and what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from callboard.scheduler import State
from callboard.scheduler.records.events import Event, NodeLost
from callboard.scheduler.records.job_records import Change, Put, WorkerRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import ENDED, HOLDING, NodeState, WorkerState
from callboard.simulation.world.network import Message, Stream
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site
from callboard.v1 import agent_pb2

LOOK_MS = 1_000

ANSWER_MS = 15_000
"""For the answer to a call: a slow commit and a snapshot before it, and some."""

SERVING_MS = 30_000
"""For the controller to serve again once its disk works: its longest wait between two attempts, and some."""

SILENCE_MS = 30_000
"""Beyond the lease, for a silent node to be given up: the longest kill and the controller's margin, and some."""

DECIDED_MS = 6_000
"""From a finding to its decision: the slowest commit, and some."""

GOODBYE_MS = 15_000
"""For a goodbye to count."""

HELD = "a device of it is still held by"
"""What an agent says of a start for which its node has no room."""

BACK_MS = 30_000
"""For a node whose agent is connected and heard of to count as there again; one that leaves takes about as long."""

PROOF_MS = 30_000
"""For the end of a worker to be known while its agent is well; a report that was lost costs its stream first."""

TASKS, TASKS_PER_NODE = 60, 20
"""Most that the controller may be at work on at one time, beside the calls of clients."""

_UNSTARTED = (WorkerState.ASSIGNED, WorkerState.STARTING)
_RUNNING = (*_UNSTARTED, WorkerState.READY)
_GONE = (NodeState.LOST, NodeState.LEFT)


class Witness:
    """Sees what passes between the controller and its agents."""

    def __init__(self, site: Site, state: Callable[[], State]) -> None:
        self._site = site
        self._state = state
        self._workers: dict[int, WorkerRecord] = {}
        """As they are on disk."""
        self._reports: dict[str, agent_pb2.Report] = {}
        self._epochs: dict[Stream, int] = {}
        self._hellos: dict[Stream, agent_pb2.Hello] = {}
        self._believed: dict[str, tuple[int, agent_pb2.Hello]] = {}
        """The Hello of each node that led to its newest session that was seen, with its epoch."""
        self._well_ms: dict[str, int] = {}
        """Since when nothing speaks against a node that counts as silent or gone."""
        self._unproved_ms: dict[str, dict[int, int]] = {}
        """By node: since when workers count as running there that don't."""
        self._stopped_ms = 0
        """For how long the controller was stopped, altogether."""
        self._heard_ms: dict[tuple[str, int], int] = {}
        """By node and epoch: when something was heard in that session last, without the time that was stopped."""
        self._came_back_ms: dict[tuple[str, int], int] = {}
        """When something was heard again after a silence for which a node is given up."""
        self._unwell_ms = -1
        """When the controller last served nobody."""
        self._since_ms = 0
        """When the state was last read from disk, or the controller went on."""

    # ---- what is seen ----

    def started(self, *, stopped_ms: int = 0) -> None:
        """A state was rebuilt from the journal, or a controller that was stopped for a while goes on: silence counts
        from now on."""
        self._stopped_ms += stopped_ms
        self._since_ms = self._site.timeline.now_ms
        self._well_ms.clear()
        self._unproved_ms.clear()

    def away(self) -> None:
        """The controller is dead or stopped: nobody is there who could decide what is due."""
        self._unwell_ms = self._site.timeline.now_ms

    def committed(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Put):
                if isinstance(change.record, WorkerRecord):
                    self._workers[change.record.generation] = change.record
            elif change.kind == "worker":
                self._workers.pop(int(str(change.key)), None)

    def received(self, stream: Stream, message: Message) -> None:
        kind, content = message
        self._site.heard_ms[stream.node_id] = self._site.timeline.now_ms
        if kind == "hello":
            self._hellos[stream] = content
        elif kind == "report":
            self._reports[content.report_id] = content
            if HELD in content.worker_start_failed.message:
                # The agent is the last to notice; its controller must have known.
                self._site.timeline.fail(RuleBroken("R2", content.worker_start_failed.message))

    def read(self, stream: Stream) -> None:
        """The controller took something from a stream. What a stopped one left unread is lost with its stream."""
        if stream in self._epochs:
            self._heard(stream.node_id, self._epochs[stream])

    def bid_farewell(self, stream: Stream) -> None:
        """The controller took a goodbye from a stream. One that arrives together with the end of its stream is dropped
        by gRPC with everything that nobody has taken: then the lease decides."""
        if stream in self._epochs:
            epoch, said_ms = self._epochs[stream], self._site.timeline.now_ms
            self._site.timeline.after(GOODBYE_MS, lambda: self._check_farewell(stream.node_id, epoch, said_ms))

    def sent(self, stream: Stream, message: Message) -> None:
        """The controller said something: it may acknowledge what is on disk, and believe the latest Hello."""
        kind, content = message
        if kind == "welcome":
            self._epochs[stream] = content.epoch
            self._heard(stream.node_id, content.epoch)
            hello, (epoch, before) = self._hellos[stream], self._believed.get(stream.node_id, (0, None))
            if epoch > content.epoch:
                return  # both were let in at once, and the Welcome of the session that is over comes last
            if before is not None and before.instance == hello.instance and before.number >= hello.number:
                what = f"Hello {hello.number} of {stream.node_id} is believed after {before.number}"
                self._site.timeline.fail(RuleBroken("I9", what))
            self._believed[stream.node_id] = (content.epoch, hello)
            self._check_kept(stream.node_id, hello, content)
        elif kind == "ack":
            for report_id in content.report_ids:
                report = self._reports.pop(report_id, None)
                if report is not None:
                    self._check_journaled(stream.node_id, report)

    def closed(self, stream: Stream) -> None:
        self._epochs.pop(stream, None)
        self._hellos.pop(stream, None)

    def _heard(self, node_id: str, epoch: int) -> None:
        now_ms = self._site.timeline.now_ms
        if self._silence_ms(node_id, epoch) >= self._site.options.lease_ms:
            self._came_back_ms[node_id, epoch] = now_ms
        self._heard_ms[node_id, epoch] = now_ms - self._stopped_ms

    def _silence_ms(self, node_id: str, epoch: int) -> int:
        listened_ms = self._site.timeline.now_ms - self._stopped_ms
        return listened_ms - self._heard_ms.get((node_id, epoch), listened_ms)

    # ---- what must hold ----

    def deciding(self, event: Event) -> None:
        """A node may be given up after a silence that the controller listened to, and not for one in which it was
        stopped itself.

        Raises:
            RuleBroken: a node is given up that was heard of.
        """
        if not isinstance(event, NodeLost) or (event.node_id, event.epoch) not in self._heard_ms:
            return
        node, now_ms = self._state().nodes.get(event.node_id), self._site.timeline.now_ms
        silent_ms = self._silence_ms(event.node_id, event.epoch)
        came_back_ms = self._came_back_ms.get((event.node_id, event.epoch), -DECIDED_MS)
        if node is None or node.epoch != event.epoch or now_ms - came_back_ms < DECIDED_MS:
            return  # it came back after that was found out, and before it is decided
        if silent_ms < self._site.options.lease_ms:
            raise RuleBroken("R5", f"{event.node_id} is given up and was heard of {silent_ms} ms ago")

    def _check_kept(self, node_id: str, hello: agent_pb2.Hello, welcome: agent_pb2.Welcome) -> None:
        """What an agent runs and is not told to keep it ends at once, whatever time a worker was given to yield: so
        that is said of nothing that still counts as there."""
        kept = {each.generation for each in welcome.keep}
        for running in hello.workers:
            worker = self._workers.get(running.generation)
            known = worker is not None and worker.node_id == node_id and worker.state in HOLDING
            if worker is not None and known and worker.generation not in kept:
                message = f"{node_id} is not told to keep g{worker.generation}, which is {worker.state} there"
                self._site.timeline.fail(RuleBroken("R5", message, worker.job))

    def _check_journaled(self, node_id: str, report: agent_pb2.Report) -> None:
        what = report.WhichOneof("content")
        assert what is not None
        content = getattr(report, what)
        worker = self._workers.get(getattr(content, "generation", 0))
        if worker is None or worker.node_id != node_id:
            return
        if what == "worker_ready":
            missing = worker.state in _UNSTARTED
        elif what == "worker_finished":
            missing = content.succeeded and worker.state in _RUNNING and not worker.finished
        elif what in ("worker_start_failed", "worker_exited", "worker_stopped"):
            missing = worker.state in _RUNNING or worker.state is WorkerState.STOPPING
        else:
            missing = False
        if missing:
            message = f"{what} of g{worker.generation} is acknowledged, and on disk it is {worker.state}"
            self._site.timeline.fail(RuleBroken("R1", message, worker.job))

    def _check_farewell(self, node_id: str, epoch: int, said_ms: int) -> None:
        if max(self._since_ms, self._unwell_ms) >= said_ms:
            return  # it may have been lost with what was not on disk
        node = self._state().nodes.get(node_id)
        if node is not None and node.epoch == epoch and node.state not in _GONE:
            raise RuleBroken("R5", f"{node_id} said goodbye {GOODBYE_MS} ms ago and is {node.state}")

    def look(self, *, serving: bool, well_ms: int, tasks: int, calls: int) -> None:
        """Looks at what time makes wrong.

        Args:
            serving: the controller takes calls.
            well_ms: since when it runs and nothing ails its disk.
            tasks: what the controller is at work on.
            calls: how many calls wait for an answer.

        Raises:
            RuleBroken: something is.
        """
        now_ms, options = self._site.timeline.now_ms, self._site.options
        if not serving:
            self._unwell_ms = now_ms
            if now_ms - well_ms > SERVING_MS:
                raise RuleBroken("R7", f"nothing ails the controller for {now_ms - well_ms} ms, and it serves nobody")
            return
        if tasks > TASKS + TASKS_PER_NODE * options.nodes + calls:
            raise RuleBroken("R8", f"the controller is at work on {tasks} things at once for {calls} calls")
        connected = {(stream.node_id, epoch) for stream, epoch in self._epochs.items()}
        for node_id, node in self._state().nodes.items():
            silent_ms = now_ms - max(self._since_ms, self._site.heard_ms.get(node_id, 0))
            well = (node_id, node.epoch) in connected and silent_ms < options.heartbeat_ms * 2
            self._check_back(node, well=well)
            self._check_proved(node, well=well)
            if node.state not in _GONE and silent_ms > options.lease_ms + SILENCE_MS:
                raise RuleBroken("R5", f"{node_id} has been silent for {silent_ms} ms and is {node.state}")

    def _check_back(self, node: NodeRecord, *, well: bool) -> None:
        if not well or node.state not in (NodeState.SUSPECT, *_GONE):
            self._well_ms.pop(node.node_id, None)
            return
        now_ms = self._site.timeline.now_ms
        if now_ms - self._well_ms.setdefault(node.node_id, now_ms) > BACK_MS:
            raise RuleBroken("R5", f"{node.node_id} is {node.state}, and its agent has been heard of for {BACK_MS} ms")

    def _check_proved(self, node: NodeRecord, *, well: bool) -> None:
        now_ms, before = self._site.timeline.now_ms, self._unproved_ms.pop(node.node_id, {})
        if not well:
            return
        unproved = self._unproved_ms[node.node_id] = {
            worker.generation: before.get(worker.generation, now_ms)
            for worker in self._state().workers_on(node.node_id)
            if is_unproved(self._site, worker)
        }
        for generation, since_ms in unproved.items():
            if now_ms - since_ms > PROOF_MS:
                message = f"g{generation} is READY, its agent is well, and nothing of it lives for {PROOF_MS} ms"
                raise RuleBroken("R4", message, self._state().workers[generation].job)

    def check_history(self, most: int) -> None:
        """Whether ended jobs are forgotten.

        Raises:
            RuleBroken: more than ``most`` are kept.
        """
        state = self._state()
        ended = [uid for each in ENDED for uid in state.jobs_by_state[each] if uid not in state.jobs_holding]
        if len(ended) > most:
            raise RuleBroken("R8", f"{len(ended)} jobs that ended are kept, {most} are allowed")


def is_unproved(site: Site, worker: WorkerRecord) -> bool:
    """Whether a worker counts as running and has no process."""
    return worker.state is WorkerState.READY and site.machines.alive(worker.generation) is None
