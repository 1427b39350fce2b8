"""The source: YAML, mappings and OmegaConf configs as one tree that is read piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import shown
from callboard.placement.source.diagnostics import Report
from callboard.placement.source.mapping_tree import MappingReader
from callboard.placement.source.tree import Value
from callboard.placement.source.yaml_tree import YamlReader, composed_text


class Document:
    """An input that is read piece by piece: only what is asked for is looked at."""

    def __init__(self, reader: YamlReader | MappingReader, root: Any) -> None:
        self._reader = reader
        self._root = root

    def value(self, *path: str) -> Value | None:
        """What is at ``path``; None when nothing is."""
        return self._reader.at(self._root, path)


def open_document(source: object, report: Report) -> Document:
    """The document of a YAML text, a mapping or an OmegaConf config.

    Raises:
        InvalidInput: the text is no YAML, or ``source`` is not a mapping.
    """
    if isinstance(source, str):
        return Document(YamlReader(report), composed_text(source))
    if isinstance(source, Mapping):
        return Document(MappingReader(report), source)
    raise InvalidInput([Fault("", f"{shown(source)} is not a placement config; give a YAML text or a mapping")])
