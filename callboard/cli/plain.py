"""How does a message look as JSON or YAML? Its own field names and exact integers, states by their short names."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def plain(message: Message) -> dict[str, Any]:
    """``message`` as plain values, for :mod:`json` and :mod:`yaml`.

    Differs from protobuf's own JSON: 64-bit integers stay numbers, so that `jq` can add them; enums lose
    the prefix of their type; absent optional fields and absent messages are left out, empty lists are not.
    """
    shown: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            enum = field.message_type.fields_by_name["value"].enum_type
            shown[field.name] = {key: _scalar(enum, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            shown[field.name] = [_scalar(field.enum_type, item) for item in value]
        else:
            shown[field.name] = _scalar(field.enum_type, value)
    return shown


def short_enum(enum: EnumDescriptor, number: int) -> str:
    """The name of an enum's value without the prefix of its type; the number, when it has no name."""
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return value.name.removeprefix(prefix)


def _scalar(enum: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if enum is not None:
        return short_enum(enum, value)
    return value
