"""What `callboard pg …` does."""

from __future__ import annotations

from callboard.cli.options import Output
from callboard.cli.pools import views as pool_views
from callboard.cli.show import printing, screen
from callboard.cli.show.plain import plain
from callboard.cli.show.session import with_client
from callboard.cli.show.showing import done
from callboard.cli.show.showing import show as show_result
from callboard.client.client import Client


def show_list(*, pool: str, controller: str, output: Output) -> None:
    """Lists placement groups."""

    async def action(client: Client) -> None:
        groups = await client.list_placement_groups(pool=pool)
        if output is Output.JSON:
            printing.print_json([plain(group) for group in groups])
        elif output is Output.YAML:
            printing.print_yaml([plain(group) for group in groups])
        elif groups:
            screen.stdout(wide=output is Output.WIDE).print(pool_views.group_table(groups, wide=output is Output.WIDE))
        else:
            screen.stderr().print(f"No placement groups at {client.address}.")

    with_client(controller, action)


def show(group_id: str, *, controller: str, output: Output) -> None:
    """Shows one placement group."""

    async def action(client: Client) -> None:
        group = await client.get_placement_group(_bare(group_id))
        show_result(plain(group), output, lambda wide: pool_views.group_view(group, wide=wide))

    with_client(controller, action)


def delete(group_id: str, *, when_free: bool, controller: str, quiet: bool) -> None:
    """Removes a placement group."""

    async def action(client: Client) -> None:
        group = await client.delete_placement_group(_bare(group_id), when_free=when_free)
        if group is None:
            became = "is gone"
        elif group.job:
            became = f"is removed once job {group.job} has left it"
        else:
            became = "is being removed"
        gone = {"name": f"placementGroups/{_bare(group_id)}", "removed": True}
        done(group or gone, f"Placement group {_bare(group_id)} {became}.", quiet=quiet)

    with_client(controller, action)


def _bare(name: str) -> str:
    return name.removeprefix("placementGroups/")
