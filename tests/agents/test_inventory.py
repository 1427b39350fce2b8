"""How many CPUs and how much memory does a node offer, in containers and outside?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from callboard.agents.options import AgentOptions
from callboard.agents.system.cgroups import Cgroups
from callboard.agents.system.inventory import (
    machine_cpus,
    machine_memory_bytes,
    object_store_bytes,
    offered_memory_bytes,
)
from callboard.model.quantities import format_memory
from tests.support.cgroups import limited, made_up

CPUS = len(os.sched_getaffinity(0))
MEMORY = psutil.virtual_memory().total
GIB = 1 << 30

UNIFIED = ("0::/pod/own\n", {"fs": "cgroup2"})
LEGACY = (
    "4:memory:/pod/own\n3:cpuset:/pod/own\n2:cpu,cpuacct:/pod/own\n1:name=systemd:/\n0::/\n",
    {"fs/cpu": "cpu,cpuacct", "fs/memory": "memory", "fs/cpuset": "cpuset", "fs/systemd": "name=systemd"},
)


def unified(folder: Path, **files: str) -> Cgroups:
    """Names of files of the own group and those around it: ``own__cpu_max`` is that of /pod/own."""
    places = {"own": "fs/pod/own", "pod": "fs/pod", "top": "fs"}
    named = {f"{places[name[:3]]}/{name[5:].replace('_', '.')}": text for name, text in files.items()}
    return made_up(folder, *UNIFIED, named)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", CPUS), ("100000 100000", 1), ("199999 100000", 1), ("50000 100000", 1), ("99900000 100000", CPUS)],
)
@pytest.mark.parametrize("place", ["own", "pod", "top"])
def test_ft_g2_a_quota_anywhere_above_bounds_the_cpus(tmp_path: Path, place: str, quota: str, cpus: int) -> None:
    assert machine_cpus(unified(tmp_path, **{f"{place}__cpu_max": quota})) == cpus


def test_ft_g2_the_tightest_limit_counts_whatever_is_said_below_it(tmp_path: Path) -> None:
    limits = {"own__memory_max": "9000000000", "pod__memory_max": str(3 * GIB), "top__memory_max": "max"}
    groups = unified(tmp_path, **limits, own__cpu_max="max 100000", pod__cpu_max="100000 100000")
    assert (machine_cpus(groups), machine_memory_bytes(groups)) == (1, 3 * GIB)
    below = unified(tmp_path, own__memory_max=str(GIB))
    assert machine_memory_bytes(below) == GIB


@pytest.mark.parametrize(("quota_us", "cpus"), [("-1", CPUS), ("150000", 1), ("99900000", CPUS)])
def test_ft_g2_a_quota_of_version_1_bounds_the_cpus(tmp_path: Path, quota_us: str, cpus: int) -> None:
    files = {"fs/cpu/pod/cpu.cfs_quota_us": quota_us, "fs/cpu/pod/cpu.cfs_period_us": "100000"}
    assert machine_cpus(made_up(tmp_path, *LEGACY, files)) == cpus


@pytest.mark.parametrize("own", ["max", "9223372036854771712", "0", ""])
@pytest.mark.parametrize("name", ["fs/pod/memory.max", "fs/memory/pod/memory.limit_in_bytes"])
def test_ft_g2_what_is_no_limit_bounds_nothing(tmp_path: Path, own: str, name: str) -> None:
    groups = made_up(tmp_path, *(UNIFIED if name.endswith("max") else LEGACY), {name: own})
    assert machine_memory_bytes(groups) == MEMORY


@pytest.mark.parametrize(
    ("tree", "name"), [(UNIFIED, "fs/pod/cpuset.cpus.effective"), (LEGACY, "fs/cpuset/pod/cpuset.cpus")]
)
@pytest.mark.parametrize(("cpus", "count"), [("3", 1), ("0-1023,2000", CPUS), ("", CPUS), ("0-x", CPUS)])
def test_ft_g2_a_set_of_cpus_bounds_them(
    tmp_path: Path, tree: tuple[str, dict[str, str]], name: str, cpus: str, count: int
) -> None:
    assert machine_cpus(made_up(tmp_path, *tree, {name: cpus})) == count


@pytest.mark.parametrize("own", ["0::/pod/own/deeper\n", "0::/../elsewhere\n", "0::/gone\n"])
def test_ft_g2_in_a_container_the_mount_is_the_group(tmp_path: Path, own: str) -> None:
    """The path may be that of the host, of which only the container's own part is mounted."""
    groups = made_up(tmp_path, own, {"fs": "cgroup2:/pod/own"}, {"fs/memory.max": str(GIB)})
    assert machine_memory_bytes(groups) == GIB


def test_a_machine_without_groups_offers_all_it_has(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path / "missing", tmp_path / "missing", tmp_path)
    assert (machine_cpus(groups), machine_memory_bytes(groups)) == (CPUS, MEMORY)


class TestObjectStore:
    def test_ft_g2_memory_is_kept_for_it_in_a_group(self, tmp_path: Path) -> None:
        groups = unified(tmp_path, pod__memory_max=str(3 * GIB))
        options = AgentOptions(node_id="n0")
        kept = object_store_bytes(options, groups, tmp_path / "none")
        assert kept is not None
        assert kept == 921 << 20
        offered = offered_memory_bytes(options, groups)
        assert offered + kept <= 3 * GIB
        assert format_memory(offered).endswith("MiB")

    def test_ft_g2_plain_processes_get_all_of_it(self, tmp_path: Path) -> None:
        groups = unified(tmp_path, pod__memory_max=str(3 * GIB))
        options = AgentOptions(node_id="n0", runtime="process")
        assert object_store_bytes(options, groups) is None
        assert format_memory(offered_memory_bytes(options, groups)) == "3GiB"

    def test_ft_g2_what_is_stated_counts(self, tmp_path: Path) -> None:
        groups = unified(tmp_path, pod__memory_max=str(3 * GIB))
        stated = AgentOptions(node_id="n0", object_store_bytes=GIB)
        assert (object_store_bytes(stated, groups), offered_memory_bytes(stated, groups)) == (GIB, 2 * GIB)
        both = AgentOptions(node_id="n0", memory_bytes=2 * GIB)
        assert (object_store_bytes(both, groups), offered_memory_bytes(both, groups)) == (None, 2 * GIB)

    def test_a_large_amount_is_whole_gibibytes(self, tmp_path: Path) -> None:
        offered = offered_memory_bytes(AgentOptions(node_id="n0", runtime="process"), unified(tmp_path))
        assert offered % (GIB if offered >= 16 * GIB else 1 << 20) == 0


ASKS = (
    "import os, sys\n"
    "for file in sys.argv[1:]: open(file, 'w').write(str(os.getpid()))\n"
    "from callboard.agents.system.inventory import machine_cpus, machine_memory_bytes\n"
    "print(machine_cpus(), machine_memory_bytes())"
)


@pytest.fixture
def real_groups() -> Iterator[list[Path]]:
    with limited(cpus=1, memory_bytes=3 * GIB) as inner:
        yield inner


def test_ft_g2_a_real_group_within_a_group_bounds_both(real_groups: list[Path]) -> None:
    command = [sys.executable, "-c", ASKS, *map(str, real_groups)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.split() == ["1", str(3 * GIB)]
