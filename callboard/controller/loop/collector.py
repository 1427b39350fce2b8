"""The garbage collector, kept from looking at the whole state again and again.

The state is millions of frozen records at most, which hold each other in no circle: counting references frees them.
The collector looks at all of them all the same, each time a quarter has been added, and nothing is decided meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

YOUNG = 10_000
"""Objects that are made before the youngest are looked at; fourteen times the interpreter's own, which looks at what
one decision makes while it is made. Such a look takes a millisecond at most."""

FULL_EVERY = 10
"""Looks at what is middle-aged for one at everything: after about as many objects as ever. What does make circles
(exceptions, the ends of streams) dies young."""


def spare_what_is_there() -> None:
    """The collector never looks at what is there now, and at everything seldom. Among ten thousand nodes a decision
    takes an eighth longer otherwise."""
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG, middle, FULL_EVERY)


@contextmanager
def sparing_what_is_made() -> Iterator[None]:
    """The collector never looks at what is made inside, nor meanwhile: a replay takes half as long again otherwise."""
    gc.disable()
    try:
        yield
    finally:
        spare_what_is_there()
        gc.enable()


@contextmanager
def sparing_a_run() -> Iterator[None]:
    """What is there already is spared inside, as in a controller that serves, and looked at again afterwards."""
    before = gc.get_threshold()
    spare_what_is_there()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def sparing_the_loop() -> Iterator[None]:
    """For what takes long in another thread: a look at all that it makes would stop the loop, too, for half a second
    where that is a hundred thousand workers. Two may overlap: then the first that ends lets the collector go on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def uncollected(work: Callable[..., T], *arguments: Any) -> T:
    """What ``work`` returns, done in :func:`sparing_the_loop`."""
    with sparing_the_loop():
        return work(*arguments)
