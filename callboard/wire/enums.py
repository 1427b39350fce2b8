"""Our enums and those of the messages: equal names, the message's with the prefix of its type.

``StopPolicy.HOLD`` ↔ ``STOP_POLICY_HOLD``; ``_UNSPECIFIED`` (0) is "not said".
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import EnumDescriptor

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


def prefix_of(wrapper: WireEnum) -> str:
    """``StopPolicy`` → ``STOP_POLICY_``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", wrapper.DESCRIPTOR.name).upper() + "_"


def to_wire(wrapper: WireEnum, value: StrEnum | str) -> Any:
    """The number of our ``value`` in the message's enum.

    Raises:
        ValueError: the message's enum has no such name.
    """
    return wrapper.Value(prefix_of(wrapper) + str(value))


def from_wire(wrapper: WireEnum, number: int, ours: type[E]) -> E | None:
    """Our value of a number in the message's enum; None for "not said".

    Raises:
        ValueError: a number without a name, or one that ``ours`` lacks (a newer peer's).
    """
    name = name_from_wire(wrapper, number)
    return ours(name) if name else None


def name_from_wire(wrapper: WireEnum, number: int) -> str:
    """The name without its prefix; empty for "not said".

    Raises:
        ValueError: a number without a name.
    """
    return "" if number == 0 else wrapper.Name(number).removeprefix(prefix_of(wrapper))
