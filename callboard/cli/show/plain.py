"""Messages as JSON or YAML, and back: their own field names and exact integers, states by their short names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from callboard.model.describe import MASK, job_to_mapping
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.source import SourceMapping
from callboard.v1 import job_pb2
from callboard.wire.specs import job_spec_from_proto

AnyMessage = TypeVar("AnyMessage", bound=Message)


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
    return str(number) if value is None else value.name.removeprefix(_prefix(enum))


def spec_of_printed(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The spec of an object as `get -o yaml` and `-o json` print it; None: the file is written by hand."""
    spec = found.get("spec")
    return spec if isinstance(spec, Mapping) and "revision" in found else None


def unprinted_job(found: SourceMapping) -> SourceMapping:
    """The job in a file; one that `job get` printed as a person would write it.

    Raises:
        InvalidInput: a printed job hides values that it needs.
    """
    printed = spec_of_printed(found)
    if printed is None:
        return found
    spec = message_of(job_pb2.JobSpec, printed, field="spec")
    hidden = [
        Fault(
            f"spec.components[{place}].{name}.{key}",
            "is hidden where jobs are printed; write the value, or pass it on from the nodes with pass_env",
        )
        for place, component in enumerate(spec.components)
        for name in ("env", "secret_env")
        for key, value in getattr(component, name).items()
        if value == MASK
    ]
    if hidden:
        raise InvalidInput(hidden)
    return SourceMapping.like(found, job_to_mapping(job_spec_from_proto(spec), secrets=True))


def message_of(kind: type[AnyMessage], shown: Mapping[str, Any], *, field: str) -> AnyMessage:
    """The message that :func:`plain` showed.

    Raises:
        InvalidInput: it is no such message.
    """
    try:
        return json_format.ParseDict(_long_names(kind.DESCRIPTOR, shown), kind())
    except json_format.ParseError as error:
        raise InvalidInput([Fault(field, f"is not as it was printed: {error}")]) from None


def _prefix(enum: EnumDescriptor) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"


def _long_names(kind: Any, shown: Mapping[str, Any]) -> dict[str, Any]:
    """With every enum's value by its whole name."""
    found = dict(shown)
    for field in kind.fields:
        value = found.get(field.name)
        items = value if isinstance(value, list) else [value]
        if field.enum_type is not None:
            known = field.enum_type.values_by_name
            long = [name if (name := f"{_prefix(field.enum_type)}{item}") in known else item for item in items]
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            long = [_long_names(field.message_type, item) if isinstance(item, Mapping) else item for item in items]
        else:
            continue
        if value is not None:
            found[field.name] = long if isinstance(value, list) else long[0]
    return found


def _scalar(enum: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if enum is not None:
        return short_enum(enum, value)
    return value
