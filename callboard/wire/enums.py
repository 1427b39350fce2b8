"""Our enums and those of the messages: equal names, the message's with the prefix of its type.

``StopPolicy.HOLD`` ↔ ``STOP_POLICY_HOLD``; ``_UNSPECIFIED`` (0) is "not said".
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

E = TypeVar("E", bound=StrEnum)


class WireEnum(Protocol):
    """An enum of the generated modules: ``job_pb2.JobState``."""

    @property
    def DESCRIPTOR(self) -> EnumDescriptor:  # noqa: N802 - protobuf's name
        """Its description."""

    def Name(self, number: Any) -> str:  # noqa: N802 - protobuf's name
        """Name of a number."""

    def Value(self, name: str) -> Any:  # noqa: N802 - protobuf's name
        """Number of a name."""


def _prefix(described: Any) -> str:
    """``StopPolicy`` → ``STOP_POLICY_``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", described.name).upper() + "_"


def to_wire(wrapper: WireEnum, value: StrEnum | str) -> Any:
    """The number of our ``value`` in the message's enum.

    Raises:
        ValueError: the message's enum has no such name.
    """
    return wrapper.Value(_prefix(wrapper.DESCRIPTOR) + str(value))


def from_wire(wrapper: WireEnum, number: int, ours: type[E]) -> E | None:
    """Our value of a number in the message's enum; None for "not said".

    Raises:
        ValueError: a number without a name, or one that ``ours`` lacks (a newer peer's).
    """
    return None if number == 0 else ours(wrapper.Name(number).removeprefix(_prefix(wrapper.DESCRIPTOR)))


def names_in(described: EnumDescriptor) -> dict[str, int]:
    """The names of a message's enum without their prefix → their numbers."""
    return {value.name.removeprefix(_prefix(described)): value.number for value in described.values}


def numbers_of(described: EnumDescriptor, ours: type[E]) -> dict[E, int]:
    """Our words → the numbers of a message's enum."""
    return {word: described.values_by_name[_prefix(described) + word].number for word in ours}


def words_of(described: EnumDescriptor, ours: type[E]) -> dict[int, E]:
    """The numbers of a message's enum → our words; 0 is none of them."""
    return {number: word for word, number in numbers_of(described, ours).items()}


def text_of(message: Message, field: str = "state") -> str:
    """An enum of a message as text: ``text_of(worker)`` is ``"READY"``, ``text_of(node)`` ``"DRAINING"``.

    Args:
        message: a job, worker, node, placement group, or any other message that the SDK returns.

    Returns:
        The name without the prefix of its type; empty: not stated; digits: a value that a newer controller sent.

    Raises:
        ValueError: the message has no enum of that name.
    """
    described = message.DESCRIPTOR.fields_by_name.get(field)
    if described is None or described.enum_type is None:
        enums = [each.name for each in message.DESCRIPTOR.fields if each.enum_type is not None]
        raise ValueError(f"{message.DESCRIPTOR.name} has no enum {field!r}; it has {', '.join(enums) or 'none'}")
    number = getattr(message, field)
    value = described.enum_type.values_by_number.get(number)
    if value is None:
        return str(number)
    return value.name.removeprefix(_prefix(described.enum_type)) if number else ""
