"""Placement groups: read and removed."""

from __future__ import annotations

from functools import partial

from callboard.controller.loop.driver import Driver
from callboard.controller.options import ControllerOptions
from callboard.controller.services.request_parts import Context, build_page, id_of, page_of
from callboard.controller.views.pools import group_message
from callboard.scheduler import State
from callboard.scheduler.records.events import GroupDeleted
from callboard.v1 import placement_group_pb2 as pb
from callboard.v1 import placement_group_pb2_grpc
from callboard.wire.refusals import NotFound


class PlacementGroupService(placement_group_pb2_grpc.PlacementGroupServiceServicer):
    def __init__(self, driver: Driver, options: ControllerOptions) -> None:
        self._driver = driver
        self._options = options

    async def GetPlacementGroup(
        self, request: pb.GetPlacementGroupRequest, context: Context
    ) -> pb.GetPlacementGroupResponse:
        group_id = id_of(request.name, "placementGroups")

        def build(state: State) -> pb.PlacementGroup:
            if group_id not in state.groups:
                subject = f"placementGroups/{group_id}"
                raise NotFound(f"there is no placement group {group_id}", metadata={"subject": subject})
            return group_message(state.groups[group_id], state)

        return pb.GetPlacementGroupResponse(placement_group=await self._driver.read(build))

    async def ListPlacementGroups(
        self, request: pb.ListPlacementGroupsRequest, context: Context
    ) -> pb.ListPlacementGroupsResponse:
        """All groups, by number."""
        page = page_of(request.page_size, request.page_token, "placementGroups", [request.pool])
        state = self._driver.state
        groups = sorted(
            (group for group in state.groups.values() if request.pool in ("", group.pool)),
            key=lambda group: group.number,
        )
        after = -1 if page.after is None else int(page.after)
        shown, token = await build_page(
            [group for group in groups if group.number > after],
            page,
            key=lambda group: str(group.number),
            show=lambda group: self._message(group.group_id),
            most_bytes=self._options.limits.page_bytes,
        )
        await self._driver.journaled()
        return pb.ListPlacementGroupsResponse(placement_groups=shown, next_page_token=token)

    async def DeletePlacementGroup(
        self, request: pb.DeletePlacementGroupRequest, context: Context
    ) -> pb.DeletePlacementGroupResponse:
        """Removes an idle group, or one that is used as soon as it isn't."""
        group_id = id_of(request.name, "placementGroups")
        group = await self._driver.ask(
            partial(GroupDeleted, group_id=group_id, when_free=request.when_free),
            lambda _: self._message(group_id),
            source="group",
        )
        return pb.DeletePlacementGroupResponse(placement_group=group)

    def _message(self, group_id: str) -> pb.PlacementGroup | None:
        state = self._driver.state
        return group_message(state.groups[group_id], state) if group_id in state.groups else None
