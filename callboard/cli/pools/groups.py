"""What `callboard pg …` does."""

from __future__ import annotations

from callboard.cli.pools import views as pool_views
from callboard.cli.show.plain import plain
from callboard.cli.show.printing import done, show_result
from callboard.cli.show.verb_guard import connected
from callboard.client.client import Client


@connected
async def show_list(client: Client, *, pool: str) -> None:
    groups = await client.list_placement_groups(pool=pool)
    show_result(
        [plain(group) for group in groups],
        lambda wide: pool_views.group_table(groups, wide=wide),
        empty=f"No placement groups at {client.address}.",
    )


@connected
async def show(client: Client, group_id: str) -> None:
    group = await client.get_placement_group(_bare(group_id))
    show_result(plain(group), lambda wide: pool_views.group_view(group, wide=wide))


@connected
async def delete(client: Client, group_id: str, *, when_free: bool) -> None:
    group = await client.delete_placement_group(_bare(group_id), when_free=when_free)
    if group is None:
        became = "is gone"
    elif group.job:
        became = f"is removed once job {group.job} has left it"
    else:
        became = "is being removed"
    gone = {"name": f"placementGroups/{_bare(group_id)}", "removed": True}
    done(group or gone, f"Placement group {_bare(group_id)} {became}.")


def _bare(name: str) -> str:
    return name.removeprefix("placementGroups/")
