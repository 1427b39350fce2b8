"""Frozen dataclasses of ours, and quick ones, are frozen dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from callboard.model import frozen
from callboard.model.frozen import evolver, quick


@dataclass(frozen=True, slots=True)
class Plain:
    """What the standard library makes of it."""

    kind: ClassVar[str] = "plain"

    first: int
    second: str = "b"
    third: tuple[int, ...] = field(default=(), kw_only=True)


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """The same, quick."""

    kind: ClassVar[str] = "plain"

    first: int
    second: str = "b"
    third: tuple[int, ...] = field(default=(), kw_only=True)


@frozen.dataclass(frozen=True, slots=True)
class Ours:
    """The same, compiled when it is used."""

    kind: ClassVar[str] = "plain"

    first: int
    second: str = "b"
    third: tuple[int, ...] = field(default=(), kw_only=True)


@quick
@frozen.dataclass(frozen=True, slots=True)
class Both:
    """The same, quick, with the rest compiled when it is used."""

    kind: ClassVar[str] = "plain"

    first: int
    second: str = "b"
    third: tuple[int, ...] = field(default=(), kw_only=True)


of_ours = pytest.mark.parametrize("ours", [Quick, Ours, Both])

ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "x"), {}),
    ((), {"first": 2, "third": (3,)}),
    ((4,), {"second": "y", "third": (5, 6)}),
]


@of_ours
@pytest.mark.parametrize(("positional", "named"), ARGUMENTS)
def test_it_is_made_as_the_standard_library_makes_it(
    ours: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> None:
    plain, made = Plain(*positional, **named), ours(*positional, **named)
    assert type(made) is ours
    assert asdict(made) == asdict(plain)
    assert repr(made) == repr(plain).replace("Plain", ours.__name__)
    assert hash(made) == hash(plain)
    assert made == ours(*positional, **named)
    assert made != plain
    assert replace(made, first=9) == ours(9, made.second, third=made.third)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    assert [each.name for each in fields(made)] == [each.name for each in fields(plain)]


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {}), ((1, "x", (2,)), {}), ((1,), {"fourth": 4}), ((1,), {"first": 1})],
    ids=["too few", "too many", "unknown", "twice"],
)
def test_it_refuses_what_the_standard_library_refuses(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    refused = []
    for of in (Plain, Quick, Ours, Both):
        with pytest.raises(TypeError) as error:
            of(*positional, **named)
        refused.append(str(error.value).replace(of.__name__, "Plain"))
    assert len(set(refused)) == 1


@of_ours
def test_it_is_frozen_however_it_was_made(ours: Any) -> None:
    evolve = evolver(ours)
    copies = (copy.copy(ours(1)), pickle.loads(pickle.dumps(ours(1))))
    for made in (ours(1), evolve(ours(1), {"second": "c"}), replace(ours(1), first=2), *copies):
        assert type(made) is ours
        with pytest.raises(FrozenInstanceError):
            made.first = 2
        with pytest.raises(FrozenInstanceError):
            del made.first


def test_evolving_changes_what_is_named_and_nothing_else() -> None:
    old = Quick(1, "x", third=(2,))
    new = evolver(Quick)(old, {"second": "z"})
    assert new == Quick(1, "z", third=(2,))
    assert old == Quick(1, "x", third=(2,))
    with pytest.raises(AttributeError):
        evolver(Quick)(old, {"fourth": 4})


def test_what_it_does_not_cover_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        number: int

        def __post_init__(self) -> None:
            assert self.number

    @dataclass(frozen=True, slots=True)
    class Made:
        numbers: list[int] = field(default_factory=list)

    @dataclass(frozen=True)
    class Open:
        number: int = 0

    for cls in (Checked, Made, Open):
        with pytest.raises(TypeError, match="not a frozen dataclass with slots"):
            quick(cls)


@pytest.mark.parametrize("declare", [dataclass, frozen.dataclass], ids=["of the library", "ours"])
def test_whatever_a_class_states_holds(declare: Any) -> None:
    @declare(frozen=True, slots=True, kw_only=True)
    class Base:
        number: int
        names: list[str] = field(default_factory=list, hash=False)
        secret: str = field(default="", repr=False, compare=False)
        fixed: int = field(default=7, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "secret", self.secret.upper())

    @declare(frozen=True, slots=True)
    class Derived(Base):
        first: int
        second: str = "b"

        def __repr__(self) -> str:
            return "its own"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Derived) and self.first == other.first

        def __hash__(self) -> int:
            return 3

    make: Any = Base
    derive: Any = Derived
    base = make(number=1, secret="x")
    assert (base.number, base.names, base.secret, base.fixed) == (1, [], "X", 7)
    assert repr(base).endswith("Base(number=1, names=[], fixed=7)")
    assert base == make(number=1, secret="other")
    assert hash(base) == hash(make(number=1, names=["a"]))
    assert base != make(number=1, names=["a"])
    assert base.names is not make(number=1).names
    derived = derive(1, number=2, secret="y")
    assert (derived.first, derived.second, derived.number, derived.secret) == (1, "b", 2, "Y")
    assert derived == derive(1, number=5)
    assert (repr(derived), hash(derived)) == ("its own", 3)
    assert derived != base
    with pytest.raises(FrozenInstanceError):
        derived.number = 3
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'number'"):
        derive(1)


@pytest.mark.parametrize("declare", [dataclass, frozen.dataclass], ids=["of the library", "ours"])
@pytest.mark.parametrize("base", [Plain, Ours, Both])
def test_a_class_of_one_kind_may_derive_from_one_of_another(base: Any, declare: Any) -> None:
    @declare(frozen=True, slots=True)
    class Derived(base):  # type: ignore[misc]
        fourth: int = 4

    derive: Any = Derived
    assert derive(1) == derive(1, fourth=4) != derive(1, fourth=5)
    assert hash(derive(1)) == hash(derive(1))
    with pytest.raises(FrozenInstanceError):
        derive(1).fourth = 3


def test_methods_are_compiled_in_whatever_order_they_are_asked_for() -> None:
    def declared() -> Any:
        @frozen.dataclass(frozen=True, slots=True)
        class One:
            number: int = 1

        return One

    for first in ("__eq__", "__hash__", "__repr__"):
        cls = declared()
        made = object.__new__(cls)
        made.__setstate__([1])
        asked = getattr(made, first)
        assert asked(made) is True if first == "__eq__" else asked() is not None
        assert made == cls()
        assert {made, cls(1)} == {cls()}
