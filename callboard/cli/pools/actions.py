"""What `callboard pool …` and `callboard pg …` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from callboard.cli.jobs.actions import read_file
from callboard.cli.options import wishes
from callboard.cli.pools import views as pool_views
from callboard.cli.show import consoles
from callboard.cli.show.changes import changed, is_file, read_changes
from callboard.cli.show.plain import message_of, plain, spec_of_printed
from callboard.cli.show.printing import done, show_result
from callboard.cli.show.verb_guard import connected, with_client
from callboard.client.client import Client
from callboard.model.describe import described
from callboard.v1 import pool_pb2
from callboard.v1.pool_pb2 import Pool
from callboard.wire.specs import pool_spec_from_proto


def create(
    name: str, *, file: Path | None, nominal: Mapping[str, str], cohort: str, limits: Mapping[str, str], validate: bool
) -> None:
    """Makes a pool from a file, or from a name and quotas."""
    stated: dict[str, Any] = {}
    if amounts := {resource: amount for resource, amount in nominal.items() if amount}:
        stated["nominal"] = amounts
    if cohort:
        stated["cohort"] = cohort
    stated |= {field: _amounts_of(text, field) for field, text in limits.items() if text}
    if file is not None and stated:
        fields = ", ".join(stated)
        raise typer.BadParameter(f"a pool is stated by its file alone; write {fields} there and leave the options out")
    if file is None and not name:
        raise typer.BadParameter("name the pool, or give a file with --file", param_hint="NAME")

    async def action(client: Client) -> None:
        spec: Mapping[str, Any] = {"name": name, **stated}
        if file is not None:
            read = read_pool(file)
            spec = {**read, "name": name} if name else read
        pool = await client.create_pool(spec, validate_only=validate)
        if validate:
            consoles.stderr().print("The pool could be made.")
        else:
            print_pool(pool)

    with_client(action)


def _amounts_of(text: str, field: str) -> dict[str, str]:
    """ "cpu=2,memory=4GiB" as a mapping; what the amounts are is checked with the pool."""
    option = f"--{field.replace('_', '-')}"
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and equals and amount for name, equals, amount in parts):
        raise typer.BadParameter(f"{text} is not a list of amounts; write e.g. cpu=2,memory=4GiB", param_hint=option)
    found = {name.strip(): amount.strip() for name, _, amount in parts}
    if len(found) < len(parts):
        raise typer.BadParameter(f"{text} has a resource twice; state each once", param_hint=option)
    return found


def read_pool(file: Path) -> Mapping[str, Any]:
    """What a file says of a pool, or the pool that `pool get` printed.

    Raises:
        CommandFailed: it can't be read.
        InvalidInput: it is no pool.
    """
    found = read_file(file)
    printed = spec_of_printed(found)
    if printed is None:
        return found
    spec = message_of(pool_pb2.PoolSpec, printed, field="spec")
    return described(pool_spec_from_proto(str(found.get("name")).removeprefix("pools/"), spec))


@connected
async def show_list(client: Client) -> None:
    pools = await client.list_pools()
    show_result(
        [plain(pool) for pool in pools],
        lambda wide: pool_views.pool_table(pools, wide=wide),
        empty=f"No pools at {client.address}. `callboard pool create` makes one.",
    )


@connected
async def show(client: Client, name: str) -> None:
    pool = await client.get_pool(name)
    show_result(plain(pool), lambda wide: pool_views.pool_view(pool, wide=wide))


def print_pool(pool: Pool) -> None:
    if wishes.for_program or not wishes.quiet:
        show_result(plain(pool), lambda wide: pool_views.pool_table([pool], wide=wide))


@connected
async def change(client: Client, name: str, changes: Sequence[str], *, etag: str, validate: bool) -> None:
    """Changes a pool: from a file, or single fields of it."""
    if is_file(changes):
        spec: Mapping[str, Any] = {**read_pool(Path(changes[0])), "name": name}
        pool = await client.update_pool(spec, etag=etag, validate_only=validate)
    else:
        pool = await _change_fields(client, name, read_changes(changes), etag=etag, validate=validate)
    if validate:
        consoles.stderr().print("The pool could be changed.")
    else:
        print_pool(pool)


@connected
async def delete(client: Client, name: str, *, force: bool) -> None:
    pool = await client.delete_pool(name, force=force)
    rest = "is gone" if pool is None else "takes no more jobs and goes with the last of those in it"
    done(pool or {"name": f"pools/{name}", "removed": True}, f"Pool {name} {rest}.")


async def _change_fields(
    client: Client, name: str, changes: Sequence[tuple[tuple[str, ...], Any]], *, etag: str, validate: bool
) -> Pool:
    """A field is changed in what is there now; the etag keeps a change that comes between from being undone."""
    now = await client.get_pool(name)
    spec = changed(described(pool_spec_from_proto(name, now.spec)), changes)
    fields = sorted({path[0] for path, _ in changes})
    return await client.update_pool(spec, fields=fields, etag=etag or now.etag, validate_only=validate)


@connected
async def show_groups(client: Client, *, pool: str) -> None:
    groups = await client.list_placement_groups(pool=pool)
    show_result(
        [plain(group) for group in groups],
        lambda wide: pool_views.group_table(groups, wide=wide),
        empty=f"No placement groups at {client.address}.",
    )


@connected
async def show_group(client: Client, group_id: str) -> None:
    group = await client.get_placement_group(_bare(group_id))
    show_result(plain(group), lambda wide: pool_views.group_view(group, wide=wide))


@connected
async def delete_group(client: Client, group_id: str, *, when_free: bool) -> None:
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
