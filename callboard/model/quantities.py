"""Quantities: integers in milli-units and bytes, and the texts people write for them.

Declared hardware is an amount, too: "Franka/1" is the second Franka of its node, a resource like any other with one
unit of it, so two jobs never hold one robot. Names of custom resources have no slash
(:func:`callboard.model.names.is_name`).

Floating point is used nowhere after the edge: 4.1 − 3.1 must equal 1.0 (docs/scheduling.md, Quantities).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from callboard.model.frozen import dataclass, quick

MILLI = 1000
"""Milli-units in one unit."""

MAX_MILLI = 10**12
"""Largest amount of anything counted in milli-units: a thousand million of it."""

MAX_MEMORY_BYTES = 1 << 60
"""Largest amount of memory in bytes."""

UNITLESS_FROM_BYTES = 1 << 20
"""Smallest amount of memory that may be written without a unit. Nothing real is smaller, so whoever writes
``memory: 2048`` means MiB."""

IN_BYTES = frozenset({"memory", "gpu_memory"})
"""Resources whose amounts are bytes; all others are counted in milli-units."""

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "KIB": 1 << 10,
    "M": 10**6,
    "MB": 10**6,
    "MIB": 1 << 20,
    "G": 10**9,
    "GB": 10**9,
    "GIB": 1 << 30,
    "T": 10**12,
    "TB": 10**12,
    "TIB": 1 << 40,
    # Kubernetes writes the binary units without the B.
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]{0,3})\s*")
_MILLI = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)(m?)\s*")

Number = int | float | str | Decimal


class QuantityError(ValueError):
    """A text or number that is no quantity. ``str()`` says what was read and what is allowed."""


def parse_milli(value: Number) -> int:
    """Milli-units of a count such as ``2``, ``0.5``, ``"1.5"`` or ``"1500m"``.

    Raises:
        QuantityError: not a number, not finite, or finer than a thousandth.
    """
    scale = MILLI
    if isinstance(value, bool):
        raise QuantityError(f"{value!r} is not a quantity; write a number such as 2 or 0.5")
    if isinstance(value, str):
        match = _MILLI.fullmatch(value)
        if match is None:
            raise QuantityError(f"{value!r} is not a quantity; write a number such as 2, 0.5 or 500m")
        value, suffix = match.groups()
        scale = 1 if suffix else MILLI
    try:
        # str() first: Decimal(0.1) is the binary neighbour of 0.1, Decimal("0.1") is what was meant.
        exact = Decimal(str(value)) * scale
    except InvalidOperation as error:
        raise QuantityError(f"{value!r} is not a quantity; write a number such as 2 or 0.5") from error
    if not exact.is_finite():
        raise QuantityError(f"{value!r} is not a finite number")
    if exact != exact.to_integral_value():
        raise QuantityError(f"{value!r} is finer than a thousandth")
    if abs(exact) > MAX_MILLI:
        raise QuantityError(f"{value!r} is larger than {MAX_MILLI // MILLI}")
    return int(exact)


def parse_memory(value: Number) -> int:
    """Bytes of an amount of memory such as ``"8GiB"``, ``"2048MiB"`` or ``1073741824``.

    Raises:
        QuantityError: no such amount, negative, not a whole number of bytes, or less than 1 MiB without a unit.
    """
    if isinstance(value, bool):
        raise QuantityError(f"{value!r} is not an amount of memory; write e.g. 8GiB")
    match = _MEMORY.fullmatch(str(value))
    if match is None:
        raise QuantityError(f"{value!r} is not an amount of memory; write e.g. 8GiB, 2048MiB or a number of bytes")
    digits, unit = match.groups()
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise QuantityError(f"{value!r} has the unknown unit {unit!r}; use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    exact = Decimal(digits) * factor
    if exact != exact.to_integral_value():
        raise QuantityError(f"{value!r} is not a whole number of bytes")
    if not unit and 0 < exact < UNITLESS_FROM_BYTES:
        likely = "GiB" if exact < 512 else "MiB"
        raise QuantityError(
            f"{digits} without a unit means bytes, which is less than any worker or pool needs; "
            f"write {digits}{likely}, or {digits}B if bytes are meant"
        )
    if exact > MAX_MEMORY_BYTES:
        raise QuantityError(f"{value!r} is larger than {format_memory(MAX_MEMORY_BYTES)}")
    return int(exact)


def format_milli(milli: int) -> str:
    """``1500`` → ``"1.5"``, ``2000`` → ``"2"``."""
    sign = "-" if milli < 0 else ""
    whole, part = divmod(abs(milli), MILLI)
    return f"{sign}{whole}" if part == 0 else f"{sign}{whole}.{part:03d}".rstrip("0")


def format_memory(amount_bytes: int) -> str:
    """The shortest exact text: ``2147483648`` → ``"2GiB"``, ``1500`` → ``"1500B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.upper()]
        if amount_bytes and amount_bytes % factor == 0:
            return f"{amount_bytes // factor}{unit}"
    for unit in ("TiB", "GiB", "MiB"):
        factor = _UNITS[unit.upper()]
        if amount_bytes >= 10 * factor:
            return f"{amount_bytes / factor:.1f}{unit}"
    return f"{amount_bytes}B"


