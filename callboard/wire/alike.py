"""Messages and records that are alike: fields of the same names are the same, and only the others are stated.

Written: resources, enums, pairs and records within a record become what the message's field says; a time ``…_time`` is
the record's ``…_ms``. A message's field that neither the record has nor the caller states is a defect, found with the
first message: a field that is added to a proto can't be forgotten here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from callboard.model.schema import once
from callboard.wire.amounts import resources_to_proto
from callboard.wire.enums import names_in

M = TypeVar("M", bound=Message)
R = TypeVar("R")

Write = Callable[[Any], Any]


def timestamp(ms: int) -> Timestamp | None:
    """A time in milliseconds since 1970; None for 0, which means "never"."""
    if ms == 0:
        return None
    seconds, rest = divmod(ms, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def message_of(kind: type[M], record: object, /, **others: Any) -> M:
    """The message of a record.

    Args:
        record: whose attributes its fields are.
        others: fields that the record has not, or has in another form.
    """
    values, plan = _plan(kind, type(record), frozenset(others))
    for (field, write), value in zip(plan, values(record), strict=True):
        others[field] = value if write is None or value is None else write(value)
    return kind(**others)


def attributes(names: Sequence[str]) -> Callable[[object], Sequence[Any]]:
    """What reads attributes of an object, all at once: several times as fast as one by one."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: [getattr(record, name) for name in names]


def record_of(kind: type[R], message: Message, cut: Callable[[str], str] = str, /, **others: Any) -> R:
    """A record, made of a message. Nothing is checked but the length of its texts.

    Args:
        kind: its class, a dataclass.
        message: whose fields its fields are.
        cut: shortens each text.
        others: fields that the message has not, or has in another form.
    """
    for field, text, several in _reading(kind, type(message), frozenset(others)):
        value = getattr(message, field)
        others[field] = cut(value) if text else tuple(value) if several else value
    return kind(**others)


@once
def _reading(kind: type, message: type[Message], stated: frozenset[str]) -> tuple[tuple[str, bool, bool], ...]:
    """The fields that are read, and whether each is a text or a list."""
    plan = []
    for name in _names(kind):
        if name not in stated:
            field = message.DESCRIPTOR.fields_by_name[name]
            several = isinstance(field.default_value, list) and not _is_map(field)
            plan.append((name, isinstance(field.default_value, str), several))
    return tuple(plan)


@once
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@once
def _plan(
    kind: type[Message], record: type, stated: frozenset[str]
) -> tuple[Callable[[object], Sequence[Any]], list[tuple[str, Write | None]]]:
    has = {*(_names(record) if is_dataclass(record) else ()), *(name for base in record.__mro__ for name in vars(base))}
    plan: list[tuple[str, Write | None]] = []
    read = []
    for field in kind.DESCRIPTOR.fields:
        if field.name in stated:
            continue
        time = field.message_type is not None and field.message_type.full_name == Timestamp.DESCRIPTOR.full_name
        attribute = f"{field.name.removesuffix('_time')}_ms" if time else field.name
        if attribute not in has:
            raise TypeError(f"{record.__name__} has no {attribute} for {kind.DESCRIPTOR.name}; state it")
        read.append(attribute)
        plan.append((field.name, timestamp if time else _writer(field)))
    return attributes(read), plan


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _writer(field: Any) -> Write | None:
    if field.enum_type is not None and isinstance(field.default_value, list):
        return list  # numbers: no record has words in a list
    if field.enum_type is not None:
        return names_in(field.enum_type).__getitem__
    inner = field.message_type
    if inner is None:
        return None
    if _is_map(field):
        return dict
    one = resources_to_proto if inner.name == "Resources" else partial(message_of, GetMessageClass(inner))

    def write(value: Any) -> Any:
        return [one(each) for each in value] if isinstance(value, tuple | list) else one(value)

    return write
