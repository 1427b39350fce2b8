"""The guides: every program in "Writing a worker" and "Writing a trainer" does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import callboard
from callboard.agents.host.worker_host import WorkerContext
from callboard.agents.host.worker_members import HOOKS
from tests.cli.machine import ROOT

WORKER, TRAINER = ROOT / "docs" / "writing_a_worker.md", ROOT / "docs" / "writing_a_trainer.md"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def played(page: Path, folder: Path, run_dir: Path) -> tuple[str, str]:
    """What the command of a page prints with the files of the page, and what the page says that it prints."""
    blocks = _BLOCK.findall(page.read_text())
    for language, text in blocks:
        if language == "python":
            (folder / text.split()[1]).write_text(text)
    ((_, command),) = [block for block in blocks if block[0] == "bash"]
    ((_, expected),) = [block for block in blocks if block[0] == "text"]
    assert command == f"PYTHONPATH=. python {command.split()[-1]}\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    shown = subprocess.run(
        [sys.executable, command.split()[-1]],
        cwd=folder,
        env=environment | {"PYTHONPATH": ".", "CALLBOARD_RUN_DIR": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert not run_dir.exists(), "the cluster ended with its program"
    return shown.stdout, expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_worker_counts_yields_and_goes_on(tmp_path: Path, run_dir: Path) -> None:
    shown, expected = played(WORKER, tmp_path, run_dir)
    assert shown == expected


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_calls_streams_restarts_and_waits(tmp_path: Path, run_dir: Path) -> None:
    shown, expected = played(TRAINER, tmp_path, run_dir)
    assert shown == expected


def test_the_worker_page_names_every_hook_and_every_field_of_its_context() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", WORKER.read_text(), re.MULTILINE))
    assert set(rows) == set(HOOKS)
    fields = set(WorkerContext.__dataclass_fields__) - {"output"}
    assert not {field for field in fields if f"`{field}`" not in rows["setup"]}
    assert not {name for name in vars(callboard.StopNotice)["__annotations__"] if f"`{name}`" not in rows["cancel"]}


def test_the_trainer_page_names_errors_and_methods_that_there_are() -> None:
    text = TRAINER.read_text()
    table = text.partition("## Errors")[2]
    errors = re.findall(r"`([A-Z]\w+)`", table)
    assert errors
    assert not [name for name in errors if name not in callboard.__all__]
    methods = re.findall(r"`(?:await )?job\.(\w+)\(", text)
    assert methods
    assert not [name for name in methods if not hasattr(callboard.JobHandle, name)]
