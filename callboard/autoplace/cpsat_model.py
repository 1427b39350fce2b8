"""How is the same model put to OR-Tools' CP-SAT? One interval per task, a literal per option, no overlap in the plane.

Each task is an interval in time and one on the GPUs of each pool it may use; two-dimensional no-overlap keeps
contiguous ranges from meeting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from callboard.autoplace.exact import tidied
from callboard.autoplace.solution import Found
from callboard.autoplace.tasks import Arc, Instance, Option

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


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
        self.spans = [self.weighted(i, lambda option: option.span) for i in range(size)]
        self.pieces = [self.weighted(i, lambda option: option.piece) for i in range(size)]
        self.columns: list[dict[int, Any]] = [{} for _ in range(size)]
        self.widths: list[dict[int, Any]] = [{} for _ in range(size)]
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

    def found(self, values: Any) -> Found:
        """The solver's plan, its tasks pushed to their earliest times and to the left."""
        value = values.value
        options = [
            next(option for literal, option in zip(self.chosen[i], task.options, strict=True) if value(literal))
            for i, task in enumerate(self.instance.tasks)
        ]
        columns = [
            {pool: value(column) for pool, column in self.columns[i].items() if dict(options[i].widths).get(pool)}
            for i in range(len(options))
        ]
        starts = [value(start) for start in self.starts]
        ends = [value(end) for end in self.ends]
        return tidied(self.instance, tuple(options), starts, ends, tuple(columns))

    def weighted(self, i: int, value: Callable[[Option], int]) -> Any:
        options = self.instance.tasks[i].options
        return sum(literal * value(option) for literal, option in zip(self.chosen[i], options, strict=True))

    def _arc(self, arc: Arc) -> None:
        i, j = arc.source, arc.target
        sources, targets = self.instance.tasks[i].options, self.instance.tasks[j].options
        if not arc.transfer:
            self._follow(arc, 0, 0, ())
            return
        crossing = self.model.new_bool_var(f"crossing{i}.{j}")
        for literal, source in zip(self.chosen[i], sources, strict=True):
            for other, target in zip(self.chosen[j], targets, strict=True):
                if any(arc.delay(source, target)):
                    self.model.add_bool_or([literal.negated(), other.negated(), crossing])
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
            self.model.add(width == sum(one * w for one, w in zip(self.chosen[i], widths, strict=True)))
            column = self.model.new_int_var(0, capacity - min(w for w in widths if w), f"column{i}.{pool}")
            self.columns[i][pool] = column
            self.widths[i][pool] = width
            edge = self.model.new_int_var(0, capacity, f"edge{i}.{pool}")
            duration = self.model.new_int_var(0, self.most, f"duration{i}.{pool}")
            if all(widths):
                times.append(self.model.new_interval_var(self.starts[i], duration, self.ends[i], f"time{i}.{pool}"))
                ranges.append(self.model.new_interval_var(column, width, edge, f"range{i}.{pool}"))
            else:
                here = self.model.new_bool_var(f"here{i}.{pool}")
                self.model.add(sum(one for one, w in zip(self.chosen[i], widths, strict=True) if w) == here)
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
            self._alone(pool, inside)
            if self.instance.memory[pool] is not None:
                self._memory(pool, inside)

    def _in_pool(self, i: int, pool: int, rule: Callable[[Option], bool]) -> list[Any]:
        return [
            literal
            for literal, option in zip(self.chosen[i], self.instance.tasks[i].options, strict=True)
            if dict(option.widths).get(pool, 0) and rule(option)
        ]

    def _alone(self, pool: int, inside: list[int]) -> None:
        """An option that is alone shares no GPU of its pool with anybody, at any time."""
        for i in inside:
            for literal in self._in_pool(i, pool, lambda option: option.alone):
                for j in inside:
                    if j != i:
                        left, right = (self.model.new_bool_var("") for _ in range(2))
                        self.model.add(
                            self.columns[i][pool] + self.widths[i][pool] <= self.columns[j][pool]
                        ).only_enforce_if(left)
                        self.model.add(
                            self.columns[j][pool] + self.widths[j][pool] <= self.columns[i][pool]
                        ).only_enforce_if(right)
                        absent = [there.negated() for there in self._in_pool(j, pool, lambda _: True)]
                        if len(absent) < len(self.chosen[j]):
                            here = self.model.new_bool_var("")
                            self.model.add_max_equality(here, self._in_pool(j, pool, lambda _: True))
                            self.model.add_bool_or([literal.negated(), here.negated(), left, right])
                        else:
                            self.model.add_bool_or([literal.negated(), left, right])

    def _memory(self, pool: int, inside: list[int]) -> None:
        """On the first GPU of every range, where the set of tasks changes: whoever runs fits beside who stays."""
        limit = self.instance.memory[pool]
        largest = 2 * sum(max(o.peak + o.resident for o in self.instance.tasks[i].options) for i in inside) + 1
        for point in inside:
            covers = {point: self._covers(pool, point, point)}
            for j in inside:
                if j != point:
                    covers[j] = self._covers(pool, j, point)
            stays = {}
            for j in inside:
                most = max(o.resident for o in self.instance.tasks[j].options)
                stays[j] = self.model.new_int_var(0, most, "")
                self.model.add(stays[j] >= self.weighted(j, lambda o: o.resident) - largest * (1 - covers[j]))
            for j in inside:
                others = sum(stays[k] for k in inside if k != j)
                self.model.add(self.weighted(j, lambda o: o.peak) + others <= limit + largest * (1 - covers[j]))

    def _covers(self, pool: int, j: int, point: int) -> Any:
        """A literal that is true whenever ``j`` covers the first GPU of ``point``, both in the pool."""
        covers = self.model.new_bool_var("")
        present = [(self._in_pool(k, pool, lambda _: True), len(self.instance.tasks[k].options)) for k in {j, point}]
        ways_out = []
        for literals, count in present:
            if len(literals) < count:
                absent = self.model.new_bool_var("")
                self.model.add(sum(literals) == 0).only_enforce_if(absent)
                ways_out.append(absent)
        if j != point:
            before, after = (self.model.new_bool_var("") for _ in range(2))
            column = self.columns[point][pool]
            self.model.add(column < self.columns[j][pool]).only_enforce_if(before)
            self.model.add(column >= self.columns[j][pool] + self.widths[j][pool]).only_enforce_if(after)
            ways_out += [before, after]
        self.model.add_bool_or([covers, *ways_out])
        return covers

    def _energy(self) -> None:
        """All GPU-seconds must fit below the length: tightens the linear relaxation."""
        total = sum(self.instance.capacity)
        if total:
            area = sum(self.weighted(i, lambda option: option.gpus * option.span) for i in range(len(self.chosen)))
            self.model.add(area <= self.length * total)
