"""Does `ctx.timed` write down what `callboard profile` averages?"""

from __future__ import annotations

from pathlib import Path

import pytest

from callboard.agents.worker_host import WorkerContext
from callboard.agents.worker_timings import SUFFIX, timings_name
from callboard.autoplace.profile import measured, read_timings


def context(rank: int = 0, generation: int = 1, devices: tuple[str, ...] = ("0", "1")) -> WorkerContext:
    return WorkerContext(
        job_id="uid-1",
        job_name="train",
        component="actor",
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        node_rank=3,
        generation=generation,
        attempt=1,
        devices=devices,
    )


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALLBOARD_AGENT", str(tmp_path))
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def test_each_block_becomes_a_line_that_profile_reads(logs: Path) -> None:
    ctx = context()
    for _ in range(3):
        with ctx.timed("rollout"):
            pass
    with ctx.timed("env", envs_per_instance=16):
        pass
    (file,) = logs.iterdir()
    assert file.name == timings_name("uid-1", "actor", 0, 1)
    assert file.name == f"uid-1-actor-0-g1{SUFFIX}"
    found = measured(read_timings(file.read_text().splitlines(), file.name), warmup=0)
    assert [(each.component, each.gpus, each.envs, each.iterations) for each in found] == [
        ("rollout", 2, None, 3),
        ("env", 2, 16, 1),
    ]


def test_without_a_name_it_is_the_workers_own_component(logs: Path) -> None:
    with context().timed():
        pass
    (file,) = logs.iterdir()
    assert '"component": "actor"' in file.read_text()


def test_ranks_on_one_machine_count_each_gpu_once(logs: Path) -> None:
    for rank, devices in enumerate((("0", "1"), ("2", "3"))):
        with context(rank, devices=devices).timed("rollout"):
            pass
    lines = [line for file in sorted(logs.iterdir()) for line in file.read_text().splitlines()]
    (found,) = measured(read_timings(lines, "all"), warmup=0)
    assert found.gpus == 4


def test_a_block_that_fails_is_not_recorded(logs: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), context().timed("rollout"):
        raise RuntimeError("half way")
    assert list(logs.iterdir()) == []


def test_outside_an_agent_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALLBOARD_AGENT", raising=False)
    monkeypatch.chdir(tmp_path)
    with context().timed("rollout"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_costs_the_measurement_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CALLBOARD_AGENT", str(tmp_path / "gone"))
    with context().timed("rollout"):
        pass
    assert "a timing was not recorded" in capsys.readouterr().err
