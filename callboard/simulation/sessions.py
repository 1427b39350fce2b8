"""Which agents are connected? The rules of ``callboard.controller.sessions`` and of its agent service."""

from __future__ import annotations

from collections.abc import Sequence

from callboard.controller.admission import Hellos
from callboard.controller.convert.commands import command_message, worker_key
from callboard.controller.convert.joining import check_hello, check_version, joined, ray_info
from callboard.controller.ray_board import RayBoard
from callboard.scheduler import Outcome, Refusal, RefusalCode
from callboard.scheduler.commands import Command
from callboard.scheduler.events import (
    Admission,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRayChanged,
    NodeSuspected,
    RaySessionLost,
)
from callboard.scheduler.states import NodeState
from callboard.simulation.controller import Controller, Make, nothing
from callboard.simulation.inbound import Reports, Session
from callboard.simulation.liveness import Liveness
from callboard.simulation.network import Message, Stream
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2


class Sessions:
    """Every agent session of the controller; both the end of the streams and the listener of the loop."""

    def __init__(self, site: Site, controller: Controller) -> None:
        self._site = site
        self._controller = controller
        self.live: dict[str, Session] = {}
        self._by_stream: dict[Stream, Session] = {}
        self._joining: dict[str, Session] = {}
        self._hellos = Hellos()
        self._reports = Reports(site, controller, self)
        self._ray = RayBoard()
        self._liveness = self._new_liveness()

    # ---- what the loop says ----

    def started(self) -> None:
        """Every node that is not gone is expected to come back."""
        self._liveness = self._new_liveness()
        for node in self._controller.scheduler.state.nodes.values():
            if node.state not in (NodeState.LOST, NodeState.LEFT):
                self._liveness.watch(node.node_id, node.epoch)

    def stopped(self) -> None:
        """The controller died: with it all it held in memory."""
        self._liveness.clear()
        self.live.clear()
        self._by_stream.clear()
        self._joining.clear()
        self._hellos.clear()
        self._reports = Reports(self._site, self._controller, self)
        self._ray = RayBoard()
        self._site.network.break_all("the controller died")

    def deliver(self, commands: Sequence[Command]) -> None:
        """Sends each command to its agent, if that is connected."""
        for command in commands:
            session = self.live.get(command.node_id)
            if session is not None:
                self.send(session, command)

    # ---- what streams say ----

    def broken(self, stream: Stream, why: str) -> None:  # noqa: ARG002 - not a goodbye, whatever the reason is
        """The stream ended. That is no goodbye: the lease decides what becomes of the node."""
        session = self._by_stream.pop(stream, None)
        if session is not None and self.live.get(session.node_id) is session:
            del self.live[session.node_id]

    def receive(self, stream: Stream, message: Message) -> None:
        """A message of an agent."""
        kind, content = message
        if not self._controller.alive:
            self._site.network.close(stream, "down", "nobody listens")
            return
        if kind == "hello":
            self._hello(stream, content)
            return
        session = self._by_stream.get(stream)
        if session is None or self.live.get(session.node_id) is not session:
            return  # a newer session speaks for the node (I9)
        self._liveness.heard(session.node_id, session.epoch)
        if kind == "heartbeat":
            self._heartbeat(session, content)
        elif kind == "report":
            self._reports.take(session, content)
        elif kind == "goodbye":
            self._goodbye(session)

    def _hello(self, stream: Stream, hello: agent_pb2.Hello) -> None:
        check_version(hello)
        check_hello(hello)
        session = Session(stream, hello)

        def make(now_ms: int, cause: str) -> NodeJoined:
            node = self._controller.scheduler.state.nodes.get(hello.node_id)
            if hello.epoch_seen > (node.epoch if node is not None else 0):
                raise Refusal(RefusalCode.WRONG_STATE, hello.node_id, "the agent knows a later session")
            self._hellos.take(hello, self._controller.scheduler.state)
            taken = self._is_taken(session)
            self._joining[session.node_id] = session
            return joined(hello, now_ms, cause, previous_alive=taken)

        def refused(error: Exception) -> None:
            self._joining.pop(session.node_id, None)
            what = "refused: " if isinstance(error, Refusal) else ""
            self._site.network.close(stream, "down", f"{what}{error}")

        self._controller.ask(make, lambda outcome: self._admit(session, hello, outcome), refused, source="join")

    def _admit(self, session: Session, hello: agent_pb2.Hello, outcome: Outcome) -> None:
        if self._joining.get(session.node_id) is session:
            del self._joining[session.node_id]
        admission = outcome.result
        assert isinstance(admission, Admission)
        session.epoch = admission.epoch
        previous = self.live.pop(session.node_id, None)
        if previous is not None:
            self._close(previous, "a newer session of the node has begun")
        self._liveness.watch(session.node_id, session.epoch)
        if not session.stream.controller_open:
            return  # it went away meanwhile; its lease runs
        self.live[session.node_id] = session
        self._by_stream[session.stream] = session
        learned = self._ray.learn(session.node_id, hello.ray)
        self._site.network.send(session.stream, "down", ("welcome", self._welcome(session, admission)))
        if learned:
            self._spread_ray(session)
        first = [command for command in outcome.commands if command.node_id == session.node_id]
        owed = self._controller.scheduler.owed_commands(session.node_id)
        for command in {command.command_id: command for command in (*first, *owed)}.values():
            self.send(session, command)

    def _welcome(self, session: Session, admission: Admission) -> agent_pb2.Welcome:
        state, options = self._controller.scheduler.state, self._site.options
        kept = [state.workers[generation] for generation in admission.keep if generation in state.workers]
        return agent_pb2.Welcome(
            epoch=admission.epoch,
            term=state.meta.term,
            rank=admission.rank,
            lease_ms=options.lease_ms,
            heartbeat_ms=options.heartbeat_ms,
            ray_bootstrap=self._ray.bootstrap,
            keep=[agent_pb2.WorkerRef(worker=worker_key(worker), generation=worker.generation) for worker in kept],
            orphan_grace_ms=options.orphan_grace_ms,
            known_report_ids=self._reports.seen(session.node_id),
        )

    def _heartbeat(self, session: Session, beat: agent_pb2.Heartbeat) -> None:
        if beat.HasField("ray"):
            for make in self.ray_events(session, beat.ray):
                self._tell(make, "ray")
        if beat.leaving and not session.leaving:
            session.leaving = True
            self.suspected(session.node_id, session.epoch, suspected=True)
        self._site.network.send(session.stream, "down", ("heartbeat_reply", beat.sequence))

    def _goodbye(self, session: Session) -> None:
        def make(now_ms: int, cause: str) -> NodeLeft:
            return NodeLeft(now_ms=now_ms, cause=cause, node_id=session.node_id, epoch=session.epoch)

        def gone(_: Outcome) -> None:
            self._liveness.forget(session.node_id, session.epoch)
            self._ray.forget(session.node_id)
            self._reports.forget(session.node_id)
            self._close(session, "goodbye")

        self._controller.ask(make, gone, nothing, source="goodbye")

    # ---- Ray and silence ----

    def ray_events(self, session: Session, ray: agent_pb2.RayNode) -> list[Make]:
        """What it means that a node's part in Ray is now ``ray`` (empty: none); other agents are told where Ray is."""
        info = ray_info(ray)
        if self._ray.learn(session.node_id, ray):
            self._spread_ray(session)
        node = self._controller.scheduler.state.nodes.get(session.node_id)
        if node is None or node.ray == info:
            return []
        makes: list[Make] = []
        old = node.ray
        if old is not None and old.head and (info is None or info.session != old.session):
            lost = old.session
            makes.append(lambda now_ms, cause: RaySessionLost(now_ms=now_ms, cause=cause, session=lost))
        makes.append(
            lambda now_ms, cause: NodeRayChanged(
                now_ms=now_ms, cause=cause, node_id=session.node_id, epoch=session.epoch, ray=info
            )
        )
        return makes

    def _spread_ray(self, but: Session) -> None:
        if self._ray.bootstrap is None:
            return
        for session in list(self.live.values()):
            if session is not but:
                self._site.network.send(session.stream, "down", ("ray_bootstrap", self._ray.bootstrap))

    def suspected(self, node_id: str, epoch: int, *, suspected: bool) -> None:
        """A node has been silent for long, or is heard of again."""
        session = self.live.get(node_id)
        if session is not None and session.leaving and not suspected:
            return
        self._tell(
            lambda now_ms, cause: NodeSuspected(
                now_ms=now_ms, cause=cause, node_id=node_id, epoch=epoch, suspected=suspected
            ),
            "lease",
        )

    def lost(self, node_id: str, epoch: int, silent_ms: int) -> None:
        """A node is given up; should its agent still be there, it has to join again."""
        self._ray.forget(node_id)
        self._reports.forget(node_id)
        session = self.live.pop(node_id, None)
        if session is not None:
            self._close(session, "given up; join again")
        reason = f"not heard of for {silent_ms / 1000:.1f} s"
        self._tell(
            lambda now_ms, cause: NodeLost(now_ms=now_ms, cause=cause, node_id=node_id, epoch=epoch, reason=reason),
            "lease",
        )

    def is_current(self, session: Session) -> bool:
        """Whether the session is its node's newest (I9)."""
        return self.live.get(session.node_id) is session

    # ---- inside ----

    def _new_liveness(self) -> Liveness:
        options = self._site.options
        return Liveness(
            self._site.timeline,
            self,
            heartbeat_ms=options.heartbeat_ms,
            lease_ms=options.lease_ms,
            kill_timeout_ms=lambda: self._controller.scheduler.state.meta.policy.kill_timeout_ms,
        )

    def _tell(self, make: Make, source: str) -> None:
        self._controller.ask(make, nothing, nothing, source=source)

    def send(self, session: Session, command: Command) -> None:
        """Sends a command, and awaits its answer."""
        session.awaited[command.command_id] = command
        message = command_message(command, self._controller.scheduler.state, _address)
        self._site.network.send(session.stream, "down", ("command", message.command))

    def _close(self, session: Session, why: str) -> None:
        self._by_stream.pop(session.stream, None)
        self._site.network.close(session.stream, "down", why)
        if self.live.get(session.node_id) is session:
            del self.live[session.node_id]

    def _is_taken(self, session: Session) -> bool:
        joining = self._joining.get(session.node_id)
        if joining is not None and joining.instance != session.instance:
            return True
        live = self.live.get(session.node_id)
        return (
            live is not None
            and live.instance != session.instance
            and live.stream.controller_open
            and self._liveness.is_fresh(session.node_id)
        )


def _address(node_id: str) -> str:
    return node_id
