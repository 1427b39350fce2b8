"""The grammar of a placement text: segments of resource ranks and process ranks, each with its column.

::

    placement = segment { "," segment }
    segment   = resources [ ":" processes ]
    resources = "all" | range
    processes = range
    range     = int | int "-" int          inclusive, ascending

Nothing here knows a cluster: :func:`compile_segments` is told how many resources there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field

from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown_text
from callboard.placement.source.diagnostics import Report, Where

MAX_TEXT = 65_536
"""Longest placement text, in characters."""

MAX_PROCESSES = 100_000
"""Most processes of a component."""

MAX_RANK = 10**9
"""Ranks are below this; what is larger is a mistake in any cluster."""

_RANGE = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?")
_LONE_DASH = re.compile(r"\s*-\s*[0-9]+\s*")


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as written.

    Attributes:
        first: first resource rank; 0 for ``all``.
        last: last resource rank; -1 for ``all``.
        processes: first and last process rank; None: one process per resource.
        column: column in the placement text, from 1.
        process_column: column of the process ranks, from 1.
    """

    first: int
    last: int
    processes: tuple[int, int] | None = None
    text: str = field(default="", compare=False)
    column: int = field(default=1, compare=False)
    process_column: int = field(default=1, compare=False)

    @property
    def every(self) -> bool:
        return self.last < 0

    def __str__(self) -> str:
        resources = "all" if self.every else _range_text(self.first, self.last)
        return resources if self.processes is None else f"{resources}:{_range_text(*self.processes)}"


@dataclass(frozen=True, slots=True)
class Part:
    """A segment whose counts are known and fit: so many processes, spread evenly over so many resources."""

    first: int
    resources: int
    processes: int
    segment: Segment = field(compare=False)

    def ranks(self) -> list[range]:
        """The resource ranks of each process, in order."""
        if self.processes <= self.resources:
            size = self.resources // self.processes
            return [range(start, start + size) for start in range(self.first, self.first + self.resources, size)]
        sharers = self.processes // self.resources
        own = [range(rank, rank + 1) for rank in range(self.first, self.first + self.resources)]
        return [rank for rank in own for _ in range(sharers)]


def format_segments(segments: Sequence[Segment]) -> str:
    """The shortest text of these segments."""
    return ",".join(str(segment) for segment in segments)


def parse_segments(text: str, where: Where, report: Report) -> tuple[Segment, ...] | None:
    """The segments of ``text``; None when there are faults, which ``report`` has then."""
    if len(text) > MAX_TEXT:
        report.fault(where, f"the placement has {len(text)} characters; {MAX_TEXT} are allowed")
        return None
    if not text.strip():
        report.fault(where, f"the placement is empty; {_HINT}", read="nothing", allowed=_HINT)
        return None
    if "${" in text:
        # Its own commas and colons are no segments.
        at = text.index("${")
        said = f"{shown_text(text[at:].strip())} is an interpolation, which nobody resolved; give the composed config"
        report.fault(where.at(at), said, segment_column=at + 1, read=shown_text(text.strip()), allowed=_HINT)
        return None
    found: list[Segment] = []
    faults_before = len(report.faults)
    start = 0
    for part in text.split(","):
        segment = _Segments(part, start, where, report).read()
        if segment is not None:
            found.append(segment)
        start += len(part) + 1
    return tuple(found) if len(report.faults) == faults_before else None


_HINT = "write e.g. all, 0-3, 0,2,5-7 or 0-1:0-3"
"""The accepted forms, shown with every fault of the text."""

_MISREADINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[\[\](){}]"), "there are no brackets, commas alone part the segments"),
    (re.compile(r"[0-9]\s*(?:\.\.|[\u2010-\u2015~]|to)\s*[0-9]", re.IGNORECASE), "a range is written with '-'"),
    (re.compile(r"[0-9]\s*[;/|+&\s]\s*[0-9]"), "commas part the segments"),
    (re.compile(r"(?:gpu|cuda|node|rank)\W*[0-9]", re.IGNORECASE), "ranks are plain numbers"),
    (re.compile(r"^\?\?\?$"), "it marks a value that is still missing"),
    (re.compile(r"\*"), "all resources are 'all'"),
    (re.compile(r"[0-9]\s*-\s*$|[0-9]\s*-\s*-"), "a range has two ends, and none is counted from the back"),
)
"""What people write in other languages, and what it is in this one."""


def _with_forms(message: str) -> str:
    return message if _HINT in message else f"{message}; {_HINT}"


