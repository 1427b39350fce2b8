"""Reading: a mapping becomes a spec by what its fields declare, with every fault of it at once.

No library does it: pydantic checked keys and nesting only (the words of each fault are ours, and its complaints had to
be translated back into places), and reading a first job took 200 ms of CPU with it, 75 ms without; msgspec stops at the
first fault. The journal keeps pydantic, which derives the codec of records from their types.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.compounds import list_of
from callboard.model.inputs.located import Misfit, Misfits, as_mapping, each, order_in, path_of, shown, shown_text
from callboard.model.schema import Declared, Kind, declared_in, once

MAX_FAULTS = 100
"""Most faults told at once."""

M = TypeVar("M", bound="Input")


class Input:
    """A mapping with known keys: those that the fields of a spec declare (``of``), and those of its own.

    A key whose value is null is not stated. Each field is an attribute, which holds its default where it is not stated:
    None for those of the spec, whose defaults :meth:`spec` fills in.
    """

    of: ClassVar[type | None] = None

    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Key of another system → what it is called here: Kubernetes, Kueue, Ray, SimpleScheduler."""

    neighbours: ClassVar[Mapping[type, str]] = MappingProxyType({})
    """Spec whose keys people write here by mistake → where they belong."""

    internal: ClassVar[frozenset[str]] = frozenset()
    """Keys that programs of ours write for each other. They are read, but nobody is pointed to them."""

    before: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    """Key → what a short form of its value stands for."""

    example: ClassVar[str] = ""
    """What to write instead of something that is not a mapping."""

    inner: ClassVar[Mapping[str, Declared] | None] = None
    """The fields of a mapping that holds several fields of the spec around it."""

    def __init_subclass__(cls, of: type | None = None) -> None:
        cls.of = of

    def __init__(self, unstated: Mapping[str, Any], stated: dict[str, Any]) -> None:
        self.__dict__.update(unstated, **stated)
        self._stated = stated

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def consistent(self) -> list[Misfit]:
        """What is wrong between fields that are right."""
        return []

    def stated(self, *but: str) -> dict[str, Any]:
        """Fields that were stated, by their names in the spec; without ``but``."""
        return {name: value for name, value in self._stated.items() if name not in but}

    def spec(self) -> Any:
        assert self.of is not None
        return self.of(**self._stated)


@once
def reader_of(spec: type) -> type[Input]:
    """What reads a spec: the model that is of it, or one that knows no more than its fields declare."""
    own = next((model for model in Input.__subclasses__() if model.of is spec), None)
    return own or type(f"{spec.__name__}Input", (Input,), {}, of=spec)


@once
def table_of(model: type[Input]) -> Mapping[str, Declared]:
    """Key → field of a model, its own ones where both declare one. A key with a dot is one of a mapping."""
    if model.inner is not None:
        return model.inner
    of = () if model.of is None else declared_in(model.of)
    merged = {field.name: field for field in (*of, *declared_in(model))}
    return {field.key: field for field in merged.values()}


class _Plan:
    """How a model is read: its keys with their readers, made once."""

    def __init__(self, model: type[Input]) -> None:
        table = table_of(model)
        own = {field.name for field in declared_in(model)}
        self.unstated = {
            field.name: field.default if field.name in own and field.default is not MISSING else None
            for field in table.values()
        }
        self.readers: dict[str, tuple[str, Callable[[Any], Any]]] = {}
        """Key → name of the field (empty: of a mapping with several), its reader."""
        self.required: list[str] = []
        """Keys that must be stated."""
        for key, field in table.items():
            top, _, below = key.partition(".")
            if not below:
                self.readers[key] = (field.name, _reader(field.kind))
                self.required += [key] if field.default is MISSING else []
            elif top not in self.readers:
                group = {inner[len(top) + 1 :]: each for inner, each in table.items() if inner.startswith(f"{top}.")}
                needed = model.inner is not None and any(each.written.needed for each in group.values())
                self.readers[top] = ("", _group_reader(f"{model.__name__}.{top}", group))
                self.required += [top] if needed else []
        for key, short in model.before.items():
            name, read = self.readers[key]
            self.readers[key] = (name, _after(short, read))