@quick
@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of each resource.

    Attributes:
        gpu_milli: milli-GPU; above 1000 a multiple of 1000.
        custom_milli: (name, milli-units), sorted by name, no zero entries: two equal amounts compare equal.
        gpu_memory_bytes: bytes of memory of all GPUs together; a worker has an equal part of it on each of its own.
        gpu_model: words that the model of each GPU must have; empty: any will do. Like the next one it is no amount:
            it says which GPUs an ask is for, and no sum has it.
        gpu_memory_min_bytes: bytes of memory that each GPU must have in all, whoever uses it.
    """

    cpu_milli: int = 0
    gpu_milli: int = 0
    memory_bytes: int = 0
    custom_milli: tuple[tuple[str, int], ...] = ()
    gpu_memory_bytes: int = 0
    gpu_model: str = ""
    gpu_memory_min_bytes: int = 0

    @classmethod
    def of(
        cls,
        *,
        cpu_milli: int = 0,
        gpu_milli: int = 0,
        memory_bytes: int = 0,
        gpu_memory_bytes: int = 0,
        custom: Mapping[str, int] | None = None,
    ) -> Resources:
        """Amounts in integers, the custom ones as a mapping of name → milli-units in any order."""
        pairs = tuple(sorted((name, milli) for name, milli in (custom or {}).items() if milli))
        return cls(cpu_milli, gpu_milli, memory_bytes, pairs, gpu_memory_bytes)

    @classmethod
    def parse(cls, amounts: Mapping[str, Number]) -> Resources:
        """Amounts as people write them: ``{"cpu": 1.5, "memory": "2GiB", "gpu": 1, "worker_unit": 1}``.

        Raises:
            QuantityError: an amount that is none; the text names the resource.
        """
        read: dict[str, int] = {}
        for name, value in amounts.items():
            try:
                read[name] = parse_memory(value) if name in IN_BYTES else parse_milli(value)
            except QuantityError as error:
                raise QuantityError(f"{name}: {error}") from error
        return cls.from_items(read.items())

    @classmethod
    def from_items(cls, items: Iterable[tuple[str, int]]) -> Resources:
        """The inverse of :meth:`items`."""
        amounts = dict(items)
        return cls.of(
            cpu_milli=amounts.pop("cpu", 0),
            gpu_milli=amounts.pop("gpu", 0),
            memory_bytes=amounts.pop("memory", 0),
            gpu_memory_bytes=amounts.pop("gpu_memory", 0),
            custom=amounts,
        )

    def items(self) -> list[tuple[str, int]]:
        """(name, amount) of every resource that is not zero, custom ones last and by name."""
        fixed = (
            ("cpu", self.cpu_milli),
            ("gpu", self.gpu_milli),
            ("memory", self.memory_bytes),
            ("gpu_memory", self.gpu_memory_bytes),
        )
        return [pair for pair in fixed if pair[1]] + list(self.custom_milli)

    def get(self, name: str) -> int:
        """Amount of the resource ``name``; 0 when there is none."""
        if name == "cpu":
            return self.cpu_milli
        if name == "gpu":
            return self.gpu_milli
        if name == "memory":
            return self.memory_bytes
        if name == "gpu_memory":
            return self.gpu_memory_bytes
        return next((milli for custom, milli in self.custom_milli if custom == name), 0)

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli + other.cpu_milli,
            self.gpu_milli + other.gpu_milli,
            self.memory_bytes + other.memory_bytes,
            _merge(self.custom_milli, other.custom_milli, 1),
            self.gpu_memory_bytes + other.gpu_memory_bytes,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli - other.cpu_milli,
            self.gpu_milli - other.gpu_milli,
            self.memory_bytes - other.memory_bytes,
            _merge(self.custom_milli, other.custom_milli, -1),
            self.gpu_memory_bytes - other.gpu_memory_bytes,
        )

    def scaled(self, count: int) -> Resources:
        """``count`` times as much."""
        return Resources(
            self.cpu_milli * count,
            self.gpu_milli * count,
            self.memory_bytes * count,
            tuple((name, milli * count) for name, milli in self.custom_milli if count),
            self.gpu_memory_bytes * count,
        )

    def on_gpus_of(self, *asks: Resources) -> Resources:
        """The same amounts, on GPUs that will do for all of these asks."""
        words = dict.fromkeys(word for ask in asks for word in ask.gpu_model.split())
        least_bytes = max((ask.gpu_memory_min_bytes for ask in asks), default=0)
        if not (words or least_bytes or self.selects):
            return self
        return replace(self, gpu_model=" ".join(words), gpu_memory_min_bytes=least_bytes)

    @property
    def selects(self) -> bool:
        """Whether it matters which GPUs there are."""
        return bool(self.gpu_model or self.gpu_memory_min_bytes)

    @property
    def card(self) -> str:
        """Which GPUs it is for, in words; empty: any."""
        least = f"{format_memory(self.gpu_memory_min_bytes)} or more" if self.gpu_memory_min_bytes else ""
        return " with ".join(filter(None, (self.gpu_model, least)))

    def suits(self, model: str, memory_bytes: int) -> bool:
        """Whether a GPU is one of those that it is for, by its model and all its memory."""
        return memory_bytes >= self.gpu_memory_min_bytes and (
            not self.gpu_model or _words(self.gpu_model) <= _words(model)
        )

    @property
    def each_gpu_memory_bytes(self) -> int:
        """Memory that a worker which asks this has on each of its GPUs."""
        return on_each(self.gpu_memory_bytes, max(1, self.gpu_milli // MILLI))

    def covers(self, ask: Resources) -> bool:
        """Whether every amount of ``ask`` is here. A zero ask never blocks (PC-16)."""
        if (
            ask.cpu_milli > max(self.cpu_milli, 0)
            or ask.gpu_milli > max(self.gpu_milli, 0)
            or ask.memory_bytes > max(self.memory_bytes, 0)
            or ask.gpu_memory_bytes > max(self.gpu_memory_bytes, 0)
        ):
            return False
        if not ask.custom_milli:
            return True
        have = dict(self.custom_milli)
        return all(milli <= max(have.get(name, 0), 0) for name, milli in ask.custom_milli)

    def clamped(self) -> Resources:
        """The same with every negative amount as zero."""
        return Resources.from_items((name, amount) for name, amount in self.items() if amount > 0)

    def __bool__(self) -> bool:
        return bool(self.cpu_milli or self.gpu_milli or self.memory_bytes or self.custom_milli or self.gpu_memory_bytes)

    def __str__(self) -> str:
        amounts = ", ".join(f"{name} {format_amount(name, amount)}" for name, amount in self.items()) or "nothing"
        return f"{amounts} (GPU: {self.card})" if self.selects else amounts


@lru_cache(maxsize=1024)
def _words(model: str) -> frozenset[str]:
    """ "NVIDIA A100-SXM4-80GB" has the words nvidia, a100, sxm4 and 80gb."""
    return frozenset(re.findall(r"[a-z0-9.]+", model.lower()))


def format_amount(resource: str, amount: int) -> str:
    """One amount for people: memory with its unit, everything else as a plain number."""
    return format_memory(amount) if resource in IN_BYTES else format_milli(amount)


def on_each(gpu_memory_bytes: int, devices: int) -> int:
    """The part of an amount of GPU memory that lies on each of some devices."""
    return -(-gpu_memory_bytes // devices)


def total(amounts: Iterable[Resources]) -> Resources:
    """Sum of many amounts; nothing for none."""
    result = NOTHING
    for amount in amounts:
        result = result + amount
    return result


def _merge(
    left: tuple[tuple[str, int], ...], right: tuple[tuple[str, int], ...], sign: int
) -> tuple[tuple[str, int], ...]:
    if not right:
        return left
    if not left and sign > 0:
        return right
    merged = dict(left)
    for name, milli in right:
        merged[name] = merged.get(name, 0) + sign * milli
    return tuple(sorted((name, milli) for name, milli in merged.items() if milli))


NOTHING = Resources()
"""No amount of anything."""


def piece_name(hardware_type: str, position: int) -> str:
    """Name of a piece.

    Args:
        hardware_type: its type, as its node declares it.
        position: which of the node's pieces of that type, from 0.
    """
    return f"{hardware_type}/{position}"


def is_piece(resource: str) -> bool:
    """Whether a resource is a piece of declared hardware; Ray knows nothing of those."""
    return "/" in resource


def pieces(types: Iterable[str]) -> Resources:
    """One unit of every piece of a node that declares hardware of these types, in the order declared."""
    seen: Counter[str] = Counter()
    custom: dict[str, int] = {}
    for hardware_type in types:
        custom[piece_name(hardware_type, seen[hardware_type])] = MILLI
        seen[hardware_type] += 1
    return Resources.of(custom=custom)
