"""The same model for OR-Tools' CP-SAT: one interval per task, a literal per option, no overlap in the plane.

Each task is an interval in time and one on the GPUs of each pool it may use; two-dimensional no-overlap keeps
contiguous ranges from meeting.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from callboard.autoplace.exact.branch_and_bound import tidied
from callboard.autoplace.instance.tasks import Arc, Found, Instance, Option

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


Kind = tuple[bool, int, int]
"""Whether an option is alone, its peak and its resident MiB: what decides with whom it may share a GPU."""


class Model:
    """The model of an instance.

    Args:
        cp: the solver's module.
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
        self.here: list[dict[int, Any]] = [{} for _ in range(size)]  # only where that is open
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
        columns = self._as_modelled(found)
        for i, option in enumerate(found.options):
            self.model.add_hint(self.starts[i], found.starts[i])
            self.model.add_hint(self.ends[i], found.ends[i])
            for literal, candidate in zip(self.chosen[i], self.instance.tasks[i].options, strict=True):
                self.model.add_hint(literal, candidate == option)
            for pool, column in columns[i].items():
                self.model.add_hint(self.columns[i][pool], column)

    def _as_modelled(self, found: Found) -> list[dict[int, int]]:
        """First GPUs of a plan, or of its mirror image in pools where the model has that one."""
        columns = [dict(of) for of in found.columns]
        for pool, capacity in enumerate(self.instance.capacity):
            inside = {i: dict(found.options[i].widths)[pool] for i, of in enumerate(columns) if pool in of}
            first = next((i for i in range(len(columns)) if pool in self.columns[i]), None)
            if first in inside and 2 * columns[first][pool] + inside[first] > capacity:
                for i, width in inside.items():
                    columns[i][pool] = capacity - columns[i][pool] - width
        return columns

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
                self.here[i][pool] = here
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
            # A plan and its mirror image are the same to everybody: in one of them the first task lies to the left.
            self.model.add(2 * self.columns[inside[0]][pool] + self.widths[inside[0]][pool] <= capacity)
            self._pairs(pool, inside)
            limit = self.instance.memory[pool]
            if limit is not None:
                self._memory(pool, limit, inside, ranges)

    def _pairs(self, pool: int, inside: list[int]) -> None:
        """Of two tasks one runs before the other or lies left of it; the solver learns most from such literals.

        Those that share no GPU, because one of them is alone or their memory doesn't fit together, lie side by side.
        """
        kinds = {i: self._kinds(i, pool) for i in inside}
        for i, j in combinations(inside, 2):
            left, right = (
                self._when(self.columns[one][pool] + self.widths[one][pool] <= self.columns[other][pool])
                for one, other in ((i, j), (j, i))
            )
            sooner, later = (self._when(self.ends[one] <= self.starts[other]) for one, other in ((i, j), (j, i)))
            self.model.add_bool_or([sooner, later, left, right, *self._away(pool, i, j)])
            for one, other in product(kinds[i], kinds[j]):
                if self._never_share(pool, one, other):
                    chosen = kinds[i][one], kinds[j][other]
                    self.model.add_bool_or([left, right, *(literal.negated() for literal in chosen)])

    def _kinds(self, i: int, pool: int) -> dict[Kind, Any]:
        """A literal for each kind that options of a task in the pool have."""
        literals: dict[Kind, list[Any]] = {}
        for literal, option in zip(self.chosen[i], self.instance.tasks[i].options, strict=True):
            if dict(option.widths).get(pool, 0):
                literals.setdefault((option.alone, option.peak, option.resident), []).append(literal)
        found = {kind: self.model.new_bool_var("") for kind in literals}
        for kind, of_kind in literals.items():
            self.model.add(sum(of_kind) == found[kind])
        return found

    def _never_share(self, pool: int, one: Kind, other: Kind) -> bool:
        limit = self.instance.memory[pool]
        return one[0] or other[0] or (limit is not None and max(one[1] + other[2], other[1] + one[2]) > limit)

    def _when(self, rule: Any) -> Any:
        """A literal that may be true only when a rule holds."""
        literal = self.model.new_bool_var("")
        self.model.add(rule).only_enforce_if(literal)
        return literal

    def _away(self, pool: int, *tasks: int) -> list[Any]:
        """Literals of tasks that may be outside the pool: that they are."""
        return [self.here[i][pool].negated() for i in tasks if pool in self.here[i]]

    def _memory(self, pool: int, limit: int, inside: list[int], ranges: list[Any]) -> None:
        """On the first GPU of every range, where the set of tasks changes: whoever runs fits beside who stays."""
        residents = {i: self._resident(i) for i in inside}
        # Implied by the rest, and seen earlier: what stays, stays for the whole time.
        self.model.add_cumulative(ranges, [residents[i] for i in inside], limit)
        for point in inside:
            covers = {j: self._covers(pool, j, point) for j in inside}
            stays = {j: self._resident(j, covers[j]) for j in inside}
            for j in inside:
                others = sum(stays[k] for k in inside if k != j)
                self.model.add(self.weighted(j, lambda o: o.peak) + others <= limit).only_enforce_if(covers[j])

    def _resident(self, i: int, *literals: Any) -> Any:
        """At least what a task keeps between its spans, whenever the literals are true."""
        resident = self.model.new_int_var(0, max(option.resident for option in self.instance.tasks[i].options), "")
        rule = self.model.add(resident >= self.weighted(i, lambda option: option.resident))
        if literals:
            rule.only_enforce_if(*literals)
        return resident

    def _covers(self, pool: int, j: int, point: int) -> Any:
        """A literal that is true whenever ``j`` covers the first GPU of ``point``, both in the pool."""
        covers = self.model.new_bool_var("")
        ways_out = self._away(pool, *{j, point})
        if j != point:
            column = self.columns[point][pool]
            ways_out.append(self._when(column < self.columns[j][pool]))
            ways_out.append(self._when(column >= self.columns[j][pool] + self.widths[j][pool]))
        self.model.add_bool_or([covers, *ways_out])
        return covers

    def _energy(self) -> None:
        """All GPU-seconds must fit below the length: tightens the linear relaxation."""
        total = sum(self.instance.capacity)
        if total:
            area = sum(self.weighted(i, lambda option: option.gpus * option.span) for i in range(len(self.chosen)))
            self.model.add(area <= self.length * total)
