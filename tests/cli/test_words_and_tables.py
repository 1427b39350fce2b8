"""Are errors told in words that help, and do tables stay readable where the terminal is narrow?"""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from callboard.cli.nodes.views import node_table
from callboard.cli.show.failures import failure_of
from callboard.cli.show.tables import table
from callboard.cli.show.verb_guard import unless_wrong
from callboard.security.contexts import log_in
from callboard.wire.refusals import NotAuthenticated


def test_a_context_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    environ = {**os.environ, "CALLBOARD_RUN_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "callboard.cli", "--context", "nope", "status"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[1]
        == "  why: There is no context nope; `callboard context list` shows those there are."
    )


def test_whose_context_has_a_token_that_is_over_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the controller's machine the token of the context is sent, not the one that is found there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CALLBOARD_CONTEXT", raising=False)
    error = NotAuthenticated("the token of the call is not valid here. Call it from the account that started it")
    assert failure_of(error).remedy == "Call it from the account that started it."
    log_in("lab", "127.0.0.1:7700", "cb_token", None)
    assert "Context lab is in use" in failure_of(error).remedy


def test_a_file_that_can_not_be_written_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), unless_wrong("clients", OSError):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/state/clients.json")
    assert "  why: /state/clients.json: Read-only file system." in capsys.readouterr().err


def test_a_list_of_nodes_does_not_call_those_on_their_gpus_all_their_jobs() -> None:
    """Jobs without a GPU hold CPUs there, too."""
    assert [column.header for column in node_table([], wide=False).columns][6] == "ON GPUS"


def test_names_stay_whole_where_the_terminal_is_narrow() -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(table(["NAME", "WHY"], [["name-of-a-longer-job", "word " * 20], ["b", "x"]]))
    assert "name-of-a-longer-job" in console.export_text()
