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

_IN_NAME = re.compile(r"(?:^|_)(ps|gv|pc|ql|pg|nj|ap|mu|se|gc)_?(\d\d)(?=_)")
_IN_DOCSTRING = re.compile(r"\b(PS|GV|PC|QL|PG|NJ|AP|MU|SE|GC)-(\d\d)\b")
_FOUND_IN_NAME = re.compile(r"(?:^|_)ft_([a-i]\d\d?)(?=_)")
_FOUND_IN_DOCSTRING = re.compile(r"\bFT-([A-I]\d\d?)\b")

HEAD = """# Scenarios and the tests that show them

Each scenario comes from a public bug report on a system that does part of this job, or (FT) from people who tried
callboard. The table is made from the tests (`tests/test_scenario_table.py`) and checked with them: a test shows a
scenario when its name or its docstring holds the id. Stories are plain text that reads like a log: start there to learn
the rules.
"""


@dataclass(frozen=True)
class Scenario:
    """What must hold, the stories that tell of it, and what no test shows yet."""

    holds: str
    stories: tuple[str, ...] = ()
    missing: str = ""


SCENARIOS = {
    "PS-01": Scenario("A pair such as `1:0` is never a number of base 60."),
    "PS-02": Scenario("Labels of node groups are texts; what another reader of YAML loses must be quoted."),
    "PS-04": Scenario("Several node groups may be a list or a text."),
    "PS-05": Scenario("Process ranks start at 0 and go on without a gap, or are refused."),
    "PS-07": Scenario("A process that would need two nodes is refused before anything starts."),
    "PS-08": Scenario("Every block of a packed range lies on one node, and every rank is used once."),
    "PS-10": Scenario("No resource gets two ranks."),
    "PS-11": Scenario("Node groups number their ranks in the order written."),
    "PS-13": Scenario("Where a rank is a node because there are no GPUs, that is said, or refused."),
    "PS-14": Scenario("Nothing of a node group is outside its nodes."),
    "PS-16": Scenario("Counts that don't divide are refused with the nearest that do."),
    "PS-17": Scenario("A number of nodes that is stated is honoured or refused."),
    "PS-19": Scenario("A component that is missing or empty is one clear fault."),
    "PS-20": Scenario("A plan that is written down and read again keeps its groups and its map."),
    "GV-01": Scenario("Numbers are positions in the node's visible list; children see the ids behind them."),
    "GV-02": Scenario("Two agents of one machine offer what each may see, and no more."),
    "GV-04": Scenario("The only device is given again at once, and only when its process is gone."),
    "GV-05": Scenario("Shares never straddle devices, and each worker sees the device of its share."),
    "GV-07": Scenario("LOCAL_RANK is an index into the worker's own visible list: two groups never meet by it."),
    "GV-08": Scenario("What a worker starts sees the worker's devices; no device has two owners."),
    "GV-10": Scenario("A node that declares more devices than it can see does not join."),
    "GV-11": Scenario("A worker without devices sees none, whatever Ray's default is."),
    "GV-13": Scenario("Device ids are those of the worker's own node."),
    "GV-14": Scenario("What we use is booked in Ray: others wait for it. Two controllers never share a Ray cluster."),
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
        "A name is free once its job is on its way out, and leads to the next one at once.", ("name_again",)
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
    "PG-07": Scenario("What a dead creator left is found and removed; a group can be removed by its id."),
    "PG-08": Scenario("What no node could hold is refused at once, with the reason.", ("unschedulable",)),
    "PG-10": Scenario("Every resource is compared on every node with what is free there."),
    "PG-11": Scenario("A head without resources is no worker; every node left out is named."),
    "PG-13": Scenario(
        "Nodes are named by id, addresses are the host's own; an unknown one is refused with those that are known."
    ),
    "PG-14": Scenario("A worker that asks nothing is kept with its group."),
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
        "History is capped: 10 000 jobs leave memory and heartbeats as they were (`benchmarks/soak.py`)."
    ),
    "NJ-13": Scenario("Ranks are unique, the lowest free, and kept."),
    "NJ-14": Scenario("After a restart everything that runs can still be stopped."),
    "AP-01": Scenario("No split is forgotten: the answer is that of brute force."),
    "AP-02": Scenario("One measured point is used for its size, and says so for all others."),
    "AP-04": Scenario("Flat costs are predicted flat; bad samples are refused by name."),
    "AP-05": Scenario("Keys that are numbers as text are numbers, or refused."),
    "AP-07": Scenario("Branching graphs get the best plan too."),
    "AP-08": Scenario("The same input gives the same bytes."),
    "AP-10": Scenario("Work per instance is rounded up, and what can't be divided is refused."),
    "AP-11": Scenario("What was measured wins; what is assumed is listed."),
    "AP-13": Scenario("No plan is a failure that names the component and its sizes."),
    "AP-14": Scenario("A workflow of any components needs no task type."),
    "AP-16": Scenario("A plan for GPUs that are not there now is refused or searched again, never half started."),
    "MU-01": Scenario("Figures of things that are gone disappear."),
    "MU-02": Scenario("What died is not shown as ready."),
    "MU-04": Scenario("Nothing is shown in two states, and the sums are the totals."),
    "MU-05": Scenario("People see jobs, components and ranks; ids on demand."),
    "MU-07": Scenario("Which cluster is meant is never guessed; errors name the controller and its nodes."),
    "MU-08": Scenario("Figures are the ledger's, whatever happens."),
    "SE-01": Scenario("Nothing listens where others reach it unless that was said."),
    "SE-02": Scenario("Another site that a browser is on reaches neither the page nor what it calls."),
    "SE-04": Scenario("Values of secrets are shown nowhere; a worker gets an allow-list, not the agent's environment."),
    "SE-05": Scenario("Names that could steer something are refused at every entry."),
    "SE-06": Scenario("Nothing of the scheduler's can be set by a job; interpreters come from an allow-list."),
    "SE-07": Scenario("What a node claims is checked; an agent ends only what it started."),
    "GC-01": Scenario("A program ends once what its calls hold is released."),
    "GC-02": Scenario("Streams that were cancelled do not hold up an end."),
    "GC-04": Scenario("A task that is cancelled in the controller becomes a status; every call has a deadline."),
    "GC-05": Scenario("Long quiet calls outlive the pings of their keepalive."),
    "GC-07": Scenario("Clients in several threads and loops disturb neither each other nor a terminal."),
    "GC-08": Scenario("Hundreds of processes started beside gRPC under load all return."),
    "GC-09": Scenario("Lists of any length are read in pages; too large a request is refused with the limit."),
    "GC-10": Scenario("Proxies of the environment carry nothing of the cluster."),
    "GC-11": Scenario("One start that fails stops all the others, also the one that is slow."),
    "FT-A1": Scenario("Until the job is forgotten, the output of every rank and attempt can be read from anywhere."),
    "FT-A2": Scenario("The first death is the reason; exceptions that follow from it are listed after it."),
    "FT-A3": Scenario("A worker that ended by itself names its signal or exit code, and the usual causes."),
    "FT-A4": Scenario(
        "A lost checkpoint is named wherever its job is shown; a job that requires one is spared until it has run."
    ),
    "FT-A5": Scenario("Hooks learn why and until when; the reason stands in the job's history."),
    "FT-A6": Scenario("The output of a worker is what it printed and nothing else."),
    "FT-A7": Scenario("A call in flight names the job, component, rank and reason when its worker ends."),
    "FT-B1": Scenario("The GPU ids that Ray gives inside a group are the ledger's."),
    "FT-B2": Scenario("Shares fit wherever the ledger says so."),
    "FT-B3": Scenario("Ray's own functions tell a worker its devices."),
    "FT-B4": Scenario("A class that does one call at a time lives on the main thread."),
    "FT-B5": Scenario("A share of several devices is a share of each."),
    "FT-B6": Scenario("A card that a job shares whole is charged whole."),
    "FT-C1": Scenario("A cluster without a Ray head says so wherever somebody looks."),
    "FT-C2": Scenario("Every obstacle to a preemption has a reason of its own."),
    "FT-C3": Scenario("A held pool and a cordoned node are named as what they are."),
    "FT-C4": Scenario("The reason that the controller sent is the one shown."),
    "FT-C5": Scenario("Every remedy that `doctor` prints helps."),
    "FT-C6": Scenario("Whole cards and parts of cards are counted apart."),
    "FT-C7": Scenario("A fraction must fit one GPU; the need and what is free are both named."),
    "FT-C8": Scenario("Amounts are named for each worker and for all together."),
    "FT-C9": Scenario("Each preemptor lists its own victims."),
    "FT-C10": Scenario("What is being stopped says when it is killed at the latest."),
    "FT-C11": Scenario("An elastic job that is short of workers says why."),
    "FT-C12": Scenario("A class that can't be imported names where it was looked for, and how to add a place."),
    "FT-C13": Scenario("Wide views of nodes name the devices."),
    "FT-D1": Scenario("The least that can be taken away yields."),
    "FT-D2": Scenario("The earliest deadline of several stops holds."),
    "FT-E1": Scenario(
        "Every field of the options has an option; an interpreter that no node allows is refused at submit."
    ),
    "FT-E2": Scenario("A component may name a strategy; suggestions are keys that exist."),
    "FT-E3": Scenario("Values of the environment may name the rank and the device."),
    "FT-E4": Scenario("A stop may begin with a signal."),
    "FT-E5": Scenario("A worker gets free ports that nobody else gets."),
    "FT-E6": Scenario("A gang may replace only the worker that it lost."),
    "FT-E7": Scenario("A placement waits for its nodes when the job says so."),
    "FT-F1": Scenario("Clients do not notice a restart of the controller."),
    "FT-F2": Scenario("Following a worker never blocks the caller's event loop."),
    "FT-G1": Scenario("The rendezvous port is free on the node of rank 0; a failed constructor may be restarted."),
    "FT-G2": Scenario("A node offers what its cgroups leave it."),
    "FT-G3": Scenario("The autoscaler counts each node once."),
    "FT-G4": Scenario("A cluster that runs already is named as such."),
    "FT-G5": Scenario("What is not a device is never offered as one."),
    "FT-G6": Scenario("A node that can't get ready says why, and whether that can change."),
    "FT-G7": Scenario("The log of an agent that is refused begins with the reason."),
    "FT-H1": Scenario("What one verb prints, another can read."),
    "FT-H2": Scenario("Comments stay with what they describe."),
    "FT-H3": Scenario("A chart shows every member of a cycle."),
    "FT-H4": Scenario("A cost law meets the measured points at its ends."),
    "FT-I1": Scenario("Bytes that can't be read are the sender's fault."),
    "FT-I2": Scenario("Memory without a unit is never taken for bytes by accident."),
    "FT-I3": Scenario("A class may stand where its path may."),
    "FT-I4": Scenario("The likely misreading of a placement is named."),
    "FT-I5": Scenario("Both keys that place a component are named."),
    "FT-I6": Scenario("Every verb that reads a job file reads all of it."),
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
    text = ast.get_docstring(node) or ""
    named = [f"{kind.upper()}-{number}" for kind, number in _IN_NAME.findall(node.name)]
    named += [f"FT-{number.upper()}" for number in _FOUND_IN_NAME.findall(node.name)]
    told = [f"{kind}-{number}" for kind, number in _IN_DOCSTRING.findall(text)]
    told += [f"FT-{number}" for number in _FOUND_IN_DOCSTRING.findall(text)]
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
