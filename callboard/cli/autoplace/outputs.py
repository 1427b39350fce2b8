"""Replacing a user's file so that no moment shows half of it and the old one is kept."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callboard.autoplace.answer.applying import with_placement
from callboard.autoplace.answer.gantt import bars_of
from callboard.autoplace.answer.picture import GROUND, INK, PALE, Picture, draw
from callboard.autoplace.answer.report import Answer, nodes_of, placement_of, section_of, summary_line
from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.rlinf.values import Config
from callboard.cli.layouts.config_source import ConfigSource, load_config
from callboard.cli.show import consoles, svg
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.model.frozen import dataclass

_MONOSPACE = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace"
_DASHED: dict[str, str] = {"stroke": INK, "stroke_dasharray": "4 3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What was asked for.

    Attributes:
        apply: change the placement in the config itself.
        write: a new file for the config with the placement.
    """

    apply: bool
    write: Path | None
    plot: Path | None

    def check(self) -> None:
        """What can be refused before anything is searched.

        Raises:
            CommandFailed: it can't be done.
        """
        if self.apply and self.write is not None:
            raise _bad(
                "The placement can't go to two files.",
                "--apply changes the config, --write makes a new one.",
                "Choose one.",
            )
        if self.write is not None and self.write.exists():
            raise _bad(f"{self.write} is there already.", "--write makes a new file.", "Name another, or remove it.")
        if self.plot is not None and self.plot.suffix.lower() != ".svg":
            raise _bad(
                f"{self.plot} can't be drawn.",
                f"Pictures are SVG files; this name ends with {self.plot.suffix or 'no suffix'}.",
                f"Name {self.plot.with_suffix('.svg')} instead; browsers and editors show it, and convert it to PNG.",
            )

    def check_source(self, source: ConfigSource, *, general: bool) -> None:
        """What can be refused once the config is known.

        Raises:
            CommandFailed: ``apply`` has no place for its placement.
        """
        if self.apply and general:
            raise _bad(
                f"{source.file} has no place for a placement.",
                "It describes a workflow in the general form; RLinf's configs have cluster.component_placement.",
                "Paste the section where it belongs, or use --write.",
            )
        own = source.own.get("cluster")
        if self.apply and source.composed and not (isinstance(own, dict) and "component_placement" in own):
            raise _bad(
                f"The placement is not in {source.file}.",
                "It comes from another file of its defaults.",
                "Name that file, paste the section, or use --write.",
            )

    def put(self, answer: Answer, source: ConfigSource) -> None:
        """Writes what was asked for.

        Raises:
            CommandFailed: a file can't be written, or a composed config would not have the placement.
            InvalidInput: the placement can't be changed in place.
        """
        try:
            if self.apply:
                _apply(answer, source)
            if self.write is not None:
                text = section_of(answer) if answer.job is None else _changed(answer, source)
                write_new(self.write, text.encode())
                consoles.stderr().print(f"{self.write} is written.")
            if self.plot is not None:
                plan = answer.plan
                drawn = draw(bars_of(plan), gpus=plan.problem.gpus, seconds=length_of(plan), title=summary_line(plan))
                self.plot.write_text(to_svg(drawn))
                consoles.stderr().print(f"{self.plot} is drawn.")
        except OSError as error:
            raise CommandFailed(
                f"{error.filename or 'A file'} could not be written.",
                f"{error.strerror or error}.",
                "Name another place; the placement is above.",
            ) from error


def length_of(plan: Plan) -> float:
    """Seconds until the last component has ended."""
    return max((span.end_seconds for span in plan.spans), default=0.0)


def _apply(answer: Answer, source: ConfigSource) -> None:
    text = _changed(answer, source)
    if text == source.text and (not source.composed or _has(source, answer)):
        consoles.stderr().print(f"{source.file} has this placement already.")
        return  # A second time must not replace the backup of what was there before the first.
    backup = replace_file(source.file, text)
    if source.composed and not _has(source, answer):
        backup.replace(source.file.resolve())
        raise _bad(
            f"The placement would have no effect in {source.file}; the file was left unchanged.",
            "Another file of its defaults states components of its own, and both are merged.",
            "Change that file, or let _self_ come last in defaults.",
        )
    consoles.stderr().print(f"{source.file} has the placement now; it was {backup.name} before.")


def _has(source: ConfigSource, answer: Answer) -> bool:
    """Whether the config, composed again, has the placement."""
    composed = Config(load_config(str(source.file.absolute()), source.folder, source.overrides).config)
    return _texts(composed.section("cluster.component_placement")) == _texts(placement_of(answer))


def _texts(placement: Mapping[Any, Any]) -> dict[frozenset[str], Any]:
    return {
        frozenset(name.strip() for name in str(key).split(",")): (
            {str(inner): str(value[inner]) for inner in value} if isinstance(value, Mapping) else str(value)
        )
        for key, value in placement.items()
    }


def _changed(answer: Answer, source: ConfigSource) -> str:
    return with_placement(source.text, nodes_of(answer), placement_of(answer))


def to_svg(picture: Picture) -> str:
    """The picture of an iteration as an SVG document."""
    rules = [svg.line(rule.x1, rule.y1, rule.x2, rule.y2, stroke=PALE, stroke_opacity="0.35") for rule in picture.rules]
    boxes = [
        svg.rect(box.x, box.y, box.width, box.height, box.colour, **(_DASHED if box.dashed else {"stroke": GROUND}))
        for box in picture.boxes
    ]
    labels = [
        # The width is stated, so that no viewer's font makes a label run into its neighbour.
        svg.text(
            *(label.x, label.y, label.text),
            textLength=label.width,
            font_size=label.size,
            fill=label.colour,
            text_anchor=label.anchor,
        )
        for label in picture.labels
    ]
    return svg.document(picture.width, picture.height, [*rules, *boxes, *labels], font=_MONOSPACE)


def _bad(what: str, why: str, remedy: str) -> CommandFailed:
    return CommandFailed(what, why, remedy, BAD_INPUT)


BACKUP_SUFFIX = ".bak"


def replace_file(path: Path, text: str) -> Path:
    """Replaces a file; returns where the old one was kept: beside it, with :data:`BACKUP_SUFFIX` added.

    A symbolic link stays one: what it leads to is replaced. Its permissions stay too.

    Raises:
        OSError: the file or its folder can't be written.
    """
    path = path.resolve()
    backup = path.with_name(path.name + BACKUP_SUFFIX)
    _put(backup, path.read_bytes(), path.stat().st_mode)
    _put(path, text.encode(), path.stat().st_mode)
    return backup


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that must not be there yet.

    Raises:
        OSError: it is there (FileExistsError), or can't be written.
    """
    with path.open("xb") as file:
        file.write(content)


def _put(path: Path, content: bytes, mode: int) -> None:
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode & 0o7777)
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise
