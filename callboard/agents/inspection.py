"""Inspection: what the node sees of its workers, of Ray and of its devices at this moment.

Asked for by people (`callboard top`, `doctor`, `job env`), answered within seconds, never stored. What can't be looked
at is said, and holds nothing else up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from callboard.agents.host.framing import Json
from callboard.agents.runtime import HostError, Runtime
from callboard.agents.system.gpu_users import seen_devices
from callboard.agents.system.nvml import NoDriver
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import within
from callboard.agents.system.usage import Usage, cpu_milli, usage_of
from callboard.agents.worker.table import WorkerTable, key_of
from callboard.agents.worker.worker import Worker
from callboard.model.describe import MASK
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2, inspection_pb2

_SAMPLE_S = 0.25
"""Between the two looks at CPU times: short for a person, long for a clock of 10 ms ticks."""

_ANSWER_S = 2.0
"""For a worker to answer. One that holds the GIL doesn't, and is shown without what only it knows."""

_FOREIGN_S = 5.0
"""For Ray to list actors and groups."""

_STORES_S = 2.0
"""For Ray to say how full its object stores are, which it knows already: `callboard status` waits for it."""

ENVIRONMENTS_BYTES = 3 << 20
"""For the variables of all workers in one answer: below the 4 MiB of a message, above what one worker can have."""


@dataclass(frozen=True)
class _Look:
    """One worker while it is looked at."""

    worker: Worker
    tree: frozenset[ProcessId]
    before: Usage
    answer: Mapping[str, Any]
    silent: str


