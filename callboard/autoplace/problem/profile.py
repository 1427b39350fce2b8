"""Profiles: averages of recorded timings, for ``profile_data`` or a cost table.

A recording is a JSON object per line::

    {"component": "rollout", "seconds": 59.9, "gpus": 8}

``gpus`` or ``envs_per_instance`` say what it was measured at, and may be missing. An iteration of a component takes as
long as its slowest ``rank``; what a rank recorded for the same ``iteration`` adds up, so one that works piece by piece
records its pieces. ``devices`` (what a worker's ``ctx.timed`` records) are counted over all ranks when
``gpus`` is missing. A new ``attempt`` is a new start, with a warm-up of its own.
"""

from __future__ import annotations

import difflib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown, shown_text
from callboard.model.names import NAME_PATTERN, is_name

MAX_LINES = 5_000_000
MAX_FAULTS = 20

MAX_SECONDS = 1e9


def _whole_from(low: int) -> tuple[Callable[[Any], bool], str]:
    return lambda it: it is None or (type(it) is int and low <= it < 1 << 63), f"a whole number from {low} on"


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "component": (lambda it: isinstance(it, str) and is_name(it), f"a name; names match {NAME_PATTERN}"),
    "seconds": (
        lambda it: type(it) in (int, float) and 0 < it <= MAX_SECONDS,
        "a measured time; more than 0 s is allowed",
    ),
    "gpus": _whole_from(0),
    "envs_per_instance": _whole_from(1),
    "rank": _whole_from(0),
    "attempt": _whole_from(0),
    "iteration": _whole_from(0),
    "devices": (lambda it: isinstance(it, list) and all(isinstance(device, str) for device in it), "a list of texts"),
}
"""Which values each key may have, and what they are called."""

