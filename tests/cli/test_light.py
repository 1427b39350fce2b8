"""Does help come at once? What takes long to import is imported when it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from callboard.cli.verbs import MODULE_OF

ROOT = Path(__file__).parents[2]

HEAVY = {"grpc", "ray", "pydantic", "google.protobuf", "rich.console", "yaml", "asyncio"}

GET_COMMAND = "from typer.main import get_command; from callboard.cli.main import app; command = get_command(app)"

PLAN = """
import io, contextlib, sys
sys.argv = ["callboard", "plan", "examples/plans/small.yaml", "-o", "json"]
from callboard.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split())


@pytest.mark.parametrize("module", ["callboard", "callboard.cli", "callboard.cli.main", "callboard.client"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}") & HEAVY == set()


def test_the_help_of_every_group_needs_nothing_heavy() -> None:
    statement = f"{GET_COMMAND}; dict(command.commands.items())"
    loaded = imported_by(statement)
    assert loaded & HEAVY == set()
    assert {f"callboard.{module}" for module in MODULE_OF.values()} <= loaded


def test_a_verb_that_is_named_imports_no_other() -> None:
    loaded = imported_by(GET_COMMAND)
    assert not {f"callboard.{module}" for module in MODULE_OF.values()} & loaded


def test_a_plan_imports_what_it_needs_and_no_more() -> None:
    loaded = imported_by(PLAN)
    assert {f"callboard.{module}" for module in MODULE_OF.values()} & loaded == {"callboard.cli.layouts.verbs"}
    unwanted = {*HEAVY - {"pydantic", "yaml"}, "rich"}
    unwanted |= {f"callboard.scheduler.{name}" for name in ("machine", "events", "transaction", "invariants")}
    unwanted |= {"callboard.client", "callboard.wire", "callboard.v1", "callboard.placement", "callboard.simulation"}
    assert loaded & unwanted == set()


def test_the_workers_of_the_demonstration_are_plain_python() -> None:
    loaded = imported_by("import callboard.demo.workers")
    assert loaded & (HEAVY | {"typer"}) == set()
