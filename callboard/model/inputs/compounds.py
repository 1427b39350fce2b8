"""Mappings and lists as input: resources, labels, variables, arguments, devices, with every fault of each at once.

Arguments of constructors are what JSON says the same way everywhere, up to 1 MiB. They stay text on the way to the
worker: ``google.protobuf.Struct`` would turn 4 into 4.0.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from callboard.model import names
from callboard.model import names as environment
from callboard.model.frozen import dataclass
from callboard.model.inputs.located import Misfit, OddNumber, Place, Refused, each, raise_any, shown, shown_text
from callboard.model.inputs.scalars import Exact, JsonText, label, module, name, plain_number, refuse_odd, text, whole
from callboard.model.quantities import (
    IN_BYTES,
    MAX_MEMORY_BYTES,
    MAX_MILLI,
    MILLI,
    QuantityError,
    Resources,
    format_amount,
    format_memory,
    parse_memory,
    parse_milli,
)
from callboard.model.schema import Form, Kind, Secrecy

R = TypeVar("R")

MAX_ENTRIES = 64
"""Most entries of labels or of one amount of resources."""

MAX_ENV_BYTES = 1 << 20
"""Largest environment of one component, names and values in UTF-8."""

MAX_DEVICES = 1_024
"""Most devices of one worker; a node has no more."""

MAX_HARDWARE_BYTES = 64 << 10
"""Longest settings of the hardware of one worker."""

MAX_VARIABLE_BYTES = 128 * 1024 - 2
"""Longest name and value together: Linux refuses a single ``NAME=value`` of more than 128 KiB (MAX_ARG_STRLEN)."""


def entries(value: object, what: str, most: int = MAX_ENTRIES) -> list[tuple[str, Any]]:
    """The entries of a mapping with text keys.

    Raises:
        ValueError: something else, or more than ``most`` of them.
    """
    if not isinstance(value, Mapping):
        raise Refused(f"{shown(value)} is not a mapping; write {what}")
    if len(value) > most:
        raise Refused(f"{len(value)} entries are too many; {most} are allowed")
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise Refused(f"{shown(odd)} is not a text, but keys are; put it in quotes if it is meant as one")
    return list(value.items())


def table(
    value: object, what: str, read: Callable[[Any], R], most: int = MAX_ENTRIES, *, key: Callable[[object], str] = name
) -> dict[str, R]:
    """The entries of a mapping, with the keys that ``key`` reads and the values that ``read`` does.

    Raises:
        ValueError: something else, or more than ``most`` of them.
        Misfits: every fault of them.
    """
    misfits: list[Misfit] = []
    found: dict[str, R] = {}
    for stated, item in entries(value, what, most):
        each(stated, key, stated, misfits)
        inner = each(stated, read, item, misfits)
        if inner is not None:
            found[stated] = inner
    raise_any(misfits)
    return found


def resources(value: object) -> Resources:
    """Amounts of one worker or bundle: not negative, whole devices above one. And which GPUs they are for."""
    return _stated(value).amounts


def shape(value: object) -> Resources:
    """Amounts of a reserved group, which hold at least something."""
    read = resources(value)
    if not read:
        raise Refused("the shape is empty; name at least one resource that isn't zero")
    return read


def quota(value: object) -> tuple[tuple[str, int], ...]:
    """A limit per resource, sorted by name; unlike in an ask, zero is a limit too."""
    return tuple(sorted(_amounts(_entries(value), [], whole_devices=False)))


def labels(value: object) -> names.Labels:
    """Label keys and values."""
    return tuple(sorted(table(value, "e.g. {role: train}", label, key=label).items()))


def env(value: object) -> names.Labels:
    """Variables for a worker. Values may be secrets: no message shows one (SE-04)."""
    misfits: list[Misfit] = []
    total_bytes = 0
    if isinstance(value, str):
        raise Refused("a text is not a mapping; write e.g. {LOG_LEVEL: DEBUG}")
    read = entries(value, "e.g. {LOG_LEVEL: DEBUG}", most=4096)
    for key, found in read:
        each(key, variable, key, misfits)
        if not isinstance(found, str):
            kinds = {
                type(None): "nothing",
                bool: "true or false",
                int: "a number",
                OddNumber: "a number",
                float: "a number",
            }
            kind = kinds.get(type(found), "something else")
            misfits.append(Misfit((key,), f"the value is {kind}, not a text; put it in quotes if it is meant as one"))
            continue
        if "\x00" in found or any("\ud800" <= char <= "\udfff" for char in found):
            misfits.append(Misfit((key,), "the value has a character that no variable can carry"))
            continue
        size_bytes = len(key.encode("utf-8", "replace")) + len(found.encode())
        total_bytes += size_bytes
        if size_bytes > MAX_VARIABLE_BYTES:
            misfits.append(Misfit((key,), f"{size_bytes} bytes are too many; Linux allows {MAX_VARIABLE_BYTES}"))
    if total_bytes > MAX_ENV_BYTES:
        misfits.append(Misfit((), f"{total_bytes} bytes are too many; {MAX_ENV_BYTES} are allowed in total"))
    raise_any(misfits)
    return tuple(sorted(read))


def variable(value: object) -> str:
    """The name of a variable that a job may set or pass on (SE-06)."""
    read = text(value)
    if not names.is_env_name(read):
        raise Refused(f"{shown(read)} is not the name of a variable; names match {names.ENV_NAME_PATTERN}")
    refusal = environment.why_refused(read)
    if refusal:
        raise Refused(f"{read} is refused: {refusal}")
    return read


def passed(value: object) -> str:
    """The name of a variable that a job may pass on, or ``NEXRL_*`` for all that begin so (SE-06)."""
    read = text(value)
    prefix = environment.prefix_of(read)
    if not prefix:
        if read.endswith("*"):
            raise Refused(f"{shown(read)} would pass on too much; write names, or a prefix with _*, such as NEXRL_*")
        return variable(read)
    variable(prefix)
    return read


def sequence(value: object, what: str, most: int) -> list[Any]:
    """A list with at most ``most`` items.

    Raises:
        ValueError: something else, or a longer one.
    """
    if not isinstance(value, list | tuple):
        raise Refused(f"{shown(value)} is not a list; write {what}")
    if len(value) > most:
        raise Refused(f"{len(value)} items are too many; {most} are allowed")
    return list(value)


def list_of(item: Callable[[object], Any], what: str, most: int, *, distinct: bool = False) -> Kind:
    """A list whose items ``item`` reads; with ``distinct`` sorted and without repeats."""

    def read(value: object) -> tuple[Any, ...]:
        misfits: list[Misfit] = []
        found = sequence(value, what, most)
        items = [each(index, item, one, misfits) for index, one in enumerate(found)]
        raise_any(misfits)
        return tuple(sorted(set(items))) if distinct else tuple(items)

    return Kind(read, show=list)


def _entries(value: object) -> list[tuple[str, Any]]:
    return entries(value, "e.g. {cpu: 2, memory: 2GiB, gpu: 1}")


def _amounts(stated: Iterable[tuple[str, Any]], misfits: list[Misfit], *, whole_devices: bool) -> list[tuple[str, int]]:
    read: list[tuple[str, int]] = []
    for resource, found in stated:
        each(resource, _resource_name, resource, misfits)
        amount = each(resource, partial(_amount, resource), found, misfits)
        if amount is None:
            continue
        if whole_devices and resource == "gpu" and amount > MILLI and amount % MILLI:
            below = format_amount("gpu", amount - amount % MILLI)
            misfits.append(
                Misfit(
                    (resource,),
                    f"{format_amount('gpu', amount)} is not a number of devices; above 1 only whole ones, e.g. {below}",
                )
            )
        read.append((resource, amount))
    raise_any(misfits)
    return read


def _resource_name(resource: str) -> str:
    if ours := names.RESOURCES_ELSEWHERE.get(resource.lower()):
        raise Refused(f"{resource} is not a resource; here it is called {ours}")
    if not names.is_name(resource):
        raise Refused(
            f"{shown_text(resource)} is not a resource; use cpu, gpu, memory, gpu_memory or {names.NAME_PATTERN}"
        )
    if near := _misspelt(resource):
        raise Refused(f"{resource} is not a resource; did you mean {near}?")
    if resource in names.GPU_SELECTORS:
        raise Refused(f"{resource} says which GPUs a worker may have; only the resources of workers can have it")
    return name(resource)


def _misspelt(resource: str) -> str:
    """The resource that is meant by a name that is nearly its own: as a custom one it would be on no node."""
    word = resource[:80].lower()
    if word in names.OWN_RESOURCES:
        return "" if resource == word else word
    known = [each for each in sorted(names.OWN_RESOURCES) if len(each) > 3]  # gpu2 and tpu are others
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.82)), "")


def _amount(resource: str, value: object) -> int:
    # One that is refused by its name is read as what it is meant for.
    resource = names.RESOURCES_ELSEWHERE.get(resource.lower()) or _misspelt(resource) or resource
    if resource in names.GPU_SELECTORS:
        return 0
    amount = value.amount if isinstance(value, Exact) else _parsed_amount(resource, value)
    most = MAX_MEMORY_BYTES if resource in IN_BYTES else MAX_MILLI
    if amount < 0:
        raise Refused(f"{format_amount(resource, amount)} is negative; 0 or more is allowed")
    if amount > most:
        raise Refused(f"{format_amount(resource, amount)} is larger than {format_amount(resource, most)}")
    return amount


def _parsed_amount(resource: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Refused(f"{shown(value)} is not an amount; write e.g. {'2GiB' if resource in IN_BYTES else '1.5'}")
    if isinstance(value, str) and len(value) > 64:
        raise Refused(f"{shown(value)} is not an amount")
    refuse_odd(value)
    if isinstance(value, int) and value.bit_length() > 128:
        raise Refused(f"{shown(value)} is out of bounds")
    if resource in IN_BYTES and isinstance(value, int | float) and value < 0:
        raise Refused(f"{value} is negative; 0 or more is allowed")
    try:
        return parse_memory(value) if resource in IN_BYTES else parse_milli(value)
    except QuantityError as error:
        raise Refused(str(error)) from None


@dataclass(frozen=True, slots=True)
class Stated:
    """Amounts, and which resources were stated as none: those take no preset."""

    amounts: Resources
    zeros: tuple[str, ...]


def _stated(value: object) -> Stated:
    stated, misfits = dict(_entries(value)), list[Misfit]()
    model = each("gpu_model", _model, stated.pop("gpu_model"), misfits) if "gpu_model" in stated else ""
    least = stated.pop("gpu_memory_min", None)
    least_bytes = 0 if least is None else each("gpu_memory_min", partial(_amount, "gpu_memory"), least, misfits)
    read = _amounts(stated.items(), misfits, whole_devices=True)
    amounts = replace(Resources.from_items(read), gpu_model=model or "", gpu_memory_min_bytes=least_bytes or 0)
    return Stated(amounts, tuple(sorted(name for name, amount in read if not amount)))


_MODEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._+()/-]{0,98}[A-Za-z0-9)])?")


def _model(value: object) -> str:
    """Words of the model of a GPU."""
    read = text(value).strip()
    if not _MODEL.fullmatch(read):
        raise Refused(f"{shown_text(read)} is not the model of a GPU; write words of it, such as H200 or A100 80GB")
    return read


def amounts_to_mapping(amounts: Iterable[tuple[str, int]]) -> dict[str, int | float | str]:
    """Amounts as people write them: ``{"cpu": 1.5, "memory": "2GiB"}``, exact."""
    return {name: _memory(amount) if name in IN_BYTES else plain_number(amount) for name, amount in amounts}


def _memory(amount_bytes: int) -> str:
    shortest = format_memory(amount_bytes)
    return f"{amount_bytes}B" if "." in shortest else shortest  # "1.5GiB" may be rounded


def _resources_to_mapping(amounts: Resources) -> dict[str, int | float | str]:
    found = amounts_to_mapping(amounts.items())
    if amounts.gpu_model:
        found["gpu_model"] = amounts.gpu_model
    if amounts.gpu_memory_min_bytes:
        found["gpu_memory_min"] = _memory(amounts.gpu_memory_min_bytes)
    return found


def _device(value: object) -> tuple[int, int]:
    """A device as its index, or as a mapping with the share."""
    misfits: list[Misfit] = []
    stated = value if isinstance(value, Mapping) else {"index": value}
    odd = sorted(str(key) for key in stated if key not in ("index", "milli"))
    misfits += [Misfit((key,), f"unknown key {shown_text(key)}; known keys are index, milli") for key in odd]
    index = _each_of(stated, "index", whole(0, MAX_DEVICES - 1), misfits)
    milli = _each_of(stated, "milli", whole(1, MILLI), misfits)
    if stated.get("index") is None:
        misfits.append(Misfit(("index",), "is required"))
    raise_any(misfits)
    return index or 0, MILLI if milli is None else milli


def _each_of(stated: Mapping[Any, Any], key: str, kind: Kind, misfits: list[Misfit]) -> int | None:
    return None if stated.get(key) is None else each(key, kind.read, stated[key], misfits)


def _show_device(device: tuple[int, int]) -> object:
    index, milli = device
    return index if milli == MILLI else {"index": index, "milli": milli}


def _hardware(value: object) -> str:
    read = text(value)
    if len(read.encode()) > MAX_HARDWARE_BYTES:
        raise Refused(f"{len(read.encode())} bytes are too many; {MAX_HARDWARE_BYTES} are allowed")
    try:
        settings = json.loads(read)
    except (ValueError, RecursionError):
        raise Refused("is not JSON; write a JSON array of settings") from None
    if not isinstance(settings, list):
        raise Refused("is not a JSON array of settings")
    return read


def _pieces(value: object) -> tuple[tuple[str, int], ...]:
    """Pieces of declared hardware with the share of each, in milli."""
    misfits: list[Misfit] = []
    read = []
    for piece, milli in entries(value, 'e.g. {"Franka/0": 1000}'):
        kind, _, position = piece.partition("/")
        if not (names.is_name(kind) and position.isascii() and position.isdigit()):
            misfits.append(
                Misfit((piece,), "is not a piece of hardware; write its type and its number, as in Franka/0")
            )
        elif (share := each(piece, whole(1, MILLI).read, milli, misfits)) is not None:
            read.append((piece, share))
    raise_any(misfits)
    return tuple(sorted(read))


Amounts = Annotated[Resources, Kind(resources, _resources_to_mapping, Form.AMOUNTS)]
StatedAmounts = Annotated[Resources, Kind(_stated, _resources_to_mapping, Form.AMOUNTS)]
"""Read as :class:`Stated`."""
Total = Annotated[Resources, Kind(shape, _resources_to_mapping, Form.AMOUNTS, unsaid=Resources())]
Shapes = Annotated[
    tuple[Resources, ...],
    Kind(
        list_of(shape, "e.g. [{cpu: 2, gpu: 1}]", 1000).read,
        lambda shapes: [_resources_to_mapping(each) for each in shapes],
        Form.SHAPES,
    ),
]
Quota = Annotated[tuple[tuple[str, int], ...], Kind(quota, amounts_to_mapping, Form.QUOTA)]
LabelMap = Annotated[names.Labels, Kind(labels, dict, Form.PAIRS)]
Env = Annotated[names.Labels, Kind(env, dict, Form.PAIRS, secrecy=Secrecy.BY_NAME)]
SecretEnv = Annotated[names.Labels, Kind(env, dict, Form.PAIRS, secrecy=Secrecy.ALL)]
Modules = Annotated[tuple[str, ...], list_of(module, "e.g. [torch, transformers]", 16)]
PassEnv = Annotated[tuple[str, ...], list_of(passed, "e.g. [HF_TOKEN, NEXRL_*]", 256, distinct=True)]
Devices = Annotated[
    tuple[tuple[int, int], ...],
    Kind(
        list_of(_device, "e.g. [0, 1]", MAX_DEVICES).read,
        lambda devices: [_show_device(each) for each in devices],
        Form.DEVICES,
    ),
]
HardwareJson = Annotated[str, Kind(_hardware, unsaid="")]
Pieces = Annotated[tuple[tuple[str, int], ...], Kind(_pieces, dict, Form.PAIRS)]


MAX_ARGUMENTS_BYTES = 1 << 20
"""Largest ``args_json`` or ``kwargs_json``."""

MAX_DEPTH = 64
"""Deepest nesting of constructor arguments."""

_MOST_BITS = 4096  # Python itself refuses to read or write ints of more than 4300 digits


def arguments(kind: type[list[Any] | dict[str, Any]]) -> Kind:
    """Constructor arguments, plain values or :class:`JsonText`, as JSON text. Text from a message stays as it is."""
    what = "a list" if kind is list else "a mapping"

    def read(value: object) -> str:
        if isinstance(value, JsonText):
            written, parsed = value.text, _parsed_json(value.text)
        else:
            written, parsed = "", value
        if not isinstance(parsed, list | tuple if kind is list else dict):
            raise Refused(f"{shown(parsed)} is not {what}; write {'[1, two]' if kind is list else '{lr: 0.1}'}")
        # A value takes a byte at least; a list that has itself twice has values without end.
        misfits = list(_unfit(parsed, (), _counted()))
        raise_any(misfits)
        written = written or json.dumps(parsed, separators=(",", ":"), allow_nan=False)
        size_bytes = len(written.encode())
        if size_bytes > MAX_ARGUMENTS_BYTES:
            raise Refused(f"{size_bytes} bytes of JSON are too many; {MAX_ARGUMENTS_BYTES} are allowed")
        return written

    return Kind(read, show=json.loads, form=Form.JSON)


def _parsed_json(written: str) -> object:
    if len(written) > MAX_ARGUMENTS_BYTES:
        raise Refused(f"{len(written)} characters of JSON are too many; {MAX_ARGUMENTS_BYTES} bytes are allowed")
    try:
        found: object = json.loads(written, object_pairs_hook=_distinct)
    except RecursionError:
        raise Refused(f"the JSON is nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"no JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("a key of the JSON occurs twice in one object")
    return found


def _counted() -> Iterator[int]:
    yield from range(MAX_ARGUMENTS_BYTES)
    raise Refused(
        f"there are more than {MAX_ARGUMENTS_BYTES} values; at most {MAX_ARGUMENTS_BYTES} bytes of JSON are allowed"
    )


def _unfit(value: object, place: Place, values: Iterator[int]) -> Iterator[Misfit]:
    """What JSON can't say the same way everywhere.

    Args:
        values: counts those that were looked at.
    """
    next(values)
    if len(place) > MAX_DEPTH:
        yield Misfit(place[:8], f"nested deeper than {MAX_DEPTH}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Misfit(place, f"{value} is not a finite number; JSON has no such value")
    elif isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            yield Misfit(place, "the text has half of a surrogate pair, which no message can carry")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unfit(item, (*place, index), values)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _unfit(item, (*place, key), values)
            else:
                yield Misfit(place, f"the key {shown(key)} is not a text")
    elif isinstance(value, int) and (isinstance(value, OddNumber) or value.bit_length() > _MOST_BITS):
        yield Misfit(place, value.why if isinstance(value, OddNumber) else "the number has too many digits")
    elif not (value is None or isinstance(value, bool | int | float)):
        yield Misfit(
            place, f"{shown(value)} is not a JSON value; use null, true, false, numbers, texts, lists, mappings"
        )


ArgsJson = Annotated[str, arguments(list)]
KwargsJson = Annotated[str, arguments(dict)]
