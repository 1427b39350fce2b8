"""The codec of the journal: one line of JSON per change, versioned by kind of record.

``{"v":1,"kind":"job","put":{…}}`` or ``{"v":1,"kind":"job","drop":"j-1"}``. Fields and their types are those of the
record classes; bytes are base64. A field that a line lacks has the class's default: most fields of most records do, and
a restart takes as long as what it reads. So fields are added without a new version; whatever can't be read that way,
another default among it, raises its kind's version and gets a step in :data:`UPGRADES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from zlib import crc32

from pydantic import ConfigDict, TypeAdapter, ValidationError

from callboard.model.frozen import dataclass
from callboard.model.specs import ComponentSpec
from callboard.scheduler.machine import HANDLERS, Outcome
from callboard.scheduler.records.events import Event
from callboard.scheduler.records.job_records import (
    RECORD_TYPES,
    Change,
    CheckpointRecord,
    Drop,
    EventRecord,
    Key,
    Put,
    WorkerRecord,
)
from callboard.scheduler.records.refusals import Refusal

VERSION = 1
"""Version that is written."""

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

UPGRADES: Mapping[tuple[str, int], Upgrade] = MappingProxyType({})
"""(kind, version) → the step that turns a record of that version into one of the next."""

_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class UnreadableChange(ValueError):
    """A line that this version can't read. ``str()`` is a clear sentence."""


def _adapter(of: Any) -> TypeAdapter[Any]:
    # "or None", because pydantic takes no configuration beside a bare dataclass.
    return TypeAdapter(of | None, config=_CONFIG)


_RECORDS: Mapping[str, TypeAdapter[Any]] = MappingProxyType({kind.kind: _adapter(kind) for kind in RECORD_TYPES})
_READ: dict[str, Callable[[str], Any]] = {kind: each.validator.validate_json for kind, each in _RECORDS.items()}
"""The same as ``validate_json`` of the adapters, which looks at eight options first: a fifth of the time of a line."""

_KEY: TypeAdapter[Key] = _adapter(Key)
_EVENT: TypeAdapter[EventRecord] = _adapter(EventRecord)
DAMAGED = "malformed"
"""Stands in every error about content that changed by itself; SQLite's word for it."""

_SEAL = 8
"""Characters of a checksum."""

_PUT = re.compile(rf'\{{"v":{VERSION},"kind":"([a-z]+)","put":')
"""How a line of the present version begins: what follows is the record alone."""


def encode_change(change: Change) -> str:
    if isinstance(change, Put):
        body = _RECORDS[change.record.kind].dump_json(change.record, exclude_defaults=True)
        return _line(change.record.kind, "put", body)
    return _line(change.kind, "drop", _KEY.dump_json(change.key))


def decode_change(line: str) -> Change:
    """The change of a line.

    Raises:
        UnreadableChange: broken, of an unknown kind, or written by a newer version.
    """
    newest = _newest(line)
    if newest is not None:
        return newest
    try:
        envelope = json.loads(line)
        version, kind = envelope["v"], envelope["kind"]
        if version > VERSION:
            raise UnreadableChange(
                f"a {kind!r} record has version {version}, this callboard reads up to {VERSION}: "
                "it was written by a newer callboard"
            )
        adapter = _RECORDS[kind]
        if "drop" in envelope:
            return Drop(kind, _KEY.validate_json(json.dumps(envelope["drop"])))
        plain = envelope["put"]
        for step in range(version, VERSION):
            plain = UPGRADES[kind, step](plain)
        # As JSON again: only there do lists become tuples and base64 becomes bytes.
        record = adapter.validate_json(json.dumps(plain))
        if record is None:
            raise UnreadableChange(f"a {kind!r} record is empty")
        return Put(record)
    except (KeyError, TypeError, ValidationError, json.JSONDecodeError) as error:
        raise UnreadableChange(f"a record can't be read ({error}): {line[:120]}") from error


def _newest(line: str) -> Put | None:
    """The change of a line as this version writes it, parsed once: a replay is hundreds of thousands of them. None for
    any other line."""
    head = _PUT.match(line)
    if head is None or head[1] not in _READ or not line.endswith("}"):
        return None
    try:
        record = _READ[head[1]](line[head.end() : -1])
    except ValidationError:
        return None  # read again, slowly, for a message that says what is wrong
    return None if record is None else Put(record)


def encode_event(event: EventRecord) -> str:
    return _EVENT.dump_json(event).decode()


def decode_event(text: str) -> EventRecord:
    """The event of a text.

    Raises:
        UnreadableChange: broken, or of a newer version.
    """
    try:
        event: EventRecord = _EVENT.validate_json(text)
    except ValidationError as error:
        raise UnreadableChange(f"an event can't be read ({error}): {text[:120]}") from error
    return event