class _Segments:
    """Reads one segment and says what is wrong with it."""

    def __init__(self, part: str, start: int, where: Where, report: Report) -> None:
        self._part = part
        self._start = start
        self._where = where
        self._report = report

    def read(self) -> Segment | None:
        """The segment, or None with its faults noted."""
        resources, colon, processes = self._part.partition(":")
        own = self._range(resources, 0, resources=True)
        offset = len(resources) + 1
        asked = self._range(processes, offset, resources=False) if colon else None
        if own is None or (colon and asked is None):
            return None
        return Segment(
            first=own[0],
            last=own[1],
            processes=asked,
            text=self._part.strip(),
            column=self._column(self._part, 0),
            process_column=self._column(processes, offset) if colon else self._column(self._part, 0),
        )

    def _range(self, text: str, offset: int, *, resources: bool) -> tuple[int, int] | None:
        stripped = text.strip()
        if stripped.lower() == "all":
            if resources:
                return 0, -1
            own = self._part.partition(":")[0].strip()
            self._fault(
                f"process ranks are never 'all'; one process per resource is {own} without the ':', "
                f"and of other counts give the range, as in {own}:0-3",
                text,
                offset,
            )
            return None
        match = _RANGE.fullmatch(text)
        if match is None:
            second = text.find(":")  # the place of the fault, if it is that one
            self._fault(
                self._why_no_range(stripped, resources=resources),
                text[max(second, 0) :] if second >= 0 else text,
                offset + max(second, 0),
                read=stripped,
            )
            return None
        low, high = match[1], match[2] or match[1]
        for digits in dict.fromkeys((low, high)):
            if len(digits) > 9:
                self._fault(f"the rank {shown_text(digits)} is too large; ranks are below {MAX_RANK}", text, offset)
                return None
            if digits[0] == "0" and digits != "0":
                said = f"{shown_text(digits)} has a leading zero, which some readers take for an octal number"
                self._fault(f"{said}; write {int(digits)}", text, offset)
                return None
        if int(low) > int(high):
            self._fault(
                f"the range {low}-{high} descends; write {high}-{low}: process ranks follow the resources, "
                "so no other order can be asked for",
                text,
                offset,
            )
            return None
        return int(low), int(high)

    def _why_no_range(self, text: str, *, resources: bool) -> str:
        kind = "resource" if resources else "process"
        if not text:
            return f"{kind} ranks are missing; {_HINT}"
        if _LONE_DASH.fullmatch(text):
            every = ", and all of them are 'all'" if resources else ""
            return f"{shown_text(text)} is negative; {kind} ranks count from 0, never from the back{every}"
        if ":" in text:
            own = self._part.partition(":")[0].strip()
            return (
                f"{shown_text(text)} has a second ':'; a segment is resources:processes and no third number, "
                f"and the next segment comes after a comma, as in {own}:{text.partition(':')[0].strip()},…"
            )
        meant = next((said for pattern, said in _MISREADINGS if pattern.search(text)), "")
        return f"{shown_text(text)} is no {kind} rank or range; {meant + '; ' if meant else ''}{_HINT}"

    def _fault(self, message: str, text: str, offset: int, *, read: str | None = None) -> None:
        column = self._column(text, offset)
        self._report.fault(
            self._where.at(column - 1),
            _with_forms(message),
            segment=shown_text(self._part.strip())[1:-1] or " ",
            segment_column=column,
            read=shown_text(text.strip() if read is None else read),
            allowed=_HINT,
        )

    def _column(self, text: str, offset: int) -> int:
        return self._start + offset + len(text) - len(text.lstrip()) + 1


def compile_segments(
    segments: Sequence[Segment], total: int, resource: str, where: Where, report: Report
) -> tuple[Part, ...] | None:
    """The parts of ``segments`` on ``total`` resources; None when there are faults, which ``report`` has then.

    Args:
        total: how many resources there are.
        resource: what a resource is called, e.g. ``GPU``.
    """
    parts: list[Part] = []
    faults_before = len(report.faults)
    previous = -1
    started = 0
    before: Segment | None = None
    for segment in segments:
        said = _Saying(segment, where, report, before, resource)
        before = segment
        first, last = (0, total - 1) if segment.every else (segment.first, segment.last)
        if last >= total:
            have = f"there are {total} here, 0 to {total - 1}" if total else "there are none here"
            said.fault(
                f"{resource} rank {last} does not exist; {have}",
                read=str(last),
                allowed=f"0 to {total - 1}" if total else "",
            )
        if segment.every and not total:
            said.fault(f"'all' names nothing: there is no {resource} here")
            continue
        if first <= previous:
            said.fault(
                _with_forms(
                    f"{resource} ranks ascend and occur once: {first} comes after {previous}"
                    f"{said.likely_meant(started)}"
                ),
                read=str(first),
                allowed=f"{previous + 1} or more",
            )
        else:
            said.note_comma(started)
        previous = max(previous, last)
        resources = last - first + 1
        processes = resources
        if segment.processes is not None:
            low, high = segment.processes
            processes = high - low + 1
            if low != started:
                rule = "start at 0" if started == 0 else f"go on at {started}"
                own = str(segment).partition(":")[0]
                message = (
                    f"process ranks must {rule} (got {low}): they are numbers of this component's own processes, "
                    f"not of resources; write {own}:{_range_text(started, started + processes - 1)}"
                )
                said.fault(_with_forms(message), read=str(low), allowed=str(started), process=True)
            said.check_even(resources, processes)
        started += processes
        if started > MAX_PROCESSES:
            said.fault(f"{started} processes are too many; {MAX_PROCESSES} are allowed")
            return None
        parts.append(Part(first, resources, processes, segment))
    return tuple(parts) if len(report.faults) == faults_before else None


