"""How is a story written down? Plain text: comments, commands, and what each command must lead to.

    # Whatever starts with # is for the reader.
    nodes n1:2 n2:cpu=4,gpu=1@zone=b
    submit low priority=1 gpu=1
    ----
    low → RUNNING on n1:0

Commands stand above ``----``, everything they lead to below it, up to the next empty line. After etcd's datadriven
tests: to change many stories, run them with ``UPDATE_SCENARIOS=1`` and read the difference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from callboard.model.durations import parse_duration_ms

RULE = "----"

_TOKEN = re.compile(r'(?:[^\s"()]|\([^)]*\)|"[^"]*")+')
_COMPONENT = re.compile(r"([0-9.]+)x\(([^)]*)\)(?:@(\S+))?")


class ScenarioError(ValueError):
    """A story that can't be read; the text says where and what is allowed."""


@dataclass(frozen=True)
class Command:
    """One line: its verb, the words after it and its ``key=value`` options."""

    text: str
    verb: str
    words: tuple[str, ...]
    options: dict[str, str]


@dataclass(frozen=True)
class Block:
    """Some commands and what they lead to. ``prose``: the lines before them, kept as they are."""

    prose: tuple[str, ...]
    commands: tuple[Command, ...]
    expected: tuple[str, ...]
    line: int


def parse(text: str) -> list[Block]:
    """The blocks of a story; the last may be prose alone."""
    blocks: list[Block] = []
    prose: list[str] = []
    commands: list[Command] = []
    expected: list[str] | None = None
    start = 0

    def close() -> None:
        nonlocal prose, commands, expected
        if commands and expected is None:
            raise ScenarioError(f"line {start}: commands without {RULE} after them")
        if commands or prose:
            blocks.append(Block(tuple(prose), tuple(commands), tuple(expected or ()), start))
        prose, commands, expected = [], [], None

    for number, line in enumerate(text.splitlines(), 1):
        if expected is not None:
            if line.strip():
                expected.append(line.rstrip())
            else:
                close()
                prose.append(line)
        elif line.startswith(RULE):
            expected = []
        elif not line.strip() or line.lstrip().startswith("#"):
            if commands:
                raise ScenarioError(f"line {number}: expected a command or {RULE}")
            prose.append(line.rstrip())
        else:
            start = start if commands else number
            commands.append(command(line))
    close()
    return blocks


def written(blocks: list[Block]) -> str:
    """The inverse of :func:`parse`."""
    lines: list[str] = []
    for block in blocks:
        lines += block.prose
        if block.commands:
            lines += [item.text for item in block.commands]
            lines += [RULE, *block.expected]
    return "\n".join(lines) + "\n"


def command(line: str) -> Command:
    """One command line."""
    tokens = _TOKEN.findall(line)
    words = [token.strip('"') for token in tokens if "=" not in token or token.startswith('"') or ":" in _head(token)]
    options = dict(
        token.split("=", 1)
        for token in tokens
        if "=" in token and not token.startswith('"') and ":" not in _head(token)
    )
    return Command(line.rstrip(), words[0], tuple(words[1:]), {key: value.strip('"') for key, value in options.items()})


def _head(token: str) -> str:
    """What stands before the first ``=``: a node (``n1:cpu=4``) has a colon there, an option has not."""
    return token.split("=", 1)[0]


def duration_ms(text: str) -> int:
    """Milliseconds of ``500ms``, ``1.5s`` or ``2m``."""
    return parse_duration_ms(text)


def amounts(text: str) -> dict[str, str]:
    """``cpu=2,gpu=1`` as a mapping; empty text: nothing."""
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """``role:train,zone:b`` as sorted pairs."""
    found = [pair.split(":", 1) for pair in text.split(",") if pair]
    return tuple(sorted((key, value) for key, value in found))


def repeated(text: str) -> tuple[tuple[int, int], dict[str, str], str]:
    """``2x(cpu=1,gpu=1)@pool`` as ((fewest, most), amounts, pool); ``1..4x(…)`` for an elastic component."""
    count, _, rest = text.partition("x(")
    match = _COMPONENT.fullmatch(f"1x({rest}")
    if match is None:
        raise ScenarioError(f"{text!r} is no component; write 2x(gpu=1) or 1..4x(gpu=1)@pool")
    least, _, most = count.partition("..")
    return (int(least), int(most or least)), amounts(match[2]), match[3] or ""


def node(text: str) -> tuple[str, dict[str, str] | int, tuple[tuple[str, str], ...]]:
    """``n1:2`` or ``n1:cpu=3,gpu=2@zone=b`` as (name, size, labels)."""
    name, _, rest = text.partition(":")
    size, _, labels = rest.partition("@")
    parsed = tuple(sorted(amounts(labels).items()))
    return name, int(size) if size.isdigit() else amounts(size), parsed


def label_rules(text: str) -> dict[str, dict[str, list[str]]]:
    """``role:train>reward+rollout,role:reward>rollout`` as the policy's rules."""
    rules: dict[str, dict[str, list[str]]] = {}
    for rule in text.split(","):
        key, _, rest = rule.partition(":")
        winner, _, losers = rest.partition(">")
        rules.setdefault(key, {})[winner] = losers.split("+")
    return rules
