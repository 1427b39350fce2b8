"""The text that describes machines: one grammar for clusters, wherever one is stated instead of joined.

::

    cluster = block { "+" block }
    block   = [ count "x" ] ( gpus | "(" amount { "," amount } ")" )
    amount  = number "gpu" [ ":" model ]  |  number "cpu"  |  number memory-unit

``8+8`` is two nodes of eight GPUs, ``1250x8`` is 1250 of them, ``4x(2gpu,32cpu)`` four nodes of two GPUs and 32 CPUs,
``8x(8gpu:h100,32cpu,512gib)+16x(32cpu)`` eight GPU nodes and sixteen without any. Letter case and spaces don't matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import shown_text
from callboard.model.quantities import QuantityError, format_milli, parse_memory, parse_milli

MAX_TEXT = 4096
"""Longest text, in characters."""

MAX_NODES = 100_000
"""Most nodes of a described cluster."""

MAX_GPUS_PER_NODE = 1024
"""Most GPUs of one node."""

MAX_CPUS_PER_NODE = 65_536
"""Most CPUs of one node."""

MAX_GPUS = 1_000_000
"""Most GPUs of a described cluster."""

MAX_FAULTS = 20
"""Most faults told at once."""

_BLOCK = re.compile(
    r"\s*(?:(?P<count>[0-9]+)\s*[x×]\s*)?(?:(?P<gpus>[0-9]+)|\((?P<amounts>[^()]*)\))\s*", re.IGNORECASE
)
_AMOUNT = re.compile(
    r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-z]+)\s*(?::\s*(?P<model>[a-z0-9][a-z0-9_.-]{0,62}))?\s*",
    re.IGNORECASE,
)
_HINT = "write e.g. 8+8 or 4x(2gpu,32cpu,512gib)"


@dataclass(frozen=True, slots=True)
class NodeText:
    """One node of a described cluster.

    Attributes:
        cpu_milli: milli-CPUs; None: not stated.
        memory_bytes: bytes of memory; None: not stated.
        gpu_model: what the GPUs are, in lower case; empty: not stated.
    """

    gpus: int = 0
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    gpu_model: str = ""

    @property
    def node_group(self) -> str:
        return group_of(self.gpus)


def group_of(gpus: int) -> str:
    """The node group of a described node that states none: ``gpu`` for those with GPUs, ``cpu`` for the others."""
    return "gpu" if gpus else "cpu"


def parse_cluster(text: str, field: str = "nodes") -> tuple[NodeText, ...]:
    """The nodes that ``text`` describes, in the order written; node ``i`` of the tuple has rank ``i``.

    Args:
        text: e.g. ``8+8`` or ``8x(8gpu,32cpu)+16x(32cpu)``.
        field: what to call the text in faults.

    Raises:
        InvalidInput: every fault, each with its column (and line 1).
    """
    if len(text) > MAX_TEXT:
        raise InvalidInput([Fault(field, f"{len(text)} characters are too many; {MAX_TEXT} are allowed", 1, 1)])
    reader = _Reader(field)
    nodes: list[NodeText] = []
    start = gpus = 0
    for part in text.split("+"):
        found = reader.block(part, start)
        if found is not None:
            count, node = found
            if len(nodes) + count > MAX_NODES:
                reader.fault(f"more than {MAX_NODES} nodes", start + 1)
                break
            gpus += node.gpus * count
            if gpus > MAX_GPUS:
                reader.fault(f"more than {MAX_GPUS} GPUs", start + 1)
                break
            nodes.extend([node] * count)
        start += len(part) + 1
    if reader.faults:
        raise InvalidInput(reader.faults[:MAX_FAULTS])
    return tuple(nodes)


def format_cluster(nodes: Iterable[NodeText]) -> str:
    """The shortest text of these nodes: the inverse of :func:`parse_cluster`."""
    blocks: list[str] = []
    for node, equal in groupby(nodes):
        count = sum(1 for _ in equal)
        if node == NodeText(gpus=node.gpus):
            blocks += [str(node.gpus)] * count if count <= 2 else [f"{count}x{node.gpus}"]
        else:
            inner = f"({','.join(_amounts(node))})"
            blocks.append(inner if count == 1 else f"{count}x{inner}")
    return "+".join(blocks)


def _amounts(node: NodeText) -> Iterator[str]:
    if node.gpus or node.gpu_model:
        yield f"{node.gpus}gpu" + (f":{node.gpu_model}" if node.gpu_model else "")
    if node.cpu_milli is not None:
        yield f"{format_milli(node.cpu_milli)}cpu"
    if node.memory_bytes is not None:
        yield _memory_text(node.memory_bytes)


def _memory_text(amount_bytes: int) -> str:
    """The exact text; the one for people is rounded above ten units."""
    for shift, unit in ((40, "tib"), (30, "gib"), (20, "mib"), (10, "kib")):
        if amount_bytes and amount_bytes % (1 << shift) == 0:
            return f"{amount_bytes >> shift}{unit}"
    return f"{amount_bytes}b"


class _Reader:
    """Reads blocks and notes every fault with its column."""

    def __init__(self, field: str) -> None:
        self._field = field
        self.faults: list[Fault] = []

    def fault(self, message: str, column: int) -> None:
        self.faults.append(Fault(self._field, message, 1, column))

    def block(self, part: str, start: int) -> tuple[int, NodeText] | None:
        """How many nodes of which kind; None with a fault noted."""
        column = start + 1 + len(part) - len(part.lstrip())
        match = _BLOCK.fullmatch(part)
        if match is None:
            read = shown_text(part.strip()) if part.strip() else "nothing"
            self.fault(f"{read} describes no node; {_HINT}", column)
            return None
        count = self._whole(match["count"] or "1", 1, MAX_NODES, "nodes", column)
        if match["gpus"] is not None:
            gpus = self._whole(match["gpus"], 0, MAX_GPUS_PER_NODE, "GPUs per node", start + 1 + match.start("gpus"))
            node = None if gpus is None else NodeText(gpus=gpus)
        else:
            node = self._node(match["amounts"], start + match.start("amounts"))
        return None if count is None or node is None else (count, node)

    def _node(self, amounts: str, start: int) -> NodeText | None:
        found: dict[str, int | str] = {}
        faults_before = len(self.faults)
        for part in amounts.split(","):
            self._amount(part, start, found)
            start += len(part) + 1
        if len(self.faults) > faults_before:
            return None
        return NodeText(**found)  # type: ignore[arg-type]  # the keys say the types

    def _amount(self, part: str, start: int, found: dict[str, int | str]) -> None:
        column = start + 1 + len(part) - len(part.lstrip())
        match = _AMOUNT.fullmatch(part) if len(part) <= 128 else None
        if match is None:
            read = shown_text(part.strip()) if part.strip() else "nothing"
            self.fault(f"{read} is not an amount; write e.g. 2gpu, 32cpu or 512gib", column)
            return
        number, unit = match["number"], match["unit"].lower().removesuffix("s")
        if match["model"] is not None and unit != "gpu":
            self.fault(f"{shown_text(part.strip())}: only GPUs have a model, as in 8gpu:h100", column)
            return
        if unit == "gpu":
            value, key = self._whole(number, 0, MAX_GPUS_PER_NODE, "GPUs per node", column), "gpus"
        elif unit == "cpu":
            value, key = self._cpus(number, column), "cpu_milli"
        else:
            value, key = self._memory(number, match["unit"], column), "memory_bytes"
        if value is None:
            return
        if key in found:
            self.fault(f"{shown_text(part.strip())}: this amount was stated already in the same parentheses", column)
            return
        found[key] = value
        if match["model"] is not None:
            found["gpu_model"] = match["model"].lower()

    def _whole(self, digits: str, low: int, high: int, what: str, column: int) -> int | None:
        if not digits.isdecimal():
            self.fault(f"{shown_text(digits)} is not a whole number of {what}", column)
            return None
        # Length first: int() of very many digits is slow, then refused.
        number = int(digits) if len(digits) <= 9 else high + 1
        if not low <= number <= high:
            self.fault(f"{shown_text(digits)} is out of bounds; {low} to {high} {what} are allowed", column)
            return None
        return number

    def _cpus(self, number: str, column: int) -> int | None:
        try:
            milli = parse_milli(number) if len(number) <= 16 else None
        except QuantityError as error:
            self.fault(str(error), column)
            return None
        if milli is None or milli > MAX_CPUS_PER_NODE * 1000:
            self.fault(f"{shown_text(number)} is out of bounds; up to {MAX_CPUS_PER_NODE} CPUs are allowed", column)
            return None
        return milli

    def _memory(self, number: str, unit: str, column: int) -> int | None:
        try:
            return parse_memory(f"{number}{unit}")
        except QuantityError as error:
            self.fault(f"{error}; besides memory there are gpu and cpu, as in (2gpu,32cpu,512gib)", column)
            return None
