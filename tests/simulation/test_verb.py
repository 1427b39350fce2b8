"""What does `callboard simulate` say?"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.scheduler import Scheduler
from callboard.scheduler.records.events import Event
from callboard.simulation.audit import Audit
from callboard.simulation.rules import RuleBroken

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


def test_an_unknown_fault_is_bad_input() -> None:
    shown = CliRunner().invoke(app, ["simulate", "--faults", "dorp"])
    assert shown.exit_code == 2
    assert "'dorp' is no fault" in shown.stderr
