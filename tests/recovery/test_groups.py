"""What becomes of placement groups in Ray whose creators are gone? (PG-07, on real Ray)"""

from __future__ import annotations

import asyncio
import shutil

import pytest

from callboard.v1 import placement_group_pb2 as pb
from callboard.wire.refusals import NotFound
from tests.agents.conftest import until_gone
from tests.recovery.conftest import WAIT_S, Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), pytest.mark.ray]

on_ray = pytest.mark.parametrize("site", ["ray"], indirect=True)


async def kept_group(site: Site, name: str) -> pb.PlacementGroup:
    """A group that a job used and left behind for the next one."""
    job = await site.submit(name)
    await job.running(WAIT_S)
    await job.cancel()
    await job.finished(WAIT_S)
    (group,) = await site.client.list_placement_groups()
    assert group.state == pb.PlacementGroupState.PLACEMENT_GROUP_STATE_READY
    return group


@on_ray
@pytest.mark.parametrize("who", ["agent", "driver", "controller", "both"])
async def test_pg_07_a_group_that_is_known_is_kept_and_used_again_whoever_was_killed(site: Site, who: str) -> None:
    before = await kept_group(site, f"first-{who}")
    await site.kill(who)
    await site.revive(who)
    job = await site.submit(f"second-{who}")
    running = await job.running(WAIT_S)
    (after,) = await site.client.list_placement_groups()
    assert (after.name, after.ray_placement_group_id) == (before.name, before.ray_placement_group_id)
    assert after.job == running.spec.name
    assert await site.groups_in_ray() == {before.ray_placement_group_id}
    await job.cancel()
    await job.finished(WAIT_S)
    group_id = before.name.removeprefix("placementGroups/")
    for _ in range(3):  # Idle, then going or gone: the answer is the same.
        await site.client.delete_placement_group(group_id)
    async with asyncio.timeout(WAIT_S):
        while await site.groups_in_ray():
            pass
    await site.client.delete_placement_group(group_id)
    with pytest.raises(NotFound):
        await site.client.delete_placement_group("pg-123456")


@on_ray
async def test_pg_07_groups_that_no_journal_knows_are_found_shown_and_removed(site: Site) -> None:
    used = await site.submit("used")
    worker = (await used.running(WAIT_S)).workers[0].pid
    other = await site.submit("other")
    await other.running(WAIT_S)
    await other.cancel()
    await other.finished(WAIT_S)
    left = await site.groups_in_ray()
    assert len(left) == 2, "one in use, one kept"
    await site.kill("both")
    shutil.rmtree(site.controller.state_dir)
    await site.controller.start()
    await site.start_agent()
    await site.settled()
    # The creator of all of it is gone, and so is every record. What it left is shown as it goes.
    seen: dict[str, str] = {}
    removed: set[str] = set()
    async with asyncio.timeout(WAIT_S):
        async for event in site.client.watch(start_revision=1, types=["group."]):
            seen[event.subject] = event.reason
            if event.type == "group.removed":
                removed.add(event.subject)
            if len(removed) == len(left):
                break
    assert all("found in Ray as pg-" in reason for reason in seen.values()), seen
    assert await site.groups_in_ray() == set()
    await until_gone(worker)  # Nobody knows its job either.
    assert await site.client.list_placement_groups() == []
    # All room is there again, under ids that were used before.
    job = await site.submit("whole", both=True)
    await job.running(WAIT_S)
    (group,) = await site.client.list_placement_groups()
    assert group.ray_placement_group_id not in left
    assert await site.groups_in_ray() == {group.ray_placement_group_id}
    await job.cancel()
    await job.finished(WAIT_S)
    await site.assert_no_worker_but_spares()
