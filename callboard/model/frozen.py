"""Frozen dataclasses, declared, made and changed at little cost.

The standard library compiles six methods of each class, a millisecond a class: a tenth of a restart. With
:func:`dataclass` a class is declared without them, and has them compiled when one of its objects needs them.

Most of a decision is making records, too. A frozen dataclass sets every field through ``object.__setattr__``, which for
a record of thirty fields takes longer than all that is decided about it. With :func:`quick` a new object belongs to a
twin class with the same slots and nothing frozen while its fields are set, by plain stores that the interpreter
specialises. It becomes one of its own class before anybody sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["dataclass", "evolver", "quick", "sleeper", "sleeps"]

_T = TypeVar("_T")

_become: Callable[[object, type], None] = object.__dict__["__class__"].__set__
"""Changes the class of an object whose class refuses assignments."""

_waking = Lock()


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """``dataclasses.dataclass``, at a third of its cost for classes that are frozen, have slots and compare by
        value."""
        return partial(dataclass, **options) if cls is None else _declared(cls, **options)


def _declared(cls: Any, **options: Any) -> Any:
    if options.keys() - {"frozen", "slots", "kw_only"} or not (options.get("frozen") and options.get("slots")):
        return dataclasses.dataclass(**options)(cls)
    lazy = [name for name in _SOURCES if name not in cls.__dict__]
    derived = any(dataclasses.is_dataclass(base) for base in cls.__bases__)  # then the library insists on all or none
    bare: Any = dataclasses.dataclass(**options | {"init": False, "repr": False, "eq": False, "frozen": derived})(cls)
    for stated in ("init", "repr", "eq", "frozen"):
        setattr(bare.__dataclass_params__, stated, True)
    for name in lazy:
        setattr(bare, name, _compiled_late(name, bare))
    bare.__getstate__, bare.__setstate__ = _values, _restore
    bare.__delattr__ = bare.__setattr__ = _refuse
    return bare


def _compiled_late(name: str, cls: Any) -> Callable[..., Any]:
    """A method that compiles itself and what else of its class waits for that, when it is called first."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        waiting = [each for each in _SOURCES if getattr(cls.__dict__.get(each), "waits", None) is cls]
        made: dict[str, Any] = {"unsaid": MISSING}
        exec("\n".join(line for each in {*waiting, name} for line in _SOURCES[each](cls, made)), made)  # noqa: S102
        for each in waiting:
            made[each].__qualname__ = f"{cls.__qualname__}.{each}"
            setattr(cls, each, made[each])
        return made[name](self, *args, **named)

    method.waits = cls  # type: ignore[attr-defined]
    return method


