"""Every record survives the journal, and what can't be read is refused in words."""

from __future__ import annotations

import dataclasses
import json
import typing
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.controller.journal.codec import (
    UnreadableChange,
    decode_change,
    decode_event,
    encode_change,
    encode_event,
)
from callboard.scheduler.records.job_records import RECORD_TYPES, Drop, EventRecord, JobRecord, Put, Record
from callboard.scheduler.records.states import JobState

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTEGER = st.integers(-(1 << 62), 1 << 62)


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bool: st.booleans(),
    int: INTEGER,
    bytes: st.binary(max_size=40),
    type(None): st.none(),
}


def strategy_of(kind: Any, within: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a type as the records use them, every field filled; what holds its own kind does so twice."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type):
        return st.sampled_from(kind) if issubclass(kind, StrEnum) else of_dataclass(kind, within)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple:
        return st.one_of([strategy_of(argument, within) for argument in arguments])
    if arguments[-1] is Ellipsis:
        if within.count(arguments[0]) > 1:
            return st.just(())
        return st.lists(strategy_of(arguments[0], within), max_size=3).map(tuple)
    return st.tuples(*[strategy_of(argument, within) for argument in arguments])


def of_dataclass(kind: Any, within: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a dataclass, every field filled."""
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind, **{field.name: strategy_of(hints[field.name], (*within, kind)) for field in dataclasses.fields(kind)}
    )


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda kind: kind.kind)
def test_every_record_comes_back_equal(kind: type[Record]) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(strategy_of(kind))
    def comes_back(record: Record) -> None:
        line = encode_change(Put(record))
        assert "\n" not in line
        found = decode_change(line)
        assert isinstance(found, Put)
        assert found.record == record
        assert type(found.record) is kind
        dropped = Drop(record.kind, record.key)
        assert decode_change(encode_change(dropped)) == dropped

    comes_back()


@settings(max_examples=40, deadline=None)
@given(strategy_of(EventRecord))
def test_events_come_back_equal(event: EventRecord) -> None:
    assert decode_event(encode_event(event)) == event


RECORD = JobRecord(uid="j-1", name="a", order=1, state=JobState.PENDING)


def changed(**fields: Any) -> str:
    """A good line with some parts replaced."""
    envelope = json.loads(encode_change(Put(RECORD)))
    return json.dumps(envelope | fields)


def test_a_field_that_an_older_log_lacks_takes_its_default() -> None:
    envelope = json.loads(encode_change(Put(RECORD)))
    del envelope["put"]["restarts"]
    assert decode_change(json.dumps(envelope)) == Put(RECORD)


def test_a_newer_version_is_refused_in_words() -> None:
    with pytest.raises(UnreadableChange, match=r"version 2.*reads up to 1.*newer callboard"):
        decode_change(changed(v=2))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"v":1}',
        changed(kind="dragon"),
        changed(put=None),
        changed(put={"uid": 1}),
        changed(v="x"),
    ],
)
def test_a_broken_line_is_refused_in_words(line: str) -> None:
    with pytest.raises(UnreadableChange, match=r"read|empty"):
        decode_change(line)
