"""The commands of README and docs/*.md: does each do, and print, what the page says?

What a page can't have a reader see stands in HTML comments before a block:

- `<!-- file: NAME -->`: the block is a file that commands use.
- `<!-- first: COMMANDS -->`: run before, without being shown.
- `<!-- run by tests/… -->`: another test runs it.
- `<!-- not run: REASON -->`: it can't be run here.

A comment in the first line of a page holds for all blocks that have none of their own. In outputs, `…` stands for
anything; times, addresses and columns may differ.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.machine import ROOT

PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<comment>(?:file|first|not run|run by)[: ](?:(?!-->).)*?) -->\n+\s*)?"
    r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
_OUR_LINE = re.compile(r"^ {4,}(?:[$#] )?(?:\S*/)?(?:callboard|scripts/\S+) ", re.MULTILINE)
_MARK = "\036"

_END_ALL = """
names='import json, sys; [print(job["name"]) for job in json.load(sys.stdin)]'
for job in $(callboard job list -o json | python -c "$names")
do callboard job cancel "${job#jobs/}" --grace 0s --wait --quiet
done
"""
"""A page finds an empty cluster, whichever pages came before it."""

_SAME = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:\.\d+)?"), "CLOCK"),
    (re.compile(r"\b\d+(?:\.\d+)? ?(?:ms|s|min|h)\b(?: \d+ s\b)?"), "TIME"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"(?<=\S)[ \t]+"), " "),
    (re.compile(r"─+"), "─"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block, the comment before it, and where it stands."""

    comment: str
    language: str
    text: str
    line: int

    @property
    def commands(self) -> bool:
        bare = self.language in {"", "text"} and self.text.startswith(("$ ", "callboard ", "scripts/"))
        return bare or self.language in {"bash", "console", "sh"}


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    whole = re.match(r"<!-- ((?:run by|not run).*?) -->\n", text)
    for found in _BLOCK.finditer(text):
        indent = len(found["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in found["text"].splitlines(keepends=True))
        comment = found["comment"] or (whole[1] if whole else "")
        yield Block(comment, found["language"], body, text.count("\n", 0, found.start("language")) + 1)


def told(text: str) -> list[tuple[str, str]]:
    """The commands of a console, each with what it prints."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        typed = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n", part)
        assert typed is not None
        found.append((typed[0], part[typed.end() :]))
    return found


def same(text: str) -> str:
    for pattern, instead in _SAME:
        text = pattern.sub(instead, text)
    return text.strip()


def agrees(shown: str, expected: str) -> bool:
    pattern = re.escape(same(expected)).replace("…", ".*?")
    return re.fullmatch(pattern, same(shown), re.DOTALL) is not None


def script_of(page: Path, folder: Path) -> tuple[str, list[tuple[int, str, str]]]:
    """A shell script of a page's commands, and what each of its consoles prints: line, command, output."""
    lines, expected = ["set -e"], []
    for block in blocks(page):
        kind, _, rest = block.comment.partition(": ")
        if kind == "file":
            (folder / rest).parent.mkdir(parents=True, exist_ok=True)
            (folder / rest).write_text(block.text)
        if not block.commands or block.comment.startswith(("run by", "not run")):
            continue
        if kind == "first":
            lines.append(rest)
        if block.language != "console" and not block.text.startswith("$ "):
            lines.append(block.text)
            continue
        for command, output in told(block.text):
            may_fail = " || true" if re.search(r"^(\S+: )?error: ", output, re.MULTILINE) else ""
            lines.append(f"echo {_MARK}; {{ {command.rstrip()}\n}} 2>&1{may_fail}; echo {_MARK}")
            expected.append((block.line, command, output))
    return "\n".join(lines), expected


RUN = [
    name
    for name, page in PAGES.items()
    if any(block.commands and not block.comment.startswith(("run by", "not run")) for block in blocks(page))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of its own: the files of this one, a `.venv` of this interpreter, and a shell's environment."""
    folder = tmp_path_factory.mktemp("pages")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, line in {"callboard": "-m callboard.cli ", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {line}"$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    return folder


def typed(script: str, place: Path, run_dir: Path, **variables: str) -> str:
    """What a shell prints for a script."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CALLBOARD_"))}
    environment |= {
        "CALLBOARD_RUN_DIR": str(run_dir),
        "CALLBOARD_STATE_DIR": str(place / "state"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PATH": f"{place / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    } | variables
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def shared(place: Path) -> Iterator[Path]:
    """The run directory of one cluster for all pages but the README, which starts its own."""
    run_dir = place.with_name(f"{place.name}-run")
    size = "--agents 2 --gpus-per-node 4 --cpus-per-node 8 --memory-per-node 8GiB"
    try:
        typed(f"callboard up {size} --runtime process --detach --quiet", place, run_dir)
        typed("callboard pool create research --cpu 16 --gpu 8", place, run_dir)
        yield run_dir
    finally:
        typed("callboard down --quiet", place, run_dir)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_do_what_it_says(name: str, place: Path, request: pytest.FixtureRequest) -> None:
    script, expected = script_of(PAGES[name], place)
    run_dir = place / "run" if name == "README" else request.getfixturevalue("shared")
    try:
        shown = typed(script, place, run_dir).split(f"{_MARK}\n")[1::2]
    finally:
        if name == "README" and run_dir.exists():
            typed("callboard down --quiet || true", place, run_dir)
        elif name != "README":
            typed(_END_ALL, place, run_dir)
    assert len(shown) == len(expected)
    for printed, (line, command, output) in zip(shown, expected, strict=True):
        assert agrees(printed, output), f"{name}:{line}: $ {command}{printed}"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_cluster_comes_up_by_hand_as_the_page_says(place: Path, tmp_path: Path) -> None:
    """All commands of one section, typed on this machine: its names become loopback, and workers are processes."""
    section = PAGES["operating"].read_text().partition("## N machines by hand\n")[2].partition("\n### ")[0]
    (tmp_path / "section.md").write_text(section)
    port = free_ports(2)[0]
    here = {
        "ray-head.lab.example:7701": f"127.0.0.1:{port + 1}",
        "ray-head.lab.example:7700": f"127.0.0.1:{port}",
        "0.0.0.0:7700": f"127.0.0.1:{port} --page none",
        "0.0.0.0:8080": "127.0.0.1:0",
        "ray-head.lab.example": "127.0.0.1",
        "/var/lib/callboard": str(tmp_path / "state"),
        "--ray-head": "",
    }
    lines = ["set -e", f"cd {tmp_path}", "trap 'kill $(jobs -p); wait' EXIT"]
    logs: list[str] = []
    for block in blocks(tmp_path / "section.md"):
        for stated, _ in told(block.text):
            command = stated.rstrip()
            for there, instead in here.items():
                command = command.replace(there, instead)
            if found := re.match(r"callboard (controller|agent) ", command):
                began = {"controller": "listening", "agent": "session_opened"}[found[1]]
                logs.append(f"log{len(logs)}")
                hosts = " --runtime process" if found[1] == "agent" else ""
                lines.append(
                    f"{command}{hosts} 2> {logs[-1]} &\n"
                    f"until grep -q {began} {logs[-1]}; do kill -0 $!; sleep 0.2; done"
                )
            else:
                lines.append(command.replace("doctor", "doctor && echo all is well"))
            if "certs init" in command:
                lines.append("ln -s state/certs/ca.pem ca.pem")
    homes = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    shown = typed("\n".join(lines), place, tmp_path / "run", **homes)
    assert len(logs) == 3
    assert "nodes: 2 ready" in shown
    assert re.search(r"^ray-head +CPU", shown, re.MULTILINE)
    assert re.search(r"^gpu-1 +CPU", shown, re.MULTILINE)
    assert "all is well" in shown


def free_ports(count: int) -> range:
    """Neighbouring ports that nobody has."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                return range(first, first + count)


@pytest.mark.parametrize("name", PAGES)
def test_no_command_of_a_page_escapes(name: str) -> None:
    """Each is in a block that runs, or whose comment names a test that there is or the reason why none runs it."""
    text = re.sub(r"^ *```.*?^ *```", "", PAGES[name].read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not _OUR_LINE.findall(text), "an indented block: put it between ```"
    for block in blocks(PAGES[name]):
        if block.comment.startswith("run by "):
            assert (ROOT / block.comment.removeprefix("run by ")).exists(), block
        elif block.comment.startswith("not run"):
            assert re.fullmatch(r"not run: \w.{4,}", block.comment), block


def test_an_output_may_differ_in_times_only() -> None:
    assert agrees("Job a yields in 20 ms\nat 127.0.0.1:81", "Job a yields in 3 s\nat 127.0.0.1:7700")
    assert agrees("NAME   AGE\nb        7s\nmore", "NAME AGE\nb 1s\n…")
    assert not agrees("Job a yields in 20 ms", "Job b yields in 20 ms")
    assert not agrees("3 of 4", "2 of 4")
    assert told("$ a \\\n  b\nout\n\n$ c\n") == [("a \\\n  b\n", "out\n\n"), ("c\n", "")]
