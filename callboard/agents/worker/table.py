"""The table of this node's workers, and which commands about them still count.

The table of workers by key and generation. A generation is a fencing token (I9): what is older than the newest one
seen for its key changes nothing. Decided here: a start of a newer generation, while an older one still
lives, ends the older one first (without hooks) and waits for its proof; the agent never runs two
generations of one worker, and never gives a device away that a living worker holds (I1, I4).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from callboard.agents.host.framing import Json
from callboard.agents.host.worker_process import scratch_of
from callboard.agents.supplies.worker_env import name_of
from callboard.agents.worker.order import Site, WorkerOrder, WorkerRecord
from callboard.agents.worker.reports import NotStarted, Reports
from callboard.agents.worker.stop_ladder import StopOrder, unasked_stop
from callboard.agents.worker.worker import Worker
from callboard.model.log import structlog
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2, common_pb2

_log = structlog.get_logger(__name__)

SNAPSHOT_S = 2.0
"""Between looks at the process trees: what a worker started later and that was reparented when it died
alone is found by marker, group and session instead."""

_PEAKS = 4
"""Looks at the memory of the workers between two looks at their trees: what grows fast is seen growing."""

MAX_GENERATIONS = 100_000
"""Keys whose newest generation is remembered, oldest forgotten first; a controller forgets a job long before."""

Key: TypeAlias = tuple[str, str, int]


class StaleGeneration(Exception):
    """A command about a generation that isn't the newest one."""


def key_of(worker: common_pb2.WorkerKey) -> Key:
    """The key as a value that can be compared."""
    return (worker.job_id, worker.component, worker.rank)


