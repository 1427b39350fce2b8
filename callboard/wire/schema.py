"""Specs ↔ messages, by what the fields of specs declare (:mod:`callboard.model.schema`) and protobuf's own description.

A field of a spec is the message's field of the same name. Its kind says how the value lies there; whether "absent"
differs from zero, and which message or enum it is, protobuf knows. Reading gives what people would have written, with
exact amounts, to the readers of :mod:`callboard.model.inputs`, so one set of rules guards every entry. What can only be
wrong in a message (an enum's unknown number, a custom resource called "cpu") is noted here and reported together with
what they find; faults are named by the message's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from callboard.model.describe import masked
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.compounds import MAX_ENTRIES
from callboard.model.inputs.located import Misfit, Misfits, Place, path_of
from callboard.model.inputs.reading import MAX_FAULTS, Input, check, reader_of, table_of
from callboard.model.inputs.scalars import Exact, JsonText
from callboard.model.policy import LabelRules
from callboard.model.schema import Declared, Form, Secrecy, declared_in, once
from callboard.model.specs import ComponentSpec
from callboard.v1 import common_pb2, job_pb2, policy_pb2
from callboard.wire.alike import attributes
from callboard.wire.amounts import FIXED_FIELDS, SELECTORS, amounts_to_proto, resources_to_proto
from callboard.wire.enums import numbers_of, words_of

I = TypeVar("I", bound=Input)  # noqa: E741 - as short as the others
M = TypeVar("M", bound=Message)

Write = Callable[[Any, bool], Any]
"""(value of a spec, whether secrets are masked) → value of a message."""

Read = Callable[[Any, "Reader", Place], Any]
"""(value of a message, what collects its faults, its place) → what people would have written."""


@dataclass(frozen=True, slots=True)
class Together:
    """What several fields of a spec say together in a message.

    Attributes:
        write: changes the message's fields, which were written one by one, for a spec.
        read: changes what was read one by one from a message at a place.
    """

    write: Callable[[Any, dict[str, Any]], None]
    read: Callable[[Any, Reader, dict[str, Any], Place], None]


def written(spec: Any, message: type[M], *, mask: bool = False) -> M:
    """The message of a spec, with every field set that says something.

    Args:
        mask: mask the values of secret variables, for everything that is shown (SE-04).
    """
    values, plan, together = _write_plan(type(spec), message)
    fields: dict[str, Any] = {}
    for (field, unsaid, write, limited), value in zip(plan, values(spec), strict=True):
        if value is None or value == unsaid:
            continue
        fields[field] = value if write is None else write(value, mask)
        if limited:
            fields[limited] = [resource for resource, _ in value]
    together(spec, fields)
    return message(**fields)


@once
def _write_plan(
    spec: type, message: type[Message]
) -> tuple[Callable[[object], Sequence[Any]], list[tuple[str, Any, Write | None, str]], Any]:
    known = message.DESCRIPTOR.fields_by_name
    said = [field for field in declared_in(spec) if field.field in known]
    plan = [
        (field.field, field.kind.unsaid, _writer(field, known[field.field]), field.written.limited) for field in said
    ]
    return attributes([field.name for field in said]), plan, _together(spec).write


def _writer(field: Declared, described: Any) -> Write | None:
    kind = field.kind
    match kind.form:
        case Form.WORD:
            assert kind.words is not None
            numbers = numbers_of(described.enum_type, kind.words)
            return lambda word, _: numbers[word]
        case Form.PAIRS if kind.secrecy is not Secrecy.NONE:
            declared = kind.secrecy is Secrecy.ALL
            return lambda pairs, mask: masked(pairs, secrets=not mask, declared=declared)
        case Form.PART:
            part = GetMessageClass(described.message_type)
            return lambda spec, mask: written(spec, part, mask=mask)
        case Form.PARTS:
            part = GetMessageClass(described.message_type)
            return lambda specs, mask: [written(spec, part, mask=mask) for spec in specs]
        case form:
            write = _WRITERS.get(form)
            return None if write is None else lambda value, _: write(value)


def _rules_message(rules: LabelRules) -> policy_pb2.LabelRuleSet:
    message = policy_pb2.LabelRuleSet()
    for key, winners in rules:
        for winner, losers in winners:
            message.keys[key].winners[winner].values.extend(losers)
    return message


_WRITERS: Mapping[Form, Callable[[Any], Any]] = {
    Form.PAIRS: dict,
    Form.AMOUNTS: resources_to_proto,
    Form.SHAPES: lambda shapes: [resources_to_proto(each) for each in shapes],
    Form.QUOTA: amounts_to_proto,
    Form.DEVICES: lambda devices: [common_pb2.DeviceShare(index=index, milli=milli) for index, milli in devices],
    Form.RULES: _rules_message,
    Form.NAMES: lambda names: policy_pb2.PoolNames(names=names),
}


class Reader:
    """Collects the mapping of one message and what is wrong with the message itself."""

    def __init__(self, field: str) -> None:
        self._field = field
        self.misfits: list[Misfit] = []

    def validated(self, model: type[I], mapping: dict[str, Any]) -> I:
        """The model of ``mapping``.

        Raises:
            InvalidInput: every fault of the message and of the model, by the message's field paths.
        """
        try:
            found = check(model, mapping)
        except Misfits as error:
            raise refuse([*self.misfits, *error.found], self._field, model) from None
        if self.misfits:
            raise refuse(self.misfits, self._field, model)
        return found

    def mapping(self, model: type[Input], message: Message, place: Place = ()) -> dict[str, Any]:
        """What ``message`` states, as people would have written it for ``model``; ``place``: where that is."""
        found: dict[str, Any] = {}
        plan, together = _read_plan(model, message.DESCRIPTOR)
        for field, keys, present, required, limited, read in plan:
            if present and not message.HasField(field):
                continue
            value = getattr(message, field)
            if not present and not value and not required:
                continue  # zero and empty are how such a field is left out
            if limited:
                value = self.limits(value, getattr(message, limited), (*place, *keys), limited) or None
            elif read is not None:
                value = read(value, self, (*place, *keys))
            if value is not None:
                into = found
                for key in keys[:-1]:
                    into = into.setdefault(key, {})
                into[keys[-1]] = value
        together(message, self, found, place)
        return found

    def ask(self, message: common_pb2.Resources, place: Place) -> dict[str, Exact | str]:
        """Amounts that aren't zero, and which GPUs they are for."""
        read: dict[str, Exact | str] = {**self.amounts(message, place)}
        if message.gpu_model:
            read["gpu_model"] = message.gpu_model
        if message.gpu_memory_min_bytes:
            read["gpu_memory_min"] = Exact(message.gpu_memory_min_bytes)
        return read

    def amounts(self, message: common_pb2.Resources, place: Place, *, zeros: Sequence[str] = ()) -> dict[str, Exact]:
        """Amounts that aren't zero, and those named in ``zeros`` whatever they are."""
        read = {name: Exact(getattr(message, field)) for name, field in FIXED_FIELDS.items()}
        for name, amount in sorted(message.custom_milli.items()):
            if field := FIXED_FIELDS.get(name) or SELECTORS.get(name):
                why = f"{name} is no custom resource; it has the field {field}"
                self.misfits.append(Misfit((*place, "custom_milli", name), why))
            else:
                read[name] = Exact(amount)
        for name in zeros:
            read.setdefault(name, Exact(0))
        return {name: exact for name, exact in read.items() if exact.amount or name in zeros}

    def limits(
        self, message: common_pb2.Resources, limited: Sequence[str], place: Place, limited_field: str
    ) -> dict[str, Exact]:
        """A quota: an amount for each of ``limited``, and none besides."""
        read = self.amounts(message, place, zeros=limited)
        for name, field in SELECTORS.items():
            if getattr(message, field):
                self.misfits.append(Misfit((*place, name), "says which GPUs a worker may have; a quota has amounts"))
        for name in read:
            if name not in limited:
                self.misfits.append(Misfit((*place, name), f"is set, but {limited_field} does not name {name}"))
        return read


