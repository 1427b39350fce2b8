"""Are ``docs/scheduling.md`` and ``docs/agents.md`` true? Their diagrams and tables are the code's, their stories are
told again on the real scheduler.

``UPDATE_DOCS=1`` writes them anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from callboard.agents.worker.life import MOVES
from callboard.scheduler.records.states import GROUP_MOVES, JOB_MOVES, NODE_MOVES, WORKER_MOVES, diagram
from tests.scenarios.stage import told

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
AGENTS_PAGE = PAGE.with_name("agents.md")
_DIAGRAM = re.compile(r"<!-- diagram: (\w+) -->\n(?:\n```mermaid\n.*?\n```\n)?", re.DOTALL)
_LIFE = re.compile(r"<!-- life of a worker -->\n(?:\n(?:\|.*\n)+)?")
_STORY = re.compile(r"```story\n(.*?)```\n", re.DOTALL)


def fresh(page: str) -> str:
    """The page with the diagrams of today's tables, and with what really happens in its stories."""
    diagrams = {
        "job": diagram("states of a job", JOB_MOVES),
        "worker": diagram("states of a worker", WORKER_MOVES),
        "group": diagram("states of a placement group", GROUP_MOVES),
        "node": diagram("states of a node", NODE_MOVES),
    }
    page = _DIAGRAM.sub(lambda found: f"<!-- diagram: {found[1]} -->\n\n```mermaid\n{diagrams[found[1]]}\n```\n", page)
    page = _LIFE.sub(lambda _: f"<!-- life of a worker -->\n\n{life()}\n", page)
    return _STORY.sub(lambda found: f"```story\n{told(found[1])}```\n", page)


def life() -> str:
    """The table of a worker's life as Markdown."""
    lines = ["| in the state | when | it becomes | and the agent does |", "|---|---|---|---|"]
    for state, moves in MOVES.items():
        first = f"**{state.name}**: {state.value}"
        for move in dict.fromkeys(moves.values()):
            events = "; or ".join(event.value for event, each in moves.items() if each == move)
            follower = "" if move.state is state else move.state.name
            effects = "; ".join(each.value for each in move.effects)
            lines.append(f"| {first} | {events} | {follower} | {effects} |")
            first = ""
        if first:
            lines.append(f"| {first} | | | |")
    return "\n".join(lines)


@pytest.mark.parametrize("path", [PAGE, AGENTS_PAGE], ids=lambda path: path.stem)
def test_the_page_is_what_the_code_does(path: Path) -> None:
    actual = fresh(path.read_text())
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(actual)
    assert actual == path.read_text(), "run with UPDATE_DOCS=1 and read the difference"


def test_the_page_has_every_diagram_and_a_story_for_each_part() -> None:
    page = PAGE.read_text()
    assert set(_DIAGRAM.findall(page)) == {"job", "worker", "group", "node"}
    assert len(_STORY.findall(page)) >= 8
    assert len(_LIFE.findall(AGENTS_PAGE.read_text())) == 1
