"""Adoption: what of an earlier agent's goes on, and what is ended before anything new.

Its Ray node goes on when it lives and is what this agent would start; with it the workers in it. Plain processes go on
by themselves. Whatever else is recorded or marked is ended, with proof, before the node takes work (I4).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from callboard.agents.files.checkpoints import ROLE as CHECKPOINT
from callboard.agents.files.run_dir import Started
from callboard.agents.ray.ray_membership import RayMembership
from callboard.agents.runtime import HostError, Launch
from callboard.agents.supplies.interpreters import InterpreterRefused
from callboard.agents.supplies.worker_env import NodeIdentity, host_environment, worker_marker, worker_name
from callboard.agents.worker.order import Site, WorkerOrder, WorkerRecord, read_record
from callboard.agents.worker.table import WorkerTable
from callboard.model.log import structlog

_log = structlog.get_logger(__name__)

LEFTOVERS_S = 15.0
"""For the end of what an agent that was killed left behind."""


class LeftBehind(Exception):
    """Something could not be ended; the text names it."""


@dataclass(frozen=True)
class Heir:
    """The parts of the new agent that take something over."""

    node: NodeIdentity
    site: Site
    workers: WorkerTable
    membership: RayMembership | None

    async def take_over(self) -> None:
        """Go on with what can go on, end what can't.

        Raises:
            LeftBehind: something doesn't end.
        """
        earlier = self.site.run_dir.recorded()
        kept = self._keep(earlier)
        self.site.processes.adopt(each.process for each in kept if each.process is not None)
        if any(each.facts.get("strict") for each in kept):
            # Before the earlier agent's fence is ended: somebody always watches.
            await self.site.fence.watching()
        # A spare that was becoming a worker when its agent was killed is recorded as both, and lives on as the worker.
        living_on = {each.process for each in kept}
        lost = [each.process for each in earlier if each.process is not None and each.process not in living_on]
        end = await self.site.processes.end_marked(lost, budget_s=LEFTOVERS_S)
        if end.killed:
            _log.warning("leftovers_ended", count=end.killed)
        if not end.gone:
            raise LeftBehind(f"an earlier agent's processes {end.left} do not end")
        fences = [Started("fence", process) for process in [self.site.fence.process] if process is not None]
        self.site.run_dir.keep_only([self._own(), *kept, *fences])
        if not any(each.role == "ray" for each in kept):
            self.site.run_dir.clear_ray()
        for each in kept:
            if each.role == "worker":
                self._adopt_worker(each)
            elif each.role == "spare":
                await self._adopt_spare(each)

    def _keep(self, earlier: list[Started]) -> list[Started]:
        if self._own().facts not in [each.facts for each in earlier if each.role == "agent"]:
            return []
        # Answers that are owed, whatever became of those who left them.
        left = [each for each in earlier if each.role == CHECKPOINT]
        nodes = [each for each in earlier if each.role == "ray"]
        if self.membership is not None:
            nodes = [each for each in nodes if self.membership.adopt(each)]
            if not nodes:
                return left
        workers = [each for each in earlier if each.role == "worker"]
        taken = {each.process for each in workers if each.process is not None}
        # A spare that was just becoming a worker is recorded as both.
        spares = [each for each in earlier if each.role == "spare" and each.process not in taken]
        # One that was coming up is an actor that only its name finds; a plain process is ended by its marker.
        by_name = self.membership is not None
        is_living = self.site.processes.is_living
        return [
            *nodes,
            *workers,
            *left,
            *(each for each in spares if (by_name if each.process is None else is_living(each.process))),
        ]

    def _own(self) -> Started:
        return Started("agent", None, "", {"cluster": self.node.cluster, "runtime": self.node.runtime})

    def _adopt_worker(self, started: Started) -> None:
        record = read_record(started)
        self.workers.adopt(self._order(record), record)
        _log.info("worker_adopted", worker=started.name, stage=record.stage.value)

    def _order(self, record: WorkerRecord) -> WorkerOrder:
        command = record.command
        name = worker_name(command)
        try:
            interpreter = self.site.interpreters.allowed(command.interpreter)
        except InterpreterRefused:
            interpreter = command.interpreter  # It is used to find what is there, not to start it.
        launch = Launch(
            name=name,
            interpreter=interpreter,
            variables=host_environment(self.node),
            placement_group_id=command.ray_placement_group_id if command.in_bundle else "",
            bundle_index=command.allocation.bundle_index,
        )
        return WorkerOrder(
            command_id=record.command_id,
            command=command,
            launch=launch,
            plan={},
            marker=worker_marker(self.node, name),
            received_at=asyncio.get_running_loop().time(),
        )

    async def _adopt_spare(self, started: Started) -> None:
        process, preloaded = started.process, bool(started.facts.get("preload"))
        if process is None:
            self.site.spares.adopt_unfinished(started.name, preloaded=preloaded)
            return
        try:
            hosted = await self.site.runtime.attach(started.facts["address"], process)
        except HostError as error:
            _log.warning("spare_not_adopted", why=str(error))
            await self.site.processes.end_roots([process], budget_s=LEFTOVERS_S)
            self.site.run_dir.drop("spare", started.name)
            return
        self.site.spares.adopt(
            Launch(started.name, self.site.interpreters.allowed(""), host_environment(self.node)),
            hosted,
            preloaded=preloaded,
        )
