"""Sets and tables in an order of their own: that of their members' places, however and whenever these came in.

Decisions walk through indexes, so an index must not remember its history: rebuilt from the records, or put back by an
undo, it must be walked through in the same order. A place is a part of the record that never changes (generation,
group number, order of submission, name).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

_K = TypeVar("_K")
_V = TypeVar("_V")
_M = TypeVar("_M", bound=Hashable)


def _itself(value: Any) -> Any:
    return value


class _Least:
    """Lower than any place."""

    def __gt__(self, other: object) -> bool:
        return False


class InOrder(dict[_K, _V]):
    """A dict that is walked through by the place of its values. Most members come in order and cost nothing more; after
    one that did not, the next walk sorts first."""

    __slots__ = ("_highest", "_mixed", "_place")

    def __init__(self, place: Callable[[_V], Any] = _itself) -> None:
        """
        Args:
            place: the place of a value, which never changes for a key; without it the value is the place.
        """
        super().__init__()
        self._place = place
        self._highest: Any = _Least()
        """The highest place that ever was: whoever comes with a higher one comes in order."""
        self._mixed = False

    def put(self, key: _K, place: Any) -> None:
        """Adds a member whose value is its place."""
        if not place < self._highest:
            self._highest = place
        elif key not in self:
            self._mixed = True
        self[key] = place

    def add(self, key: _K, value: _V) -> None:
        """Adds a member that is new."""
        place = self._place(value)
        if place < self._highest:
            self._mixed = True
        else:
            self._highest = place
        self[key] = value

    def add_all(self, members: Mapping[_K, _V]) -> None:
        """Adds members that are new."""
        self.update(members)
        if self._mixed or not members:
            return  # the highest place is found by sorting
        places = list(map(self._place, members.values()))
        if places[0] < self._highest or places != sorted(places):
            self._mixed = True
        else:
            self._highest = places[-1]

    # Not by way of super(), which takes as long as a short walk.

    def __iter__(self) -> Iterator[_K]:
        if self._mixed:
            self._sort()
        return dict.__iter__(self)

    def __reversed__(self) -> Iterator[_K]:
        if self._mixed:
            self._sort()
        return dict.__reversed__(self)

    def keys(self) -> dict_keys[_K, _V]:
        if self._mixed:
            self._sort()
        return dict.keys(self)

    def values(self) -> dict_values[_K, _V]:
        if self._mixed:
            self._sort()
        return dict.values(self)

    def items(self) -> dict_items[_K, _V]:
        if self._mixed:
            self._sort()
        return dict.items(self)

    def _sort(self) -> None:
        place = self._place
        in_order = sorted(dict.items(self), key=lambda item: place(item[1]))
        self.clear()
        self.update(in_order)
        self._mixed = False
        highest = place(in_order[-1][1]) if in_order else self._highest
        if not highest < self._highest:
            self._highest = highest


Members = dict[_M, _M | int]
"""A few keys, each with its place, in the order of their places: a plain dict, since there are as many as records.
Where there are many, and one did not come in order, an :class:`InOrder`."""

_FEW = 32
"""Members that are sorted each time that one does not come in order."""


def add(index: dict[_K, dict[_M, Any]], key: _K, member: _M, place: _M | int) -> None:
    """Adds one entry to a one-to-many index."""
    members = index.get(key)
    if members is None:
        index[key] = {member: place}
    elif isinstance(members, InOrder):
        members.put(member, place)
    elif member in members or members[next(reversed(members))] < place:
        members[member] = place
    elif len(members) < _FEW:
        members[member] = place
        index[key] = dict(sorted(members.items(), key=itemgetter(1)))
    else:
        # The groups of a thousand nodes that are lost at once: sorted when somebody walks through them.
        index[key] = many = InOrder[_M, Any]()
        many.add_all(members)
        many.put(member, place)


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
