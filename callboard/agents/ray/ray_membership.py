"""The node's membership in a Ray cluster, and what has to happen when that changes.

The head starts its own cluster, an agent with `ray_address` joins that one, all others wait until the controller tells
where Ray is. A node that ends by itself takes its workers with it (their trees are ended by pid: an actor
outlives a killed raylet by about a second (m)); then another one is started in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Protocol

from callboard.agents.files.run_dir import Started
from callboard.agents.host.framing import PeerGone, RemoteError
from callboard.agents.ray.ray_command import free_port
from callboard.agents.ray.ray_driver_client import Connection, DriverClient, DriverLost
from callboard.agents.ray.ray_faults import PortTaken, RayNodeError, fault_of
from callboard.agents.ray.ray_node import RayNode, StartRayNode
from callboard.agents.ray.ray_plan import RayPlan, RayTarget
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import answer_within
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.model.ray_fault import NO_RAY_HEAD, RayFault, RayFaultCode
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2, common_pb2
from callboard.wire.enums import to_wire

_log = structlog.get_logger(__name__)

_DRIVER_TRIES = 3
"""Drivers started for a Ray node that was adopted before it is given up."""

_CLAIM_S = 15.0
"""For a look into Ray's own store, which takes milliseconds."""

_BACKOFF_FIRST_S, _BACKOFF_MAX_S, _BACKOFF_UNKNOWN_S = 1.0, 30.0, 300.0
"""Between tries; what isn't known to pass is tried ever more rarely."""

_WORKERS_GONE_S = 15.0
"""For the workers of a lost node to be ended before the next one is started; a quarantined one may take for ever."""


class Tenants(Protocol):
    """What the node's workers are told, and asked."""

    def host_lost(self, message: str) -> None:
        """Their host ended."""

    async def wait_none(self) -> None:
        """Return when all are gone."""


