"""Single values of a config: labels, ranks, numbers, flags, each read and bounded once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from callboard.model.inputs.located import shown_text
from callboard.model.names import LABEL_PATTERN, is_label
from callboard.placement.source.diagnostics import Report, Where, nearest_of, parts_of, unknown
from callboard.placement.source.tree import Items, Leaf, Table, Value, kind_of, traps

MAX_ITEMS = 100_000
"""Most items of a list of nodes, ranks or hardware."""

_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")
_RANKS = re.compile(r"[0-9][0-9:-]*")
_SHARE = re.compile(r"(?P<part>0?\.[0-9]{1,3}|1\.0{1,3}|0\.[0-9]{1,3})|(?P<milli>[0-9]{1,4})(?P<unit>m?)")


def table(value: Value, what: str, report: Report) -> Table | None:
    """``value`` as a mapping; None with a fault."""
    if isinstance(value, Table):
        return value
    report.fault(value.where, f"{kind_of(value)} is not a mapping; write {what}", read=kind_of(value), allowed=what)
    return None


def known_keys(
    found: Table, known: Sequence[str], report: Report, component: str = "", *, passed_over: Sequence[str] = ()
) -> None:
    """A fault for each key that is neither known nor passed over, with the nearest that is known (rule 6)."""
    before: tuple[Leaf, Value] | None = None
    for torn, group in groupby(found.entries, key=_is_torn_off):
        entries = list(group)
        for key, _ in entries if not torn or before is None else ():
            if key.text not in known and key.text not in passed_over:
                sentence, near = unknown("key", key.text, known, shown_text(key.text))
                report.fault(key.where.of(component), sentence, read=key.text, allowed=", ".join(known), nearest=near)
        if torn and before is not None:
            rest = ",".join(key.text for key, _ in entries)
            whole = f'{before[0].text}: "{before[1].text if isinstance(before[1], Leaf) else ""},{rest}"'
            said = f"between braces a comma begins a new key, and {rest} is none; write {whole}"
            report.fault(entries[0][0].where.of(component), said, read=rest, allowed=whole)
        before = entries[-1]


def _is_torn_off(entry: tuple[Leaf, Value]) -> bool:
    """Whether this is no key but the rest of a text with commas: {node_ranks: 1,3}."""
    key, value = entry
    return _RANKS.fullmatch(key.text) is not None and isinstance(value, Leaf) and value.null


def meant_keys(found: Table, known: Sequence[str]) -> set[str]:
    """The known keys that misspelt ones were meant for: told once, and nothing is concluded from their absence."""
    return {nearest_of(key.text, known) for key, _ in found.entries if key.text not in known}


def text(value: Value, what: str, report: Report, component: str = "") -> Leaf | None:
    """``value`` as a scalar whose text is known; None with a fault."""
    where = value.where.of(component)
    if not isinstance(value, Leaf):
        report.fault(where, f"{kind_of(value)} is not {what}", read=kind_of(value), allowed=what)
        return None
    if value.problem:
        report.fault(where, value.problem, allowed=what)
        return None
    if value.lost:
        message = f"{value.lost} is what a YAML reader made of {what} written without quotes; quote it"
        report.fault(where, message, read=value.lost, allowed=what)
        return None
    return value


def unresolved(read: str) -> str:
    """Why ``read`` is no value yet, where Hydra would put one in its place; empty: it is one."""
    if "${" in read:
        return f"{shown_text(read)} is an interpolation, which nobody resolved; give the composed config"
    return "'???' marks a value that is still missing; state it" if read == "???" else ""


def label(value: Value, what: str, report: Report, component: str = "") -> str | None:
    """``value`` as a label of a node group (rule 7); None with a fault.

    A bare label that another reader of YAML takes for a number or a truth value is refused although it is text here:
    the same file is read by the job's own program too, and must name the same group there (PS-02).
    """
    found = text(value, f"a {what}", report, component)
    if found is None:
        return None
    where = found.where.of(component)
    read = found.text.strip()
    trap = traps(read) if found.bare else ""
    if trap:
        report.fault(
            where,
            f"{shown_text(read)} without quotes is {trap} for other readers of YAML; quote this {what}: "
            f'"{shown_text(read)[1:-1]}"',
            read=read,
            allowed=f"a quoted {what}",
        )
        return None
    if not is_label(read) or "/" in read:
        report.fault(
            where,
            unresolved(read)
            or f"{shown_text(read)} is no {what}; it starts and ends with a letter or digit, up to 63 of letters, "
            "digits, '_', '.' and '-'",
            read=read,
            allowed=LABEL_PATTERN,
        )
        return None
    return read


def whole(value: Value, low: int, high: int, what: str, report: Report) -> int | None:
    """``value`` as a whole number of bounds; None with a fault."""
    found = text(value, what, report)
    if found is None:
        return None
    read = found.text.strip()
    number = int(read) if _RANK.fullmatch(read) else -1
    if low <= number <= high:
        return number
    report.fault(
        found.where,
        unresolved(read) or f"{shown_text(read)} is no {what}; {low} to {high} is allowed",
        read=read,
        allowed=f"{low} to {high}",
    )
    return None


def flag(value: Value, what: str, report: Report) -> bool | None:
    """``value`` as true or false; None with a fault."""
    if isinstance(value, Leaf) and value.bare and value.text.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.text.lower() in ("true", "yes", "on")
    said = kind_of(value)
    why = unresolved(value.text) if isinstance(value, Leaf) else ""
    message = why or f"{said} is neither true nor false, as {what} is"
    report.fault(value.where, message, read=said, allowed="true or false")
    return None


def share_milli(value: Value, report: Report, component: str) -> int | None:
    """``share``: milli-GPU of each worker, 1 to 1000; also ``500m`` and the part of a GPU, ``0.5``."""
    where = value.where.of(component)
    hint = "write milli-GPU per worker, 2 to 1000, or a part of a GPU such as 0.5"
    match = _SHARE.fullmatch(value.text.strip()) if isinstance(value, Leaf) else None
    if match is None:
        report.fault(
            where, f"{kind_of(value)} is not a share; {hint}", read=kind_of(value), allowed="1 to 1000 milli-GPU"
        )
        return None
    if match["part"] is not None:
        whole_part, _, decimals = match["part"].partition(".")
        milli = int(whole_part or "0") * 1000 + int(decimals.ljust(3, "0"))
    else:
        milli = int(match["milli"])
        if milli == 1 and not match["unit"]:
            report.fault(where, "the share 1 may mean one milli-GPU or one GPU; write 1m or 1000", read="1")
            return None
    if not 1 <= milli <= 1000:
        report.fault(where, f"the share {milli} is out of bounds; {hint}", read=str(milli), allowed="1 to 1000")
        return None
    return milli


def node_ranks(value: Value, known: Sequence[int], report: Report) -> tuple[int, ...] | None:
    """Node ranks: a number, ``0-3``, ``0,2``, ``all`` or a list; ascending, each once, each of a node that is there.

    Args:
        known: ranks of the nodes that are there, ascending.
    """
    leaves: list[Leaf] = []
    for item in value.items if isinstance(value, Items) else (value,):
        found = text(item, "a node rank", report)
        if found is None:
            return None
        leaves.append(found)
    if not leaves:
        report.fault(value.where, "there is no node rank; write e.g. 0-3, 0,2 or all")
        return None
    there = frozenset(known)
    ranks: list[int] = []
    fine = True
    for leaf in leaves:
        if leaf.text.strip().lower() == "all" and len(leaves) == 1:
            return tuple(known)
        if _sexagesimal(leaf):
            message = f"{leaf.text} may be what a YAML reader made of a pair such as 1:0; quote it"
            report.fault(leaf.where, message, read=leaf.text)
            return None
        for part, where in parts_of(leaf.text, leaf.where):
            fine = _take_ranks(part, where, there, ranks, report) and fine
    return tuple(ranks) if fine else None


def _take_ranks(part: str, where: Where, there: frozenset[int], ranks: list[int], report: Report) -> bool:
    match = _RANGE.fullmatch(part)
    if match is None or any(digits and digits[0] == "0" and digits != "0" for digits in match.groups()):
        said = shown_text(part)
        report.fault(where, f"{said} is not a node rank or range; write e.g. 0-3, 0,2 or all", read=part)
        return False
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        report.fault(where, f"the range {low}-{high} descends; write {high}-{low}", read=part)
        return False
    if ranks and low <= ranks[-1]:
        report.fault(
            where,
            f"node ranks ascend and occur once: {low} comes after {ranks[-1]}; to number a later node first, make "
            "groups of both and name them in that order",
            read=str(low),
            allowed=f"{ranks[-1] + 1} or more",
        )
        return False
    # At most one rank more than there are nodes is looked at, however long the range.
    missing = next((rank for rank in range(low, high + 1) if rank not in there), None)
    if missing is not None:
        report.fault(
            where,
            f"there is no node of rank {missing}; nodes are {rank_list(sorted(there))}",
            read=part,
            allowed=rank_list(sorted(there)),
        )
        return False
    ranks.extend(range(low, high + 1))
    return True


def rank_list(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` → ``0-2,5``."""
    if not ranks:
        return "none"
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], -1]:
        if rank != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = rank
        previous = rank
    return ",".join(parts)