@dataclass(frozen=True, slots=True)
class Told:
    """What agents and the sender of an event were told, as far as a rerun can be compared with it: counts and digests,
    so that it takes the same room for one worker and for a thousand.

    Attributes:
        commands: how many commands the event led to.
        digest: of the commands and the result, or of the refusal.
        refused: whether the event was refused.
    """

    commands: int
    digest: str
    refused: bool = False

    @classmethod
    def of(cls, outcome: Outcome | Refusal) -> Told:
        """What came of an event."""
        if isinstance(outcome, Refusal):
            # Without its account, which is not a part of the decision.
            bare = outcome if outcome.about is None else (outcome.code.value, outcome.subject, outcome.field)
            return cls(0, digest_of(bare), refused=True)
        # Not in it: what is in the records, and the spec, whose secret values a journal doesn't have.
        plain = [_plainly(command) for command in outcome.commands]
        return cls(len(plain), digest_of((plain, outcome.result)))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plainly(command: Any) -> tuple[Any, ...]:
    kind: Any = type(command)
    return (kind.__name__, *[_plain(getattr(command, name)) for name in _field_names(kind)])


def _plain(value: Any) -> Any:
    if isinstance(value, WorkerRecord):
        return value.generation
    if isinstance(value, CheckpointRecord):
        return (value.key, value.at_ms)
    return "" if isinstance(value, ComponentSpec) else value


def digest_of(value: object) -> str:
    """Tells one thing that was told from another."""
    return sha256(repr(value).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One event that was decided, and what a rerun must come to.

    Attributes:
        changes: how many changes it led to; they lie beside each other in the log.
        wake_ms: when the scheduler wanted to look at the time again, after it; None: never.
        ended_jobs: most ended jobs that were kept.
        outcome: what came of it, unless this was read from a journal.
        told: the same as it is in a journal; None: of an earlier version, or not to be compared.
    """

    event: Event
    changes: int
    wake_ms: int | None
    ended_jobs: int
    outcome: Outcome | Refusal | None = None
    told: Told | None = None


_EVENT_TYPES: Mapping[str, type[Event]] = MappingProxyType({kind.__name__: kind for kind in HANDLERS})


@cache
def _event_adapter(kind: str) -> TypeAdapter[Any]:
    """Made when it is needed: most programs that read the log never need it."""
    return _adapter(_EVENT_TYPES[kind])


def encode_decision(decision: Decision) -> str:
    kind = type(decision.event).__name__
    body = _event_adapter(kind).dump_json(decision.event).decode()
    wake = "null" if decision.wake_ms is None else decision.wake_ms
    head = f'"v":{VERSION},"kind":"{kind}","changes":{decision.changes},"wake_ms":{wake}'
    # Here and not when it was decided: this runs beside the loop that decides.
    told = decision.told or (None if decision.outcome is None else Told.of(decision.outcome))
    plain = None if told is None else {name: getattr(told, name) for name in _field_names(Told)}
    said = "" if plain is None else f'"told":{json.dumps(plain)},'
    return f'{{{head},"ended_jobs":{decision.ended_jobs},{said}"event":{body}}}'


def decode_decision(text: str) -> Decision:
    """The decision of a text.

    Raises:
        UnreadableChange: broken, of an unknown kind, or written by a newer version.
    """
    try:
        plain = json.loads(text)
        if plain["v"] > VERSION:
            raise UnreadableChange(f"a decision has version {plain['v']}: it was written by a newer callboard")
        event: Event = _event_adapter(plain["kind"]).validate_json(json.dumps(plain["event"]))
        told = Told(**plain["told"]) if plain.get("told") else None
        return Decision(
            event=event,
            changes=plain["changes"],
            wake_ms=plain["wake_ms"],
            ended_jobs=plain["ended_jobs"],
            told=told,
        )
    except (KeyError, TypeError, ValidationError, json.JSONDecodeError) as error:
        raise UnreadableChange(f"a decision can't be read ({error}): {text[:120]}") from error


def sealed(place: int, text: str) -> str:
    """A text as it is kept under a number: behind a checksum of both. Databases notice damage to their own structure,
    and not that a letter of a text is another one now."""
    return f"{crc32(text.encode(), place & 0xFFFFFFFF):08x}{text}"


def unsealed(place: int, kept: object) -> str:
    """The text that was kept under a number. Earlier versions kept it without a checksum.

    Raises:
        UnreadableChange: it is another one than was written there.
    """
    if not isinstance(kept, str):
        raise UnreadableChange(f"{DAMAGED}: entry {place} is not text")
    if kept.startswith("{"):
        return kept
    text = kept[_SEAL:]
    if f"{crc32(text.encode(), place & 0xFFFFFFFF):08x}" != kept[:_SEAL]:
        raise UnreadableChange(f"{DAMAGED}: the checksum of entry {place} is another one: {text[:80]}")
    return text


def _line(kind: str, what: str, body: bytes) -> str:
    return f'{{"v":{VERSION},"kind":"{kind}","{what}":{body.decode()}}}'
