"""What `callboard pool set` and `callboard pool delete` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callboard.cli.pools.actions import print_pool, read_pool
from callboard.cli.show import screen
from callboard.cli.show.changes import changed, is_file, read_changes
from callboard.cli.show.printing import done
from callboard.cli.show.session import connected
from callboard.client.client import Client
from callboard.model.describe import pool_to_mapping
from callboard.v1.pool_pb2 import Pool
from callboard.wire.pool import pool_spec_from_proto


@connected
async def change(client: Client, name: str, changes: Sequence[str], *, etag: str, validate: bool) -> None:
    """Changes a pool: from a file, or single fields of it."""
    if is_file(changes):
        spec: Mapping[str, Any] = {**read_pool(Path(changes[0])), "name": name}
        pool = await client.update_pool(spec, etag=etag, validate_only=validate)
    else:
        pool = await _change_fields(client, name, read_changes(changes), etag=etag, validate=validate)
    if validate:
        screen.stderr().print("The pool could be changed.")
    else:
        print_pool(pool)


@connected
async def delete(client: Client, name: str, *, force: bool) -> None:
    """Deletes a pool."""
    pool = await client.delete_pool(name, force=force)
    rest = "is gone" if pool is None else "takes no more jobs and goes with the last of those in it"
    done(pool or {"name": f"pools/{name}", "removed": True}, f"Pool {name} {rest}.")


async def _change_fields(
    client: Client, name: str, changes: Sequence[tuple[tuple[str, ...], Any]], *, etag: str, validate: bool
) -> Pool:
    """A field is changed in what is there now; the etag keeps a change that comes between from being undone."""
    now = await client.get_pool(name)
    spec = changed(pool_to_mapping(pool_spec_from_proto(name, now.spec)), changes)
    fields = sorted({path[0] for path, _ in changes})
    return await client.update_pool(spec, fields=fields, etag=etag or now.etag, validate_only=validate)