class WorkerTable:
    """The workers of one node."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._workers: dict[tuple[Key, int], Worker] = {}
        self._newest: OrderedDict[Key, int] = OrderedDict()
        self._less = asyncio.Event()
        self._more = asyncio.Event()
        self.on_gone: Callable[[], None] = lambda: None
        """Called when everything of a worker is proved gone."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with whatever a worker's work raised: a bug, after which nothing here can be trusted."""

    def reports(self) -> list[agent_pb2.WorkerReport]:
        """Every worker the agent still answers for."""
        return [worker.report() for worker in self._workers.values()]

    def all(self) -> list[Worker]:
        """Every worker of this node, also those that end."""
        return list(self._workers.values())

    def holders(self) -> dict[str, str]:
        """By id of each device that workers hold, how one of them is called. One that observes may use them all."""
        return {
            share.id: worker.name
            for worker in self._workers.values()
            for share in worker.order.command.allocation.devices
        }

    def control_of(self, worker: common_pb2.WorkerKey, generation: int) -> Callable[..., Awaitable[Json]] | None:
        """What asks the host of a worker that is ready; None: there is no such worker."""
        found = self._workers.get((key_of(worker), generation))
        ready = found is not None and found.report().state == agent_pb2.AGENT_WORKER_STATE_READY
        return found.hosted.control if ready and found is not None and found.hosted is not None else None

    def knows(self, command: agent_pb2.StartWorker) -> bool:
        """Whether the worker of this very generation is here."""
        return (key_of(command.worker), command.generation) in self._workers

    def start(self, order: WorkerOrder) -> None:
        """Start a worker; its reports answer the command.

        Raises:
            StaleGeneration: the generation isn't newer than the newest one known for this worker.
        """
        command = order.command
        key = key_of(command.worker)
        there = self._workers.get((key, command.generation))
        if there is not None and there.adopted:
            there.start_again(order)
            return
        newest = self._newest.get(key, 0)
        if command.generation <= newest:
            raise StaleGeneration(f"generation {command.generation} of {order.launch.name} is not newer than {newest}")
        self._remember(key, command.generation)
        holder = self._holder_of_devices(command)
        if holder is not None:
            self._refuse(order, f"a device of it is still held by {holder}")
            return
        older = [worker for (other, _), worker in self._workers.items() if other == key]
        for worker in older:
            worker.stop(unasked_stop(f"generation {command.generation} takes its place"))
        self._begin(Worker(order, self._site, self._ended, predecessor=older[-1] if older else None))

    def adopt(self, order: WorkerOrder, record: WorkerRecord) -> None:
        """Go on with a worker of an earlier agent of this node."""
        self._remember(key_of(record.command.worker), record.command.generation)
        self._site.ports.keep(order.launch.name, record.ports)
        self._begin(Worker(order, self._site, self._ended, record=record))

    def stop(self, command_id: str, command: agent_pb2.StopWorker) -> None:
        """Stop a worker; a generation that isn't here is answered as already gone."""
        key = key_of(command.worker)
        self._remember(key, max(command.generation, self._newest.get(key, 0)))
        worker = self._workers.get((key, command.generation))
        if worker is None:
            self._answer_for_gone(command_id, command)
            return
        now = asyncio.get_running_loop().time()
        order = StopOrder(
            asked_at=now,
            hooks_until=now + command.cancel_timeout_ms / 1000,
            kill_s=command.kill_timeout_ms / 1000,
            checkpoint=command.checkpoint,
            reason=command.reason,
            kind=agent_pb2.StopKind.Name(command.kind).removeprefix("STOP_KIND_").lower(),
            command_ids=[command_id],
        )
        worker.stop(order)

    def _answer_for_gone(self, command_id: str, command: agent_pb2.StopWorker) -> None:
        """It is gone; an earlier agent may have stopped it and been killed before it could say so."""
        name = name_of(command.worker, command.generation)
        gone = agent_pb2.WorkerStopped(worker=command.worker, generation=command.generation)
        gone.outcome = agent_pb2.STOP_OUTCOME_ALREADY_GONE
        left = self._site.checkpoints.find(name)
        if left is not None and left.checkpoint is not None:
            gone.outcome = agent_pb2.STOP_OUTCOME_COOPERATIVE if left.cooperative else agent_pb2.STOP_OUTCOME_KILLED
            gone.checkpoint.CopyFrom(left.checkpoint)
            gone.detail, gone.checkpoint_lost = left.detail, left.lost
        report = self._site.outbox.report(command_id, worker_stopped=gone)
        self._site.outbox.when_acknowledged(report, lambda: self._site.checkpoints.drop(name))

    def keep_only(self, kept: Iterable[agent_pb2.WorkerRef]) -> None:
        """End every worker that the controller doesn't want to go on."""
        wanted = {(key_of(ref.worker), ref.generation) for ref in kept}
        for name, worker in self._workers.items():
            if name not in wanted:
                worker.stop(unasked_stop("the controller doesn't keep it"))

    def end(self, reason: str, *, only: Callable[[Worker], bool] = lambda _: True, hooks_s: float = 0.0) -> None:
        """End workers that nobody asked to stop by a command."""
        for worker in self._workers.values():
            if only(worker):
                worker.stop(unasked_stop(reason, hooks_s=hooks_s))

    def host_lost(self, message: str) -> None:
        """What hosts the workers ended."""
        for worker in self._workers.values():
            worker.host_lost(message)

    async def wait_none(self) -> None:
        """Return once no worker is left."""
        while self._workers:
            self._less.clear()
            await self._less.wait()

    async def keep_snapshots(self) -> None:
        """Remember the process trees of living workers; runs until cancelled."""
        while True:
            if not self._workers:
                self._more.clear()
                await self._more.wait()
            for _ in range(_PEAKS):
                await asyncio.sleep(SNAPSHOT_S / _PEAKS)
                for process, worker in self._living().items():
                    worker.footprint.see_memory(process)
            if living := self._living():
                for process, tree in (await self._site.processes.trees(living)).items():
                    living[process].footprint.see_tree(process, tree)

    def _living(self) -> dict[ProcessId, Worker]:
        return {worker.process: worker for worker in self._workers.values() if worker.process is not None}

    def _begin(self, worker: Worker) -> None:
        command = worker.order.command
        self._workers[key_of(command.worker), command.generation] = worker
        self._more.set()
        self._site.outputs.begin(worker.order.output)
        worker.begin()

    def _remember(self, key: Key, generation: int) -> None:
        self._newest[key] = generation
        self._newest.move_to_end(key)
        while len(self._newest) > MAX_GENERATIONS:
            self._newest.popitem(last=False)

    def _holder_of_devices(self, command: agent_pb2.StartWorker) -> str | None:
        """A living worker beside which these devices would be given twice."""
        key = key_of(command.worker)
        others = [worker for (other, _), worker in self._workers.items() if other != key]
        for share in command.allocation.devices:
            used: Counter[str] = Counter({"": share.milli})
            for worker in others:
                for held in worker.order.command.allocation.devices:
                    if held.id == share.id:
                        used[worker.order.launch.name] += held.milli
            if used.total() > 1000:
                return max(used.keys() - {""}, default=None)
        return None

    def _refuse(self, order: WorkerOrder, why: str) -> None:
        self._site.ports.release(order.launch.name)
        Reports(order, self._site.outbox).not_started(NotStarted(agent_pb2.START_FAILURE_HOST, why), "")

    def _ended(self, worker: Worker, error: BaseException | None) -> None:
        command = worker.order.command
        self._workers.pop((key_of(command.worker), command.generation), None)
        self._site.outputs.end(worker.order.output, scratch_of(worker.order.marker.partition("=")[2]))
        self._less.set()
        self.on_gone()
        if error is not None:
            _log.error("worker_failed", worker=worker.order.launch.name, exc_info=error)
            if not self.failed.done():
                self.failed.set_exception(error)
