"""Pools: made, read, changed, deleted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from callboard.controller.loop.driver import Driver
from callboard.controller.options import ControllerOptions
from callboard.controller.services.request_parts import (
    LARGEST_PAGE,
    Context,
    Page,
    build_page,
    id_of,
    page_of,
    version_of,
)
from callboard.controller.views.pools import pool_message
from callboard.scheduler import Refusal, RefusalCode, State
from callboard.scheduler.account.stats import jobs_in_pools
from callboard.scheduler.records.events import PoolCreated, PoolDeleted, PoolUpdated
from callboard.scheduler.records.pool_records import PoolRecord
from callboard.v1 import pool_pb2, pool_pb2_grpc
from callboard.wire.refusals import NotFound, invalid
from callboard.wire.specs import pool_spec_from_proto, pool_spec_to_proto


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    def __init__(self, driver: Driver, options: ControllerOptions) -> None:
        self._driver = driver
        self._options = options

    async def CreatePool(self, request: pool_pb2.CreatePoolRequest, context: Context) -> pool_pb2.CreatePoolResponse:
        """Makes a pool; an equal one that exists is returned."""
        spec = pool_spec_from_proto(request.pool_id, request.spec)
        if request.validate_only:
            await self._driver.trial(partial(PoolCreated, spec=spec))
            return pool_pb2.CreatePoolResponse(pool=_planned(PoolRecord(spec=spec)))
        pool = await self._driver.ask(
            partial(PoolCreated, spec=spec), lambda _: self._message(spec.name), source="pool"
        )
        return pool_pb2.CreatePoolResponse(pool=pool)

    async def GetPool(self, request: pool_pb2.GetPoolRequest, context: Context) -> pool_pb2.GetPoolResponse:
        name = id_of(request.name, "pools")

        def build(state: State) -> pool_pb2.Pool:
            if name not in state.pools:
                raise NotFound(f"there is no pool {name}", metadata={"subject": f"pools/{name}"})
            return pool_message(state.pools[name], state)

        return pool_pb2.GetPoolResponse(pool=await self._driver.read(build))

    async def ListPools(self, request: pool_pb2.ListPoolsRequest, context: Context) -> pool_pb2.ListPoolsResponse:
        """All pools, by name."""
        page = page_of(request.page_size, request.page_token, "pools")
        pools, token = await self._listed(page, self._options.limits.page_bytes)
        await self._driver.journaled()
        return pool_pb2.ListPoolsResponse(pools=pools, next_page_token=token)

    async def foremost(self) -> tuple[list[pool_pb2.Pool], int]:
        """The first pools, by name, and how many there are beside them. What they say may not be journaled yet."""
        pools, _ = await self._listed(page_of(LARGEST_PAGE, "", "pools"), self._options.limits.page_bytes // 4)
        return pools, len(self._driver.state.pools) - len(pools)

    async def UpdatePool(self, request: pool_pb2.UpdatePoolRequest, context: Context) -> pool_pb2.UpdatePoolResponse:
        name = id_of(request.name, "pools")
        expected = version_of(request.etag)
        mask = _checked_mask(request)

        def make(now_ms: int, cause: str) -> PoolUpdated:
            # The mask is applied to what is there when the change is decided, so that two changes never undo another.
            old = self._driver.state.pools.get(name)
            if old is None:
                raise Refusal(RefusalCode.NOT_FOUND, f"pools/{name}", f"there is no pool {name}", "name")
            merged = _merged(pool_spec_to_proto(old.spec), request.spec, mask)
            spec = pool_spec_from_proto(name, merged, name_field="name")
            return PoolUpdated(now_ms=now_ms, cause=cause, spec=spec, expected_version=expected)

        if request.validate_only:
            event = await self._driver.trial(make)
            assert isinstance(event, PoolUpdated)
            return pool_pb2.UpdatePoolResponse(pool=_planned(PoolRecord(spec=event.spec)))
        pool = await self._driver.ask(make, lambda _: self._message(name), source="pool")
        return pool_pb2.UpdatePoolResponse(pool=pool)

    async def DeletePool(self, request: pool_pb2.DeletePoolRequest, context: Context) -> pool_pb2.DeletePoolResponse:
        """Deletes a pool; what is left of it while it drains."""
        name = id_of(request.name, "pools")
        expected = version_of(request.etag)
        pool = await self._driver.ask(
            partial(PoolDeleted, name=name, force=request.force, expected_version=expected),
            lambda _: self._message(name),
            source="pool",
        )
        return pool_pb2.DeletePoolResponse(pool=pool)

    async def _listed(self, page: Page, most_bytes: int) -> tuple[list[pool_pb2.Pool], str]:
        state = self._driver.state
        inside = jobs_in_pools(state)
        return await build_page(
            [name for name in sorted(state.pools) if page.after is None or name > page.after],
            page,
            key=str,
            show=lambda name: self._message(name, inside),
            most_bytes=most_bytes,
        )

    def _message(self, name: str, inside: Mapping[str, tuple[int, int]] | None = None) -> pool_pb2.Pool | None:
        state = self._driver.state
        return pool_message(state.pools[name], state, inside) if name in state.pools else None


def _planned(record: PoolRecord) -> pool_pb2.Pool:
    """A pool that was only checked."""
    return pool_pb2.Pool(name=f"pools/{record.spec.name}", spec=pool_spec_to_proto(record.spec))


def _checked_mask(request: pool_pb2.UpdatePoolRequest) -> tuple[str, ...]:
    fields = {field.name for field in pool_pb2.PoolSpec.DESCRIPTOR.fields}
    for path in request.update_mask.paths:
        if path not in fields:
            raise invalid("update_mask", f"{path[:100]!r} is not a top-level field of PoolSpec")
    paths = set(request.update_mask.paths)
    # An amount and the list of what it limits are one setting in two fields.
    for pair in ({"nominal", "limited"}, {"borrow_limit", "borrow_limited"}, {"lend_limit", "lend_limited"}):
        if paths & pair:
            paths |= pair
    return tuple(sorted(paths or fields))


def _merged(old: pool_pb2.PoolSpec, new: pool_pb2.PoolSpec, mask: tuple[str, ...]) -> pool_pb2.PoolSpec:
    for path in mask:
        old.ClearField(path)  # type: ignore[arg-type]
    picked = pool_pb2.PoolSpec()
    picked.CopyFrom(new)
    for field in picked.DESCRIPTOR.fields:
        if field.name not in mask:
            picked.ClearField(field.name)  # type: ignore[arg-type]
    old.MergeFrom(picked)
    return old
