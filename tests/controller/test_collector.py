"""What does the garbage collector look at after a replay? Nothing of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from callboard.controller.loop.collector import FULL_EVERY, sparing_the_loop, sparing_what_is_made, uncollected


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_was_made_meanwhile_is_never_looked_at_and_what_comes_later_is(collector: None) -> None:
    with sparing_what_is_made():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(10)]
    later: list[object] = []
    looked_at = {id(each) for each in gc.get_objects()}
    assert gc.isenabled()
    assert gc.get_threshold()[2] == FULL_EVERY
    assert looked_at.isdisjoint(map(id, made))
    assert id(later) in looked_at


def test_a_start_that_fails_leaves_a_collector_that_works(collector: None) -> None:
    with pytest.raises(RuntimeError), sparing_what_is_made():
        raise RuntimeError("no journal")
    assert gc.isenabled()


def test_what_takes_long_beside_the_loop_is_not_collected_meanwhile_and_the_collector_goes_on_after_it() -> None:
    assert gc.isenabled()
    assert uncollected(gc.isenabled) is False
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        uncollected(lambda: 1 // 0)
    assert gc.isenabled()
    with sparing_the_loop():
        uncollected(gc.isenabled)
        assert not gc.isenabled(), "one that overlaps lets it rest"
