"""Commands to a simulated agent, by the rules of ``callboard.agents.commands`` and of its table of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from callboard.simulation.hosting import UNASKED_KILL_MS, Keeper, StopOrder, Worker
from callboard.simulation.machines import Key
from callboard.simulation.tasks import GroupTasks
from callboard.v1 import agent_pb2, common_pb2


class Doer(Keeper, Protocol):
    """The agent, as its commands see it."""

    leaving: bool
    groups: GroupTasks

    def say(self, command_id: str, **content: Any) -> None:
        """Reports something."""


class Commands:
    """Carries out commands; the workers of one agent's run."""

    def __init__(self, agent: Doer) -> None:
        self.term = 0
        self.workers: dict[tuple[Key, int], Worker] = {}
        self._agent = agent
        self._newest: dict[Key, int] = {}

    def handle(self, command: agent_pb2.Command) -> None:
        """Begins what is asked; one that was answered is answered the same again."""
        if not self._agent.outbox.begin(command.command_id):
            return
        if command.term < self.term:
            self._refuse(command, f"term {command.term} is over, {self.term} is current")
        else:
            self.term = command.term
            self._begin(command)

    def keep_only(self, kept: list[agent_pb2.WorkerRef]) -> None:
        """Ends every worker that the controller doesn't want to go on."""
        wanted = {(key_of(ref.worker), ref.generation) for ref in kept}
        for name, worker in list(self.workers.items()):
            if name not in wanted:
                worker.stop(self._unasked())

    def end(self, only: Callable[[Worker], bool] = lambda _: True, *, hooks_ms: int = 0) -> None:
        """Ends workers that nobody asked to stop by a command."""
        for worker in list(self.workers.values()):
            if only(worker):
                worker.stop(self._unasked(hooks_ms))

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""
        self.workers.pop((worker.key, worker.generation), None)

    def _begin(self, command: agent_pb2.Command) -> None:
        match command.WhichOneof("action"):
            case "start_worker":
                self._start(command)
            case "reserve_port":
                asked = command.reserve_port
                port = 20_000 + asked.generation % 10_000
                reserved = agent_pb2.PortReserved(worker=asked.worker, generation=asked.generation, port=port)
                self._agent.say(command.command_id, port_reserved=reserved)
            case "stop_worker":
                self._stop(command.command_id, command.stop_worker)
            case "create_placement_group":
                self._agent.groups.create(command.command_id, command.create_placement_group)
            case "remove_placement_group":
                self._agent.groups.remove(command.command_id, command.remove_placement_group)
            case _:
                self._refuse(command, "unknown")

    def _start(self, command: agent_pb2.Command) -> None:
        start = command.start_worker
        key, generation = key_of(start.worker), start.generation
        newest = self._newest.get(key, 0)
        if self._agent.leaving:
            self._refuse(command, "this node is leaving")
            return
        if generation <= newest:
            self._refuse(command, f"generation {generation} is not newer than {newest}")
            return
        self._newest[key] = generation
        holder = self._holder_of_devices(start)
        if holder:
            self._agent.site.count("start refused by its agent: device held")
            failed = agent_pb2.WorkerStartFailed(
                worker=start.worker,
                generation=generation,
                failure=agent_pb2.START_FAILURE_HOST,
                message=f"a device of it is still held by {holder}",
            )
            self._agent.say(command.command_id, worker_start_failed=failed)
            return
        older = [worker for (other, _), worker in self.workers.items() if other == key]
        for worker in older:
            worker.stop(self._unasked())
        self.workers[key, generation] = Worker(self._agent, command.command_id, start, older[-1] if older else None)

    def _stop(self, command_id: str, stop: agent_pb2.StopWorker) -> None:
        key = key_of(stop.worker)
        self._newest[key] = max(stop.generation, self._newest.get(key, 0))
        worker = self.workers.get((key, stop.generation))
        if worker is None or worker.gone:
            gone = agent_pb2.WorkerStopped(
                worker=stop.worker, generation=stop.generation, outcome=agent_pb2.STOP_OUTCOME_ALREADY_GONE
            )
            self._agent.say(command_id, worker_stopped=gone)
            return
        now_ms = self._agent.site.timeline.now_ms
        until_ms = now_ms + stop.cancel_timeout_ms
        worker.stop(StopOrder(now_ms, until_ms, stop.kill_timeout_ms, stop.checkpoint, [command_id]))

    def _holder_of_devices(self, start: agent_pb2.StartWorker) -> str:
        """A living worker beside which a device would be given twice; empty: none."""
        key = key_of(start.worker)
        for share in start.allocation.devices:
            used = share.milli
            for (other, generation), worker in self.workers.items():
                if other != key:
                    used += sum(held.milli for held in worker.command.allocation.devices if held.id == share.id)
                    if used > 1_000:
                        return f"{other[0]} g{generation}"
        return ""

    def _refuse(self, command: agent_pb2.Command, why: str) -> None:
        self._agent.site.count("command refused by its agent")
        self._agent.say(command.command_id, command_refused=agent_pb2.CommandRefused(message=why))

    def _unasked(self, hooks_ms: int = 0) -> StopOrder:
        now_ms = self._agent.site.timeline.now_ms
        return StopOrder(now_ms, now_ms + hooks_ms, UNASKED_KILL_MS, hooks_ms > 0)


def key_of(worker: common_pb2.WorkerKey) -> Key:
    """The key as a value that can be compared."""
    return (worker.job_id, worker.component, worker.rank)
