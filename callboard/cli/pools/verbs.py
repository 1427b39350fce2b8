"""`callboard pool …`: named quotas and their placement-group pools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import reads, takes, writes

app = typer.Typer(help="Make, change and end pools, the quotas that jobs use.", no_args_is_help=True)


@app.command("create", epilog="Example: callboard pool create rlhf --cpu 6 --memory 8GiB --gpu 6")
@takes("controller", "output", "quiet")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pool; may stand in the file instead.")] = "",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="YAML or JSON file with the whole spec; - reads the input."),
    ] = None,
    cpu: Annotated[str, typer.Option("--cpu", metavar="N", help="CPU quota.", show_default=False)] = "",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory quota, e.g. 8GiB.", show_default=False)
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", metavar="N", help="GPU quota.", show_default=False)] = "",
    cohort: Annotated[
        str,
        typer.Option(
            "--cohort", metavar="NAME", help="Pools of a cohort lend quota to each other.", show_default=False
        ),
    ] = "",
    borrow_limit: Annotated[
        str,
        typer.Option(
            "--borrow-limit",
            metavar="cpu=N,gpu=N,memory=SIZE",
            help="Most that it may borrow. Default: no limit.",
            show_default=False,
        ),
    ] = "",
    lend_limit: Annotated[
        str,
        typer.Option(
            "--lend-limit",
            metavar="cpu=N,gpu=N,memory=SIZE",
            help="Most that it lends. Default: no limit.",
            show_default=False,
        ),
    ] = "",
    validate: Annotated[
        bool, typer.Option("--validate", help="Only check; change nothing.", show_default=False)
    ] = False,
) -> None:
    """Make a pool. One that exists with an equal spec is left as it is."""
    actions.pools.create(
        name,
        file=file,
        nominal={"cpu": cpu, "memory": memory, "gpu": gpu},
        cohort=cohort,
        limits={"borrow_limit": borrow_limit, "lend_limit": lend_limit},
        validate=validate,
    )


@app.command("list", epilog="Example: callboard pool list")
@reads
def list_pools() -> None:
    """List pools with what is used of their quota."""
    actions.pools.show_list()


@app.command("get", epilog="Example: callboard pool get rlhf -o yaml")
@reads
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pool.", autocompletion=completing.pools)],
) -> None:
    """Show one pool: quota, usage, placement groups."""
    actions.pools.show(name)


@app.command("set", epilog="Example: callboard pool set rlhf nominal.cpu=8 pg_pool.max_dynamic=4")
@takes("controller", "output", "quiet")
def set_pool(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pool.", autocompletion=completing.pools)],
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | KEY=VALUE…",
            help="A YAML file with the whole spec, or single fields to change; values are YAML, null takes one away.",
        ),
    ],
    etag: Annotated[
        str,
        typer.Option(
            "--etag", help="Refuse the change if the pool has changed since this etag was read.", show_default=False
        ),
    ] = "",
    validate: Annotated[
        bool, typer.Option("--validate", help="Only check; change nothing.", show_default=False)
    ] = False,
) -> None:
    """Change a pool: as a whole from a file, or single fields. What runs goes on."""
    actions.pool_changes.change(name, changes, etag=etag, validate=validate)


@app.command("delete", epilog="Example: callboard pool delete rlhf --force")
@writes
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pool.", autocompletion=completing.pools)],
    force: Annotated[
        bool, typer.Option("--force", help="Also cancel the jobs in the pool.", show_default=False)
    ] = False,
) -> None:
    """End a pool. Refused while jobs are in it, unless forced."""
    actions.pool_changes.delete(name, force=force)
