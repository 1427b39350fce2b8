"""The chart of an iteration, GPU axis × time: its bars, and a chart in lines of text.

A bar is one component's stay on a contiguous range of GPUs. A GPU does one thing at a time, so bars overlap only where
the members of a cycle take turns on the same GPUs for the whole stage; those lie above one another in lanes of their
own. That is what lets every label stay inside its own bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from callboard.autoplace.problem.plan import Plan
from callboard.model.frozen import dataclass

MIN_WIDTH = 40
"""Fewest columns of a chart of text."""

FILL = "━"
ESTIMATED_FILL = "╌"
"""What a bar is filled with behind its name when its cost was measured, and when it is an estimate."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A component's stay on some GPUs.

    Attributes:
        start_seconds: when it begins, from the start of the iteration.
        first_gpu: lowest rank; -1: it has no GPU.
        gpus: number of ranks from there on.
        estimated: its cost was not measured.
    """

    component: str
    start_seconds: float
    end_seconds: float
    first_gpu: int
    gpus: int
    estimated: bool

    @property
    def ranks(self) -> str:
        """ "0-31", "7" or "no GPU"."""
        return rank_text(self.first_gpu, self.gpus)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a line of text: whose bar it is, or nobody's."""

    text: str
    component: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a range of GPUs on which the same happens all the time."""

    label: str
    pieces: tuple[Piece, ...]


def bars_of(plan: Plan) -> tuple[Bar, ...]:
    """The bars of a plan, component by component in its own order; one for each contiguous range of its ranks."""
    return tuple(
        Bar(span.component, span.start_seconds, span.end_seconds, first, count, span.estimated)
        for span in plan.spans
        for first, count in _runs(span.gpu_ranks)
    )


def lanes_of(bars: Sequence[Bar]) -> tuple[tuple[int, int], ...]:
    """(lane, lanes) of each bar: which part of its GPUs' height it takes, of how many equal parts."""
    found: list[tuple[int, int]] = []
    for bar in bars:
        together = [other for other in bars if other is bar or _overlap(bar, other)]
        found.append((together.index(bar), len(together)))
    return tuple(found)


def _overlap(one: Bar, other: Bar) -> bool:
    on_same_gpus = one.first_gpu < other.first_gpu + other.gpus and other.first_gpu < one.first_gpu + one.gpus
    return on_same_gpus and one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds


def rank_text(first: int, count: int) -> str:
    """ "0-31", "7" or "no GPU"."""
    if count == 0:
        return "no GPU"
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def chart_lines(bars: Sequence[Bar], *, gpus: int, seconds: float, width: int) -> tuple[tuple[Line, ...], str]:
    """A chart of text: lines for ranges of GPUs and for components without any, and the time axis below them.

    Args:
        gpus: GPUs of the cluster; those without a bar are shown idle.
        seconds: length of the iteration.
        width: columns, labels included; at least :data:`MIN_WIDTH`.
    """
    bands = list(_bands(bars, gpus))
    labels = [f"GPU {rank_text(first, count)}" for first, count in bands]
    lanes = dict(zip(bars, lanes_of(bars), strict=True))
    rows = []
    for label, band in zip(labels, bands, strict=True):
        inside = [bar for bar in bars if bar.gpus and bar.first_gpu <= band[0] < bar.first_gpu + bar.gpus]
        # A bar that has its GPUs to itself is as high as they are.
        rows += [
            (label * (not lane), [bar for bar in inside if lanes[bar][1] == 1 or lanes[bar][0] == lane])
            for lane in range(max((lanes[bar][1] for bar in inside), default=1))
        ]
    rows += [("no GPU", [bar]) for bar in bars if bar.gpus == 0]
    label_width = max(len(label) for label, _ in rows)
    columns = max(width, MIN_WIDTH) - label_width - 3
    lines = tuple(
        Line(label.rjust(label_width), tuple(_pieces(_in_time(inside), seconds, columns))) for label, inside in rows
    )
    return lines, " " * (label_width + 2) + _axis(seconds, columns)


def nice_step(seconds: float, most: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that cuts ``seconds`` into at most ``most`` parts."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds <= step * factor * most:
                return step * factor
        step *= 10


def seconds_text(seconds: float) -> str:
    """ "0.04 s", "95.7 s", "1234 s": three figures, and whole seconds above a thousand."""
    digits = 3 if seconds < 1000 else len(str(int(seconds)))
    return f"{seconds:.{digits}g} s"


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    if not ranks:
        yield -1, 0
        return
    ordered = sorted(ranks)
    cuts = [0, *(index + 1 for index, (left, right) in enumerate(pairwise(ordered)) if right != left + 1), len(ordered)]
    for begin, end in pairwise(cuts):
        yield ordered[begin], end - begin


def _bands(bars: Iterable[Bar], gpus: int) -> Iterator[tuple[int, int]]:
    """Ranges of ranks that no bar begins or ends within."""
    edges = {0, gpus}
    for bar in bars:
        if bar.gpus:
            edges |= {bar.first_gpu, bar.first_gpu + bar.gpus}
    for first, end in pairwise(sorted(edges)):
        yield first, end - first


def _in_time(bars: Iterable[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: (bar.start_seconds, bar.end_seconds))


def _pieces(bars: Sequence[Bar], seconds: float, columns: int) -> Iterator[Piece]:
    at = 0
    for index, bar in enumerate(bars):
        # Each later bar keeps a column, however short it is: nothing that happens is invisible.
        last = columns - (len(bars) - 1 - index)
        begin = min(max(at, _column(bar.start_seconds, seconds, columns)), last - 1)
        end = min(max(begin + 1, _column(bar.end_seconds, seconds, columns)), last)
        if begin > at:
            yield Piece(" " * (begin - at))
        yield Piece(_filled(bar, end - begin), bar.component)
        at = end
    if at < columns:
        yield Piece(" " * (columns - at))


def _filled(bar: Bar, columns: int) -> str:
    """The bar with its name in it: ``▐rollout━━━━``. A name that doesn't fit is cut, never the bar."""
    fill = ESTIMATED_FILL if bar.estimated else FILL
    return f"▐{bar.component}"[:columns].ljust(columns, fill)


def _column(moment: float, seconds: float, columns: int) -> int:
    return round(moment / seconds * columns) if seconds > 0 else 0


def _axis(seconds: float, columns: int) -> str:
    """ "0 s       50 s      100 s": each text begins below its moment, none runs into the next or over the end."""
    if seconds <= 0:
        return "0 s"
    step = nice_step(seconds, max(columns // 12, 1))
    text = ""
    for tick in range(int(seconds / step + 1e-9) + 1):
        label = seconds_text(tick * step)
        column = _column(tick * step, seconds, columns)
        if column >= len(text) and column + len(label) <= columns:
            text = text.ljust(column) + label
    return text