@once
def _read_plan(
    model: type[Input], message: Any
) -> tuple[list[tuple[str, tuple[str, ...], bool, bool, str, Read | None]], Any]:
    known = message.fields_by_name
    plan = []
    for field in table_of(model).values():
        described = known.get(field.field)
        if described is not None and not (field.kind.form is Form.PART and _is_map(described)):
            limited = field.written.limited
            present = described.has_presence and not limited
            required = field.default is MISSING and field.kind.form is not Form.WORD
            plan.append((field.field, field.keys, present, required, limited, _reader(field, described)))
    return plan, _together(model.of).read


def _is_map(described: Any) -> bool:
    return bool(described.message_type and described.message_type.GetOptions().map_entry)


def _reader(field: Declared, described: Any) -> Read | None:
    kind = field.kind
    match kind.form:
        case Form.WORD:
            assert kind.words is not None
            words, known = words_of(described.enum_type, kind.words), " or ".join(kind.words)

            def word(number: int, reader: Reader, place: Place) -> Any:
                if number not in words:
                    reader.misfits.append(Misfit(place, f"{number} is unknown; use {known}"))
                return words.get(number)

            return word
        case Form.PART:
            assert kind.part is not None
            model = reader_of(kind.part)
            return lambda message, reader, place: reader.mapping(model, message, place)
        case Form.PARTS:
            assert kind.part is not None
            model = reader_of(kind.part)
            # One beyond the bound is enough for the model to refuse the list; the rest of a huge message is not read.
            return lambda messages, reader, place: [
                reader.mapping(model, message, (*place, index))
                for index, message in enumerate(messages[: kind.most + 1])
            ]
        case Form.PLAIN:
            is_list = not described.has_presence and isinstance(described.default_value, list)
            return (lambda items, _reader, _place: list(items)) if is_list else None
        case form:
            return _READERS[form]


