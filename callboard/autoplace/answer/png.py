"""PNG pictures, drawn with Pillow, which is an option."""

from __future__ import annotations

import importlib
import io
from typing import Any

from callboard.autoplace.answer.picture import GROUND, INK, Box, Label, Picture

SCALE = 2
"""Pixels of the file per pixel of the picture: sharp on the screens of today."""

_RULE = "#d5d9de"
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_DASH, _PAUSE = 8, 6


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG file.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
    """
    image_module = importlib.import_module("PIL.Image")
    size = (round(picture.width * SCALE), round(picture.height * SCALE))
    image = image_module.new("RGB", size, GROUND)
    canvas = importlib.import_module("PIL.ImageDraw").Draw(image)
    for rule in picture.rules:
        canvas.line([SCALE * at for at in (rule.x1, rule.y1, rule.x2, rule.y2)], fill=_RULE, width=1)
    for box in picture.boxes:
        _box(canvas, box)
    for label in picture.labels:
        _label(canvas, label)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _box(canvas: Any, box: Box) -> None:
    left, top = box.x * SCALE, box.y * SCALE
    right, bottom = max(left, left + box.width * SCALE - 1), max(top, top + box.height * SCALE - 1)
    canvas.rectangle([left, top, right, bottom], fill=box.colour, outline=None if box.dashed else GROUND)
    if box.dashed:
        _dashes(canvas, left, top, right, bottom)


def _dashes(canvas: Any, left: float, top: float, right: float, bottom: float) -> None:
    """Pillow has no dashed lines."""
    for begin in range(round(left), round(right), _DASH + _PAUSE):
        for y in (top, bottom):
            canvas.line([begin, y, min(begin + _DASH, right), y], fill=INK, width=SCALE)
    for begin in range(round(top), round(bottom), _DASH + _PAUSE):
        for x in (left, right):
            canvas.line([x, begin, x, min(begin + _DASH, bottom)], fill=INK, width=SCALE)


def _label(canvas: Any, label: Label) -> None:
    """Drawn in the font that Pillow brings, made smaller where that one is wider than the picture counts with."""
    fonts = importlib.import_module("PIL.ImageFont")
    size, room = label.size * SCALE, label.width * SCALE
    font = fonts.load_default(size=size)
    if (width := font.getlength(label.text)) > room:
        font = fonts.load_default(size=size * room / width)
    canvas.text(
        (label.x * SCALE, label.y * SCALE), label.text, fill=label.colour, font=font, anchor=_ANCHORS[label.anchor]
    )
