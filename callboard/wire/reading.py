"""Messages as what the models read: fields that are set, amounts exact, enums by name.

What can only be wrong in a message (an enum's unknown number, a custom resource called "cpu") is noted here and told
together with what the models find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from callboard.model.inputs.exact import Exact
from callboard.model.inputs.located import Misfit, Misfits, Place
from callboard.model.inputs.reading import Input, check
from callboard.v1 import common_pb2
from callboard.wire.amounts import FIXED_FIELDS
from callboard.wire.enums import WireEnum, from_wire
from callboard.wire.paths import refuse

M = TypeVar("M", bound=Input)
E = TypeVar("E", bound=StrEnum)


class MessageReader:
    """Collects the mapping of one message and what is wrong with the message itself."""

    def __init__(self, field: str) -> None:
        self._field = field
        self.misfits: list[Misfit] = []

    def validated(self, model: type[M], mapping: dict[str, Any]) -> M:
        """The model of ``mapping``.

        Raises:
            InvalidInput: every fault of the message and of the model, by the message's field paths.
        """
        try:
            found = check(model, mapping)
        except Misfits as error:
            raise refuse([*self.misfits, *error.found], self._field) from None
        if self.misfits:
            raise refuse(self.misfits, self._field)
        return found

    def word(self, wrapper: WireEnum, number: int, ours: type[E], place: Place) -> E | None:
        """Our word for an enum's number; None for "not said"."""
        try:
            return from_wire(wrapper, number, ours)
        except ValueError:
            self.misfits.append(Misfit(place, f"{number} is unknown; use {' or '.join(ours)}"))
            return None

    def amounts(self, message: common_pb2.Resources, place: Place, *, zeros: Sequence[str] = ()) -> dict[str, Exact]:
        """Amounts that aren't zero, and those named in ``zeros`` whatever they are."""
        read = {name: Exact(getattr(message, field)) for name, field in FIXED_FIELDS.items()}
        for name, amount in sorted(message.custom_milli.items()):
            if name in FIXED_FIELDS:
                why = f"{name} is no custom resource; it has the field {FIXED_FIELDS[name]}"
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
        for name in read:
            if name not in limited:
                self.misfits.append(Misfit((*place, name), f"is set, but {limited_field} does not name {name}"))
        return read


def given(**fields: Any) -> dict[str, Any]:
    """The mapping of ``fields`` without those that are None, empty texts, lists or mappings: messages' "not said"."""
    return {name: value for name, value in fields.items() if value is not None and value not in ("", [], {}, ())}


def optional(message: Message, field: str, wrap: Callable[[Any], Any] = lambda value: value) -> Any:
    """The wrapped value of an optional field, or None where it is absent."""
    return wrap(getattr(message, field)) if message.HasField(field) else None


def exact_or_none(amount: int) -> Exact | None:
    """A field whose 0 means "not said"."""
    return Exact(amount) if amount else None
