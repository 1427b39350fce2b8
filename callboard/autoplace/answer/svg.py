"""SVG pictures, made of rectangles, lines and texts."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from callboard.autoplace.answer.picture import GROUND, INK, PALE, Box, Label, Picture, Rule

_FONT = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace"


def to_svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    width, height = _number(picture.width), _number(picture.height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{_FONT}" role="img">'
    )
    yield f'<rect width="{width}" height="{height}" fill="{GROUND}"/>'
    yield from (_rule(rule) for rule in picture.rules)
    yield from (_box(box) for box in picture.boxes)
    yield from (_label(label) for label in picture.labels)
    yield "</svg>"


def _rule(rule: Rule) -> str:
    ends = f'x1="{_number(rule.x1)}" y1="{_number(rule.y1)}" x2="{_number(rule.x2)}" y2="{_number(rule.y2)}"'
    return f'<line {ends} stroke="{PALE}" stroke-opacity="0.35"/>'


def _box(box: Box) -> str:
    place = f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" height="{_number(box.height)}"'
    dashes = f' stroke="{INK}" stroke-dasharray="4 3"' if box.dashed else f' stroke="{GROUND}"'
    return f'<rect {place} fill="{box.colour}"{dashes}/>'


def _label(label: Label) -> str:
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    # The width is stated, so that no viewer's font makes a label run into its neighbour.
    place = f'x="{_number(label.x)}" y="{_number(label.y)}" textLength="{_number(label.width)}"'
    return f'<text {place} font-size="{_number(label.size)}" fill="{label.colour}"{anchor}>{escape(label.text)}</text>'


def _number(value: float) -> str:
    """Two decimals, and none that say nothing: equal pictures are equal bytes."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