_READERS: Mapping[Form, Read] = {
    Form.EXACT: lambda amount, _reader, _place: Exact(amount),
    Form.JSON: lambda text, _reader, _place: JsonText(text),
    Form.PAIRS: lambda pairs, _reader, _place: dict(pairs),
    Form.AMOUNTS: lambda amounts, reader, place: reader.ask(amounts, place) or None,
    Form.SHAPES: lambda shapes, reader, place: [
        reader.ask(shape, (*place, index)) for index, shape in enumerate(shapes)
    ],
    Form.QUOTA: lambda amounts, _reader, _place: amounts,  # with what it limits: Reader.limits
    Form.DEVICES: lambda shares, _reader, _place: [
        {"index": share.index} | ({"milli": share.milli} if share.milli else {}) for share in shares
    ],
    Form.RULES: lambda rules, _reader, _place: {
        key: {winner: list(losers.values) for winner, losers in sorted(each.winners.items())}
        for key, each in sorted(rules.keys.items())
    },
    Form.NAMES: lambda names, _reader, _place: list(names.names),
}


# Paths: places of the models → fields of the message, for ``BadRequest``. ``components[0].resources.gpu`` is
# ``spec.components[0].resources.gpu_milli`` in a message.


def refuse(misfits: Sequence[Misfit], field: str, model: type[Input]) -> InvalidInput:
    """The refusal of a message that is at ``field`` of its request, with at most :data:`MAX_FAULTS` faults spelt out.

    Args:
        misfits: faults by places of ``model``; an empty place is the message itself.
        field: path of the message in its request.
        model: what the message was read into.
    """
    faults = [
        Fault(path_of((*field.split("."), *_translated(model, each.place))), each.message)
        for each in misfits[:MAX_FAULTS]
    ]
    if len(misfits) > MAX_FAULTS:
        faults.append(Fault(field, f"and {len(misfits) - MAX_FAULTS} more faults"))
    return InvalidInput(faults)


def _translated(model: type[Input], place: Place) -> Place:
    """``place`` in the words of the message; below a map of the user's, keys stay as they are."""
    field = next((each for each in table_of(model).values() if _is_at(each, place)), None)
    if field is None:
        return place
    kind, rest = field.kind, place[len(field.keys) :]
    match kind.form:
        case Form.EXACT | Form.WORD:
            rest = ()
        case Form.PART | Form.PARTS if kind.part is not None:
            head = rest[:1] if kind.form is Form.PARTS else ()
            rest = (*head, *_translated(reader_of(kind.part), rest[len(head) :]))
        case Form.AMOUNTS | Form.SHAPES | Form.QUOTA:
            rest = _amount(rest)
        case Form.RULES:
            steps = ("keys", "winners", "values")
            rest = tuple(word for step, part in zip(steps, rest, strict=False) for word in (step, part))
        case Form.NAMES:
            rest = ("names", *rest)
        case _:
            pass
    return (field.field, *rest)


def _is_at(field: Declared, place: Place) -> bool:
    """Whether a place is that of a field, in it, or of the mapping that the field is written in."""
    return bool(place) and field.keys[: len(place)] == place[: len(field.keys)]


def _amount(rest: Place) -> Place:
    """Below an amount: an index where it is one of a list, then the resource."""
    head = rest[:1] if rest and isinstance(rest[0], int) else ()
    tail = rest[len(head) :]
    if not tail:
        return head
    if tail[0] == "custom_milli" and len(tail) > 1:
        return (*head, *tail)
    name = str(tail[0])
    field = FIXED_FIELDS.get(name) or SELECTORS.get(name)
    return (*head, field) if field else (*head, "custom_milli", name)


# What several fields of a spec say together.


def _write_component(spec: ComponentSpec, fields: dict[str, Any]) -> None:
    """Its work, its workers, Ray's options, and which resources are stated as none."""
    if spec.command:
        for field in ("actor", "args_json", "kwargs_json", "entry", "max_concurrency"):
            fields.pop(field, None)
        fields |= {"command": spec.command, "ray": spec.ray, "tty": spec.tty}
    if not spec.elastic:
        fields["workers"] = fields.pop("min_workers")
        del fields["max_workers"]
    if spec.alias:
        fields["ray_options"] = {"name": spec.alias}
    fields["zero_resources"] = spec.zero_resources


def _read_component(message: job_pb2.ComponentSpec, reader: Reader, found: dict[str, Any], place: Place) -> None:
    for key in sorted(set(message.ray_options) - {"name"}):
        why = "is refused: memory and max_concurrency have their own fields, the scheduler decides about the rest"
        reader.misfits.append(Misfit((*place, "ray_options", key), why))
    if "name" in message.ray_options:
        found["ray_options"] = {"name": message.ray_options["name"]}
    for resource in message.zero_resources[: MAX_ENTRIES + 1]:
        amounts = found.setdefault("resources", {})
        if resource in amounts:
            why = f"names {resource}, of which resources has some"
            reader.misfits.append(Misfit((*place, "zero_resources"), why))
        amounts.setdefault(resource, Exact(0))


def _together(spec: type | None) -> Together:
    if spec is not None and issubclass(spec, ComponentSpec):
        return Together(_write_component, _read_component)
    return Together(lambda _spec, _fields: None, lambda _message, _reader, _found, _place: None)
