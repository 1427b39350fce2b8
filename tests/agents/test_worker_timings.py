"""Timings of `ctx.timed`, which `callboard profile` averages, and results of entry methods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callboard.agents.host.worker_host import WorkerContext
from callboard.agents.host.worker_output import MAX_RESULT_BYTES, RESULTS, TIMINGS, keep_result
from callboard.autoplace.problem.profile import measured, read_timings


def context(output: Path | None, *, rank: int = 0, devices: tuple[str, ...] = ("0", "1")) -> WorkerContext:
    return WorkerContext(
        job_id="uid-1",
        job_name="train",
        component="actor",
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        node_rank=3,
        generation=1,
        attempt=1,
        devices=devices,
        output=str(output or ""),
    )


def test_each_block_becomes_a_line_that_profile_reads(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    for _ in range(3):
        with ctx.timed("rollout"):
            pass
    with ctx.timed("env", envs_per_instance=16):
        pass
    (file,) = tmp_path.iterdir()
    assert file.name == TIMINGS
    found = measured(read_timings(file.read_text().splitlines(), file.name), warmup=0)
    assert [(each.component, each.gpus, each.envs, each.iterations) for each in found] == [
        ("rollout", 2, None, 3),
        ("env", 2, 16, 1),
    ]


def test_without_a_name_it_is_the_workers_own_component(tmp_path: Path) -> None:
    with context(tmp_path).timed():
        pass
    (file,) = tmp_path.iterdir()
    assert '"component": "actor"' in file.read_text()


def test_ranks_on_one_machine_count_each_gpu_once(tmp_path: Path) -> None:
    for rank, devices in enumerate((("0", "1"), ("2", "3"))):
        with context(tmp_path, rank=rank, devices=devices).timed("rollout"):
            pass
    lines = (tmp_path / TIMINGS).read_text().splitlines()
    (found,) = measured(read_timings(lines, "all"), warmup=0)
    assert found.gpus == 4


def test_a_block_that_fails_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), context(tmp_path).timed("rollout"):
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_outside_an_agent_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with context(None).timed("rollout"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_costs_the_measurement_and_not_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with context(tmp_path / "gone").timed("rollout"):
        pass
    assert "a timing was not recorded" in capsys.readouterr().err


class Loops(list[object]):
    """A list that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.append(self)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"loss": 0.5, "steps": (1, 2)}, {"value": {"loss": 0.5, "steps": [1, 2]}}),
        (None, {"value": None}),
        ({"loss": float("nan"), "best": [float("-inf")]}, {"value": {"loss": "NaN", "best": ["-Infinity"]}}),
        ("the password is hunter22", {"value": "the password is ****"}),
        (
            "x" * MAX_RESULT_BYTES,
            {"problem": f"its result has {MAX_RESULT_BYTES + 2} bytes as JSON; at most 65536 are kept"},
        ),
        (object, {"problem": "its result can't be written as JSON: Object of type type is not JSON serializable"}),
    ],
)
def test_what_an_entry_returned_is_kept_or_it_is_said_why_not(tmp_path: Path, value: object, kept: object) -> None:
    keep_result(str(tmp_path), "", value, lambda text: text.replace("hunter22", "****"))
    assert json.loads((tmp_path / RESULTS).read_text()) == {"member": "", **kept}  # type: ignore[dict-item]


def test_a_result_without_end_costs_no_worker(tmp_path: Path) -> None:
    keep_result(str(tmp_path), "actor", Loops(), str)
    keep_result("", "actor", 3, str)  # outside an agent nobody keeps it
    assert "can't be written as JSON" in json.loads((tmp_path / RESULTS).read_text())["problem"]
