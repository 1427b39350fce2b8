"""What `callboard pool …` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from callboard.cli.jobs.actions import read_file
from callboard.cli.options import Output
from callboard.cli.pools import views as pool_views
from callboard.cli.show import printing, screen
from callboard.cli.show.plain import message_of, plain, spec_of_printed
from callboard.cli.show.session import with_client
from callboard.client.client import Client
from callboard.model.describe import pool_to_mapping
from callboard.v1 import pool_pb2
from callboard.v1.pool_pb2 import Pool
from callboard.wire.pool import pool_spec_from_proto


def create(
    name: str,
    *,
    file: Path | None,
    nominal: Mapping[str, str],
    cohort: str,
    limits: Mapping[str, str],
    validate: bool,
    controller: str,
    output: Output,
    quiet: bool,
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
            screen.stderr().print("The pool could be made.")
        else:
            print_pool(pool, output, quiet=quiet)

    with_client(controller, action)


def _amounts_of(text: str, field: str) -> dict[str, str]:
    """ "cpu=2,memory=4GiB" as a mapping; what the amounts are is checked with the pool."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and equals and amount for name, equals, amount in parts):
        option = f"--{field.replace('_', '-')}"
        raise typer.BadParameter(f"{text} is not a list of amounts; write e.g. cpu=2,memory=4GiB", param_hint=option)
    return {name.strip(): amount.strip() for name, _, amount in parts}


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
    return pool_to_mapping(pool_spec_from_proto(str(found.get("name")).removeprefix("pools/"), spec))


def show_list(*, controller: str, output: Output) -> None:
    """Lists pools."""

    async def action(client: Client) -> None:
        pools = await client.list_pools()
        if output is Output.JSON:
            printing.print_json([plain(pool) for pool in pools])
        elif output is Output.YAML:
            printing.print_yaml([plain(pool) for pool in pools])
        elif pools:
            screen.stdout(wide=output is Output.WIDE).print(pool_views.pool_table(pools, wide=output is Output.WIDE))
        else:
            screen.stderr().print(f"No pools at {client.address}. `callboard pool create` makes one.")

    with_client(controller, action)


def show(name: str, *, controller: str, output: Output) -> None:
    """Shows one pool."""

    async def action(client: Client) -> None:
        pool = await client.get_pool(name)
        if output in (Output.JSON, Output.YAML):
            print_pool(pool, output, quiet=False)
        else:
            screen.stdout(wide=output is Output.WIDE).print(pool_views.pool_view(pool, wide=output is Output.WIDE))

    with_client(controller, action)


def print_pool(pool: Pool, output: Output, *, quiet: bool) -> None:
    """Prints a pool that was made or changed."""
    if output is Output.JSON:
        printing.print_json(plain(pool))
    elif output is Output.YAML:
        printing.print_yaml(plain(pool))
    elif not quiet:
        screen.stdout(wide=output is Output.WIDE).print(pool_views.pool_table([pool], wide=output is Output.WIDE))