def _initial(cls: type, made: dict[str, Any]) -> list[str]:
    """Each field is set through its slot, which asks nobody whether the class is frozen."""
    positional, named, body = ["self"], ["*"], []
    for field in fields(cls):
        name, fresh = field.name, field.default_factory is not MISSING
        made[f"set_{name}"] = getattr(cls, name).__set__
        made[f"default_{name}"] = field.default_factory if fresh else field.default
        value = f"default_{name}()" if fresh else name if field.init else f"default_{name}"
        if field.init:
            value = f"{value} if {name} is unsaid else {name}" if fresh else value
            (named if field.kw_only else positional).append(f"{name}=unsaid" if fresh else _parameter(field))
        if field.init or fresh or field.default is not MISSING:
            body.append(f"    set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("    self.__post_init__()")
    return [f"def __init__({', '.join(positional + named[len(named) == 1 :])}):", *(body or ["    pass"])]


def _of(cls: type, wanted: Callable[[Field[Any]], bool], of: str = "self") -> str:
    return f"({''.join(f'{of}.{each.name}, ' for each in fields(cls) if wanted(each))})"


def _equal(cls: type, _: Any) -> list[str]:
    same = " == ".join(_of(cls, lambda field: field.compare, of) for of in ("self", "other"))
    return ["def __eq__(self, other):", f"    return {same} if other.__class__ is self.__class__ else NotImplemented"]


def _hashed(cls: type, _: Any) -> list[str]:
    values = _of(cls, lambda field: field.compare if field.hash is None else field.hash)
    return ["def __hash__(self):", f"    return hash({values})"]


def _shown(cls: type, _: Any) -> list[str]:
    told = ", ".join(f"{each.name}={{self.{each.name}!r}}" for each in fields(cls) if each.repr)
    return ["def __repr__(self):", f"    return f'{{self.__class__.__qualname__}}({told})'"]


_SOURCES = {"__init__": _initial, "__eq__": _equal, "__hash__": _hashed, "__repr__": _shown}


def _values(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _restore(self: Any, values: Sequence[Any]) -> None:
    for field, value in zip(fields(self), values, strict=True):
        object.__setattr__(self, field.name, value)


def _refuse(self: Any, name: str, *_: Any) -> None:
    raise FrozenInstanceError(f"{name} of a {self.__class__.__qualname__} can't be changed")


def quick(cls: type[_T]) -> type[_T]:
    """Decorates a frozen dataclass with slots: the same ``__init__`` at a quarter of its cost for many fields.

    Raises:
        TypeError: the class has what this doesn't cover: no slots, a ``__post_init__``, a default factory.
    """
    own = fields(cls)  # type: ignore[arg-type]  # a dataclass by contract
    covered = all(field.init and field.default_factory is MISSING for field in own)
    if not covered or not hasattr(cls, "__slots__") or hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__} is not a frozen dataclass with slots and plain defaults")
    positional = [_parameter(field) for field in own if not field.kw_only]
    named = [_parameter(field) for field in own if field.kw_only]
    source = [
        f"def __init__({', '.join(['self', *positional, *(['*'] if named else []), *named])}):",
        "    become(self, twin)",
        *(f"    self.{field.name} = {field.name}" for field in own),
        "    self.__class__ = cls",
    ]
    defaults = {f"default_{field.name}": field.default for field in own if field.default is not MISSING}
    made = _compiled(cls, source, **defaults)["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]
    return cls


def evolver(cls: type[_T]) -> Callable[[_T, dict[str, Any]], _T]:
    """A function that copies an object of ``cls`` with some fields changed: ``dataclasses.replace`` without a call of
    ``__init__``, at a tenth of its cost. A name that is no field raises AttributeError."""
    source = [
        "def evolve(old, changes):",
        "    new = make(twin)",
        *(f"    new.{field.name} = old.{field.name}" for field in fields(cls)),  # type: ignore[arg-type]
        "    for name, value in changes.items():",
        "        setattr(new, name, value)",
        "    new.__class__ = cls",
        "    return new",
    ]
    made: Callable[[_T, dict[str, Any]], _T] = _compiled(cls, source)["evolve"]
    return made


def sleeper(cls: type[_T], find: Callable[[Any], _T], *eager: str, **alike: Any) -> Callable[..., _T]:
    """A function that makes an object of ``cls`` of its ``eager`` fields alone, given by position behind what leads
    ``find`` to the whole object. That is called when something else is asked for: then the object sleeps no more.

    While it sleeps it is of a subclass, which ``cls`` has no other of; any thread may wake it.

    Args:
        alike: fields whose value is the same for all, with that value: they wake nobody either.
    """
    lazy = [field.name for field in fields(cls) if field.name not in eager]  # type: ignore[arg-type]
    slots = {name: cls.__dict__[name] for name in lazy}
    kept = slots[lazy[0]]  # where that lies meanwhile

    def leads(self: Any) -> Any:
        with _waking:
            return None if self.__class__ is cls else kept.__get__(self)

    def wake(self: Any) -> Any:
        with _waking:
            if self.__class__ is not cls:
                whole = find(kept.__get__(self))
                for name, slot in slots.items():
                    slot.__set__(self, getattr(whole, name))
                _become(self, cls)
        return self

    def asked(name: str) -> Any:
        return property(lambda self: getattr(wake(self), name))

    body: dict[str, Any] = {name: asked(name) for name in lazy}
    body |= alike
    body |= {
        "__slots__": (),
        "__eq__": lambda self, other: wake(self) == other,
        "__hash__": lambda self: hash(wake(self)),
        "__repr__": lambda self: repr(wake(self)),
        "_leads": property(leads),
    }
    source = [
        f"def fall_asleep(leads, {', '.join(eager)}):",
        "    new = make(twin)",
        *(f"    new.{name} = {name}" for name in eager),
        f"    new.{lazy[0]} = leads",
        "    new.__class__ = asleep",
        "    return new",
    ]
    made: Callable[..., _T] = _compiled(cls, source, asleep=type(f"Sleeping{cls.__name__}", (cls,), body))[
        "fall_asleep"
    ]
    return made


def sleeps(record: object) -> Any:
    """What leads to the whole of an object that sleeps; None: it doesn't."""
    return getattr(record, "_leads", None)


def _parameter(field: Field[Any]) -> str:
    return field.name if field.default is MISSING else f"{field.name}=default_{field.name}"


def _compiled(cls: type, source: list[str], **names: Any) -> dict[str, Any]:
    twin = type(f"{cls.__name__}Twin", (), {"__slots__": tuple(field.name for field in fields(cls))})
    found = {"cls": cls, "twin": twin, "become": _become, "make": object.__new__, **names}
    exec("\n".join(source), found)  # noqa: S102 - of field names only, as dataclasses itself does it
    return found
