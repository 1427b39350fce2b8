"""Completion of names on the command line: what the controller has of a kind. It never fails and never waits long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from callboard.client.client import Client

_ANSWER_S = 1.0
"""For the controller: whoever pressed the key waits."""


def _of(names: Callable[[Client], Awaitable[list[str]]]) -> Callable[[typer.Context, str], list[str]]:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        # Every key press starts a program: what needs gRPC is loaded only here.
        import asyncio  # noqa: PLC0415

        from callboard.cli.show.failures import EXPECTED  # noqa: PLC0415
        from callboard.client.client import Client  # noqa: PLC0415

        async def ask() -> list[str]:
            async with Client(ctx.params.get("controller") or None, timeout=_ANSWER_S, retry=0) as client:
                return await names(client)

        try:
            found = asyncio.run(ask())
        except EXPECTED:
            return []  # There is nobody to say it to: the line is still being written.
        return sorted({name for name in found if name.startswith(incomplete)})

    return complete


@_of
async def jobs(client: Client) -> list[str]:
    return [job.spec.name for job in await client.list_jobs()]


@_of
async def pools(client: Client) -> list[str]:
    return [pool.name.removeprefix("pools/") for pool in await client.list_pools()]


@_of
async def nodes(client: Client) -> list[str]:
    return [node.name.removeprefix("nodes/") for node in await client.list_nodes()]


@_of
async def groups(client: Client) -> list[str]:
    found = await client.list_placement_groups()
    return [group.name.removeprefix("placementGroups/") for group in found]
