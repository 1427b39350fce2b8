"""Does help come at once? What takes long to import is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"grpc", "ray", "pydantic", "google.protobuf", "rich.console", "yaml", "asyncio"}


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


@pytest.mark.parametrize("module", ["callboard", "callboard.cli", "callboard.cli.main", "callboard.client"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}") & HEAVY == set()


def test_the_help_of_every_group_needs_nothing_heavy() -> None:
    statement = "from typer.main import get_command; from callboard.cli.main import app; get_command(app)"
    assert imported_by(statement) & HEAVY == set()


def test_the_workers_of_the_demonstration_are_plain_python() -> None:
    loaded = imported_by("import callboard.cli.demo.workers")
    assert loaded & (HEAVY | {"typer"}) == set()