@dataclass(frozen=True, slots=True)
class _Saying:
    """Notes faults of one segment."""

    segment: Segment
    where: Where
    report: Report
    before: Segment | None
    resource: str

    @property
    def _begins_where_processes_go_on(self) -> bool:
        """Whether this may be meant as more processes of the segment before: 0-3:0,1 for 0-3:0-1."""
        before = self.before
        return before is not None and before.processes is not None and self.segment.processes is None

    def likely_meant(self, started: int) -> str:
        """What somebody may have meant by a segment that goes back, as the end of a sentence."""
        before, segment = self.before, self.segment
        if before is None or segment.every:
            return ""
        own = str(before).partition(":")[0]
        if self._begins_where_processes_go_on and before.processes is not None:
            more = _range_text(before.processes[0], max(segment.last, started))
            return (
                f"; a comma begins a new segment, so this {segment} means {self.resource}s: "
                f"processes {more} on {self.resource}s {own} are {own}:{more}"
            )
        same = (before.first, before.last) == (segment.first, segment.last)
        if same and not before.every:
            all_of_them = _range_text(started - _count(before), started + _count(segment) - 1)
            return f"; more processes on the same {self.resource}s are one segment: {own}:{all_of_them}"
        return "" if before.every or segment.last >= before.first else f"; write {segment},{before}"

    def note_comma(self, started: int) -> None:
        """Warns of 0-3:0,4: a process more, on GPU 4, where processes 0 to 4 may be meant."""
        before, segment = self.before, self.segment
        if not self._begins_where_processes_go_on or before is None or before.processes is None or segment.every:
            return
        if before.processes[0] != before.processes[1] or segment.first != segment.last:
            return  # a range is what it looks like
        own = str(before).partition(":")[0]
        meant = f"{own}:{_range_text(before.processes[0], segment.last)}"
        self.report.warn(
            self.where.at(segment.column - 1),
            f"{before},{segment}: the comma begins a new segment, so process {started} is on {self.resource} "
            f"{segment.first}; processes {before.processes[0]} to {segment.last} on {self.resource}s {own} are {meant}",
        )

    def fault(self, message: str, *, read: str = "", allowed: str = "", process: bool = False) -> None:
        column = self.segment.process_column if process else self.segment.column
        self.report.fault(
            self.where.at(column - 1),
            message,
            segment=self.segment.text or str(self.segment),
            segment_column=column,
            read=read,
            allowed=allowed,
        )

    def check_even(self, resources: int, processes: int) -> None:
        """Rule 3: one count divides the other."""
        if resources % processes == 0 or processes % resources == 0:
            return
        low, high = nearest_counts(resources, processes)
        own, first = str(self.segment).partition(":")[0], self.segment.processes[0] if self.segment.processes else 0
        texts = dict.fromkeys(f"{own}:{_range_text(first, first + count - 1)}" for count in (low, high))
        self.fault(
            _with_forms(
                f"{processes} processes can't be spread evenly over {resources} resources: one count must divide the "
                f"other; the nearest are {low} or {high} processes, {' or '.join(texts)}"
            ),
            read=f"{processes} processes on {resources} resources",
            allowed=f"{low} or {high} processes",
            process=True,
        )


def _count(segment: Segment) -> int:
    """Processes of a segment that names its resources."""
    if segment.processes is None:
        return segment.last - segment.first + 1
    return segment.processes[1] - segment.processes[0] + 1


def nearest_counts(resources: int, processes: int) -> tuple[int, int]:
    """The nearest process counts below and above ``processes`` that spread evenly over ``resources``."""
    if processes > resources:
        low = processes // resources * resources
        return low, low + resources
    low = next(count for count in range(processes, 0, -1) if resources % count == 0)
    high = next(count for count in range(processes, resources + 1) if resources % count == 0)
    return low, high


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
