"""Clients in other languages, against a live controller: the examples do what docs/other_languages.md says."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from tests.cli.cluster import ROOT, RealCluster

PAGE = ROOT / "docs" / "other_languages.md"


@pytest.mark.parametrize(
    ("folder", "command", "prefix"),
    [("javascript", ("node", "jobs.mjs"), "js"), ("ruby", ("ruby", "jobs.rb"), "rb")],
)
async def test_it_submits_watches_asks_why_is_refused_and_cancels(
    bare: RealCluster, tmp_path: Path, folder: str, command: tuple[str, ...], prefix: str
) -> None:
    await bare.add_node("node-0")
    program = await asyncio.create_subprocess_exec(
        *command,
        bare.address,
        cwd=ROOT / "examples" / folder,
        env={
            **os.environ,
            "CALLBOARD_TOKEN_FILE": str(tmp_path / "state" / "token"),
            "http_proxy": "http://127.0.0.1:9",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, errors = await asyncio.wait_for(program.communicate(), timeout=100)
    assert program.returncode == 0, errors.decode()
    # The page shows what the JavaScript program prints; Ruby's differs in names, and in one fault.
    (block,) = re.findall(r"^(js-first .*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    expected = block.replace("js-", f"{prefix}-").replace("pool javascript", f"pool {folder}").splitlines()
    if folder == "ruby":
        expected = [line for line in expected if "[0].name" not in line]
    assert shown.decode().splitlines() == expected


async def test_an_error_of_nobody_has_no_reason(tmp_path: Path) -> None:
    program = await asyncio.create_subprocess_exec(
        "node",
        "jobs.mjs",
        "127.0.0.1:1",
        cwd=ROOT / "examples" / "javascript",
        env={**os.environ, "CALLBOARD_TOKEN": "t"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(program.communicate(), timeout=100)
    assert program.returncode == 1
    assert "code: 'UNAVAILABLE'" in errors.decode()
    assert "reason: ''" in errors.decode()
