"""How many CPUs and how much memory does a node offer, in a container and outside?"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from callboard.agents.inventory import machine_cpus, machine_memory_bytes

CPUS = len(os.sched_getaffinity(0))
MEMORY = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", CPUS), ("100000 100000", 1), ("199999 100000", 1), ("50000 100000", 1), ("99900000 100000", CPUS)],
)
def test_a_quota_bounds_the_cpus(tmp_path: Path, quota: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert machine_cpus(tmp_path) == cpus


@pytest.mark.parametrize(("quota_us", "cpus"), [("-1", CPUS), ("150000", 1), ("99900000", CPUS)])
def test_a_quota_of_version_1_bounds_the_cpus(tmp_path: Path, quota_us: str, cpus: int) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine_cpus(tmp_path) == cpus


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("limit", "memory"), [("max", MEMORY), ("1073741824", 1 << 30), ("9223372036854771712", MEMORY)]
)
def test_a_limit_bounds_the_memory(tmp_path: Path, file: str, limit: str, memory: int) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{limit}\n")
    assert machine_memory_bytes(tmp_path) == memory


def test_a_machine_without_groups_offers_all_it_has(tmp_path: Path) -> None:
    assert (machine_cpus(tmp_path), machine_memory_bytes(tmp_path)) == (CPUS, MEMORY)
