"""Deliberate faults in the code that ships are found: a few with every run, all of them by `scripts/mutants`."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from callboard.scheduler import State
from callboard.scheduler.records.events import Event, JobSubmitted
from callboard.simulation import Fault, SimulationOptions, Simulator, shrink
from callboard.simulation.checks.audit import Audit
from callboard.simulation.world.rules import RuleBroken
from tests.simulation.mutants import MOST_EVENTS, MUTANTS, ROOT, Mutant, hunt

A_RUN = 2
"""Mutants that each run of the suite takes, drawn anew: in the long run all of them, at a few seconds each time."""

SHRUNK = """
import sys
from itertools import count
from tests.simulation.mutants import install
install("admit-before-reconciliation")
from callboard.simulation import SimulationOptions, shrink
# So many looks at the clock, not seconds: the same runs on every machine.
shrunk = shrink(SimulationOptions(seed=1, events=1_000, nodes=3), within_s=4, clock=count().__next__)
assert shrunk is not None
assert shrunk.failure.rule == "QL-03", shrunk.failure
assert shrunk.after < shrunk.before
sys.stdout.write(shrunk.scenario)
"""

WITH_MUTANT = """
from tests.simulation.mutants import install
install("admit-before-reconciliation")
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_changes_is_there(mutant: Mutant) -> None:
    module, code = mutant.find()
    assert module.startswith(f"callboard.{mutant.area}.")
    assert code.co_filename.endswith(".py")


@pytest.mark.parametrize("number", range(A_RUN))
def test_a_mutant_is_found(number: int) -> None:
    name = random.SystemRandom().choice([mutant for mutant in MUTANTS if not mutant.rare]).name
    assert hunt(name).rule, f"{name} was not found within {MOST_EVENTS} events; again: scripts/mutants {name}"


def test_there_are_mutants_of_every_part() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert {mutant.area for mutant in MUTANTS} == {"controller", "scheduler", "agents"}


def test_a_shrunk_run_fails_with_the_mutant_and_holds_without() -> None:
    made = _python(SHRUNK)
    assert made.returncode == 0, made.stderr
    scenario = made.stdout
    assert "only=(" in scenario
    (test,) = (line.split()[1].partition("(")[0] for line in scenario.splitlines() if line.startswith("def "))
    broken = _python(f"{WITH_MUTANT}\n{scenario}\n{test}()")
    assert broken.returncode == 1
    assert "AssertionError: QL-03: " in broken.stderr
    held = _python(f"{scenario}\n{test}()")
    assert held.returncode == 0, held.stderr


def test_what_is_left_of_a_shrunk_run_is_what_breaks_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(self: Audit, state: State, event: Event) -> None:
        if isinstance(event, JobSubmitted) and event.spec.name == "job-1":
            raise RuleBroken("R0", "a job was submitted")

    monkeypatch.setattr(Audit, "before", before)
    options = SimulationOptions(seed=3, events=60, nodes=2, faults=frozenset({Fault.DROP, Fault.AGENT}))
    shrunk = shrink(options, within_s=60)
    assert shrunk is not None
    assert [name.rpartition(" ")[0] for name in shrunk.options.only or ()] == ["submit"]
    assert shrunk.options.faults == frozenset()
    again = Simulator(shrunk.options).run().failure
    assert again is not None
    assert again.rule == "R0"


def test_a_run_that_holds_is_not_shrunk() -> None:
    assert shrink(SimulationOptions(seed=3, events=40, nodes=2), within_s=10) is None


def test_nothing_more_is_tried_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(self: Audit, state: State, event: Event) -> None:
        raise RuleBroken("R0", "anything")

    monkeypatch.setattr(Audit, "before", before)
    shrunk = shrink(SimulationOptions(seed=3, events=40, nodes=2), within_s=1.0, clock=iter(range(1_000)).__next__)
    assert shrunk is not None
    assert shrunk.runs == 1


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
