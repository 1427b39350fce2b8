"""How short could any plan be? Bounds that need no search: area, critical path, and both at once.

* *Area*: all GPU-seconds, each task in its thriftiest option, spread over all GPUs.
* *Critical path*: every task in its fastest option, GPUs without end.
* *Dual*: a plan of length T has T ≥ the length of each path and T ≥ area / G, in the *same* options. For every
  0 ≤ λ ≤ 1: T ≥ λ · path + (1 − λ) · area / G, and the least right-hand side over all options is found task by task.
* *Destructive*: the shortest length that propagation alone can't refute (Klein and Scholl, 1999).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from callboard.autoplace.combination import Combination
from callboard.autoplace.propagation import propagate
from callboard.autoplace.tasks import Instance, Option

SHARES = 32
"""How finely λ is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds in units.

    Attributes:
        area: by GPU-seconds.
        path: by the critical path.
        dual: by both.
    """

    area: int
    path: int
    dual: int

    @property
    def best(self) -> int:
        """The highest."""
        return max(self.area, self.path, self.dual)


def bounds_of(instance: Instance) -> Bounds:
    """The bounds of an instance, rounded so that they stay bounds."""
    values = [_combined(instance, share / SHARES) for share in range(SHARES + 1)]
    return Bounds(area=int(values[0] - 1e-3), path=int(values[-1] - 1e-3), dual=int(max(values) - 1e-3))


def destructive(search: Combination, least: int, most: int) -> int:
    """The shortest length in [``least``, ``most``] that propagation doesn't refute for one choice of chains."""
    root = search.root()
    if root is None:
        return most
    while least < most:
        middle = (least + most) // 2
        if propagate(search, root, middle + 1) is None:
            least = middle + 1
        else:
            most = middle
    return least


def _combined(instance: Instance, share: float) -> float:
    """λ · path + (1 − λ) · area / G at λ = ``share``, the options chosen task by task."""
    capacity = sum(instance.capacity)

    def least(options: tuple[Option, ...], time: Callable[[Option], int] | None) -> float:
        return min(
            (share * time(option) if time is not None else 0.0)
            + ((1 - share) * option.gpus * option.span / capacity if capacity else 0.0)
            for option in options
        )

    alone = [least(task.options, None) for task in instance.tasks]
    spans = [least(task.options, lambda o: o.span) - base for task, base in zip(instance.tasks, alone, strict=True)]
    pieces = [least(task.options, lambda o: o.piece) - base for task, base in zip(instance.tasks, alone, strict=True)]
    starts = [0.0] * len(alone)
    ends = list(spans)
    for j in sorted(range(len(alone)), key=lambda j: sum(j in reach for reach in instance.reach)):
        for arc in instance.arcs:
            if arc.target == j:
                i = arc.source
                starts[j] = max(starts[j], ends[i] if arc.barrier else starts[i] + pieces[i])
                ends[j] = max(ends[j], 0.0 if arc.barrier else ends[i] + pieces[j])
        ends[j] = max(ends[j], starts[j] + spans[j])
    return max(ends) + sum(alone)