def _after(short: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: read(short(value))


def _reader(kind: Kind) -> Callable[[Any], Any]:
    if kind.part is None:
        return kind.read
    part = kind.part

    def one(value: Any) -> Any:
        return check(reader_of(part), value).spec()

    return list_of(one, kind.what, kind.most).read if kind.most else one


def _group_reader(name: str, fields: Mapping[str, Declared]) -> Callable[[Any], dict[str, Any]]:
    """Reads a mapping that holds several fields of the spec around it."""
    inner = {
        key: replace(field, keys=tuple(key.split(".")), default=MISSING if field.written.needed else None)
        for key, field in fields.items()
    }
    group = type(name, (Input,), {"inner": inner})

    def read(value: Any) -> dict[str, Any]:
        return {} if value is None else check(group, value).stated()

    return read


@once
def plan_of(model: type[Input]) -> _Plan:
    return _Plan(model)


def build_inputs() -> None:
    """Makes the plan of every model that is imported. Else each is made when it is first used: a program that reads one
    job waits for no others, and one that runs for long doesn't want its first job to wait."""
    kinds = Input.__subclasses__()
    for kind in kinds:
        plan_of(kind)
        kinds += kind.__subclasses__()


def keys_of(model: type[Input]) -> list[str]:
    """The keys that people write in a mapping of this model."""
    return [key for key in plan_of(model).readers if key not in model.internal]


def check(model: type[M], source: object) -> M:
    """The model of ``source``.

    Raises:
        Misfits: every fault, in the order of ``source``. Faults between fields are looked for once each field is right.
    """
    source = as_mapping(source)
    if not isinstance(source, Mapping):
        what = model.example or f"a mapping; its keys are {', '.join(keys_of(model))}"
        raise Misfits([Misfit((), f"{shown(source)} is not {what}")])
    odd = [key for key in source if not isinstance(key, str)]
    if odd:
        keys = ", ".join(keys_of(model))
        raise Misfits([Misfit((), f"the key {shown(key)} is not a text; keys are {keys}") for key in odd])
    plan = plan_of(model)
    misfits: list[Misfit] = []
    stated: dict[str, Any] = {}
    meant: set[str] = set()  # told once, and nothing is concluded from their absence
    for key, value in source.items():
        if value is None:
            continue
        if (known := plan.readers.get(key)) is None:
            meant.add(near := _meant(model, key))
            misfits.append(Misfit((key,), _unknown(model, key, near)))
            continue
        name, read = known
        if (found := each(key, read, as_mapping(value), misfits)) is None:
            continue
        if name:
            stated[name] = found
        else:
            stated |= found
    misfits += [Misfit((key,), "is required") for key in plan.required if source.get(key) is None and key not in meant]
    if not misfits:
        made = model(plan.unstated, stated)
        misfits = made.consistent()
        if not misfits:
            return made
    misfits.sort(key=lambda misfit: order_in(source, misfit.place))
    raise Misfits(misfits)


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
    position = getattr(source, "position", None)
    line, column = position(misfit.place) if callable(position) else (0, 0)
    return Fault(path_of(misfit.place), misfit.message, line, column)


def _keys_in(spec: type) -> set[str]:
    return set(keys_of(spec)) if issubclass(spec, Input) else {field.keys[0] for field in declared_in(spec)}


def _meant(model: type[Input], key: str) -> str:
    """The key that was probably meant by one that is not known; empty: none looks like it."""
    if key in model.elsewhere:
        return model.elsewhere[key]
    known = keys_of(model)
    word = key[:80].lower().replace("-", "_")
    # Who shortens or misspells a long key begins as it does: seconds is seconds_by_gpus, not tail_seconds.
    begins = {
        "_".join(name.split("_")[:end]): name for name in reversed(known) for end in range(1, name.count("_") + 1)
    }
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8) or [
        begins[start] for start in difflib.get_close_matches(word, begins, n=1, cutoff=0.8)
    ]
    near = near or difflib.get_close_matches(word, known, n=1)
    return next(iter(near), "") or next((name for name in known if len(key) > 3 and (key in name or name in key)), "")


def _unknown(model: type[Input], key: str, meant: str) -> str:
    if key in model.elsewhere:
        return f"unknown key {key}; here it is called {meant}"
    for spec, where in model.neighbours.items():
        if key in _keys_in(spec):
            return f"unknown key {key}; it belongs to {where}"
    guess = f"did you mean {meant}?" if meant else f"known keys are {', '.join(keys_of(model))}"
    return f"unknown key {shown_text(key)}; {guess}"
