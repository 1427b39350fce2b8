"""Parts of requests: resource names, etags and page tokens, read or refused with the field at fault; and pages of long
lists, each bounded in items and bytes, built without holding up the loop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from callboard.model.faults import Fault
from callboard.model.frozen import dataclass
from callboard.model.names import NAME_PATTERN, is_name
from callboard.scheduler import State
from callboard.scheduler.records.job_records import JobRecord
from callboard.security.caller_roles import caller
from callboard.v1 import common_pb2
from callboard.wire.refusals import ErrorReason, InvalidRequest, NotAllowed, invalid

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000
MAX_REQUEST_ID = 128
MAX_REASON = 512
MAX_PLACES = 20_000
"""Most places that a reader of output goes on after: a stream or two of each worker of a large job."""

Item = TypeVar("Item")
M = TypeVar("M", bound=Message)

TURN_S = 0.005
"""Longest time that a page is built without giving others their turn (GetStats answers within 50 ms)."""

_TOKEN_MARK = b"callboard page token 1"


def id_of(name: str, collection: str, field: str = "name") -> str:
    """The id in a resource name such as ``jobs/train-00``.

    Args:
        collection: its first part: ``jobs``.
        field: path of the name in its request.

    Raises:
        InvalidRequest: it is no such name.
    """
    prefix, slash, found = name.partition("/")
    if prefix != collection or not slash or not is_name(found):
        raise invalid(
            field,
            f"{name[:100]!r} is not a valid name; write {collection}/ID, where ID begins with a letter and matches "
            f"{NAME_PATTERN}",
        )
    return found


def version_of(etag: str) -> int:
    """The version that a change is based on; 0: whatever is there. An etag that is none of ours matches nothing."""
    if not etag:
        return 0
    return int(etag) if etag.isascii() and etag.isdigit() and 0 < int(etag) < 1 << 62 else -1


def text_of(text: str, field: str, limit: int = MAX_REASON) -> str:
    """A text for people, bounded.

    Raises:
        InvalidRequest: too long.
    """
    if len(text) > limit:
        raise invalid(field, f"has {len(text)} characters; at most {limit} are allowed")
    return text


def output_selection(selection: common_pb2.OutputSelection) -> common_pb2.OutputSelection:
    """The output that is meant.

    Raises:
        InvalidRequest: a number or a name that can't be meant.
    """
    if selection.component and not is_name(selection.component):
        raise invalid(
            "selection.component", f"{selection.component[:80]!r} is not a valid name; names must match {NAME_PATTERN}"
        )
    for field in ("rank", "first_attempt", "last_attempt", "since_ms", "tail_lines"):
        if getattr(selection, field) < 0:
            raise invalid(f"selection.{field}", f"{getattr(selection, field)} is negative")
    if selection.last_attempt and selection.first_attempt > selection.last_attempt:
        raise invalid("selection.last_attempt", f"{selection.last_attempt} comes before {selection.first_attempt}")
    known = set(common_pb2.OutputStream.values()) - {common_pb2.OUTPUT_STREAM_UNSPECIFIED}
    if not set(selection.streams) <= known:
        raise invalid("selection.streams", "names a stream that there isn't")
    if len(selection.after) > MAX_PLACES:
        raise invalid("selection.after", f"{len(selection.after)} places; at most {MAX_PLACES} are allowed")
    if any(place.offset < 0 or place.stream not in known for place in selection.after):
        raise invalid("selection.after", "an offset is negative, or a stream is none")
    return selection


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for.

    Attributes:
        after: key of the last item of the page before; None: from the start.
        list_id: the list with its filters; a token of another list is refused.
    """

    size: int
    after: str | None
    list_id: str

    def token(self, last: str) -> str:
        """The token of the page after the item ``last``."""
        body = json.dumps([self.list_id, last]).encode()
        return base64.urlsafe_b64encode(_checksum(body) + body).decode()


def page_of(
    page_size: int, page_token: str, collection: str, filters: Iterable[object] = (), *, field: str = "page_size"
) -> Page:
    """Reads the paging fields of a request.

    Args:
        filters: everything else that selects its items.
        field: of the request, that states the size.

    Raises:
        InvalidRequest: a size out of bounds, or (BAD_PAGE_TOKEN) a token that is not one of this list.
    """
    if not 0 <= page_size <= LARGEST_PAGE:
        raise invalid(field, f"{page_size} is out of bounds; use 1 to {LARGEST_PAGE}, 0: the default")
    list_id = json.dumps([collection, *(str(one) for one in filters)])
    after = _read_token(page_token, list_id) if page_token else None
    return Page(page_size or DEFAULT_PAGE, after, list_id)


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


def _read_token(token: str, list_id: str) -> str:
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        body = raw[8:]
        found_list, last = json.loads(body)
    except (ValueError, binascii.Error, TypeError, RecursionError) as error:
        raise _bad_token("is not a page token") from error
    if raw[:8] != _checksum(body) or not isinstance(last, str):
        raise _bad_token("is damaged or was made by another version")
    if found_list != list_id:
        raise _bad_token("belongs to another list or other filters; start from the first page")
    return last


def _bad_token(why: str) -> InvalidRequest:
    fault = Fault("page_token", why)
    return InvalidRequest(f"page_token: {why}", reason=ErrorReason.BAD_PAGE_TOKEN, faults=(fault,))


def _checksum(body: bytes) -> bytes:
    # Against accidents, not attackers: a forged token shows nothing that a list without one does not show.
    return hashlib.blake2b(body, digest_size=8, key=_TOKEN_MARK).digest()


def check_member(state: State, pools: Iterable[str], what: str) -> None:
    """Whether the caller may see and change ``what``, which belongs to these pools. Ask in the task of the call: the
    loop that decides does not know the caller.

    Raises:
        NotAllowed: the caller is a trainer, and one of the pools does not name it as a member.
    """
    who = caller()
    if not who.in_pools_only:
        return
    for pool in sorted(set(pools)):
        if not is_member(state, pool, who.name):
            raise NotAllowed(
                f"{what} is in pool {pool}, which does not name {who.name} as a member. "
                f"Ask an operator to add {who.name} to the members of the pool"
            )


def is_member(state: State, pool: str, name: str) -> bool:
    """Whether a pool names a client as a member."""
    record = state.pools.get(pool)
    return record is not None and name in record.spec.members


def sees_job(state: State, job: JobRecord, client: str) -> bool:
    """Whether every pool of a job names a client as a member."""
    return all(is_member(state, pool, client) for pool in state.specs[job.uid].spec.pools)


def is_member_of(state: State, job_name: str, client: str) -> bool:
    """Whether every pool of the job of a name names a client as a member."""
    job = state.find_job(job_name)
    return job is not None and sees_job(state, job, client)
