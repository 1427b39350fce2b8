"""What does `callboard simulate` say?"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.scheduler import Scheduler
from callboard.scheduler.records.events import ControllerStarted, Event
from callboard.simulation.checks.audit import Audit
from callboard.simulation.world.rules import RuleBroken

ARGUMENTS = ["simulate", "--seed", "9", "--events", "120", "--nodes", "2", "--quiet"]


def test_a_run_is_summed_up() -> None:
    shown = CliRunner().invoke(app, ARGUMENTS)
    assert shown.exit_code == 0, shown.output
    assert "every rule held" in shown.stdout
    assert "sha256" in shown.stdout


def test_json_is_for_programs() -> None:
    shown = CliRunner().invoke(app, [*ARGUMENTS, "-o", "json"])
    report = json.loads(shown.stdout)
    assert (report["passed"], report["seed"], report["nodes"]) == (True, 9, 2)
    assert report["events"] >= 120


def test_a_broken_rule_ends_it_with_1_and_says_how_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(self: Audit, state: Scheduler, event: Event) -> None:
        raise RuleBroken("I9", "something stale changed something")

    monkeypatch.setattr(Audit, "before", finds)
    shown = CliRunner().invoke(app, ARGUMENTS)
    assert shown.exit_code == 1
    assert "error: I9: something stale changed something" in shown.stderr
    assert "replay: callboard simulate --seed 9 --nodes 2 --events 120 --faults all" in shown.stderr


def test_a_failing_run_is_shrunk_to_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(self: Audit, state: Scheduler, event: Event) -> None:
        raise RuleBroken("I9", "something stale changed something")

    monkeypatch.setattr(Audit, "before", finds)
    shown = CliRunner().invoke(app, [*ARGUMENTS, "-o", "json"])
    assert shown.exit_code == 1
    scenario = json.loads(shown.stdout)["scenario"]
    assert "def test_i9_holds_in_seed_9() -> None:" in scenario
    assert "only=()," in scenario
    compile(scenario, "scenario", "exec")
    shown = CliRunner().invoke(app, [*ARGUMENTS, "--shrink", "0", "-o", "json"])
    assert json.loads(shown.stdout)["scenario"] == ""


def test_schedules_are_tried_one_after_the_other_and_one_of_them_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["simulate", "--seed", "9", "--events", "60", "--nodes", "2", "--quiet", "-o", "json", "--shrink", "0"]
    shown = CliRunner().invoke(app, [*arguments, "--schedules", "3"])
    assert shown.exit_code == 0, shown.output
    last = json.loads(shown.stdout)
    assert (last["schedules"], last["command"]) == (
        3,
        "callboard simulate --seed 9 --nodes 2 --events 60 --schedule 2 --faults all",
    )
    assert last["choices"] > 0
    no_order = [*arguments, "--faults", "drop", "--schedules", "3"]
    assert json.loads(CliRunner().invoke(app, no_order).stdout)["schedules"] == 1
    third = json.loads(CliRunner().invoke(app, [*arguments, "--schedule", "2"]).stdout)
    assert third["journal_digest"] == last["journal_digest"]
    seen = []

    def finds(self: Audit, state: Scheduler, event: Event) -> None:
        if isinstance(event, ControllerStarted):
            seen.append(event)
        if len(seen) == 2:
            raise RuleBroken("I9", "something stale changed something")

    monkeypatch.setattr(Audit, "before", finds)
    arguments[arguments.index("--events") + 1] = "20"
    shown = CliRunner().invoke(app, [*arguments, "--faults", "schedule", "--schedules", "9"])
    assert shown.exit_code == 1
    failed = json.loads(shown.stdout)
    assert failed["schedules"] == 2
    assert failed["failure"]["command"].endswith("--schedule 1 --faults schedule")


def test_an_unknown_fault_is_bad_input() -> None:
    shown = CliRunner().invoke(app, ["simulate", "--faults", "dorp"])
    assert shown.exit_code == 2
    assert "'dorp' is no fault" in shown.stderr
