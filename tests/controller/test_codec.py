"""Every record survives the journal, and what can't be read is refused in words."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from enum import StrEnum
from pathlib import Path
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

DEFAULTS = Path(__file__).parents[1] / "data" / "journal_defaults.txt"

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


def test_a_field_that_a_line_lacks_has_its_default() -> None:
    record = dataclasses.replace(RECORD, restarts=2)
    envelope = json.loads(encode_change(Put(record)))
    assert envelope["put"].pop("restarts") == 2
    assert decode_change(json.dumps(envelope)) == Put(RECORD)
    assert "preemptions" not in envelope["put"], "a line says what differs from the default"


def classes_in(kind: Any, found: set[Any]) -> None:
    """Adds the dataclasses that a type consists of."""
    if dataclasses.is_dataclass(kind) and kind not in found:
        found.add(kind)
        for hint in typing.get_type_hints(kind).values():
            classes_in(hint, found)
    for argument in typing.get_args(kind):
        classes_in(argument, found)


def defaults() -> dict[str, str]:
    """The default of every field of a record, and of what it consists of."""
    found: set[Any] = set()
    for kind in RECORD_TYPES:
        classes_in(kind, found)
    return {
        f"{each.__name__}.{field.name}": repr(field.default)
        for each in sorted(found, key=lambda each: each.__name__)
        for field in dataclasses.fields(each)
        if field.default is not dataclasses.MISSING
    }


def test_no_default_means_something_else_than_it_did() -> None:
    """``UPDATE_DOCS=1`` adds the fields that are new."""
    known = dict(line.split(" = ", 1) for line in DEFAULTS.read_text().splitlines()) if DEFAULTS.exists() else {}
    now = defaults()
    moved = {name: f"{known[name]} -> {value}" for name, value in now.items() if known.get(name, value) != value}
    assert not moved, f"lines without these fields are read otherwise now: raise the version, with an upgrade: {moved}"
    if os.environ.get("UPDATE_DOCS"):
        DEFAULTS.write_text("".join(f"{name} = {value}\n" for name, value in (known | now).items()))
    assert now.items() <= dict(line.split(" = ", 1) for line in DEFAULTS.read_text().splitlines()).items(), (
        "UPDATE_DOCS=1"
    )


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
