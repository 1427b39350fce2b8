"""Quick frozen dataclasses are frozen dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

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


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "x"), {}),
    ((), {"first": 2, "third": (3,)}),
    ((4,), {"second": "y", "third": (5, 6)}),
]


@pytest.mark.parametrize(("positional", "named"), ARGUMENTS)
def test_it_is_made_as_the_standard_library_makes_it(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    plain, made = Plain(*positional, **named), Quick(*positional, **named)
    assert type(made) is Quick
    assert asdict(made) == asdict(plain)
    assert repr(made) == repr(plain).replace("Plain", "Quick")
    assert hash(made) == hash(plain)
    assert made == Quick(*positional, **named)
    assert replace(made, first=9) == Quick(9, made.second, third=made.third)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    assert [each.name for each in fields(made)] == [each.name for each in fields(plain)]


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {}), ((1, "x", (2,)), {}), ((1,), {"fourth": 4}), ((1,), {"first": 1})],
    ids=["too few", "too many", "unknown", "twice"],
)
def test_it_refuses_what_the_standard_library_refuses(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    for of in (Plain, Quick):
        with pytest.raises(TypeError):
            of(*positional, **named)


def test_it_is_frozen_however_it_was_made() -> None:
    evolve = evolver(Quick)
    for made in (Quick(1), evolve(Quick(1), {"second": "c"}), replace(Quick(1), first=2)):
        assert type(made) is Quick
        with pytest.raises(FrozenInstanceError):
            made.first = 2  # type: ignore[misc]
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
