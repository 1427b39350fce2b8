"""Can a plan be made shorter nearby? Everything stays as it is but a few tasks that run about the same time.

A large neighbourhood search (Shaw 1998): each neighbourhood is a small problem for branch and bound, which may arrange
the freed tasks anew and choose all GPU counts. In a fixed order, so that it gives the same plan every time.
"""

from __future__ import annotations

from callboard.autoplace.branching import around
from callboard.autoplace.combination import Combination
from callboard.autoplace.exact import Shortest
from callboard.autoplace.solution import Found
from callboard.autoplace.stopping import Budget, Stopped

SIZES = (4, 5, 6)
"""Tasks freed at a time."""

NODES = 150
"""Nodes for one neighbourhood."""


def improved(search: Combination, found: Found, budget: Budget) -> Found:
    """A plan that no neighbourhood makes shorter, or the best when the budget was spent.

    Args:
        search: the choice of chains that ``found`` is of.
        found: where to start.
        budget: asked whether to stop; its nodes are not spent.
    """
    for size in SIZES:
        again = size < search.size
        while again and not budget.stopped():
            again = False
            for free in _windows(found, size):
                start = around(search, found, free)
                if start is None:
                    continue
                shortest = Shortest(found.length, Budget(NODES, budget.stopped))
                try:
                    shortest.run(search, start)
                except Stopped:
                    if budget.stopped():
                        return shortest.best or found
                if shortest.best is not None:
                    found = shortest.best
                    again = True
    return found


def _windows(found: Found, size: int) -> list[frozenset[int]]:
    """Tasks next to each other by start, and by end."""
    tasks = range(len(found.starts))
    orders = (
        sorted(tasks, key=lambda i: (found.starts[i], i)),
        sorted(tasks, key=lambda i: (found.ends[i], i)),
    )
    windows = [frozenset(order[at : at + size]) for order in orders for at in range(len(order) - size + 1)]
    return list(dict.fromkeys(windows))
