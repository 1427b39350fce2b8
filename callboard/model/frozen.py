"""Frozen dataclasses, made and changed at little cost: most of a decision is making records.

A frozen dataclass sets every field through ``object.__setattr__``, which for a record of thirty fields takes longer
than all that is decided about it. Here a new object belongs to a twin class with the same slots and nothing frozen
while its fields are set, by plain stores that the interpreter specialises. It becomes one of its own class before
anybody sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from threading import Lock
from typing import Any, TypeVar

_T = TypeVar("_T")

_become: Callable[[object, type], None] = object.__dict__["__class__"].__set__
"""Changes the class of an object whose class refuses assignments."""

_waking = Lock()


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
