"""Single values as input: names, numbers, amounts, durations, choices, each read, bounded and shown by one kind.

Messages carry amounts in base units: ``6`` is six CPUs and ``Exact(6000)`` 6 000 milli-CPUs. The type says which, so no
file and no keyword argument can be taken for the other form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from callboard.model import names
from callboard.model.durations import format_duration_ms, parse_duration_ms
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import OddNumber, Refused, shown
from callboard.model.quantities import MAX_MILLI, MILLI, QuantityError, format_milli, parse_milli
from callboard.model.schema import Form, Kind

E = TypeVar("E", bound=StrEnum)

DAY_MS = 86_400_000
"""Longest timeout."""

LONGEST_MS = 366 * DAY_MS
"""Longest duration of anything else."""

_RAY_CLASS = "__ray_actor_class__"
"""Where what ``@ray.remote`` makes of a class keeps the class; Ray itself is not imported for it."""

PACKAGE = re.compile(r"package:([0-9a-f]{64})")
"""Name of a package: the hash of its bytes."""

MAX_WORKERS = 100_000
"""Most workers of a component, and of a job."""

MAX_PLACEMENT_BYTES = 1 << 20
"""Longest text of a placement."""

MAX_PRIORITY_MILLI = 1_000_000
"""Largest priority, either way: ±1000."""

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, slots=True)
class Exact:
    """An amount in its base unit: milli-units, bytes or milliseconds."""

    amount: int


@dataclass(frozen=True, slots=True, repr=False)
class JsonText:
    """A JSON document as text; no repr, for arguments may hold secrets."""

    text: str


def text(value: object) -> str:
    """A text; numbers and truth values are refused, because YAML turned ``1.10`` into 1.1 and ``no`` into false."""
    if not isinstance(value, str):
        raise Refused(f"{shown(value)} is not a text; put it in quotes if it is meant as one")
    if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise Refused(f"{shown(value)} has a character that no variable or message can carry")
    return value


def name(value: object) -> str:
    """The name of a node, pool, job, component, role, cohort or group."""
    read = text(value)
    if not names.is_name(read):
        raise Refused(f"{shown(read)} is not a name; names match {names.NAME_PATTERN}")
    return read


def label(value: object) -> str:
    """A label key or value."""
    read = text(value)
    if not names.is_label(read):
        raise Refused(f"{shown(read)} is not a label; labels match {names.LABEL_PATTERN}")
    return read


def actor(value: object) -> str:
    """An import path, or the class itself, plain or of ``@ray.remote``. It is never imported here."""
    plain = getattr(value, _RAY_CLASS, value)  # Ray's decorator keeps the class that it was given
    if not isinstance(plain, type | str):
        raise Refused(f"{shown(value)} is not a text with an import path, nor a class; write pkg.module:Class")
    read = _class_path(plain) if isinstance(plain, type) else text(value)
    if not names.is_actor_path(read):
        raise Refused(f"{shown(read)} is not an import path; write pkg.module:Class")
    return read


def _class_path(found: type) -> str:
    """Where a worker finds a class: workers are other processes, so only what a module holds by name is found."""
    module, name_there = found.__module__, found.__qualname__
    if module == "__main__":
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        instead = f"'{spec.name}:{name_there}'" if spec is not None else f"'your_module:{name_there}'"
        raise Refused(
            f"{name_there} is defined in the program itself (__main__), which workers don't run; "
            f"move it to a module that they can import, and write {instead}"
        )
    if "<locals>" in name_there:
        function = name_there.partition(".<locals>")[0]
        raise Refused(
            f"{found.__name__} is defined inside {function}(), where no worker can import it; "
            f"move it to the top of {module} and write '{module}:{found.__name__}'"
        )
    held: Any = sys.modules.get(module)
    for part in name_there.split("."):
        held = getattr(held, part, None)
    if getattr(held, _RAY_CLASS, held) is not found:
        raise Refused(
            f"{module} holds another {name_there} than this class, which was made at run time or replaced; "
            f"workers import by name: bind the class to its name in {module}"
        )
    return f"{module}:{name_there}"


def method(value: object) -> str:
    """The name of a public method."""
    read = text(value)
    if not (read.isascii() and read.isidentifier() and len(read) <= 255) or read.startswith("_"):
        raise Refused(f"{shown(read)} is not the name of a public method; write e.g. run")
    return read


def module(value: object) -> str:
    """The name of a module. It is never imported here."""
    read = text(value)
    if not names.is_module(read):
        raise Refused(f"{shown(read)} is not the name of a module; write e.g. torch or transformers.models.qwen3")
    return read


def interpreter(value: object) -> str:
    """An absolute path; whether a node allows it is the node's to say."""
    read = text(value)
    parts = read.split("/")
    if not read.startswith("/") or len(read) > 4096 or ".." in parts or not read.isprintable():
        raise Refused(f"{shown(read)} is not the absolute path of an interpreter, such as /opt/envs/rl/bin/python")
    return read


