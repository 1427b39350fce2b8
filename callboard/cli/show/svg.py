"""SVG documents, made of rectangles, lines and texts. Equal drawings are equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def document(width: float, height: float, body: Iterable[str], *, font: str, title: str = "") -> str:
    """The document: what is in the body, on a white ground, with a title for those who can't see it."""
    size = f'viewBox="0 0 {_number(width)} {_number(height)}" {_attributes(width=width, height=height)}'
    named = [f"<title>{escape(title)}</title>"] if title else []
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{font}" role="img">'
    return "\n".join([head, *named, rect(0, 0, width, height, "#ffffff"), *body, "</svg>"]) + "\n"


def rect(x: float, y: float, width: float, height: float, fill: str, **more: float | str) -> str:
    """A filled rectangle; ``more``: its other attributes, with ``_`` for ``-``."""
    return f"<rect {_attributes(x=x, y=y, width=width, height=height, fill=fill, **more)}/>"


def line(x1: float, y1: float, x2: float, y2: float, **more: float | str) -> str:
    return f"<line {_attributes(x1=x1, y1=y1, x2=x2, y2=y2, **more)}/>"


def text(x: float, y: float, said: str, **more: float | str) -> str:
    """A text on one line, whose base line is ``y``."""
    return f"<text {_attributes(x=x, y=y, **more)}>{escape(said)}</text>"


def _attributes(**given: float | str) -> str:
    values = {name: value if isinstance(value, str) else _number(value) for name, value in given.items()}
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in values.items())


def _number(value: float) -> str:
    """Two decimals, and no zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
