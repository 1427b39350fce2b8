"""Packs of jobs that have ended: how a snapshot holds its history, so that a restart need not read a hundred thousand
jobs before it serves.

One line has the heads of some hundred jobs, which is all that is decided by, and behind them their lines, compressed.
Records made of it sleep (:func:`callboard.model.frozen.sleeper`) until somebody asks for more than the head.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from callboard.controller.journal.codec import UnreadableChange, decode_change, encode_change
from callboard.controller.journal.secret_store import without_values
from callboard.model.frozen import sleeper, sleeps
from callboard.scheduler.records.job_records import Change, JobRecord, Put, Record, SpecRecord
from callboard.scheduler.records.states import ENDED, JobState

_BEGINS = '{"v":1,"kind":"pack",'

_SIZE = 256
"""Jobs in a pack. What one of them is asked for unpacks them all."""

_HEAD = ("uid", "name", "order", "state", "end_ms", "request_id", "revision")
"""Fields of a job that a head tells."""

_UNSAID: Mapping[str, Any] = {
    **dict.fromkeys(("deadline_ms", "eligible_ms", "session_ms", "starving_ms", "retry_ms", "cause_ms"), 0),
    **dict.fromkeys(("nominated", "starving"), False),
    "checkpoint_ms": 0,
}
"""Fields that are looked at while the state is made, and say nothing of most jobs that have ended. Others are not
packed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Some jobs that have ended.

    Attributes:
        specs: the spec of each job.
    """

    line: str
    specs: Sequence[SpecRecord]
    jobs: Sequence[JobRecord]

    @classmethod
    def of(cls, specs: Sequence[SpecRecord], jobs: Sequence[JobRecord]) -> Pack:
        """A new one."""
        heads = [[getattr(job, field) for field in _HEAD] for job in jobs]
        lines = "\n".join(line_of(record) for pair in zip(specs, jobs, strict=True) for record in pair)
        body = {"heads": heads, "packed": b64encode(zlib.compress(lines.encode(), 1)).decode()}
        return cls(_BEGINS + json.dumps(body, separators=(",", ":"))[1:], specs, jobs)

    @classmethod
    def read(cls, line: str) -> Pack:
        """One that was written.

        Raises:
            UnreadableChange: it can't be read.
        """
        try:
            body = json.loads(line)
            lines = _Lines(b64decode(body["packed"], validate=True))
            uids, names, orders, states, *told = zip(*body["heads"], strict=True)
            specs = list(map(_spec_asleep, [(lines, 2 * place) for place in range(len(uids))], uids))
            leads = [(lines, 2 * place + 1) for place in range(len(uids))]
            jobs = list(map(_job_asleep, leads, uids, names, orders, map(_STATES.__getitem__, states), *told))
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableChange(f"a pack of jobs can't be read ({error}): {line[:120]}") from error
        return cls(line, specs, jobs)


class _Lines:
    """The lines of a pack, compressed. It knows none of the records, which know it: a circle would never be freed."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def unpacked(self) -> Sequence[str]:
        return zlib.decompress(self._packed).decode().split("\n")


@lru_cache(maxsize=4)
def _unpacked(lines: _Lines) -> Sequence[str]:
    return lines.unpacked()


def _line_at(leads: tuple[_Lines, int]) -> str:
    lines, place = leads
    return _unpacked(lines)[place]


def _whole(leads: tuple[_Lines, int]) -> Any:
    change = decode_change(_line_at(leads))
    assert isinstance(change, Put)
    return change.record


_job_asleep = sleeper(JobRecord, _whole, *_HEAD, **_UNSAID)
_spec_asleep = sleeper(SpecRecord, _whole, "uid")
_STATES: Mapping[str, JobState] = {state.value: state for state in ENDED}


def line_of(record: Record) -> str:
    """The line of a record in a snapshot: that of its :class:`Put`, without secret values. One that sleeps goes on
    sleeping."""
    leads = sleeps(record)
    if leads is not None:
        return _line_at(leads)
    return encode_change(Put(without_values(record) if isinstance(record, SpecRecord) else record))


def changes_of(line: str, packs: list[Pack] | None = None) -> Sequence[Change]:
    """The changes of a line of a snapshot.

    Args:
        line: of one record, or of a pack.
        packs: gets the pack, whose jobs are no changes then.

    Raises:
        UnreadableChange: broken, of an unknown kind, or written by a newer version.
    """
    if not line.startswith(_BEGINS):
        return (decode_change(line),)
    pack = Pack.read(line)
    if packs is not None:
        packs.append(pack)
        return ()
    return [Put(record) for pair in zip(pack.specs, pack.jobs, strict=True) for record in pair]


def packed(records: Iterable[Record], known: Iterable[Pack] = ()) -> tuple[list[Pack], list[Record]]:
    """What a snapshot of some records consists of: packs, and the records that are in none.

    Args:
        known: packs that were made or read before: those of which nothing changed are taken as they are.
    """
    specs: dict[str, SpecRecord] = {}
    jobs: dict[str, JobRecord] = {}
    others: list[Record] = []
    live: list[Record] = []
    for record in records:
        if isinstance(record, SpecRecord):
            specs[record.uid] = record
        elif not isinstance(record, JobRecord):
            others.append(record)
        elif record.state in ENDED and record.uid in specs and not any(getattr(record, field) for field in _UNSAID):
            jobs[record.uid] = record
        else:
            live.append(record)
    packs = []
    for pack in known:
        # A job that ended changes seldom. Small packs become large ones.
        if len(pack.jobs) > _SIZE // 2 and all(jobs.get(job.uid) is job for job in pack.jobs):
            packs.append(pack)
            for job in pack.jobs:
                del jobs[job.uid], specs[job.uid]
    theirs, ended = [specs.pop(uid) for uid in jobs], list(jobs.values())
    parts = (slice(first, first + _SIZE) for first in range(0, len(ended), _SIZE))
    packs += [Pack.of(theirs[part], ended[part]) for part in parts]
    return packs, [*others, *specs.values(), *live]
