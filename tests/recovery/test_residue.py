"""Does anything stay behind when jobs come and go for long? A short run of `benchmarks/residue.py`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "residue.py"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_pc_13_pg_20_nothing_is_left_of_jobs_that_came_and_went() -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), "--pairs", "10", "--reuses", "4", "--rounds", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, (output.decode(), errors.decode()[-4000:])
    assert output.decode().count("nothing is left") == 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_is_left_of_nodes_that_joined_and_left() -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), "--joins", "2"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, (output.decode(), errors.decode()[-4000:])
    assert "2 nodes joined and left: nothing is left" in output.decode()
