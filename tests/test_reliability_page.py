"""docs/reliability.md lists every queue, with the bounds that the code has and tests that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from callboard.controller.options import Limits

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
QUEUE = re.compile(r"\b(?:asyncio\.Queue|queue\.Queue|SimpleQueue|deque|(?:Bounded)?Semaphore)(?:\[[^=\n]*\])?\(")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]


def sources() -> list[Path]:
    """Modules that run in a cluster; those of the simulator keep what a run needs."""
    return [path for path in sorted((ROOT / "callboard").rglob("*.py")) if "simulation" not in path.parts]


def test_every_module_with_a_queue_is_listed() -> None:
    found = {str(path.relative_to(ROOT / "callboard")) for path in sources() if QUEUE.search(path.read_text())}
    assert len(found) > 8
    assert {name for name in found if f"`{name}`" not in PAGE} == set()


def test_every_place_that_is_named_exists() -> None:
    for place in re.findall(r"\| `((?:controller|agents|client|cli|security|scheduler)/[^`]*)`", PAGE):
        assert (ROOT / "callboard" / place).exists(), place


def test_every_limit_is_listed_with_its_number() -> None:
    for limit in fields(Limits):
        assert isinstance(limit.default, int)
        shown = {str(limit.default), f"{limit.default >> 20} MiB"}
        assert any(f"`{limit.name}` = {number}" in PAGE for number in shown), limit.name


def test_every_number_is_the_one_of_its_module() -> None:
    compared = 0
    for row in ROWS:
        place = re.search(r"`([a-z]+/[^`]*\.py)`", row)
        for name, number in re.findall(r"`(_?[A-Z][A-Z_]+)` = (\d+)", row):
            assert place is not None, row
            text = (ROOT / "callboard" / place[1]).read_text()
            stated = re.search(rf"^{name} = ([\d_]+)(?: \* 1024 \* 1024| << 20)?$", text, re.MULTILINE)
            assert stated is not None, (place[1], name)
            assert int(stated[1]) == int(number), (place[1], name)
            compared += 1
    assert compared > 12


@pytest.mark.parametrize("page", ["reliability.md", "scheduling.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    assert len(named) > 12
    assert named <= known, named - known