def _sexagesimal(leaf: Leaf) -> bool:
    """Whether a parsed number may have been a pair: YAML 1.1 reads ``1:0`` as 60, and never as less."""
    return not leaf.where.line and leaf.bare and isinstance(leaf.value, int) and leaf.value >= 60


def placement_text(value: Value, report: Report, component: str) -> Leaf | None:
    """A placement as its text; None with a fault. A parsed number from 60 on may have been a pair (PS-01)."""
    if isinstance(value, Items):
        written = ",".join(item.text for item in value.items if isinstance(item, Leaf)) or "0-3"
        where = value.where.of(component)
        report.fault(where, f"a list is not a placement; write it as one text: {written}", allowed="a placement")
        return None
    found = text(value, "a placement", report, component)
    if found is None:
        return None
    if _sexagesimal(found):
        number = int(found.text)
        pair = f'"{number // 60}:{number % 60}"'
        report.fault(
            found.where.of(component),
            f"{number} may be what a YAML reader made of {pair}, so it is not clear what was written; quote it: "
            f'"{number}" or {pair}',
            read=found.text,
            allowed="a quoted text",
        )
        return None
    return found


def as_json(value: Value, report: Report) -> str:
    """``value`` as JSON, mappings in the order written."""
    return json.dumps(_json(value, report), ensure_ascii=False, separators=(",", ":"))


def _json(value: Value, report: Report) -> Any:
    if isinstance(value, Table):
        return {key.text: _json(inner, report) for key, inner in value.entries}
    if isinstance(value, Items):
        return [_json(inner, report) for inner in value.items]
    if value.problem:
        report.fault(value.where, value.problem)
    odd = value.value is None if value.lost else False
    if odd or (isinstance(value.value, float) and not math.isfinite(value.value)):
        report.fault(value.where, f"{value.lost or value.text} is not a text, number, list or mapping")
    return value.value
