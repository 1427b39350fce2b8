"""The agent of one node: its parts, and how they begin and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import callboard
from callboard.agents.adoption import Heir, LeftBehind
from callboard.agents.commands import Commands
from callboard.agents.departure import Departure, NoticeWatcher, ask_for_drain
from callboard.agents.files.checkpoints import Checkpoints
from callboard.agents.groups import Groups
from callboard.agents.inspection import Inspector
from callboard.agents.link.fence_keeper import FenceKeeper
from callboard.agents.link.lease import Lease
from callboard.agents.link.outbox import Outbox
from callboard.agents.link.session import Session, SessionRefused
from callboard.agents.machine import Machine
from callboard.agents.options import AgentOptions
from callboard.agents.ray.ray_driver_client import DriverClient
from callboard.agents.ray.ray_membership import RayMembership
from callboard.agents.ray.ray_plan import RayPlan
from callboard.agents.ray.ray_runtime import RayRuntime
from callboard.agents.runtime import Runtime
from callboard.agents.supplies.interpreters import Interpreters
from callboard.agents.supplies.worker_env import NodeIdentity, host_environment, import_path
from callboard.agents.system.device_watch import DeviceWatch
from callboard.agents.system.devices import NodeDevices, renderers
from callboard.agents.system.inventory import cpus_near
from callboard.agents.system.tasks import answer_within, cancelled
from callboard.agents.worker.order import Site
from callboard.agents.worker.process_runtime import ProcessRuntime
from callboard.agents.worker.spares import Spares
from callboard.agents.worker.table import WorkerTable
from callboard.model.log import structlog
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2, common_pb2, inspection_pb2

_log = structlog.get_logger(__name__)

_SUCCESSOR_S = 60.0
"""For a supervisor to start the next agent; above the pauses that supervisors make between attempts."""

_PRELOAD_PART = 10
"""Spares with preloaded modules may take one part in so many of the memory that the node offers."""

_PRELOAD_CPU_MILLI = 4000
"""CPUs of the node for each of those that is made at one time: an import keeps one busy for seconds."""

_FLUSH_S = 3.0
"""For the controller to acknowledge the last reports of a leaving agent."""


class Agent:
    """Puts the parts together and lives until it leaves."""

    def __init__(
        self,
        options: AgentOptions,
        devices: NodeDevices,
        inventory: agent_pb2.Inventory,
        machine: Machine,
        node_ip: str,
    ) -> None:
        self._options = options
        self._inventory = inventory
        self._machine = machine
        self._hellos = 0
        self._instance = machine.token_hex(8)
        run_dir = machine.run_dir
        self._outbox = Outbox(self._instance)
        self._departure = Departure()
        self._driver = DriverClient(run_dir, machine.processes, machine.start_driver)
        node = self._identity(devices)
        self._runtime = self._new_runtime()
        interpreters = Interpreters(inventory.interpreters, with_ray=options.runtime == "ray")
        self._spares = Spares(
            self._runtime,
            run_dir,
            machine.processes,
            prefix=f"spare/{options.node_id}/{self._instance}",
            variables=host_environment(node),
            preload_bytes=options.preload_bytes or inventory.capacity.memory_bytes // _PRELOAD_PART,
            at_once=max(1, inventory.capacity.cpu_milli // _PRELOAD_CPU_MILLI),
            on_change=self._beat,
        )
        self._lease = Lease(
            on_expired=self._end_strict,
            on_orphaned=self._end_orphans,
            write=machine.lease_file.write,
            clock=machine.boot_s,
        )
        self._fence = FenceKeeper(run_dir, machine.processes, machine.start_fence, host_environment(node))
        site = Site(
            self._runtime,
            self._outbox,
            machine.processes,
            interpreters,
            run_dir,
            self._spares,
            self._lease,
            self._fence,
            Checkpoints(run_dir),
            machine.outputs,
            ports=machine.ports,
            packages=machine.packages,
            environments=machine.environments,
            containers=machine.containers,
        )
        self._workers = WorkerTable(site)
        self._groups = Groups(self._runtime, self._outbox)
        self._commands = Commands(
            node=node,
            site=site,
            workers=self._workers,
            groups=self._groups,
            on_shutdown=self._departure.ask,
        )
        self._session = Session(
            options.controller,
            handler=self,
            outbox=self._outbox,
            lease=self._lease,
            connect=machine.connect,
            uniform=machine.uniform,
            wall_ns=machine.wall_ns,
        )
        self._membership = (
            RayMembership(
                RayPlan(options, inventory, devices, run_dir=run_dir, node_ip=node_ip, import_path=node.import_path),
                processes=machine.processes,
                driver=self._driver,
                start_node=machine.start_ray_node,
                token_hex=machine.token_hex,
                tenants=self._workers,
                on_change=self._ray_changed,
                on_exit=self._report_ray_exit,
            )
            if options.runtime == "ray"
            else None
        )
        self._watch = DeviceWatch(
            () if inventory.simulated else inventory.devices,
            options,
            machine.processes,
            holders=self._workers.holders,
            on_change=self._beat,
        )
        self._workers.on_gone = self._watch.look_soon
        self._devices_told = agent_pb2.DeviceStates()
        self._inspector = Inspector(self._workers, self._runtime, machine.processes, inventory)
        self._ray_told = agent_pb2.RayNode()
        self._preloads_told = agent_pb2.PreloadStates()
        self._heir = Heir(
            node=node,
            site=site,
            workers=self._workers,
            membership=self._membership,
        )

    async def run(self) -> None:
        """Live until asked to leave, then end everything that was started.

        Raises:
            SessionRefused: the controller doesn't want this agent; its workers were ended.
            LeftBehind: not everything could be ended in time.
        """
        heard = self._machine.lease_file.read()
        await self._heir.take_over()
        if heard is not None:
            self._lease.resume(heard)
        # Before the first Hello: nothing is placed on a device that somebody else has filled.
        await self._watch.look()
        self._departure.listen()
        tasks = [asyncio.create_task(work, name=name) for name, work in self._works().items()]
        self._tasks = tasks
        signs: list[asyncio.Future[Any]] = [self._departure.reason, self._workers.failed, *tasks]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            await self._leave(_why(signs))
            # What ended by itself tells why; nothing is swallowed.
            for sign in signs:
                if sign.done() and not sign.cancelled():
                    sign.result()
        finally:
            self._departure.ignore()
            await cancelled(tasks)
            await self._machine.sender.close()
            if self._machine.containers is not None:
                await self._machine.containers.close()
            if self._machine.execs is not None:
                await self._machine.execs.close()
            self._machine.processes.close()
            self._machine.lease_file.close()
            self._machine.ports.close()

    def _works(self) -> dict[str, Coroutine[Any, Any, None]]:
        works = {
            "session": self._session.run(),
            "lease": self._lease.watch(),
            "snapshots": self._workers.keep_snapshots(),
            "spares": self._spares.keep(),
            "output": self._machine.outputs.keep(),
            "devices": self._watch.run(),
        }
        if self._membership is not None:
            works["ray"] = self._membership.run()
        if self._options.exit_with_parent is not None:
            works["parent"] = self._departure.follow_parent(self._options.exit_with_parent)
        if self._options.notice_command:
            works["notices"] = NoticeWatcher(self._options, partial(ask_for_drain, self._options)).run()
        if self._options.exit_with is not None:
            works["keeper"] = self._departure.follow(ProcessId(*self._options.exit_with))
        return works

    # What the session asks and tells (SessionHandler).

    def hello(self, epoch_seen: int) -> agent_pb2.Hello:
        """Who we are and what runs here."""
        options, facts = self._options, self._machine.facts
        ray = options.runtime == "ray"
        self._ray_told = self._ray_now()
        self._preloads_told = agent_pb2.PreloadStates()
        self._devices_told = agent_pb2.DeviceStates(states=self._watch.states)
        self._hellos += 1
        return agent_pb2.Hello(
            node_id=options.node_id,
            version=callboard.__version__,
            epoch_seen=epoch_seen,
            rank=options.rank,
            labels=options.labels,
            node_group=options.node_group,
            inventory=self._inventory,
            ray=self._ray_told,
            workers=self._workers.reports(),
            instance=self._instance,
            runtime=agent_pb2.RUNTIME_RAY if ray else agent_pb2.RUNTIME_PROCESS,
            hostname=facts.hostname,
            pid=facts.pid,
            clock_ms=self._machine.wall_ns() // 1_000_000,
            warm_spares=options.warm_spares,
            number=self._hellos,
            hardware=[common_pb2.Hardware(type=kind, config_json=config) for kind, config in options.hardware],
            ray_version=facts.ray_version,
            python_version=facts.python_version,
            output_jobs=self._machine.outputs.jobs(),
            devices=self._devices_told,
        )

    def ray_node(self) -> agent_pb2.RayNode | None:
        """The node's part in Ray, if it changed."""
        told, self._ray_told = self._ray_told, self._ray_now()
        return self._ray_told if self._ray_told != told else None

    def _ray_now(self) -> agent_pb2.RayNode:
        return agent_pb2.RayNode() if self._membership is None else self._membership.node

    def welcomed(self, welcome: agent_pb2.Welcome) -> None:
        """A session began: end what the controller doesn't keep."""
        self._commands.term = welcome.term
        if self._membership is not None:
            self._membership.belong(welcome.controller_id)
        self._workers.keep_only(welcome.keep)
        for text in welcome.warnings:
            _log.warning("controller_warns", what=text)
        # Also an empty one: then there is no cluster to join.
        self.ray_bootstrap(welcome.ray_bootstrap)

    def command(self, command: agent_pb2.Command) -> None:
        self._commands.handle(command)

    def spare_target(self, target: agent_pb2.SpareTarget) -> None:
        if not self._commands.leaving:
            lists = [each.modules for each in target.preloads]
            self._spares.aim(min(target.count, self._options.warm_spares), lists)

    def devices(self) -> agent_pb2.DeviceStates | None:
        """What the driver says of the devices, if it changed."""
        told, self._devices_told = self._devices_told, agent_pb2.DeviceStates(states=self._watch.states)
        return self._devices_told if self._devices_told != told else None

    def preloads(self) -> agent_pb2.PreloadStates | None:
        """What became of preloads, if it changed."""
        told, self._preloads_told = self._preloads_told, agent_pb2.PreloadStates(states=self._spares.states())
        return self._preloads_told if self._preloads_told != told else None

    def read_output(self, ask: agent_pb2.ReadOutput) -> None:
        self._machine.sender.begin(ask)

    def start_exec(self, ask: agent_pb2.StartExec) -> None:
        if self._machine.execs is not None:
            self._machine.execs.begin(ask, self._workers.control_of(ask.worker, ask.generation))

    def forget_jobs(self, jobs: Sequence[str]) -> None:
        self._machine.outputs.forget(jobs)

    async def inspect(self, ask: inspection_pb2.InspectionAsk) -> inspection_pb2.NodeInspection:
        return await self._inspector.inspect(ask)

    def ray_bootstrap(self, bootstrap: agent_pb2.RayBootstrap) -> None:
        if self._membership is not None:
            self._membership.offer(bootstrap)

    # Ending.

    async def _leave(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.leave_s
        _log.info("leaving", why=reason)
        self._commands.leaving = True
        self._session.leaving = True
        self._session.kill_at = loop.time() + self._options.leave_hooks_s
        self._session.beat()
        why = f"node {self._options.node_id} leaves: {reason}"
        self._departure.on_hurry = lambda: self._workers.end(why)
        self._workers.end(why, hooks_s=self._options.leave_hooks_s)
        await self._spares.close()
        await answer_within(self._workers.wait_none(), self._options.leave_s)
        await self._groups.close()
        if await self._session.settled():
            await answer_within(self._outbox.wait_empty(), _FLUSH_S)
        await self._runtime.close()
        await self._stop_ray()
        await self._fence.close()
        await self._session.say_goodbye(reason)
        left = await self._machine.processes.end_marked((), budget_s=max(1.0, deadline - loop.time()))
        still = [*left.left, *(worker.pid for worker in self._workers.reports())]
        if still:
            raise LeftBehind(f"processes {still} did not end in time")

    async def _stop_ray(self) -> None:
        if self._membership is None:
            return
        # Its own loop would take the end of the node for a loss.
        await cancelled(task for task in self._tasks if task.get_name() == "ray")
        await self._membership.stop()

    def _ray_changed(self) -> None:
        self._session.beat()
        if self._ray_now().ray_node_id:
            self._groups.look_around()
        self._spares.wake()

    def _beat(self) -> None:
        self._session.beat()

    def _report_ray_exit(self, message: str) -> None:
        ended = agent_pb2.RayNodeExited(message=message, head=self._options.ray_head)
        self._outbox.report("", ray_node_exited=ended)

    def _end_strict(self) -> None:
        _log.warning("lease_expired")
        self._workers.end("the lease ended", only=lambda worker: worker.order.command.strict)

    def _end_orphans(self) -> None:
        _log.warning("orphan_grace_over")
        self._workers.end("the controller was away for too long")

    def _new_runtime(self) -> Runtime:
        options = self._options
        if options.runtime == "ray":
            return RayRuntime(self._driver, options.cluster)
        alone = options.exit_with_parent is not None or options.exit_with is not None
        successor_s = options.successor_s if options.successor_s is not None else 0.0 if alone else _SUCCESSOR_S
        run_dir = self._machine.run_dir
        return ProcessRuntime(logs=run_dir.logs, sockets=run_dir.sockets, successor_s=successor_s)

    def _identity(self, devices: NodeDevices) -> NodeIdentity:
        return NodeIdentity(
            cluster=self._options.cluster,
            controller=self._options.controller,
            runtime=self._options.runtime,
            vendor=devices.vendor,
            run_dir=str(self._machine.run_dir.path),
            devices=tuple(device.id for device in devices.devices),
            environment=self._machine.environment,
            import_path=import_path(self._machine.environment.get("PYTHONPATH", "")),
            renderers=renderers(devices),
            near_cpus=cpus_near(devices),
        )


def _why(signs: Sequence[asyncio.Future[Any]]) -> str:
    """Why the agent leaves: the first of what asks for it, or failed."""
    for sign in signs:
        if not sign.done() or sign.cancelled():
            continue
        match sign.exception():
            case None:
                if isinstance(sign.result(), str):
                    return str(sign.result())
            case SessionRefused() as refused:
                return f"the controller refused this agent: {refused}"
            case error:
                return str(error) or type(error).__name__
    return "a part of the agent ended"
