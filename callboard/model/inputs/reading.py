"""Reading: a mapping becomes a model, and pydantic's complaints become faults.

pydantic checks the shape (keys, nesting, all faults of one pass); the words of each fault are ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import (
    Misfit,
    Misfits,
    Place,
    Refused,
    as_mapping,
    order_in,
    path_of,
    shown,
    shown_text,
)
from callboard.model.inputs.source import SourceMapping

MAX_FAULTS = 100
"""Most faults told at once."""

M = TypeVar("M", bound="Input")


class Input(BaseModel):
    """A mapping with known keys. A key whose value is null is not stated, and takes its default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True, defer_build=True
    )

    later: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Key of another system → what it is called here: Kubernetes, Kueue, Ray, SimpleScheduler."""
    """Keys of the design that are not supported yet."""

    internal: ClassVar[frozenset[str]] = frozenset()
    """Keys that programs of ours write for each other. They are read, but nobody is pointed to them."""

    @model_validator(mode="before")
    @classmethod
    def _stated_only(cls, value: object) -> object:
        value = as_mapping(value)
        if not isinstance(value, Mapping):
            raise Refused(f"{shown(value)} is not a mapping; its keys are {', '.join(keys_of(cls))}")
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise Misfits([Misfit((), f"the key {shown(key)} is not a text") for key in odd])
        return {key: as_mapping(item) for key, item in value.items() if item is not None}

    def stated(self, *but: str) -> dict[str, Any]:
        """Fields that were stated, by their names in the spec; without ``but``."""
        return {name: getattr(self, name) for name in self.model_fields_set if name not in but}


def build_inputs() -> None:
    """Builds every model that is imported. Else each is built when it is first used: a program that reads one job waits
    for no others, and one that runs for long doesn't want its first job to wait."""
    kinds = Input.__subclasses__()
    for kind in kinds:
        kind.model_rebuild()
        kinds += kind.__subclasses__()


def keys_of(model: type[Input]) -> list[str]:
    """The keys that people write in a mapping of this model."""
    keys = [info.alias or name for name, info in model.model_fields.items()]
    return [key for key in keys if key not in model.internal]


def check(model: type[M], source: object) -> M:
    """The model of ``source``.

    Raises:
        Misfits: every fault, in the order of ``source``.
    """
    source = as_mapping(source)
    try:
        return model.model_validate(source)
    except ValidationError as error:
        # What pydantic says carries input values, which may be secrets: only our words leave this function.
        complaints = error.errors(include_url=False)
    found = [misfit for complaint in complaints for misfit in _misfits(model, complaint)]
    found.sort(key=lambda misfit: order_in(source, misfit.place))
    raise Misfits(found)


def read(model: type[M], source: object) -> M:
    """The model of ``source``, which a person wrote.

    Raises:
        InvalidInput: every fault with its path, and with its line and column if ``source`` has them.
    """
    try:
        return check(model, source)
    except Misfits as error:
        raise InvalidInput(faults_of(error, source)) from None


def faults_of(error: Misfits, source: object) -> list[Fault]:
    """Misfits as faults with their path, and with line and column if ``source`` has them."""
    faults = [_fault(misfit, source) for misfit in error.found[:MAX_FAULTS]]
    if len(error.found) > MAX_FAULTS:
        faults.append(Fault("", f"and {len(error.found) - MAX_FAULTS} more faults"))
    return faults


def _fault(misfit: Misfit, source: object) -> Fault:
    line, column = source.position(misfit.place) if isinstance(source, SourceMapping) else (0, 0)
    return Fault(path_of(misfit.place), misfit.message, line, column)


def _misfits(model: type[Input], complaint: ErrorDetails) -> list[Misfit]:
    place: Place = tuple(complaint["loc"])
    kind = complaint["type"]
    if kind == "extra_forbidden":
        return [Misfit(place, _unknown(_model_at(model, place[:-1]), str(place[-1])))]
    if kind == "missing":
        return [Misfit(place, "is required")]
    error = complaint.get("ctx", {}).get("error")
    if isinstance(error, Misfits):
        return [Misfit((*place, *misfit.place), misfit.message) for misfit in error.found]
    return [Misfit(place, str(error) if error is not None else complaint["msg"])]


def _unknown(model: type[Input], key: str) -> str:
    if key in model.later:
        return f"{key} is not supported yet"
    if key in model.elsewhere:
        return f"unknown key {key}; here it is called {model.elsewhere[key]}"
    known = keys_of(model)
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1) or [
        name for name in known if len(key) > 3 and (key in name or name in key)
    ]
    guess = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
    return f"unknown key {shown_text(key)}; {guess}"


def _model_at(model: type[Input], place: Place) -> type[Input]:
    """The model that validates what is at ``place``."""
    for part in place:
        if isinstance(part, int):
            continue
        info = next(info for name, info in model.model_fields.items() if part == (info.alias or name))
        model = _model_in(info.annotation) or model
    return model


def _model_in(annotation: object) -> type[Input] | None:
    """The model inside ``Model``, ``Model | None`` or ``tuple[Model, …]``."""
    if isinstance(annotation, type) and issubclass(annotation, Input):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)
