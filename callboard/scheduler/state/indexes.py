"""Sets and tables in an order of their own: that of their members' places, however and whenever these came in.

Decisions walk through indexes, so an index must not remember its history: rebuilt from the records, or put back by an
undo, it must be walked through in the same order. A place is a part of the record that never changes (generation,
group number, order of submission, name).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

_K = TypeVar("_K")
_V = TypeVar("_V")
_M = TypeVar("_M", bound=Hashable)


class InOrder(dict[_K, _V]):
    """A dict that is walked through by the place of its values. Most members come in order and cost nothing more; after
    one that did not, the next walk sorts first."""

    _place: Callable[[Any], Any] | None = None
    """The place of a value, which never changes for a key; None: the value is the place."""
    _highest: Any = None
    """The highest place that ever was: whoever comes with a higher one comes in order."""
    _mixed = False

    @classmethod
    def by(cls, place: Callable[[_V], Any]) -> Self:
        """An empty one whose values have their places somewhere in them."""
        made = cls()
        made._place = place
        return made

    def put(self, key: _K, value: _V) -> None:
        """Adds a member, or replaces its value."""
        if key not in self:
            place = value if self._place is None else self._place(value)
            if self._highest is None or place >= self._highest:
                self._highest = place
            else:
                self._mixed = True
        self[key] = value

    def __iter__(self) -> Iterator[_K]:
        self._sort()
        return super().__iter__()

    def __reversed__(self) -> Iterator[_K]:
        self._sort()
        return super().__reversed__()

    def keys(self) -> dict_keys[_K, _V]:
        """The keys, in order."""
        self._sort()
        return super().keys()

    def values(self) -> dict_values[_K, _V]:
        """The values, in order."""
        self._sort()
        return super().values()

    def items(self) -> dict_items[_K, _V]:
        """The items, in order."""
        self._sort()
        return super().items()

    def _sort(self) -> None:
        if self._mixed:
            place = self._place or _itself
            in_order = sorted(super().items(), key=lambda item: place(item[1]))
            self.clear()
            self.update(in_order)
            self._mixed = False


def _itself(value: Any) -> Any:
    return value


Members = dict[_M, _M | int]
"""A few keys, each with its place, in the order of their places: a plain dict, since there are as many as records."""


def add(index: dict[_K, dict[_M, Any]], key: _K, member: _M, place: _M | int) -> None:
    """Adds one entry to a one-to-many index."""
    members = index.get(key)
    if members is None:
        index[key] = {member: place}
    elif member in members or members[next(reversed(members))] < place:
        members[member] = place
    else:
        members[member] = place
        index[key] = dict(sorted(members.items(), key=itemgetter(1)))


def remove(index: dict[_K, dict[_M, Any]], key: _K, member: _M) -> None:
    """Takes one entry out; empty sets are taken out too, so that an index never outgrows its records."""
    members = index[key]
    del members[member]
    if not members:
        del index[key]


def mark(index: InOrder[_M, Any], key: _M, place: int | str, *, wanted: bool) -> None:
    """Puts a key into a set, or takes it out."""
    if wanted:
        index.put(key, place)
    else:
        index.pop(key, None)