def package(value: object) -> str:
    """Code that travelled: a directory becomes a package where a job is submitted."""
    read = text(value)
    if not PACKAGE.fullmatch(read):
        raise Refused(f"{shown(read)} is not a package; a client packs and sends the directory that a job names here")
    return read


ENVIRONMENTS = ("requirements", "uv", "conda")
"""What a Python environment may be made of."""


def environment(value: object) -> str:
    """A Python environment: one of ``ENVIRONMENTS`` and what it says, ``kind:what`` or as a mapping of one entry."""
    if isinstance(value, Mapping):
        if len(value) != 1 or next(iter(value)) not in ENVIRONMENTS:
            raise Refused(f"one of {', '.join(ENVIRONMENTS)} is named here; variables belong in env")
        ((kind, what),) = value.items()
    else:
        kind, _, what = text(value).partition(":")
    if kind not in ENVIRONMENTS:
        raise Refused(f"{shown(value)} is not an environment; write e.g. {{requirements: requirements.txt}}")
    if kind != "conda":
        return f"{kind}:{package(what)}"
    if not re.fullmatch(r"\w[\w.+-]{0,127}", text(what)):
        raise Refused(f"{shown(what)} is not the name of a conda environment; a path goes into interpreter")
    return f"conda:{what}"


def image(value: object) -> str:
    """A container image, by a name or a path as the runtime of the node understands it."""
    read = text(value)
    if not re.fullmatch(r"[\w./][\w./:@+~-]{0,511}", read):
        raise Refused(f"{shown(read)} is not the name of an image; write e.g. docker.io/library/python:3.11")
    return read


def flag(value: object) -> bool:
    """True or false, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise Refused(f"{shown(value)} is neither true nor false")
    return value


def refuse_odd(value: object) -> None:
    """Refuses a number that may be another than was meant."""
    if isinstance(value, OddNumber):
        raise Refused(value.why)


def whole(minimum: int, maximum: int) -> Kind:
    """A whole number from ``minimum`` to ``maximum``."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused(f"{shown(value)} is not a whole number; {minimum} to {maximum} is allowed")
        refuse_odd(value)
        if not minimum <= value <= maximum:
            raise Refused(f"{shown(value)} is out of bounds; {minimum} to {maximum} is allowed")
        return value

    return Kind(read)


def whole_or_unlimited(maximum: int) -> Kind:
    """A whole number from 0 (or the word) for unlimited."""
    inner = whole(0, maximum).read

    def read(value: object) -> int:
        number: int = 0 if isinstance(value, str) and value.strip().lower() == "unlimited" else inner(value)
        return number

    return Kind(read, show=lambda count: "unlimited" if count == 0 else count)


def milli(minimum: int, maximum: int) -> Kind:
    """A number with up to three decimals, as milli-units from ``minimum`` to ``maximum``."""
    return Kind(_bounded(parse_milli, format_milli, minimum, maximum), show=plain_number, form=Form.EXACT)


def plain_number(milli: int) -> int | float:
    """Milli-units as people write them, exact."""
    # Up to MAX_MILLI the shortest text of the nearest float has at most 15 digits, and parse reads that text.
    return milli // MILLI if milli % MILLI == 0 else milli / MILLI


def duration(minimum_ms: int, maximum_ms: int) -> Kind:
    """A duration, as milliseconds from ``minimum_ms`` to ``maximum_ms``."""
    read = _bounded(parse_duration_ms, format_duration_ms, minimum_ms, maximum_ms)
    return Kind(read, show=format_duration_ms, form=Form.EXACT)