class RayMembership:
    """Keeps the node in its Ray cluster."""

    def __init__(
        self,
        plan: RayPlan,
        *,
        processes: Processes,
        driver: DriverClient,
        start_node: StartRayNode,
        token_hex: Callable[[int], str],
        tenants: Tenants,
        on_change: Callable[[], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self.node = agent_pb2.RayNode(head=plan.options.ray_head)
        """As told to the controller; without an address while the node is in no cluster, with what keeps it out."""
        self._plan = plan
        self._processes = processes
        self._driver = driver
        self._start_node = start_node
        self._token_hex = token_hex
        self._tenants = tenants
        self._on_change = on_change
        self._on_exit = on_exit
        self._running: RayNode | None = None
        self._offered: RayTarget | None = None
        self._adopted: RayTarget | None = None
        self._offer_changed = asyncio.Event()
        self._owner: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def belong(self, controller_id: str) -> None:
        """The controller said who it is."""
        if not self._owner.done():
            self._owner.set_result(controller_id)

    def adopt(self, started: Started) -> bool:
        """Go on with the Ray node that an earlier agent recorded, if it lives and is what this agent would start.

        Told to the controller at once: a Hello without it would void every placement group of the node.
        """
        facts = started.facts
        if started.process is None or facts.get("shape") != self._plan.shape():
            return False
        if self._plan.options.ray_address not in ("", facts["gcs_address"]):
            return False
        vital = {ProcessId(pid, ticks): name for pid, ticks, name in facts["vital"]}
        self._running = RayNode.adopt(started.process, vital, self._processes)
        if self._running is None:
            return False
        token = self._plan.run_dir.read_ray_token() if facts["token"] else facts["token"]
        self._adopted = RayTarget(facts["gcs_address"], facts["session"], token)
        connection = Connection(**facts["connection"])
        self._driver.connection = connection
        self.node = self._part_in_ray(connection, self._adopted)
        return True

    def offer(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        """The controller says where Ray is."""
        if self._plan.options.ray_head or self._plan.options.ray_address:
            return
        if not bootstrap.gcs_address:
            self._await_head(bootstrap.head_node)
            return
        target = RayTarget(bootstrap.gcs_address, bootstrap.session, bootstrap.auth_token)
        if target != self._offered:
            self._offered = target
            self._offer_changed.set()

    def _await_head(self, starting: str) -> None:
        """The controller knows of no cluster to join; at most of a node that starts its head."""
        if self._offered is not None or self.node.gcs_address:
            return
        if starting:
            self._keep_out(RayFault(RayFaultCode.AWAITS_HEAD, f"waiting for Ray's head, which {starting} starts"))
        else:
            self._keep_out(RayFault(RayFaultCode.NO_HEAD, NO_RAY_HEAD))

    def _keep_out(self, fault: RayFault) -> None:
        """Tell the controller and the log what keeps the node out of Ray."""
        told = common_pb2.RayFault(
            code=to_wire(common_pb2.RayFaultCode, fault.code), message=fault.message, permanent=fault.permanent
        )
        if self.node.fault == told:
            return
        self.node = agent_pb2.RayNode(head=self._plan.options.ray_head, fault=told)
        _log.warning("ray_kept_out", why=fault.message, do=fault.remedy(self._plan.options.node_id))
        self._on_change()

    async def run(self) -> None:
        """Be in the cluster, again and again; runs until cancelled.

        Raises:
            PortTaken: the first start found a port in use that was asked for.
        """
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        joined_before = self._adopted is not None
        while True:
            adopted, self._adopted = self._adopted, None
            target = adopted or await self._target()
            try:
                connection = await (self._join(target) if adopted is None else self._join_again(adopted))
            except (RayNodeError, DriverLost) as error:
                fault = fault_of(error)
                if isinstance(error, PortTaken) and joined_before:
                    # What listened there a moment ago may have been our own.
                    fault = replace(fault, permanent=False)
                if adopted is None:
                    await self._part()
                else:
                    await self._lose(f"the Ray node of the earlier agent can't be used: {error}")
                self._keep_out(fault)
                if isinstance(error, PortTaken) and not joined_before:
                    raise
                if fault.permanent:
                    await self._other_target(target)
                    continue
                pause_s = backoff.next_s(_BACKOFF_UNKNOWN_S if fault.code is RayFaultCode.START_FAILED else None)
                _log.error("ray_not_joined", why=fault.message, retry_s=pause_s)
                await asyncio.sleep(pause_s)
                continue
            joined_before = True
            backoff.reset()
            _log.info("ray_joined", address=connection.gcs_address, ray_node=connection.ray_node_id)
            await self._until_over(target)

    async def stop(self) -> None:
        """Leave the cluster: end the driver and the node."""
        await self._part()

    async def _target(self) -> RayTarget:
        if self._plan.options.ray_head:
            port = self._plan.options.ray_port or free_port(self._plan.node_ip)
            return RayTarget(f"{self._plan.node_ip}:{port}", "", self._token_hex(32))
        if self._plan.options.ray_address:
            return RayTarget(self._plan.options.ray_address, "", None)
        while self._offered is None:
            self._offer_changed.clear()
            await self._offer_changed.wait()
        return self._offered

    async def _other_target(self, target: RayTarget) -> None:
        """Return once there is another cluster to join: what happened would happen again with this one."""
        while self._offered in (None, target):
            self._offer_changed.clear()
            await self._offer_changed.wait()

    async def _join(self, target: RayTarget) -> Connection:
        self._offer_changed.clear()
        environment = self._plan.environment(target)
        spec = self._plan.spec(target, environment)
        self._running = await self._start_node(spec)
        self._plan.run_dir.put(Started("ray", self._running.process))
        connection = await self._driver.connect(target.gcs_address, spec.node_ip, environment)
        self._check_connection(target, connection)
        self._record(self._running, target, connection)
        await self._claim()
        self.node = self._part_in_ray(connection, target)
        self._on_change()
        return connection

    async def _join_again(self, target: RayTarget) -> Connection:
        """A driver for the node that was adopted."""
        connection = await self._new_driver(target)
        self._check_connection(target, connection)
        if connection.ray_node_id != self.node.ray_node_id:
            raise RayNodeError("another Ray node has its address")
        await self._claim()
        self._on_change()
        return connection

    async def _claim(self) -> None:
        """Two controllers in one Ray cluster would take each other's groups and devices: the later one stays out
        (GV-14). Waits for the controller, without which there is no work anyway."""
        assert self._running is not None
        lost = asyncio.create_task(self._running.wait_lost())
        try:
            await asyncio.wait([self._owner, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise RayNodeError(f"the Ray node ended: {lost.result()}")
        finally:
            lost.cancel()
        owner = self._owner.result()
        if not owner:
            return
        try:
            others = await self._driver.ask("claim", {"owner": owner}, within_s=_CLAIM_S)
        except RemoteError as error:
            raise RayNodeError(f"whose Ray cluster this is can't be found out: {error}") from error
        if others:
            raise RayNodeError(
                f"this Ray cluster is used by another controller, on {', '.join(others)}; "
                "give this one a Ray cluster of its own, or end that one's agents",
                RayFaultCode.NOT_OURS,
            )

    async def _new_driver(self, target: RayTarget) -> Connection:
        """A driver for a Ray node that runs. One that dies is no reason to end the node and its workers."""
        environment = self._plan.environment(target)
        for left in range(_DRIVER_TRIES - 1, 0, -1):
            try:
                return await self._driver.connect(target.gcs_address, self._plan.node_ip, environment)
            except DriverLost as error:
                if not isinstance(error.__cause__, PeerGone):
                    raise
                _log.warning("ray_driver_died", why=str(error), tries_left=left)
        return await self._driver.connect(target.gcs_address, self._plan.node_ip, environment)

    def _check_connection(self, target: RayTarget, connection: Connection) -> None:
        if target.session and connection.session != target.session:
            why = f"{target.gcs_address} is another Ray session than the one that is wanted"
            raise RayNodeError(why, RayFaultCode.NOT_OURS)
        if connection.node_ip != self._plan.node_ip:
            # Placement, rendezvous and drivers all go by what Ray says (PG-13).
            why = f"Ray took {connection.node_ip} for the node's address and not {self._plan.node_ip}"
            raise RayNodeError(why, RayFaultCode.BAD_OPTION, permanent=True)

    def _record(self, node: RayNode, target: RayTarget, connection: Connection) -> None:
        facts = {
            "shape": self._plan.shape(),
            "gcs_address": target.gcs_address,
            "session": connection.session,
            "token": target.token and "file",
            "node_ip": self._plan.node_ip,
            "connection": asdict(connection),
            "vital": [[each.pid, each.start_ticks, name] for each, name in node.vital.items()],
        }
        self._plan.run_dir.put(Started("ray", node.process, "", facts))

    def _part_in_ray(self, connection: Connection, target: RayTarget) -> agent_pb2.RayNode:
        head = self._plan.options.ray_head
        return agent_pb2.RayNode(
            gcs_address=connection.gcs_address,
            session=connection.session,
            ray_node_id=connection.ray_node_id,
            head=head,
            auth_token=target.token or "" if head else "",
            node_ip=connection.node_ip,
        )

    async def _until_over(self, target: RayTarget) -> None:
        """Return when the node has ended, or is to be in another cluster; nothing of it is left then."""
        assert self._running is not None
        lost = asyncio.create_task(self._running.wait_lost())
        while not lost.done() and self._offered in (None, target):
            moved = asyncio.create_task(self._offer_changed.wait())
            await asyncio.wait([lost, moved], return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            self._offer_changed.clear()
        message = f"the Ray node ended: {lost.result()}" if lost.done() else "the Ray cluster was replaced"
        lost.cancel()
        await self._lose(message)

    async def _lose(self, message: str) -> None:
        """The node is over, and its workers with it."""
        _log.warning("ray_left", why=message)
        self._tenants.host_lost(message)
        self._on_exit(message)
        self.node = agent_pb2.RayNode(head=self._plan.options.ray_head)
        self._on_change()
        await answer_within(self._tenants.wait_none(), _WORKERS_GONE_S)
        await self._part()

    async def _part(self) -> None:
        if self.node.gcs_address:
            self.node = agent_pb2.RayNode(head=self._plan.options.ray_head)
        await self._driver.disconnect()
        if self._running is not None:
            # Ours until it has ended: whoever is told to leave while it ends has it ended all the same.
            await self._running.stop()
            self._running = None
            self._plan.run_dir.drop("ray")
        self._plan.run_dir.clear_ray()
