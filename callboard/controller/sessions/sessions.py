"""The sessions of all connected agents: admission, commands to each, and what silence means.

Guaranteed: one session per node at most; a later session of a node has a greater epoch, and what an earlier one still
says is ignored (I9). Not guaranteed: that a command reaches its agent. It stays owed and is sent again when the agent
joins.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from callboard.controller.convert.commands import command_message
from callboard.controller.convert.hello import (
    check_hello,
    check_version,
    closed_devices,
    device_states,
    joined,
    ray_fault,
    ray_info,
)
from callboard.controller.loop.driver import Driver, Listener
from callboard.controller.loop.liveness import Liveness
from callboard.controller.options import ControllerOptions
from callboard.controller.sessions.admission import GONE, check_epoch, check_order, check_peers, unusual, welcome
from callboard.controller.sessions.ray_board import RayBoard
from callboard.controller.sessions.session import AgentSession
from callboard.controller.sessions.spare_targets import MAX_PRELOADS, tell_spares
from callboard.model.log import structlog
from callboard.scheduler import Outcome
from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.events import (
    Admission,
    Make,
    NodeJoined,
    NodeLost,
    NodeObserved,
    NodeRayChanged,
    NodeSuspected,
    RaySessionLost,
)
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.refusals import Refusal
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.refusals import AlreadyExists, CallboardError, ErrorReason, LimitReached, Unavailable

log = structlog.get_logger(__name__)


class Sessions(Listener):
    """Every agent session of this controller."""

    def __init__(self, driver: Driver, options: ControllerOptions, identity: Callable[[], str]) -> None:
        """
        Args:
            identity: of the controller's state.
        """
        self._driver = driver
        self._identity = identity
        self._options = options
        self.live: dict[str, AgentSession] = {}
        self._joining: dict[str, AgentSession] = {}
        self._seen: dict[str, OrderedDict[str, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ray = RayBoard()
        self.liveness = Liveness(
            self,
            heartbeat_ms=options.heartbeat_ms,
            lease_ms=options.lease_ms,
            kill_timeout_ms=lambda: driver.state.meta.policy.kill_timeout_ms,
        )

    # ---- what the driver says ----

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - sessions don't care for the log
        """Every node that is not gone is expected to come back."""
        self.liveness.clear()
        for node in self._driver.state.nodes.values():
            if node.state not in GONE:
                self.liveness.watch(node.node_id, node.epoch)

    def outage(self) -> None:
        """Ends every session: what agents were told is on disk, what they would be told next is not."""
        self.liveness.clear()
        self.close_all(Unavailable("the controller can't use its journal", reason=ErrorReason.STORE_FAILED))

    def deliver(self, commands: Sequence[Command]) -> None:
        """Sends each command to the agent it is for, if that is connected."""
        for command in commands:
            session = self.live.get(command.node_id)
            if session is not None:
                self._send(session, command)

    # ---- joining and leaving ----

    async def join(self, session: AgentSession, hello: agent_pb2.Hello) -> None:
        """Admits an agent and queues its Welcome, then all it is owed.

        Raises:
            CallboardError, Refusal: it may not join; the message says why.
        """
        check_version(hello)
        check_hello(hello)
        if len(self.live) >= self._options.limits.agents:
            raise LimitReached(f"{len(self.live)} agents are connected already")

        def make(now_ms: int, cause: str) -> NodeJoined:
            check_epoch(hello, self._driver.state)
            check_order(hello, self._driver.state)
            check_peers(hello, self._driver.state)
            session.warnings = unusual(hello, self._driver.state)
            taken = self._is_taken(session)
            self._joining[session.node_id] = session
            return joined(hello, now_ms, cause, address=session.address, previous_alive=taken)

        try:
            await (
                await self._driver.enqueue(
                    make, lambda outcome: self._admit(session, hello.ray, outcome), source="join"
                )
            )
        finally:
            if self._joining.get(session.node_id) is session:
                del self._joining[session.node_id]

    def leave(self, session: AgentSession) -> None:
        """The stream ended. That is not a goodbye: the lease decides what becomes of the node."""
        if self.live.get(session.node_id) is session:
            del self.live[session.node_id]

    def goodbye(self, session: AgentSession) -> None:
        """The agent left on purpose."""
        self.liveness.forget(session.node_id, session.epoch)
        self._forget_head(session.node_id)
        self._seen.pop(session.node_id, None)
        self.leave(session)

    def close_all(self, why: Unavailable) -> None:
        """Ends every session with ``why``."""
        for session in list(self.live.values()):
            session.close(why)
        self.live.clear()

    async def shut_down(self) -> None:
        """Ends the timers and waits for own tasks."""
        self.liveness.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- what agents say ----

    def heard(self, session: AgentSession) -> None:
        self.liveness.heard(session.node_id, session.epoch)

    def is_current(self, session: AgentSession) -> bool:
        """Whether the session is its node's newest (I9)."""
        return self.live.get(session.node_id) is session

    def leaves(self, session: AgentSession, kill_within_ms: int | None = None) -> None:
        """The agent began to leave: until its goodbye the node counts as one that takes nothing new."""
        if not session.leaving:
            session.leaving = True
            self.suspected(session.node_id, session.epoch, suspected=True, kill_within_ms=kill_within_ms)

    def ray_changed(self, session: AgentSession, ray: agent_pb2.RayNode) -> None:
        """The node's part in Ray is another than before."""
        for make in self.ray_events(session, ray):
            self._tell(make, source="ray")

    def preloads_changed(self, session: AgentSession, states: Sequence[common_pb2.PreloadState]) -> None:
        """What became of the node's spares with modules."""
        session.preloads = states[:MAX_PRELOADS]
        refused = tuple(
            sorted((", ".join(each.modules)[:512], each.refused[:512]) for each in session.preloads if each.refused)
        )
        self._observed(session, refused_preloads=refused)

    def devices_changed(self, session: AgentSession, states: Sequence[common_pb2.DeviceState]) -> None:
        """What the driver of the node's devices says of them."""
        before, session.devices = session.devices, device_states(states)
        node = self._driver.state.nodes.get(session.node_id)
        known = {} if node is None else dict((*node.closed, *node.opened))
        said = tuple((index, _kept(known.get(index, ""), why)) for index, why in closed_devices(states))
        warned = {index for index, state in before.items() if state.warning}
        warnings = tuple(
            (index, state.warning) for index, state in session.devices.items() if state.warning and index not in warned
        )
        self._observed(session, warnings=warnings, **({} if dict(said) == known else {"closed": said}))

    def _observed(self, session: AgentSession, **seen: Any) -> None:
        node = self._driver.state.nodes.get(session.node_id)
        if node is None or all(getattr(node, name, ()) == value for name, value in seen.items()):
            return
        self._tell(partial(NodeObserved, node_id=session.node_id, epoch=session.epoch, **seen), source="heartbeat")

    def ray_events(self, session: AgentSession, ray: agent_pb2.RayNode) -> list[Make]:
        """What it means that a node's part in Ray is now ``ray`` (empty: none); other agents are told where Ray is."""
        info, fault = ray_info(ray), ray_fault(ray)
        if self.ray.learn(session.node_id, ray):
            self._spread_ray(but=session)
        node = self._driver.state.nodes.get(session.node_id)
        if node is None or (node.ray == info and node.ray_fault == fault):
            return []
        makes = self._void_sessions(ray)
        old = node.ray
        if old is not None and old.head and info is None:
            makes.append(_session_lost(old.session))
        makes.append(partial(NodeRayChanged, node_id=session.node_id, epoch=session.epoch, ray=info, fault=fault))
        return makes

    def was_seen(self, node_id: str, report_id: str) -> bool:
        """Whether this report was journaled already."""
        return report_id in self._seen.get(node_id, ())

    def mark_seen(self, node_id: str, report_id: str) -> None:
        """Remembers that a report was journaled; the oldest is forgotten, and the scheduler takes it as old (I9)."""
        seen = self._seen.setdefault(node_id, OrderedDict())
        seen[report_id] = None
        if len(seen) > self._options.limits.reports_remembered:
            seen.popitem(last=False)

    def send_again(self, session: AgentSession, command_id: str) -> None:
        """Queues a command once more, if it is still owed (PG-05)."""
        if not self.is_current(session):
            return
        for command in self._driver.scheduler.owed_commands(session.node_id):
            if command.command_id == command_id:
                self._send(session, command)

    # ---- silence ----

    def suspected(self, node_id: str, epoch: int, *, suspected: bool, kill_within_ms: int | None = None) -> None:
        """A node has been silent for long, or is heard of again, or leaves and kills in so many ms what runs there."""
        session = self.live.get(node_id)
        leaving = session is not None and session.leaving
        if leaving and not suspected:
            return
        self._tell(
            partial(
                NodeSuspected,
                node_id=node_id,
                epoch=epoch,
                suspected=suspected,
                leaving=leaving,
                kill_within_ms=kill_within_ms,
            ),
            source="lease",
        )

    def lost(self, node_id: str, epoch: int, silent_ms: int) -> None:
        """A node is given up; should its agent still be there, it has to join again."""
        self._forget_head(node_id)
        self._seen.pop(node_id, None)
        session = self.live.pop(node_id, None)
        if session is not None:
            session.close(Unavailable(f"node {node_id} was given up after {silent_ms} ms of silence; join again"))
        reason = f"not heard of for {silent_ms / 1000:.1f} s"
        self._tell(partial(NodeLost, node_id=node_id, epoch=epoch, reason=reason), source="lease")

    # ---- inside ----

    def _admit(self, session: AgentSession, ray: agent_pb2.RayNode, outcome: Outcome) -> None:
        admission = outcome.result
        assert isinstance(admission, Admission)
        session.epoch = admission.epoch
        previous = self.live.pop(session.node_id, None)
        if previous is not None:
            why = f"a newer session of node {session.node_id} has begun"
            previous.close(AlreadyExists(why, reason=ErrorReason.NODE_TAKEN))
        self.liveness.watch(session.node_id, session.epoch)
        if session.closed:
            return  # it went away meanwhile; its lease runs
        self.live[session.node_id] = session
        learned = self.ray.learn(session.node_id, ray)
        session.send(
            welcome(
                admission,
                self._driver.state,
                self._options,
                bootstrap=self.ray.bootstrap,
                known_report_ids=list(self._seen.get(session.node_id, ())),
                controller_id=self._identity(),
                warnings=session.warnings,
            )
        )
        if learned:
            self._spread_ray(but=session)
            for make in self._void_sessions(ray):
                self._tell(make, source="ray")
        # What the join led to comes first: ends of workers that nobody wants are owed by no record.
        first = [command for command in outcome.commands if command.node_id == session.node_id]
        owed = {command.command_id: command for command in self._driver.scheduler.owed_commands(session.node_id)}
        for command in {**{command.command_id: command for command in first}, **owed}.values():
            self._send(session, command)
        tell_spares(session, self._driver.state)
        log.info("agent joined", node=session.node_id, rank=admission.rank, epoch=session.epoch)

    def _void_sessions(self, ray: agent_pb2.RayNode) -> list[Make]:
        """What it means for placement groups that Ray's head runs the session of ``ray``: those of others are void."""
        if not ray.head or not ray.session:
            return []
        known = dict.fromkeys(group.ray_session for group in self._driver.state.groups.values())
        return [_session_lost(old) for old in known if old not in ("", ray.session)]

    def _forget_head(self, node_id: str) -> None:
        if self.ray.forget(node_id):
            self._spread_ray(but=self.live.get(node_id))

    def _spread_ray(self, *, but: AgentSession | None) -> None:
        """Tells every agent where Ray is, or that nobody starts its head."""
        for session in self.live.values():
            if session is not but:
                session.send(agent_pb2.SessionResponse(ray_bootstrap=self.ray.bootstrap or agent_pb2.RayBootstrap()))

    def _send(self, session: AgentSession, command: Command) -> None:
        session.awaited[command.command_id] = command
        session.send(command_message(command, self._driver.state.meta.term))

    def _is_taken(self, session: AgentSession) -> bool:
        """Whether another living agent has the node id: one whose stream is open and who was heard of lately."""
        joining = self._joining.get(session.node_id)
        if joining is not None and joining.instance != session.instance:
            return True
        live = self.live.get(session.node_id)
        return (
            live is not None
            and live.instance != session.instance
            and not live.closed
            and self.liveness.is_fresh(session.node_id)
        )

    def _tell(self, make: Make, *, source: str) -> None:
        task = asyncio.get_running_loop().create_task(self._told(make, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, make: Make, source: str) -> None:
        try:
            await (await self._driver.enqueue(make, _nothing, source=source))
        except (Refusal, CallboardError) as refusal:
            # About a session that is over, or the journal failed: then every node is looked at anew.
            log.debug("not taken", source=source, why=str(refusal))


def _session_lost(ray_session: str) -> Make:
    """Ray's head died, and with it every placement group and actor of its session."""
    return partial(RaySessionLost, session=ray_session, reason="the Ray session it was made in ended")


def _nothing(_outcome: Outcome) -> None:
    """Nobody waits for an answer."""


_AMOUNT = re.compile(r"[0-9.]+ GiB")


def _kept(known: str, why: str) -> str:
    """Why a device is closed: as it is known, where it is the same but for amounts of memory. Those change all the
    time."""
    return known if _AMOUNT.sub("", known) == _AMOUNT.sub("", why) else why
