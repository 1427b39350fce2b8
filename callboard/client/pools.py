"""The calls of a client that concern pools and their placement groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.client.paging import PAGE_SIZE, all_pages
from callboard.model.inputs import pool_spec
from callboard.model.requests import PoolSpec
from callboard.model.specs import PoolSpec as ExactPoolSpec
from callboard.v1.placement_group_pb2 import (
    DeletePlacementGroupRequest,
    GetPlacementGroupRequest,
    ListPlacementGroupsRequest,
    ListPlacementGroupsResponse,
    PlacementGroup,
)
from callboard.v1.pool_pb2 import (
    CreatePoolRequest,
    DeletePoolRequest,
    GetPoolRequest,
    ListPoolsRequest,
    ListPoolsResponse,
    Pool,
    UpdatePoolRequest,
)
from callboard.wire.pool import pool_spec_to_proto


class PoolCalls:
    """Pools and placement groups."""

    _connection: Connection

    async def create_pool(
        self, spec: PoolSpec | ExactPoolSpec | Mapping[str, Any], *, validate_only: bool = False
    ) -> Pool:
        """Makes a pool; one that exists with an equal spec is returned as it is.

        Args:
            spec: the SDK's PoolSpec, a frozen one, or a mapping in human units:
                ``{"name": "rlhf", "nominal": {"cpu": 6}}``.
            validate_only: only check.

        Raises:
            InvalidInput: the mapping has faults; nothing was sent.
            AlreadyExists: a pool of that name has another spec.
        """
        read = spec if isinstance(spec, ExactPoolSpec) else pool_spec(spec)
        request = CreatePoolRequest(pool_id=read.name, spec=pool_spec_to_proto(read), validate_only=validate_only)
        return (await self._connection.call(methods.CREATE_POOL, request)).pool

    async def ensure_pool(self, /, name: str, **fields: Any) -> Pool:
        """Makes the pool ``name`` unless it exists with an equal spec.

        Args:
            name: name of the pool.
            **fields: fields of the pool in human units: ``nominal={"cpu": 6, "memory": "8GiB"}``,
                ``pg_pool={"reserved": [{"cpu": 2, "gpu": 1}], "max_dynamic": 2}``.
        """
        return await self.create_pool({"name": name, **fields})

    async def update_pool(
        self,
        spec: PoolSpec | ExactPoolSpec | Mapping[str, Any],
        *,
        fields: Sequence[str] = (),
        etag: str = "",
        validate_only: bool = False,
    ) -> Pool:
        """Changes a pool.

        Args:
            spec: the new spec; its name says which pool.
            fields: top-level fields to take from it; empty: all.
            etag: refuse if the pool changed since this was read; empty: don't care.
            validate_only: only check.

        Raises:
            InvalidInput: the mapping has faults; nothing was sent.
            EtagMismatch: the pool changed meanwhile.
        """
        read = spec if isinstance(spec, ExactPoolSpec) else pool_spec(spec)
        request = UpdatePoolRequest(
            name=f"pools/{read.name}",
            spec=pool_spec_to_proto(read),
            update_mask=FieldMask(paths=fields),
            etag=etag,
            validate_only=validate_only,
        )
        return (await self._connection.call(methods.UPDATE_POOL, request)).pool

    async def get_pool(self, name: str) -> Pool:
        """One pool.

        Raises:
            NotFound: there is none of that name.
        """
        request = GetPoolRequest(name=f"pools/{name}")
        return (await self._connection.call(methods.GET_POOL, request)).pool

    async def list_pools(self) -> list[Pool]:
        """Every pool, by name."""

        async def fetch(token: str) -> ListPoolsResponse:
            request = ListPoolsRequest(page_size=PAGE_SIZE, page_token=token)
            return await self._connection.call(methods.LIST_POOLS, request)

        return [pool async for page in all_pages(fetch) for pool in page.pools]

    async def delete_pool(self, name: str, *, force: bool = False) -> Pool | None:
        """Deletes a pool.

        Args:
            name: name of the pool.
            force: cancel the jobs that are in it.

        Returns:
            The pool while it still drains; None when it is gone.

        Raises:
            PoolInUse: jobs are in it and ``force`` was not given.
        """
        request = DeletePoolRequest(name=f"pools/{name}", force=force)
        response = await self._connection.call(methods.DELETE_POOL, request)
        return response.pool if response.HasField("pool") else None

    async def list_placement_groups(self, *, pool: str = "") -> list[PlacementGroup]:
        """Every placement group, by id.

        Args:
            pool: only those of this pool; empty: all.
        """

        async def fetch(token: str) -> ListPlacementGroupsResponse:
            request = ListPlacementGroupsRequest(page_size=PAGE_SIZE, page_token=token, pool=pool)
            return await self._connection.call(methods.LIST_PLACEMENT_GROUPS, request)

        return [group async for page in all_pages(fetch) for group in page.placement_groups]

    async def get_placement_group(self, group_id: str) -> PlacementGroup:
        """One placement group.

        Raises:
            NotFound: there is none of that id.
        """
        request = GetPlacementGroupRequest(name=f"placementGroups/{group_id}")
        return (await self._connection.call(methods.GET_PLACEMENT_GROUP, request)).placement_group

    async def delete_placement_group(self, group_id: str, *, when_free: bool = False) -> PlacementGroup | None:
        """Removes an idle placement group; a reserved one stays away until its pool is updated.

        Args:
            group_id: which.
            when_free: also one that is used: it takes no other job, and is removed once nobody uses it.

        Returns:
            The group while its removal is owed; None when it is gone.
        """
        request = DeletePlacementGroupRequest(name=f"placementGroups/{group_id}", when_free=when_free)
        response = await self._connection.call(methods.DELETE_PLACEMENT_GROUP, request)
        return response.placement_group if response.HasField("placement_group") else None
