"""Values of a config, read at their paths with every fault, the same for plain mappings and for OmegaConf's.

Only what is asked for is read, so an interpolation that nobody here needs may stay unresolved: RLinf's configs use
resolvers that exist only inside RLinf.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from callboard.model.faults import Fault
from callboard.model.inputs import SourceMapping
from callboard.model.inputs.located import Place, path_of, shown, shown_text

MAX_COUNT = 1_000_000_000
"""Largest batch, group or number of environments."""

MAX_SECONDS = 1e9


class Config:
    """Reads values of a config and notes every fault, each with its path (and line, where the source knows it)."""

    def __init__(self, source: Mapping[str, Any], located: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            source: a mapping, possibly OmegaConf's DictConfig or one with positions (``read_yaml``).
            located: the file that ``source`` was made of, for the places of faults.
        """
        self._source = source
        self._located = located if isinstance(located, SourceMapping) else source
        self.faults: list[Fault] = []
        self.misspelt: set[str] = set()
        """Paths that were asked for and are misspelt, which was told."""

    def find(self, path: str) -> Any:
        """The value at ``path`` ("data.rollout_batch_size"); None when it is missing, null, misspelt or can't be
        resolved (the last two with a fault)."""
        found: Any = self._source
        place = ""
        for part in path.split("."):
            if not isinstance(found, Mapping):
                return None
            if part not in found:
                near = _nearest(part, found, 0.9)
                if near:
                    self._tell_misspelt(place + near, part)
                    self.misspelt.add(path)
                return None
            found = self._at(found, part, path)
            place += f"{part}."
        if isinstance(found, str) and "${" in found:
            self.fault(path, f"{shown_text(found)} is an interpolation; install callboard[hydra] to have it resolved")
            return None
        return None if isinstance(found, str) and found == "???" else found

    def section(self, path: str) -> Mapping[str, Any]:
        """The mapping at ``path``; empty when it is missing."""
        found = self.find(path)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            self.fault(path, f"{shown(found)} is not a mapping")
            return {}
        return found

    def whole(self, path: str, *, default: int | None = None, high: int = MAX_COUNT) -> int:
        """A whole number; 1 with a fault when it is none, or missing without a default."""
        faults_before = len(self.faults)
        found = self.find(path)
        if len(self.faults) > faults_before or path in self.misspelt:
            pass  # told why it is no value
        elif found is None:
            if default is not None:
                return default
            self.fault(path, "is required: a whole number")
        elif isinstance(found, bool) or not isinstance(found, int):
            self.fault(path, f"{shown(found)} is not a whole number; 1 to {high} is allowed")
        elif not 1 <= found <= high:
            self.fault(path, f"{shown(found)} is out of bounds; 1 to {high} is allowed")
        else:
            return found
        return 1

    def flag(self, path: str, *, default: bool) -> bool:
        found = self.find(path)
        if found is None:
            return default
        if not isinstance(found, bool):
            self.fault(path, f"{shown(found)} is neither true nor false")
            return default
        return found

    def choice(self, path: str, allowed: Iterable[str]) -> str:
        """One of the words that are allowed; the first with a fault when it is none of them."""
        words = tuple(allowed)
        found = self.find(path)
        if isinstance(found, str) and found in words:
            return found
        if path in self.misspelt:
            return words[0]
        read = "is required" if found is None else f"{shown(found)} is unknown"
        self.fault(path, f"{read}; use {' or '.join(words)}")
        return words[0]

    def seconds(self, path: str, found: Any) -> float | None:
        """``found``, read at ``path``, as seconds; None with a fault."""
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.fault(path, f"{shown(found)} is not a number of seconds; write it without quotes, e.g. 95.7")
        elif not 0 < found <= MAX_SECONDS:  # NaN is neither.
            self.fault(path, f"{found} is not a measured time; more than 0 s is allowed")
        else:
            return float(found)
        return None

    def table(self, path: str, found: Mapping[Any, Any], what: str) -> dict[int, float]:
        """``found``, read at ``path``, as seconds by a count of ``what``, ascending. Keys that are text are converted
        when they are whole numbers (AP-05)."""
        read: dict[int, float] = {}
        if not found:
            self.fault(path, f"is empty; write {{{what}: seconds}}")
        for key in found:
            place = f"{path}.{key}"
            count = _count(key)
            value = self._at(found, key, place)
            if count is None or not 1 <= count <= MAX_COUNT:
                self.fault(place, f"{shown(key)} is not a number of {what}; 1 to {MAX_COUNT} is allowed")
            elif count in read:
                self.fault(place, f"{count} {what} are stated twice")
            elif (seconds := self.seconds(place, value)) is not None:
                read[count] = seconds
        return dict(sorted(read.items()))

    def fault(self, path: str, message: str) -> None:
        self.faults.append(located_fault(self._located, tuple(path.split(".")) if path else (), message))

    def _at(self, mapping: Mapping[Any, Any], key: Any, path: str) -> Any:
        try:
            return mapping[key]
        except Exception as error:
            if not _is_omegaconf(error):
                raise
            self.fault(path, f"can't be resolved: {str(error).splitlines()[0]}")
            return None

    def near(self, path: str) -> str:
        """A key beside ``path`` that was probably meant; empty: none looks like it."""
        parent, _, key = path.rpartition(".")
        section = self.find(parent)
        return _nearest(key, section, 0.8) if isinstance(section, Mapping) else ""

    def _tell_misspelt(self, path: str, meant: str) -> None:
        """A key that decides something and is misspelt would be passed over among the hundreds that decide nothing."""
        if path not in self.misspelt:
            self.misspelt.add(path)
            self.fault(path, f"unknown key {shown_text(path.rpartition('.')[2])}; did you mean {meant}?")


def _nearest(key: str, section: Mapping[Any, Any], cutoff: float) -> str:
    known = [each for each in section if isinstance(each, str)]
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=cutoff)), "")


def located_fault(source: object, place: Place, message: str) -> Fault:
    """A fault of what is at ``place``, with its line and column if ``source`` was read from a file."""
    line, column = source.position(place) if isinstance(source, SourceMapping) else (0, 0)
    return Fault(path_of(place), message, line, column)


def _count(key: Any) -> int | None:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and key.strip().isascii() and key.strip().isdecimal() and len(key) <= 12:
        return int(key)
    return None


def _is_omegaconf(error: Exception) -> bool:
    """Whether OmegaConf raised it: known by name, for OmegaConf is an option."""
    return any(base.__name__ == "OmegaConfBaseException" for base in type(error).__mro__)
