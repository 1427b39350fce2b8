"""The placement groups that this agent makes or removes.

Creation and removal are owed until done (docs/agents.md): a removal that comes while the group is being made waits for
what comes of that and removes it, so a half-made group is never left in Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from callboard.agents.link.outbox import Outbox
from callboard.agents.ray.ray_choice import Shares, amount, in_order
from callboard.agents.runtime import BundleBooking, GroupBooking, HostError, Runtime
from callboard.agents.system.tasks import cancelled
from callboard.model.log import structlog
from callboard.model.quantities import MILLI, is_piece
from callboard.v1 import agent_pb2, common_pb2

_log = structlog.get_logger(__name__)


class Groups:
    def __init__(self, runtime: Runtime, outbox: Outbox) -> None:
        self._runtime = runtime
        self._outbox = outbox
        self._making: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def look_around(self) -> None:
        """Tell of every group of this cluster that is in Ray: this node is new there, or its agent is (PG-07)."""
        self._track(asyncio.create_task(self._look_around()))

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
        await cancelled(self._tasks)

    async def _look_around(self) -> None:
        try:
            groups = await self._runtime.found()
        except HostError as error:
            # Whatever keeps it from being found out ends in another join, and that in another look.
            _log.warning("placement_groups_not_listed", why=str(error))
            return
        for each in groups:
            found = agent_pb2.PlacementGroupFound(
                placement_group_id=each.id, ray_placement_group_id=each.ray_id, ray_session=each.ray_session
            )
            self._outbox.report("", placement_group_found=found)

    async def _create(self, command_id: str, command: agent_pb2.CreatePlacementGroup) -> None:
        started = asyncio.get_running_loop().time()
        group = GroupBooking(
            id=command.placement_group_id,
            attempt=command.attempt,
            bundles=ray_bundles(command.bundles),
            timeout_s=command.timeout_ms / 1000,
            certain=command.certain_devices,
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
            # Bundles behind the ledger's own hold parts, of which none is to move.
            devices=[agent_pb2.BundleDevices(indexes=each) for each in booked.devices[: len(command.bundles)]],
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
    """Bundles in Ray's terms. The index of a bundle stays what it is; more may follow behind all of them.

    Ray gives a bundle whole GPUs or a part of one. Parts that the group has of one device are booked as one amount: so
    whatever is to be on one device is, and a device is named by one bundle. The first bundle that has a part of a
    device books the whole sum, or, where it books GPUs already, a bundle of its own does. Whole devices are booked one
    by one where Ray could not give the bundles theirs otherwise (0 and 3, 1 and 2).
    """
    parts: dict[tuple[str, int], int] = {}
    for each in bundles:
        for share in each.devices:
            if share.milli < MILLI:
                device = (each.ray_node_id, share.index)
                parts[device] = parts.get(device, 0) + share.milli
    apart = _crossing(bundles)
    booked: list[BundleBooking] = []
    more: list[BundleBooking] = []
    for each in bundles:
        amounts = ray_amounts(each.resources)
        held: list[Shares] = []
        whole = tuple((share.index, MILLI) for share in each.devices if share.milli == MILLI)
        if whole:
            held += [(share,) for share in whole] if each.ray_node_id in apart else [whole]
        for share in each.devices:
            if total_milli := parts.pop((each.ray_node_id, share.index), 0):
                held.append(((share.index, total_milli),))
        if each.devices:
            amounts.pop("GPU", None)
        if held:
            amounts["GPU"] = amount(held[0]) / MILLI
        booked.append(BundleBooking(each.ray_node_id, amounts or {"memory": 1}, held[0] if held else ()))
        more += [BundleBooking(each.ray_node_id, {"GPU": amount(shares) / MILLI}, shares) for shares in held[1:]]
    return booked + more


def _crossing(bundles: Sequence[agent_pb2.Bundle]) -> set[str]:
    """Nodes of which Ray could not give these bundles their whole devices, in whatever order."""
    whole: dict[str, list[Shares]] = {}
    for each in bundles:
        shares = tuple((share.index, MILLI) for share in each.devices if share.milli == MILLI)
        whole.setdefault(each.ray_node_id, []).append(tuple(sorted(shares)))
    return {node for node, held in whole.items() if not in_order(sorted(held))}


def ray_amounts(resources: common_pb2.Resources) -> dict[str, float]:
    """Amounts in Ray's units, without declared hardware, which Ray doesn't know.

    Ray refuses an empty bundle, so nothing at all becomes one byte.
    """
    amounts = {
        "CPU": resources.cpu_milli / 1000,
        "GPU": resources.gpu_milli / 1000,
        "memory": resources.memory_bytes,
        **{name: milli / 1000 for name, milli in resources.custom_milli.items() if not is_piece(name)},
    }
    return {name: amount for name, amount in amounts.items() if amount} or {"memory": 1}