def _bounded(
    parse: Callable[[Any], int], written: Callable[[int], str], minimum: int, maximum: int
) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = value.amount if isinstance(value, Exact) else _parsed(parse, value)
        if not minimum <= number <= maximum:
            bounds = f"{written(minimum)} to {written(maximum)}"
            raise Refused(f"{written(number)} is out of bounds; {bounds} is allowed")
        return number

    return read


def choice(ours: type[E], *, lower: bool = False) -> Kind:
    """One of an enum's words, in any case, with ``-`` for ``_`` if one likes; ``lower``: how it is shown."""

    def read(value: object) -> E:
        if isinstance(value, ours):
            return value
        word = value.strip().upper().replace("-", "_") if isinstance(value, str) else ""
        if word not in ours.__members__:
            raise Refused(f"{shown(value)} is unknown; use {' or '.join(ours)}")
        return ours[word]

    return Kind(read, show=lambda word: word.value.lower() if lower else word.value, form=Form.WORD, words=ours)


def stop_signal(value: object) -> str:
    """A signal that a stop may begin with, by its name with or without ``SIG``."""
    word = value.strip().upper() if isinstance(value, str) else ""
    name = word if word.startswith("SIG") else f"SIG{word}"
    if name not in STOP_SIGNALS:
        raise Refused(f"{shown(value)} is not a signal that a stop may begin with; use {' or '.join(STOP_SIGNALS)}")
    return name


def placement_text(value: object) -> str:
    """A text that is no longer than allowed. What it means is decided where the nodes are known."""
    if not isinstance(value, str):
        raise Refused("is not a text; write the placement as YAML with a cluster: key")
    if len(value.encode("utf-8", "replace")) > MAX_PLACEMENT_BYTES:
        raise Refused(f"{len(value.encode('utf-8', 'replace'))} bytes are too many; {MAX_PLACEMENT_BYTES} are allowed")
    return value


def _parsed(parse: Callable[[Any], int], value: object) -> int:
    if not isinstance(value, str | int | float):
        raise Refused(f"{shown(value)} is not a number")
    if isinstance(value, bool) or (isinstance(value, str) and not 0 < len(value) <= 64):
        raise Refused(f"{shown(value)} is not a number")
    refuse_odd(value)
    if isinstance(value, int) and value.bit_length() > 128:
        raise Refused(f"{shown(value)} is out of bounds")
    try:
        return parse(value)
    except QuantityError as error:
        raise Refused(str(error)) from None


Text = Annotated[str, Kind(text, unsaid="")]
Name = Annotated[str, Kind(name, unsaid="")]
Actor = Annotated[str, Kind(actor, unsaid="")]
Method = Annotated[str, Kind(method, unsaid="")]
Interpreter = Annotated[str, Kind(interpreter, unsaid="")]
Package = Annotated[str, Kind(package, unsaid="")]
Environment = Annotated[str, Kind(environment, show=lambda value: dict([value.split(":", 1)]), unsaid="")]
Image = Annotated[str, Kind(image, unsaid="")]
StopSignal = Annotated[str, Kind(stop_signal, unsaid="")]
Flag = Annotated[bool, Kind(flag)]
Workers = Annotated[int, whole(1, MAX_WORKERS)]
Concurrency = Annotated[int, whole(1, 10_000)]
Gauge = Annotated[int, milli(-MAX_MILLI, MAX_MILLI)]
PlacementText = Annotated[str, Kind(placement_text, unsaid="")]
Priority = Annotated[int, milli(-MAX_PRIORITY_MILLI, MAX_PRIORITY_MILLI)]
PriorityGap = Annotated[int, milli(0, 2 * MAX_PRIORITY_MILLI)]
Timeout = Annotated[int, duration(0, DAY_MS)]
PositiveTimeout = Annotated[int, duration(1, DAY_MS)]
Duration = Annotated[int, duration(0, LONGEST_MS)]
PositiveDuration = Annotated[int, duration(1, LONGEST_MS)]
Ratio = Annotated[int, milli(1_000, MAX_MILLI // 1_000_000)]
