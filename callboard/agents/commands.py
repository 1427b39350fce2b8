"""Commands of the controller, and what each makes the agent do.

A command that was seen before gets its first answer again and does nothing; one of an older term than the controller's
current one is refused (I9). Everything else is handed to the workers or the placement groups, which answer by
reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from callboard.agents.files.output_store import OutputOf
from callboard.agents.groups import Groups
from callboard.agents.host.worker_output import CODE, MODULES
from callboard.agents.runtime import HostError, Launch
from callboard.agents.supplies.worker_env import (
    NodeIdentity,
    PlanRefused,
    early_variables,
    name_of,
    worker_environment,
    worker_marker,
    worker_name,
    worker_plan,
)
from callboard.agents.worker.order import Site, WorkerOrder
from callboard.agents.worker.table import StaleGeneration, WorkerTable
from callboard.model.log import structlog
from callboard.model.names import is_name
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class Commands:
    node: NodeIdentity
    site: Site
    workers: WorkerTable
    groups: Groups
    on_shutdown: Callable[[str], None]
    term: int = 0
    """Newest term heard of."""
    leaving: bool = False
    """Once set, nothing new is started."""

    def handle(self, command: agent_pb2.Command) -> None:
        """Begin what is asked; reports will answer."""
        if not self.site.outbox.begin(command.command_id):
            return
        if command.term < self.term:
            self._refuse(command, f"term {command.term} is over, {self.term} is current")
            return
        self.term = command.term
        match command.WhichOneof("action"):
            case "start_worker":
                self._start(command)
            case "stop_worker":
                self.workers.stop(command.command_id, command.stop_worker)
            case "create_placement_group":
                self.groups.create(command.command_id, command.create_placement_group)
            case "remove_placement_group":
                self.groups.remove(command.command_id, command.remove_placement_group)
            case "reserve_port":
                self._reserve(command)
            case "shutdown":
                self.on_shutdown(command.shutdown.reason or "the controller asked for it")
            case _:
                self._refuse(command, "this agent doesn't know the action; is it older?")

    def _start(self, command: agent_pb2.Command) -> None:
        name = worker_name(command.start_worker)
        if self.leaving:
            key, generation = command.start_worker.worker, command.start_worker.generation
            gone = agent_pb2.WorkerStopped(worker=key, generation=generation, detail="its node is leaving")
            gone.outcome = agent_pb2.STOP_OUTCOME_ALREADY_GONE
            self.site.outbox.report(command.command_id, worker_stopped=gone)
            return
        there = self.workers.knows(command.start_worker)
        try:
            self.workers.start(self._order(command.command_id, command.start_worker))
        except (PlanRefused, HostError, StaleGeneration) as error:
            if not there:
                self.site.ports.release(name)
            self._refuse(command, str(error))

    def _reserve(self, command: agent_pb2.Command) -> None:
        asked = command.reserve_port
        try:
            port = self.site.ports.reserve(name_of(asked.worker, asked.generation))
        except HostError as error:
            self._refuse(command, str(error))
            return
        reserved = agent_pb2.PortReserved(worker=asked.worker, generation=asked.generation, port=port)
        self.site.outbox.report(command.command_id, port_reserved=reserved)

    def _order(self, command_id: str, start: agent_pb2.StartWorker) -> WorkerOrder:
        key = start.worker
        if not is_name(key.job_id) or not is_name(key.component) or key.rank < 0:
            raise PlanRefused(f"worker: {key.job_id!r}/{key.component!r}/{key.rank} can't be a worker")
        name = worker_name(start)
        variables = worker_environment(start, self.node, self.site.ports.give(name, start.ports))
        output = str(self.site.outputs.folder_of(OutputOf.of(start)))
        launch = Launch(
            name=name,
            interpreter=self.site.interpreters.allowed(start.interpreter),
            variables=variables,
            early=early_variables(start, self.node, variables),
            placement_group_id=start.ray_placement_group_id if start.in_bundle else "",
            bundle_index=start.allocation.bundle_index,
            output=output,
        )
        return WorkerOrder(
            command_id=command_id,
            command=start,
            launch=launch,
            plan={
                **worker_plan(start, self.node, variables),
                "output": output,
                "working_dir": str(Path(output) / CODE) if start.working_dir else "",
                "py_modules": [str(Path(output) / MODULES / str(place)) for place in range(len(start.py_modules))],
                "output_bytes": self.site.outputs.bounds.worker_bytes,
            },
            marker=worker_marker(self.node, name),
            received_at=asyncio.get_running_loop().time(),
        )

    def _refuse(self, command: agent_pb2.Command, why: str) -> None:
        _log.warning("command_refused", command=command.command_id, why=why)
        self.site.outbox.report(command.command_id, command_refused=agent_pb2.CommandRefused(message=why))
