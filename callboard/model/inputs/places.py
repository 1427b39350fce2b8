"""Explicit places as input, one per worker: a node, devices of it, and what the node's settings add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from callboard.model.inputs.compounds import Env, each, entries, list_of
from callboard.model.inputs.located import Misfit, Misfits, Refused
from callboard.model.inputs.reading import Input, check
from callboard.model.inputs.scalars import Flag, Interpreter, Name, text, whole
from callboard.model.names import is_name
from callboard.model.quantities import MILLI
from callboard.model.specs import WorkerPlace

MAX_DEVICES = 1_024
"""Most devices of one worker; a node has no more."""

MAX_HARDWARE_BYTES = 64 << 10
"""Longest settings of the hardware of one worker."""


class DeviceInput(Input):
    """The keys of one device of a place."""

    index: Annotated[int, whole(0, MAX_DEVICES - 1)]
    milli: Annotated[int, whole(1, MILLI)] | None = None


def _device(value: object) -> tuple[int, int]:
    """A device as its index, or as a mapping with the share."""
    if isinstance(value, Mapping):
        read = check(DeviceInput, value)
        return read.index, MILLI if read.milli is None else read.milli
    return check(DeviceInput, {"index": value}).index, MILLI


def _hardware(value: object) -> str:
    read = text(value)
    if len(read.encode()) > MAX_HARDWARE_BYTES:
        raise Refused(f"{len(read.encode())} bytes are too many; {MAX_HARDWARE_BYTES} are allowed")
    try:
        settings = json.loads(read)
    except ValueError:
        raise Refused("is no JSON; write a JSON array of settings") from None
    if not isinstance(settings, list):
        raise Refused("is not a JSON array of settings")
    return read


_share: Any = whole(1, MILLI).func


def _pieces(value: object) -> tuple[tuple[str, int], ...]:
    """Pieces of declared hardware with the share of each, in milli."""
    misfits: list[Misfit] = []
    read = []
    for piece, milli in entries(value, 'e.g. {"Franka/0": 1000}'):
        kind, _, position = piece.partition("/")
        if not (is_name(kind) and position.isascii() and position.isdigit()):
            misfits.append(Misfit((piece,), "is no piece of hardware; write its type and its number, as in Franka/0"))
        elif (share := each(piece, _share, milli, misfits)) is not None:
            read.append((piece, share))
    if misfits:
        raise Misfits(misfits)
    return tuple(sorted(read))


class PlaceInput(Input):
    """The keys of one place."""

    node_id: Name = Field(alias="node")
    devices: Annotated[tuple[tuple[int, int], ...], list_of(_device, "e.g. [0, 1]", MAX_DEVICES)] | None = None
    observes: Flag | None = None
    env: Env | None = None
    interpreter: Interpreter | None = None
    node_group: Name | None = None
    hardware_json: Annotated[str, PlainValidator(_hardware)] | None = None
    hardware: Annotated[tuple[tuple[str, int], ...], PlainValidator(_pieces)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PlaceInput:
        indexes = [index for index, _ in self.devices or ()]
        if len(set(indexes)) != len(indexes):
            raise Misfits([Misfit(("devices",), "names a device twice")])
        if indexes and self.observes:
            raise Misfits([Misfit(("observes",), "an observer holds no devices; leave out one of the two")])
        return self

    def spec(self) -> WorkerPlace:
        """The frozen form."""
        return WorkerPlace(**self.stated())


def _place(value: Any) -> WorkerPlace:
    return check(PlaceInput, value).spec()


def places_of(most: int) -> Any:
    """A list of places, one per worker."""
    return BeforeValidator(list_of(_place, "a list of places, each with node and devices", most).func)
