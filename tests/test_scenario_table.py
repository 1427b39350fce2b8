"""Which test shows which scenario? ``docs/scenarios.md`` is made from the tests themselves, so it can't rot.

A test shows a scenario when its name holds the id (``test_pc01_…``, ``test_nj_04_…``) or its docstring does
(``NJ-05``). ``UPDATE_DOCS=1`` writes the table anew.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "scenarios.md"
STORIES = ROOT / "tests" / "scenarios"

_IN_NAME = re.compile(r"(?:^|_)(pc|ql|pg|nj)_?(\d\d)(?=_)")
_IN_DOCSTRING = re.compile(r"\b(PC|QL|PG|NJ)-(\d\d)\b")

HEAD = """# Scenarios and the tests that show them

Each scenario comes from a public bug report on a system that does part of this job. The table is made from the tests
(`tests/test_scenario_table.py`) and checked with them: a test shows a scenario when its name or its docstring holds
the id. Stories are plain text that reads like a log: start there to learn the rules.
"""


@dataclass(frozen=True)
class Scenario:
    """What must hold, the stories that tell of it, and what no test shows yet."""

    holds: str
    stories: tuple[str, ...] = ()
    missing: str = ""


SCENARIOS = {
    "PC-01": Scenario("Victims that end at different times do not come back in between.", ("nomination",)),
    "PC-02": Scenario(
        "No loop of preempting and admitting. An impossible job evicts nobody.", ("no_eviction_in_vain",)
    ),
    "PC-04": Scenario("Nobody is evicted for a job that still could not start.", ("no_eviction_in_vain",)),
    "PC-05": Scenario("A gang may need free room and a victim together."),
    "PC-07": Scenario("One victim serves two components of a job."),
    "PC-08": Scenario(
        "A preempted job runs again: next attempt, first submit time, its checkpoint.", ("requeue_with_checkpoint",)
    ),
    "PC-10": Scenario("Cancelling ends busy code by its timeout."),
    "PC-11": Scenario("A hook that hangs does not move the timeout."),
    "PC-12": Scenario("Children that hide go too, or their slot is quarantined.", ("quarantine",)),
    "PC-13": Scenario("A cancel at any moment of a start leaves nothing."),
    "PC-14": Scenario(
        "A name is free as soon as its job has ended.", (), "agents: a lookup of the Ray actor's name in the gap"
    ),
    "PC-16": Scenario("Only resources that are asked for and limited count."),
    "PC-17": Scenario("A victim that is gone already counts as gone."),
    "PC-19": Scenario(
        "The gap must reach the threshold; the youngest of equals yields; never the own components.",
        ("same_pool_thresholds", "preemption_youngest"),
    ),
    "PC-20": Scenario("What a victim frees goes to nobody but its preemptor.", ("nomination", "overtaken")),
    "QL-01": Scenario("Quota is the sum over what may still have a process; a stopped job holds none."),
    "QL-02": Scenario("A gang that restarts is charged whole before its ranks start.", ("gang_charged_whole",)),
    "QL-03": Scenario("After a restart nothing is admitted before what runs is counted.", ("controller_restart",)),
    "QL-04": Scenario("A quota lowered under use: over, nothing free, nothing admitted.", ("quota_lowered",)),
    "QL-05": Scenario("A pool that is being deleted lends nothing."),
    "QL-07": Scenario("A pool never goes beyond its cap, and evicts nobody for that.", ("cohort_limits",)),
    "QL-08": Scenario("A lender takes back exactly what it needs, or nothing.", ("cohort_borrow_and_reclaim",)),
    "QL-10": Scenario("Jobs within their own quota go before borrowers."),
    "QL-11": Scenario("Reports that come twice, late or swapped move no counter."),
    "PG-01": Scenario("Ranks follow nodes and devices, whatever the order of bundles."),
    "PG-02": Scenario("Whoever waits is woken, in order."),
    "PG-04": Scenario("A cancel during a creation frees the room at once; a late answer changes nothing."),
    "PG-05": Scenario("A removal stays owed until it is done or its node is given up."),
    "PG-07": Scenario(
        "What a dead creator left is found and removed; a group can be removed by its id.",
        (),
        "controller: groups in Ray that no journal knows are found and removed after a restart",
    ),
    "PG-08": Scenario("What no node could hold is refused at once, with the reason.", ("unschedulable",)),
    "PG-10": Scenario("Every resource is compared on every node with what is free there."),
    "PG-11": Scenario("A head without resources is no worker; every node left out is named."),
    "PG-13": Scenario(
        "Nodes are named by id; an unknown one is refused with those that are known.",
        (),
        "agents: joining with `--node-ip` on a host with several addresses",
    ),
    "PG-14": Scenario(
        "A worker that asks nothing is kept with its group.", (), "agents: the same with a real Ray placement group"
    ),
    "PG-16": Scenario("Uneven nodes: each worker knows its own local world size."),
    "PG-17": Scenario("A job waits for nodes as long as it says, then leaves no ghost.", ("wait_for_nodes",)),
    "PG-19": Scenario("A job's helpers never take the room of its engines: all are planned together.", ("two_pools",)),
    "PG-20": Scenario("A kept group is used again only after its last user is proved gone.", ("reuse",)),
    "NJ-01": Scenario("The same node or device never joins twice."),
    "NJ-02": Scenario("A node given up and back ends its old workers before it takes work.", ("fenced_node",)),
    "NJ-04": Scenario("A port that is taken is named, and nothing starts."),
    "NJ-05": Scenario("Stopping one cluster ends nothing else."),
    "NJ-07": Scenario("A second node that dies during recovery leaves nothing half placed."),
    "NJ-08": Scenario("Two half-lost gangs do not wait for each other.", ("node_loss",)),
    "NJ-10": Scenario("A cordoned or draining node takes nothing new.", ("cordon", "drain")),
    "NJ-11": Scenario(
        "History is capped.", (), "controller: heartbeat delay and memory over 10 000 jobs with two agents"
    ),
    "NJ-13": Scenario("Ranks are unique, the lowest free, and kept."),
    "NJ-14": Scenario("After a restart everything that runs can still be stopped."),
}


@cache
def shown() -> dict[str, list[str]]:
    """``file::test`` by the id of the scenario it shows."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for scenario in _ids(node):
                    found.setdefault(scenario, []).append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def _ids(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    named = [f"{kind.upper()}-{number}" for kind, number in _IN_NAME.findall(node.name)]
    told = [f"{kind}-{number}" for kind, number in _IN_DOCSTRING.findall(ast.get_docstring(node) or "")]
    return list(dict.fromkeys(named + told))


def table() -> str:
    """The whole document."""
    tests = shown()
    lines = [HEAD]
    for scenario, what in SCENARIOS.items():
        lines.append(f"## {scenario}\n\n{what.holds}\n")
        lines += [f"- story [`{story}`](../tests/scenarios/{story}.txt)" for story in what.stories]
        lines += [f"- `{name}`" for name in tests.get(scenario, [])]
        if what.missing:
            lines.append(f"- not shown yet: {what.missing}")
        lines.append("")
    return "\n".join(lines)


def test_the_table_is_what_the_tests_say() -> None:
    if os.environ.get("UPDATE_DOCS"):
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table())
    assert TABLE.read_text() == table(), "run with UPDATE_DOCS=1"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_has_a_test(scenario: str) -> None:
    assert shown().get(scenario)
    assert [story for story in SCENARIOS[scenario].stories if not (STORIES / f"{story}.txt").exists()] == []


def test_no_test_names_a_scenario_that_is_not_listed() -> None:
    assert sorted(set(shown()) - set(SCENARIOS)) == []
