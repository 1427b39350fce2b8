"""Which agents are connected? The rules of ``callboard.controller.sessions`` and of its agent service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from callboard.controller.convert.commands import command_message, worker_key
from callboard.controller.convert.joining import check_hello, check_version, joined, ray_info
from callboard.controller.convert.reports import event_of, refused_event
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
from callboard.scheduler.records import NodeState
from callboard.simulation.controller import Controller, Make, Unavailable, nothing
from callboard.simulation.liveness import Liveness
from callboard.simulation.network import Message, Stream
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2

REPORTS_REMEMBERED = 10_000


class Session:
    """One stream of one agent, from its Hello on."""

    def __init__(self, stream: Stream, hello: agent_pb2.Hello) -> None:
        self.stream = stream
        self.node_id = hello.node_id
        self.instance = hello.instance
        self.epoch = 0
        self.leaving = False
        self.awaited: dict[str, Command] = {}
        self.refusals: dict[str, int] = {}


class StaleEpoch(Exception):
    """The agent knows a later session than the controller."""


class Sessions:
    """Every agent session of the controller; both the end of the streams and the listener of the loop."""

    def __init__(self, site: Site, controller: Controller) -> None:
        self._site = site
        self._controller = controller
        self.live: dict[str, Session] = {}
        self._by_stream: dict[Stream, Session] = {}
        self._joining: dict[str, Session] = {}
        self._seen: dict[str, dict[str, None]] = {}
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
        self._seen.clear()
        self._ray = RayBoard()
        self._site.network.break_all("the controller died")

    def deliver(self, commands: Sequence[Command]) -> None:
        """Sends each command to its agent, if that is connected."""
        for command in commands:
            session = self.live.get(command.node_id)
            if session is not None:
                self._send(session, command)

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
            self._report(session, content)
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
            taken = self._is_taken(session)
            self._joining[session.node_id] = session
            return joined(hello, now_ms, cause, previous_alive=taken)

        def refused(error: Exception) -> None:
            self._joining.pop(session.node_id, None)
            what = "" if isinstance(error, Unavailable) else "refused: "
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
            self._send(session, command)

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
            known_report_ids=list(self._seen.get(session.node_id, ())),
        )

    def _heartbeat(self, session: Session, beat: agent_pb2.Heartbeat) -> None:
        if beat.HasField("ray"):
            for make in self._ray_events(session, beat.ray):
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
            self._seen.pop(session.node_id, None)
            self._close(session, "goodbye")

        self._controller.ask(make, gone, nothing, source="goodbye")

    # ---- reports ----

    def _report(self, session: Session, report: agent_pb2.Report) -> None:
        if report.report_id in self._seen.get(session.node_id, ()):
            self._acknowledge(session, report.report_id)
            return
        command = session.awaited.pop(report.command_id, None)
        if command is not None and self._is_owed_again(session, report, command):
            self._acknowledge(session, report.report_id)
            return
        makes = self._makes(session, report, command)
        if not makes:
            self._settle(session, report.report_id)
        for place, make in enumerate(makes, 1):
            last = place == len(makes)

            def settle(_: object, *, last: bool = last) -> None:
                if last:
                    self._settle(session, report.report_id)

            def failed(error: Exception, *, last: bool = last) -> None:
                if last and not isinstance(error, Unavailable):
                    self._settle(session, report.report_id)

            self._controller.ask(make, settle, failed, source="report")

    def _makes(self, session: Session, report: agent_pb2.Report, command: Command | None) -> list[Make]:
        what = report.WhichOneof("content")
        if what == "ray_node_exited":
            return self._ray_events(session, agent_pb2.RayNode())
        if what == "command_refused":
            if command is None:
                return []
            message = report.command_refused.message
            return [_certain(lambda now_ms, cause: refused_event(command, session.node_id, message, now_ms, cause))]
        return [_certain(lambda now_ms, cause: event_of(report, session.node_id, now_ms, cause))]

    def _is_owed_again(self, session: Session, report: agent_pb2.Report, command: Command) -> bool:
        message = report.command_refused.message
        if not report.HasField("command_refused") or refused_event(command, session.node_id, message, 0, ""):
            return False
        times = session.refusals.get(command.command_id, 0)
        session.refusals[command.command_id] = times + 1
        self._site.timeline.after(min(1_000 * 2**times, 30_000), lambda: self._send_again(session, command.command_id))
        return True

    def _send_again(self, session: Session, command_id: str) -> None:
        if self.live.get(session.node_id) is session:
            for command in self._controller.scheduler.owed_commands(session.node_id):
                if command.command_id == command_id:
                    self._send(session, command)

    def _settle(self, session: Session, report_id: str) -> None:
        seen = self._seen.setdefault(session.node_id, {})
        seen[report_id] = None
        if len(seen) > REPORTS_REMEMBERED:
            del seen[next(iter(seen))]
        self._acknowledge(session, report_id)

    def _acknowledge(self, session: Session, report_id: str) -> None:
        self._site.network.send(session.stream, "down", ("ack", [report_id]))

    # ---- Ray and silence ----

    def _ray_events(self, session: Session, ray: agent_pb2.RayNode) -> list[Make]:
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
        self._seen.pop(node_id, None)
        session = self.live.pop(node_id, None)
        if session is not None:
            self._close(session, "given up; join again")
        reason = f"not heard of for {silent_ms / 1000:.1f} s"
        self._tell(
            lambda now_ms, cause: NodeLost(now_ms=now_ms, cause=cause, node_id=node_id, epoch=epoch, reason=reason),
            "lease",
        )

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

    def _send(self, session: Session, command: Command) -> None:
        session.awaited[command.command_id] = command
        self._liveness.spoke(session.node_id, session.epoch)
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


def _certain(make: Callable[[int, str], object]) -> Make:
    return make  # type: ignore[return-value]
