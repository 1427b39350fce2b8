"""Long lists given out page by page, each bounded in items and bytes, without holding up the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from callboard.controller.services.request_parts import Page

Item = TypeVar("Item")
M = TypeVar("M", bound=Message)

TURN_S = 0.005
"""Longest time that a page is built without giving others their turn (GetStats answers within 50 ms)."""


async def build_page(
    items: Iterable[Item], page: Page, *, key: Callable[[Item], str], show: Callable[[Item], M | None], most_bytes: int
) -> tuple[list[M], str]:
    """Messages of the first items that fit a page, and the token of the next page (empty: none follows).

    Args:
        items: the items after ``page.after``, in the order of the list.
        key: key of an item; the list is ordered by it and it never changes.
        show: message of an item; None if it went away meanwhile.
        most_bytes: the page ends before it gets larger, but holds one item at least (GC-09).
    """
    messages: list[M] = []
    total_bytes = 0
    last = ""
    turn_ends = time.monotonic() + TURN_S
    for item in items:
        if len(messages) >= page.size:
            return messages, page.token(last)
        message = show(item)
        if message is not None:
            total_bytes += message.ByteSize()
            if messages and total_bytes > most_bytes:
                return messages, page.token(last)
            messages.append(message)
        last = key(item)
        if time.monotonic() >= turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.monotonic() + TURN_S
    return messages, ""