_KEYS = ", ".join(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One recorded run of one rank.

    Attributes:
        gpus: GPUs of the whole component; None: not stated.
        envs: environments per instance; None: not stated.
        rank: of the component's worker.
        iteration: which; None: in the order recorded.
        devices: GPUs of this worker, unique in the cluster.
    """

    component: str
    seconds: float
    gpus: int | None = None
    envs: int | None = None
    rank: int = 0
    attempt: int = 0
    iteration: int | None = None
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A component's mean.

    Attributes:
        gpus: GPUs it was measured on; None: not known.
        envs: environments per instance; None: it has none.
        seconds: mean per iteration.
        spread_seconds: standard deviation of the iterations.
        iterations: how many were averaged.
        dropped: how many were left out as warm-up.
    """

    component: str
    gpus: int | None
    envs: int | None
    seconds: float
    median_seconds: float
    spread_seconds: float
    iterations: int
    dropped: int


def read_timings(lines: Iterable[str], source: str) -> list[Timing]:
    """The recordings of a JSONL text; empty lines are skipped.

    Args:
        source: what to call it in faults.

    Raises:
        InvalidInput: every line that is none, up to :data:`MAX_FAULTS`.
    """
    found: list[Timing] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        if number > MAX_LINES:
            faults.append(Fault(source, f"more than {MAX_LINES} lines", number, 1))
            break
        if not line.strip():
            continue
        wrong: list[str] = []
        timing = _timing(line.removeprefix("\ufeff") if number == 1 else line, wrong)
        if timing is not None:
            found.append(timing)
        faults += [Fault(source, why, number, 1) for why in wrong]
        if len(faults) >= MAX_FAULTS:
            break
    if faults:
        raise InvalidInput(faults)
    return found


def measured(timings: Iterable[Timing], *, warmup: int) -> tuple[Measured, ...]:
    """The mean of each component at each size, in the order in which they were first recorded.

    Args:
        timings: in the order recorded.
        warmup: iterations to leave out at the start of each attempt.

    Raises:
        InvalidInput: nothing was recorded, or warm-up leaves nothing of a component.
    """
    starts: dict[tuple[str, int | None, int | None, int], list[Timing]] = {}
    for timing in timings:
        starts.setdefault((timing.component, timing.gpus, timing.envs, timing.attempt), []).append(timing)
    sizes: dict[tuple[str, int | None, int | None], tuple[list[float], int]] = {}
    for (component, gpus, envs, _), runs in starts.items():
        iterations = list(_iterations(runs))
        devices = frozenset[str]().union(*(run.devices for run in runs))
        kept, dropped = sizes.setdefault((component, gpus or len(devices) or None, envs), ([], 0))
        kept += iterations[warmup:]
        sizes[component, gpus or len(devices) or None, envs] = kept, dropped + min(warmup, len(iterations))
    faults = [
        Fault(component, f"recorded iterations: {dropped}, of which warm-up: {warmup}; record more, or lower --warmup")
        for (component, _, _), (kept, dropped) in sizes.items()
        if not kept
    ]
    if not sizes:
        faults = [Fault("", f"no timings; write a JSON object per line, with the keys {_KEYS}")]
    if faults:
        raise InvalidInput(faults)
    return tuple(_mean(key, kept, dropped) for key, (kept, dropped) in sizes.items())


def profile_data(found: Iterable[Measured]) -> dict[str, Any]:
    """The means as RLinf's ``profile_data``: a number per component, a table where several sizes were measured.

    Raises:
        InvalidInput: some recordings of a component say on how many GPUs it ran, and others don't.
    """
    means = list(found)
    for name in dict.fromkeys(each.component for each in means):
        sizes = {each.gpus for each in means if each.component == name and each.envs is None}
        if None in sizes and len(sizes) > 1:
            why = 'some recordings say on how many GPUs it ran, others don\'t; record "gpus" in all of them, or in none'
            raise InvalidInput([Fault(name, why)])
    tables: dict[str, dict[int | None, float]] = {}
    for each in means:
        key = f"{each.component}_cost" if each.envs is None else f"{each.component}_profile_data"
        tables.setdefault(key, {})[each.gpus if each.envs is None else each.envs] = _rounded(each.seconds)
    return {
        key: next(iter(table.values())) if len(table) == 1 and key.endswith("_cost") else _ascending(table)
        for key, table in tables.items()
    }


def components(found: Iterable[Measured]) -> dict[str, Any]:
    """The means as ``workflow.components`` of the general form.

    Raises:
        InvalidInput: it isn't known on how many GPUs a component ran.
    """
    tables: dict[str, dict[int | None, float]] = {}
    faults = []
    for each in found:
        if each.gpus is None:
            faults.append(Fault(each.component, 'on how many GPUs it ran isn\'t known; record "gpus" (0: none)'))
        tables.setdefault(each.component, {})[each.gpus] = _rounded(each.seconds)
    if faults:
        raise InvalidInput(faults)
    return {name: {"seconds_by_gpus": _ascending(table)} for name, table in tables.items()}


def _timing(line: str, faults: list[str]) -> Timing | None:
    """What a line records; None, and why, where it is not right."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        faults.append(f"no JSON: {error}")
        return None
    if not isinstance(said, Mapping):
        faults.append(f"{shown(said)} is not an object with the keys {_KEYS}")
        return None
    # Recordings may say more than is read here, but no key may be another one misspelt.
    meant: set[str] = set()
    for key in said:
        near = difflib.get_close_matches(key[:80].lower(), _FIELDS, n=1, cutoff=0.8) if key not in _FIELDS else []
        if near:
            meant.add(near[0])
            faults.append(f"unknown key {shown_text(key)}; did you mean {near[0]}?")
    found = {"devices": [], **said}
    faults += [
        f"{key} is required: {what}" if found.get(key) is None else f"{key}: {shown(found[key])} is not {what}"
        for key, (fits, what) in _FIELDS.items()
        if not fits(found.get(key)) and key not in meant
    ]
    if faults:
        return None
    return Timing(
        component=found["component"],
        seconds=float(found["seconds"]),
        gpus=found.get("gpus"),
        envs=found.get("envs_per_instance"),
        rank=found.get("rank") or 0,
        attempt=found.get("attempt") or 0,
        iteration=found.get("iteration"),
        devices=frozenset(found["devices"]),
    )


def _iterations(runs: Iterable[Timing]) -> Iterator[float]:
    """Seconds of each iteration that every rank has ended: those of its slowest rank. Pieces add up."""
    by_rank: dict[int, dict[int, float]] = {}
    for run in runs:
        own = by_rank.setdefault(run.rank, {})
        iteration = len(own) if run.iteration is None else run.iteration
        own[iteration] = own.get(iteration, 0.0) + run.seconds
    shared = set.intersection(*(set(own) for own in by_rank.values()))
    yield from (max(own[iteration] for own in by_rank.values()) for iteration in sorted(shared))


def _mean(key: tuple[str, int | None, int | None], kept: list[float], dropped: int) -> Measured:
    mean = math.fsum(kept) / len(kept)
    spread = math.sqrt(math.fsum((each - mean) ** 2 for each in kept) / len(kept))
    component, gpus, envs = key
    return Measured(
        component=component,
        gpus=gpus,
        envs=envs,
        seconds=mean,
        median_seconds=statistics.median(kept),
        spread_seconds=spread,
        iterations=len(kept),
        dropped=dropped,
    )


def _rounded(seconds: float) -> float:
    """Five figures: more than any measurement repeats."""
    return float(f"{seconds:.5g}")


def _ascending(table: Mapping[int | None, float]) -> dict[int, float]:
    return {size: table[size] for size in sorted(table, key=lambda size: size or 0) if size is not None}
