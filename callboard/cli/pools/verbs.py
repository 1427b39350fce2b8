"""`callboard pool`, `pg` and `policy`: quotas, placement groups, and when a job must yield."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions, completing
from callboard.cli.options import PoolOption, argument, option, reads, takes, writes

app = typer.Typer()


pool_verbs = typer.Typer(help="Make, change and end pools, the quotas that jobs use.", no_args_is_help=True)
app.add_typer(pool_verbs, name="pool")
PoolArgument = Annotated[str, argument("NAME", "Name of the pool.", autocompletion=completing.pools)]
ValidateOption = Annotated[bool, option("--validate", "Only check; change nothing.")]


@pool_verbs.command("create", epilog="Example: callboard pool create rlhf --cpu 6 --memory 8GiB --gpu 6")
@takes("controller", "output", "quiet")
def create(
    name: Annotated[str, argument("NAME", "Name of the pool; may stand in the file instead.")] = "",
    file: Annotated[
        Path | None, option("--file", "-f", "FILE", "YAML or JSON file with the whole spec; - reads the input.")
    ] = None,
    cpu: Annotated[str, option("--cpu", "N", "CPU quota.")] = "",
    memory: Annotated[str, option("--memory", "SIZE", "Memory quota, e.g. 8GiB.")] = "",
    gpu: Annotated[str, option("--gpu", "N", "GPU quota.")] = "",
    cohort: Annotated[str, option("--cohort", "NAME", "Pools of a cohort lend quota to each other.")] = "",
    borrow_limit: Annotated[
        str, option("--borrow-limit", "cpu=N,gpu=N,memory=SIZE", "Most that it may borrow. Default: no limit.")
    ] = "",
    lend_limit: Annotated[
        str, option("--lend-limit", "cpu=N,gpu=N,memory=SIZE", "Most that it lends. Default: no limit.")
    ] = "",
    validate: ValidateOption = False,
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


@pool_verbs.command("list", epilog="Example: callboard pool list")
@reads
def list_pools() -> None:
    """List pools with what is used of their quota."""
    actions.pools.show_list()


@pool_verbs.command("get", epilog="Example: callboard pool get rlhf -o yaml")
@reads
def get(name: PoolArgument) -> None:
    """Show one pool: quota, usage, placement groups."""
    actions.pools.show(name)


@pool_verbs.command("set", epilog="Example: callboard pool set rlhf nominal.cpu=8 pg_pool.max_dynamic=4")
@takes("controller", "output", "quiet")
def set_pool(
    name: PoolArgument,
    changes: Annotated[
        list[str],
        argument(
            "FILE | KEY=VALUE…",
            "A YAML file with the whole spec, or single fields to change; values are YAML, null takes one away.",
        ),
    ],
    etag: Annotated[
        str, option("--etag", "ETAG", "Refuse the change if the pool has changed since this etag was read.")
    ] = "",
    validate: ValidateOption = False,
) -> None:
    """Change a pool: as a whole from a file, or single fields. What runs goes on."""
    actions.pools.change(name, changes, etag=etag, validate=validate)


@pool_verbs.command("delete", epilog="Example: callboard pool delete rlhf --force")
@writes
def delete(
    name: PoolArgument,
    force: Annotated[bool, option("--force", "Also cancel the jobs in the pool.")] = False,
) -> None:
    """End a pool. Refused while jobs are in it, unless forced."""
    actions.pools.delete(name, force=force)


pg_verbs = typer.Typer(help="Show and remove placement groups, which book room in Ray.", no_args_is_help=True)
app.add_typer(pg_verbs, name="pg")

GroupArgument = Annotated[
    str, argument("ID", "Id of the placement group, as `pg list -o wide` shows it.", autocompletion=completing.groups)
]


@pg_verbs.command("list", epilog="Example: callboard pg list --pool rlhf -o wide")
@reads
def list_groups(pool: PoolOption = "") -> None:
    """List placement groups."""
    actions.pools.show_groups(pool=pool)


@pg_verbs.command("get", epilog="Example: callboard pg get pg-7")
@reads
def get_group(group: GroupArgument) -> None:
    """Show one placement group: what it books where, and who uses it."""
    actions.pools.show_group(group)


@pg_verbs.command("delete", epilog="Example: callboard pg delete pg-7")
@writes
def delete_group(
    group: GroupArgument,
    when_free: Annotated[
        bool, option("--when-free", "Also remove a group that is in use, once its job has left it.")
    ] = False,
) -> None:
    """Remove an idle placement group.

    A reserved group is not made again until its pool is changed.
    """
    actions.pools.delete_group(group, when_free=when_free)


policy_verbs = typer.Typer(help="Read and set the preemption policy: who yields to whom.", no_args_is_help=True)
app.add_typer(policy_verbs, name="policy")


@policy_verbs.command("get", epilog="Example: callboard policy get -o yaml > policy.yaml")
@reads
def get_policy() -> None:
    """Show the policy, every default filled in. The YAML form can be given to `policy set`."""
    actions.policy.show()


@policy_verbs.command("set", epilog="Example: callboard policy set cancel_timeout=500ms aggressiveness=HIGH")
@takes("controller", "output", "quiet")
def set_policy(
    changes: Annotated[
        list[str],
        argument(
            "FILE | KEY=VALUE…", "A YAML file with the whole policy, or single fields to change; values are YAML."
        ),
    ],
    validate: ValidateOption = False,
) -> None:
    """Set the policy: as a whole from a file, or single fields."""
    actions.policy.change(changes, validate=validate)