@dataclass(frozen=True)
class Inspector:
    """Looks around on one node."""

    workers: WorkerTable
    runtime: Runtime
    processes: Processes
    inventory: agent_pb2.Inventory

    async def inspect(self, ask: inspection_pb2.InspectionAsk) -> inspection_pb2.NodeInspection:
        """Everything that is asked for, at most a few seconds later."""
        if ask.object_stores:
            return await self._object_stores()
        chosen = [worker for worker in self.workers.all() if _is_asked_for(worker, ask) and not worker.gone.is_set()]
        seen = inspection_pb2.NodeInspection()
        foreign = asyncio.create_task(self._foreign(seen)) if ask.foreign else None
        looks = await self._look(chosen)
        room, dropped = ENVIRONMENTS_BYTES if ask.environment else 0, 0
        for look in looks:
            told = self._told(look, environment=ask.environment)
            room -= told.ByteSize()
            if ask.environment and room < 0:
                told.environment.clear()
                dropped += 1
            seen.workers.append(told)
        if dropped:
            seen.unknown.append(f"the variables of {dropped} workers are too much for one answer; ask for one of them")
        await self._devices(seen, looks)
        if foreign is not None:
            await foreign
        return seen

    async def _look(self, workers: list[Worker]) -> list[_Look]:
        living = {worker.process: worker for worker in workers if worker.process is not None}
        trees = await self.processes.trees(living) if living else {}
        before = {process: await asyncio.to_thread(usage_of, tree) for process, tree in trees.items()}
        sampled = asyncio.create_task(asyncio.sleep(_SAMPLE_S))
        answers = await asyncio.gather(*(self._ask(worker) for worker in workers))
        await sampled
        none = frozenset[ProcessId]()
        return [
            _Look(
                worker,
                trees.get(worker.process, none) if worker.process is not None else none,
                before.get(worker.process, Usage()) if worker.process is not None else Usage(),
                answer,
                silent,
            )
            for worker, (answer, silent) in zip(workers, answers, strict=True)
        ]

    async def _ask(self, worker: Worker) -> tuple[Mapping[str, Any], str]:
        """What the process says of itself, and why it doesn't."""
        if worker.hosted is None:
            return {}, "it is still being started"
        try:
            return await within(worker.hosted.control("ping"), _ANSWER_S), ""
        except TimeoutError:
            return {}, f"it did not answer within {_ANSWER_S:g} s: native code may hold the interpreter"
        except HostError as error:
            return {}, str(error)

    def _told(self, look: _Look, *, environment: bool) -> inspection_pb2.WorkerInspection:
        order, answer = look.worker.order, look.answer
        after = usage_of(look.tree)
        if look.worker.process is not None:
            look.worker.footprint.see_tree(look.worker.process, look.tree)
        told = inspection_pb2.WorkerInspection(
            worker=order.command.worker,
            generation=order.command.generation,
            pid=look.worker.process.pid if look.worker.process is not None else 0,
            cpu_milli=cpu_milli(look.before, after) if look.tree else 0,
            memory_bytes=after.memory_bytes,
            peak_memory_bytes=look.worker.footprint.peak_bytes,
            calls=[
                inspection_pb2.CallLoad(member=load["name"], in_flight=load["in_flight"], limit=load["limit"])
                for load in answer.get("loads", ())
            ],
            framework=answer.get("framework", ""),
            uses_device=answer.get("uses_device", False),
            silent=look.silent,
        )
        if answer.get("visible_devices") is not None:
            told.visible_devices = answer["visible_devices"]
        if environment:
            secret = frozenset(order.plan["secrets"])
            for name, value in order.launch.variables.items():
                # A message carries UTF-8 alone, a variable any bytes.
                shown = value.encode(errors="backslashreplace").decode()
                told.environment[name] = MASK if name in secret else shown
        return told

    async def _foreign(self, seen: inspection_pb2.NodeInspection) -> None:
        """What Ray lists, as far as it answers."""
        listed = await _answer(self.runtime.listed(), _FOREIGN_S, "list its actors", seen)
        if listed:  # Plain processes are listed nowhere.
            seen.ray_listed = True
            seen.actors.extend(inspection_pb2.RayActor(**actor) for actor in listed.get("actors", ()))
            groups = listed.get("placement_groups", ())
            seen.placement_groups.extend(inspection_pb2.RayPlacementGroup(**group) for group in groups)

    async def _object_stores(self) -> inspection_pb2.NodeInspection:
        """What Ray says of its object stores, as far as it answers."""
        seen = inspection_pb2.NodeInspection()
        stores = await _answer(self.runtime.object_stores(), _STORES_S, "tell of its object stores", seen)
        seen.object_stores.extend(inspection_pb2.RayObjectStore(**store) for store in stores or ())
        return seen

    async def _devices(self, seen: inspection_pb2.NodeInspection, looks: list[_Look]) -> None:
        if self.inventory.simulated or not self.inventory.devices:
            return
        owners = {process.pid: look.worker for look in looks for process in look.tree}
        try:
            found = await asyncio.to_thread(seen_devices, list(self.inventory.devices))
        except NoDriver as error:
            seen.unknown.append(f"the use of the devices can't be asked: {error}")
            return
        seen.unknown.extend(found.silent)
        for user in found.users:
            entry = seen.device_users.add(index=user.index, pid=user.pid, memory_bytes=user.memory_bytes)
            if user.pid in owners:
                entry.worker.CopyFrom(owners[user.pid].order.command.worker)
        for load in found.loads:
            seen.device_loads.add(
                index=load.index,
                utilization_percent=load.utilization_percent,
                used_memory_bytes=load.used_memory_bytes,
                memory_bytes=load.memory_bytes,
            )


def _is_asked_for(worker: Worker, ask: inspection_pb2.InspectionAsk) -> bool:
    command = worker.order.command
    job_id, component, rank = key_of(command.worker)
    owns = ask.component in ("", component, *(member.name for member in command.members))
    return ask.job_id in ("", job_id) and owns and (not ask.HasField("rank") or ask.rank == rank)


async def _answer(
    asking: Coroutine[Any, Any, Json], within_s: float, what: str, seen: inspection_pb2.NodeInspection
) -> Json:
    """What Ray answers; None, with the reason among what is unknown, if it doesn't."""
    try:
        return await within(asking, within_s)
    except TimeoutError:
        seen.unknown.append(f"Ray did not {what} within {within_s:g} s")
    except HostError as error:
        seen.unknown.append(f"Ray can't be asked: {error}")
    return None
