"""How is the same model put to OR-Tools' CP-SAT? One interval per task, a literal per option, no overlap in the plane.

Each task is an interval in time and one on the GPUs of each pool it may use; two-dimensional no-overlap keeps
contiguous ranges from meeting. Optional: without OR-Tools the search of :mod:`callboard.autoplace.exact` goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from callboard.autoplace.exact import Found
from callboard.autoplace.tasks import Arc, Instance, Option

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SEED = 1
"""Of the solver, fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver says.

    Attributes:
        found: the best plan; None: none within the time.
        bound: no plan is shorter.
        proved: ``found`` is the shortest, or there is none.
    """

    found: Found | None
    bound: int
    proved: bool


def solver_module() -> Any | None:
    """``ortools.sat.python.cp_model``, or None where OR-Tools is not installed."""
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an optional extra, and slow to import
    except ImportError:
        return None
    return cp_model


class Model:
    """The model of an instance.

    Args:
        cp: the solver's module.
        instance: what to model.
        below: only shorter plans are of interest.
        bound: a known lower bound.
    """

    def __init__(self, cp: Any, instance: Instance, *, below: int, bound: int) -> None:
        self.instance = instance
        self.model: cp_model.CpModel = cp.CpModel()
        self.most = below - 1
        self.length = self.model.new_int_var(bound, max(bound, self.most), "length")
        size = len(instance.tasks)
        self.starts = [self.model.new_int_var(0, self.most, f"start{i}") for i in range(size)]
        self.ends = [self.model.new_int_var(0, self.most, f"end{i}") for i in range(size)]
        self.chosen = [
            [self.model.new_bool_var(f"option{i}.{o}") for o in range(len(task.options))]
            for i, task in enumerate(instance.tasks)
        ]
        self.spans = [self._weighted(i, lambda option: option.span) for i in range(size)]
        self.pieces = [self._weighted(i, lambda option: option.piece) for i in range(size)]
        self.columns: list[dict[int, Any]] = [{} for _ in range(size)]
        for i in range(size):
            self.model.add_exactly_one(self.chosen[i])
            self.model.add(self.ends[i] >= self.starts[i] + self.spans[i])
            self.model.add(self.length >= self.ends[i])
        for arc in instance.arcs:
            self._arc(arc)
        for pool in range(len(instance.capacity)):
            self._pool(pool)
        self._energy()
        self.model.minimize(self.length)

    def hint(self, found: Found) -> None:
        """A plan to start from."""
        for i, option in enumerate(found.options):
            self.model.add_hint(self.starts[i], found.starts[i])
            self.model.add_hint(self.ends[i], found.ends[i])
            for literal, candidate in zip(self.chosen[i], self.instance.tasks[i].options, strict=True):
                self.model.add_hint(literal, candidate == option)
            for pool, column in found.columns[i].items():
                self.model.add_hint(self.columns[i][pool], column)

    def _weighted(self, i: int, value: Callable[[Option], int]) -> Any:
        options = self.instance.tasks[i].options
        return sum(literal * value(option) for literal, option in zip(self.chosen[i], options, strict=True))

    def _arc(self, arc: Arc) -> None:
        i, j = arc.source, arc.target
        sources, targets = self.instance.tasks[i].options, self.instance.tasks[j].options
        if not arc.transfer:
            self._follow(arc, 0, 0, ())
            return
        crossing = self.model.new_bool_var(f"crossing{i}.{j}")
        pools = sorted({o.pool_of(arc.ends[0]) for o in sources} | {o.pool_of(arc.ends[1]) for o in targets})
        for pool in pools:
            here = [l for l, o in zip(self.chosen[i], sources, strict=True) if o.pool_of(arc.ends[0]) == pool]
            there = [l for l, o in zip(self.chosen[j], targets, strict=True) if o.pool_of(arc.ends[1]) != pool]
            there = [
                l
                for l, o in zip(self.chosen[j], targets, strict=True)
                if o.pool_of(arc.ends[1]) not in (pool, "") and pool
            ]
            for one in here:
                for other in there:
                    self.model.add_bool_or([one.negated(), other.negated(), crossing])
        self._follow(arc, 0, 0, (crossing.negated(),))
        self._follow(arc, arc.transfer, arc.transfer_piece, (crossing,))

    def _follow(self, arc: Arc, whole: int, piece: int, literals: tuple[Any, ...]) -> None:
        i, j = arc.source, arc.target
        if arc.barrier:
            rules = [self.starts[j] >= self.ends[i] + whole]
        else:
            rules = [
                self.starts[j] >= self.starts[i] + self.pieces[i] + piece,
                self.ends[j] >= self.ends[i] + piece + self.pieces[j],
            ]
            if whole:
                rules.append(self.ends[j] >= self.starts[i] + self.pieces[i] + whole + self.pieces[j])
        for rule in rules:
            added = self.model.add(rule)
            if literals:
                added.only_enforce_if(*literals)

    def _pool(self, pool: int) -> None:
        capacity = self.instance.capacity[pool]
        times, ranges, heights, inside = [], [], [], []
        for i, task in enumerate(self.instance.tasks):
            widths = [dict(option.widths).get(pool, 0) for option in task.options]
            if not any(widths):
                continue
            inside.append(i)
            width = self.model.new_int_var(0, capacity, f"width{i}.{pool}")
            self.model.add(width == sum(l * w for l, w in zip(self.chosen[i], widths, strict=True)))
            column = self.model.new_int_var(0, capacity - min(w for w in widths if w), f"column{i}.{pool}")
            self.columns[i][pool] = column
            edge = self.model.new_int_var(0, capacity, f"edge{i}.{pool}")
            duration = self.model.new_int_var(0, self.most, f"duration{i}.{pool}")
            if all(widths):
                times.append(self.model.new_interval_var(self.starts[i], duration, self.ends[i], f"time{i}.{pool}"))
                ranges.append(self.model.new_interval_var(column, width, edge, f"range{i}.{pool}"))
            else:
                here = self.model.new_bool_var(f"here{i}.{pool}")
                self.model.add(sum(l for l, w in zip(self.chosen[i], widths, strict=True) if w) == here)
                times.append(
                    self.model.new_optional_interval_var(
                        self.starts[i], duration, self.ends[i], here, f"time{i}.{pool}"
                    )
                )
                ranges.append(self.model.new_optional_interval_var(column, width, edge, here, f"range{i}.{pool}"))
            heights.append(width)
        if len(inside) > 1:
            self.model.add_no_overlap_2d(times, ranges)
            self.model.add_cumulative(times, heights, capacity)

    def _energy(self) -> None:
        """All GPU-seconds must fit below the length: tightens the linear relaxation."""
        total = sum(self.instance.capacity)
        if total:
            area = sum(self._weighted(i, lambda option: option.gpus * option.span) for i in range(len(self.chosen)))
            self.model.add(area <= self.length * total)
