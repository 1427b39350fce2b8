"""Which placement groups is this agent making or removing?

Creation and removal are owed until done (design 02): a removal that comes while the group is being made waits for what
comes of that and removes it, so a half-made group is never left in Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from callboard.agents.outbox import Outbox
from callboard.agents.runtime import BundleBooking, GroupBooking, HostError, Runtime
from callboard.v1 import agent_pb2, common_pb2

_log = structlog.get_logger(__name__)


class Groups:
    """Placement groups under way."""

    def __init__(self, runtime: Runtime, outbox: Outbox) -> None:
        self._runtime = runtime
        self._outbox = outbox
        self._making: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, command_id: str, command: agent_pb2.CreatePlacementGroup) -> None:
        """Make a group; a report answers the command."""
        task = asyncio.create_task(self._create(command_id, command))
        self._making[command.placement_group_id] = task
        self._track(task)

    def remove(self, command_id: str, command: agent_pb2.RemovePlacementGroup) -> None:
        """Remove a group; a report answers the command once it is gone."""
        making = self._making.pop(command.placement_group_id, None)
        self._track(asyncio.create_task(self._remove(command_id, command, making)))

    async def close(self) -> None:
        """Give up what is under way: the controller still owes it, another agent will be asked."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _create(self, command_id: str, command: agent_pb2.CreatePlacementGroup) -> None:
        started = asyncio.get_running_loop().time()
        group = GroupBooking(
            id=command.placement_group_id,
            attempt=command.attempt,
            bundles=ray_bundles(command.bundles),
            timeout_s=command.timeout_ms / 1000,
        )
        try:
            booked = await self._runtime.book(group)
        except HostError as error:
            failed = agent_pb2.PlacementGroupFailed(
                placement_group_id=group.id, attempt=group.attempt, message=str(error)
            )
            self._outbox.report(command_id, placement_group_failed=failed)
            return
        took_s = asyncio.get_running_loop().time() - started
        ready = agent_pb2.PlacementGroupReady(
            placement_group_id=group.id,
            attempt=group.attempt,
            ray_placement_group_id=booked.ray_id,
            ray_session=booked.ray_session,
            took_ms=round(took_s * 1000),
        )
        self._outbox.report(command_id, placement_group_ready=ready)

    async def _remove(
        self,
        command_id: str,
        command: agent_pb2.RemovePlacementGroup,
        making: asyncio.Task[None] | None,
    ) -> None:
        group_id, ray_id = command.placement_group_id, command.ray_placement_group_id
        await self._runtime.unbook(group_id, command.attempt, ray_id)
        if making is not None and not making.done():
            # The first removal hurried it to its end; if it was too early, the second one counts.
            await asyncio.wait([making])
            await self._runtime.unbook(group_id, command.attempt, ray_id)
        removed = agent_pb2.PlacementGroupRemoved(placement_group_id=group_id)
        self._outbox.report(command_id, placement_group_removed=removed)

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._making = {name: each for name, each in self._making.items() if each is not task}
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("placement_group_task_failed", exc_info=error)


def ray_bundles(bundles: Sequence[agent_pb2.Bundle]) -> list[BundleBooking]:
    """Bundles in Ray's terms. Ray gives a bundle whole GPUs or a part of one, so one with parts of several (a worker
    whose placement shares them) becomes several: its own, with its first device, and one more for each other device,
    behind all others, so that the index of a bundle stays what it was."""
    booked, more = [], []
    for each in bundles:
        amounts = ray_amounts(each.resources)
        if len(each.devices) > 1 and any(share.milli < 1000 for share in each.devices):
            first, *rest = (share.milli / 1000 for share in each.devices)
            amounts["GPU"] = first
            more += [BundleBooking(each.ray_node_id, {"GPU": part}) for part in rest]
        booked.append(BundleBooking(each.ray_node_id, amounts))
    return booked + more


def ray_amounts(resources: common_pb2.Resources) -> dict[str, float]:
    """Amounts in Ray's units. Ray refuses an empty bundle, so nothing at all becomes one byte."""
    amounts = {
        "CPU": resources.cpu_milli / 1000,
        "GPU": resources.gpu_milli / 1000,
        "memory": resources.memory_bytes,
        **{name: milli / 1000 for name, milli in resources.custom_milli.items()},
    }
    return {name: amount for name, amount in amounts.items() if amount} or {"memory": 1}
