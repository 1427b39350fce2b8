"""The picture of an iteration: boxes, lines and labels in pixels.

No two labels overlap: bars are disjoint (`gantt`), a bar holds a label only if it fits inside, and the list beside the
chart names every component with its number, so that a bar too small for its name is found by its number or its colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from callboard.autoplace.answer.gantt import Bar, lanes_of, nice_step, rank_text, seconds_text
from callboard.model.frozen import dataclass

FONT_WIDTH = 0.61
"""Width of a character of a monospace font, as a share of its size (DejaVu Sans Mono, Menlo, Courier: 0.60)."""

COLOURS = (
    "#4878a8", "#e0913a", "#5a9e5a", "#c85a54", "#8a6cb0", "#8c6d5c", "#d17fb4", "#7f7f7f", "#b3a93a", "#4aa3b0",
)  # fmt: skip
"""A component's colour by its place in the workflow."""

INK, PALE, GROUND = "#1b1f24", "#8b949e", "#ffffff"

_LEFT, _TOP, _CHART_WIDTH, _CHART_HEIGHT = 64.0, 48.0, 720.0, 420.0
_LANE_HEIGHT = 22.0
_GAP, _LIST_LINE = 24.0, 20.0
_TEXT, _SMALL, _SMALLEST = 12.0, 11.0, 8.0
_INSET = 3.0


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``dashed``: its cost is an estimate."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A thin line."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Label:
    """A text on one line. ``y`` is its base line; ``anchor`` says which end ``x`` is: "start", "middle" or "end"."""

    text: str
    x: float
    y: float
    size: float
    anchor: str = "start"
    colour: str = INK

    @property
    def width(self) -> float:
        return text_width(self.text, self.size)

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom edge."""
        left = self.x - {"start": 0.0, "middle": self.width / 2, "end": self.width}[self.anchor]
        return left, self.y - 0.8 * self.size, left + self.width, self.y + 0.25 * self.size


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture; later items lie on earlier ones."""

    width: float
    height: float
    rules: tuple[Rule, ...]
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From seconds and ranks to pixels."""

    seconds: float
    gpus: int

    def x(self, moment: float) -> float:
        return _LEFT + (moment / self.seconds if self.seconds > 0 else 0) * _CHART_WIDTH

    def y(self, rank: float) -> float:
        """Of the upper edge of a rank."""
        return _TOP + rank / max(self.gpus, 1) * _CHART_HEIGHT


def text_width(text: str, size: float) -> float:
    """Width in pixels of ``text`` in a monospace font of ``size`` pixels."""
    return len(text) * size * FONT_WIDTH


def draw(bars: Sequence[Bar], *, gpus: int, seconds: float, title: str) -> Picture:
    """The picture of an iteration.

    Args:
        bars: what is shown, component by component.
        gpus: GPUs of the cluster: the vertical axis.
        seconds: length of the iteration: the horizontal axis.
    """
    scale = _Scale(seconds, gpus)
    lanes = [bar for bar in bars if bar.gpus == 0]
    names = list(dict.fromkeys(bar.component for bar in bars))
    chart_height = (_CHART_HEIGHT if gpus else 0) + len(lanes) * _LANE_HEIGHT
    boxes = [_box(bar, scale, names, lanes, part) for bar, part in zip(bars, lanes_of(bars), strict=True)]
    listed = list(_list(bars, names))
    marks = list(_list_marks(bars, names))
    labels = [
        Label(title, _LEFT, 24, 14),
        *_axis_labels(scale, chart_height, lanes),
        *(label for bar, box in zip(bars, boxes, strict=True) if (label := _inside(bar, box, names)) is not None),
        *listed,
    ]
    right = max(label.extent[2] for label in labels)
    bottom = max(label.extent[3] for label in labels)
    return Picture(
        width=math.ceil(right + 16),
        height=math.ceil(max(bottom, _TOP + chart_height) + 16),
        rules=tuple(_rules(scale, chart_height)),
        boxes=(*boxes, *marks),
        labels=tuple(labels),
    )


def _box(bar: Bar, scale: _Scale, names: Sequence[str], lanes: Sequence[Bar], part: tuple[int, int]) -> Box:
    left, right = scale.x(bar.start_seconds), scale.x(bar.end_seconds)
    if bar.gpus:
        lane, of = part
        top, bottom = (scale.y(bar.first_gpu + bar.gpus * edge / of) for edge in (lane, lane + 1))
    else:
        top = scale.y(scale.gpus) * (scale.gpus > 0) + _TOP * (scale.gpus == 0) + lanes.index(bar) * _LANE_HEIGHT
        bottom = top + _LANE_HEIGHT
    return Box(left, top, right - left, bottom - top, _colour(bar.component, names), bar.estimated)


def _inside(bar: Bar, box: Box, names: Sequence[str]) -> Label | None:
    """The longest text that fits inside the bar, or None."""
    number = str(names.index(bar.component) + 1)
    length = seconds_text(bar.end_seconds - bar.start_seconds)
    for text in (f"{number} {bar.component} · {length}", f"{number} {bar.component}", number):
        for size in (_TEXT, _SMALL, _SMALLEST):
            if text_width(text, size) <= box.width - 2 * _INSET and 1.05 * size <= box.height - 2:
                middle = box.y + box.height / 2 + 0.275 * size
                return Label(text, box.x + box.width / 2, middle, size, "middle", _readable_on(box.colour))
    return None


def _list(bars: Sequence[Bar], names: Sequence[str]) -> Iterator[Label]:
    x = _LEFT + _CHART_WIDTH + _GAP + 20
    for index, name in enumerate(names):
        own = [bar for bar in bars if bar.component == name]
        ranks = "GPU " + ",".join(bar.ranks for bar in own) if own[0].gpus else "no GPU"
        if len(ranks) > 40:
            ranks = f"{sum(bar.gpus for bar in own)} GPUs"
        first, last = own[0].start_seconds, own[0].end_seconds
        y = _TOP + 12 + index * 2 * _LIST_LINE
        note = ", estimated" if own[0].estimated else ""
        yield Label(f"{index + 1} {name}", x, y, _TEXT)
        yield Label(f"{ranks}, {seconds_text(first)} to {seconds_text(last)}{note}", x, y + 15, _SMALL, colour=PALE)


def _list_marks(bars: Sequence[Bar], names: Sequence[str]) -> Iterator[Box]:
    for index, name in enumerate(names):
        estimated = next(bar.estimated for bar in bars if bar.component == name)
        top = _TOP + 2 + index * 2 * _LIST_LINE
        yield Box(_LEFT + _CHART_WIDTH + _GAP, top, 12, 12, _colour(name, names), estimated)


def _axis_labels(scale: _Scale, chart_height: float, lanes: Sequence[Bar]) -> Iterator[Label]:
    if scale.gpus:
        yield Label("GPU", _LEFT - 6, _TOP - 8, _SMALL, "end", PALE)
    yield from (Label(text, _LEFT - 6, y + 4, _SMALL, "end", PALE) for text, y in _rank_ticks(scale))
    for index in range(len(lanes)):
        y = (scale.y(scale.gpus) if scale.gpus else _TOP) + (index + 0.5) * _LANE_HEIGHT
        yield Label("CPU", _LEFT - 6, y + 4, _SMALL, "end", PALE)
    base = _TOP + chart_height + 18
    for tick in _time_ticks(scale.seconds):
        yield Label(seconds_text(tick), scale.x(tick), base, _SMALL, "middle", PALE)


def _rank_ticks(scale: _Scale) -> Iterator[tuple[str, float]]:
    """Ranks beside the middle of their row, at most sixteen of them."""
    step = max(1, 2 ** math.ceil(math.log2(max(scale.gpus, 1) / 16)))
    row = _CHART_HEIGHT / max(scale.gpus, 1)
    for rank in range(0, scale.gpus, step):
        yield rank_text(rank, 1), scale.y(rank) + row / 2


def _time_ticks(seconds: float) -> Iterator[float]:
    if seconds <= 0:
        yield 0
        return
    step = nice_step(seconds, 8)
    for tick in range(int(seconds / step + 1e-9) + 1):
        yield tick * step


def _rules(scale: _Scale, chart_height: float) -> Iterator[Rule]:
    bottom = _TOP + chart_height
    for tick in _time_ticks(scale.seconds):
        yield Rule(scale.x(tick), _TOP, scale.x(tick), bottom + 5)
    for y in (_TOP, bottom):
        yield Rule(_LEFT, y, _LEFT + _CHART_WIDTH, y)


def _readable_on(colour: str) -> str:
    """Dark or light, whichever has the greater contrast (WCAG's relative luminance)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return GROUND if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.06 else INK


def _colour(component: str, names: Sequence[str]) -> str:
    return COLOURS[names.index(component) % len(COLOURS)]
