"""Long lists, read page by page, so that no reply meets a size limit (GC-09)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

PAGE_SIZE = 200
"""Objects per page: a job with its history is a few KiB, so a page stays far below 4 MiB."""


class Page(Protocol):
    """Some objects, and where the next ones are."""

    @property
    def next_page_token(self) -> str:
        """Token of the next page; empty: this is the last."""


AnyPage = TypeVar("AnyPage", bound=Page)


async def all_pages(fetch: Callable[[str], Awaitable[AnyPage]]) -> AsyncIterator[AnyPage]:
    """Every page of a list, in order.

    Args:
        fetch: gets the page of a token; the empty token gets the first.
    """
    token = ""
    while True:
        page = await fetch(token)
        yield page
        token = page.next_page_token
        if not token:
            return
