"""Waiting on the screen: a spinner on a terminal, one line elsewhere, nothing when quiet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from callboard.cli.show import screen


@asynccontextmanager
async def waiting(what: str, *, quiet: bool) -> AsyncIterator[None]:
    """Shows ``what`` as long as the block runs."""
    if quiet:
        yield
        return
    console = screen.stderr()
    if not console.is_terminal:
        console.print(f"{what} …")
        yield
        return
    with console.status(f"{what} …"):
        yield
