"""What does `callboard profile` make of recorded timings?"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from callboard.cli.main import app
from callboard.client.calls import methods
from callboard.v1.common_pb2 import OUTPUT_STREAM_TIMINGS, OutputChunk
from callboard.v1.job_pb2 import GetJobResponse, ReadJobOutputRequest, ReadJobOutputResponse
from tests.cli import objects
from tests.cli.cluster import RealCluster, job, verb
from tests.cli.conftest import Run
from tests.support.fake_api import FakeApi

RECORDED = [
    {"component": name, "seconds": seconds + extra, "gpus": 8}
    for extra in (40, 0, 2)
    for name, seconds in (("rollout", 58.9), ("inference", 29.8), ("actor", 94.7))
]


@pytest.fixture
def timings(tmp_path: Path) -> Path:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDED))
    return file


def profile(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], input=stdin)


def test_a_file_becomes_the_section_to_paste(timings: Path) -> None:
    shown = profile(timings)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == "profile_data:\n  rollout_cost: 59.9\n  inference_cost: 30.8\n  actor_cost: 95.7\n"
    assert "warm-up" in shown.stderr


def test_the_section_pasted_can_be_searched(timings: Path, tmp_path: Path) -> None:
    config = {
        "runner": {"task_type": "reasoning"},
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 8},
        "algorithm": {"group_size": 16, "n_minibatches": 4},
        "data": {"rollout_batch_size": 128},
        **yaml.safe_load(profile(timings).stdout),
    }
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    shown = CliRunner().invoke(app, ["autoplace", str(file), "-o", "json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["alternatives"]["collocated"] == pytest.approx(186.4)


def test_the_input_can_be_read(timings: Path) -> None:
    assert profile("-", "-o", "yaml", stdin=timings.read_text()).stdout == profile(timings).stdout


def test_json_says_how_sure_each_figure_is(timings: Path) -> None:
    found = json.loads(profile(timings, "-o", "json").stdout)
    assert found["profile_data"]["actor_cost"] == 95.7
    rollout = found["measured"][0]
    assert (rollout["component"], rollout["iterations"], rollout["warmup"]) == ("rollout", 2, 1)
    assert rollout["spread_seconds"] == pytest.approx(1)


def test_the_general_form_has_tables(timings: Path) -> None:
    found = yaml.safe_load(profile(timings, "--workflow").stdout)
    assert found["workflow"]["components"]["rollout"] == {"seconds_by_gpus": {8: 59.9}}


def test_ft_h1_the_tables_pasted_can_be_searched(timings: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(profile(timings, "--workflow").stdout) | {"cluster": {"nodes": [{"gpus": 8}]}}
    config["workflow"]["edges"] = [["rollout", "actor"]]
    assert {"rollout", "actor"} <= config["workflow"]["components"].keys()
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    shown = CliRunner().invoke(app, ["autoplace", str(file), "-o", "json"])
    assert shown.exit_code == 0, shown.output


def test_too_much_warm_up_is_bad_input(timings: Path) -> None:
    shown = profile(timings, "--warmup", 3)
    assert shown.exit_code == 2
    assert "rollout" in shown.stderr


def test_a_bad_line_is_bad_input_with_its_number(timings: Path) -> None:
    timings.write_text(timings.read_text() + "{\n")
    shown = profile(timings)
    assert shown.exit_code == 2
    assert f"{len(RECORDED) + 1}:1" in shown.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert profile(tmp_path / "gone.jsonl").exit_code == 2


class TestOfAJob:
    def test_what_its_workers_recorded_is_averaged(self, run: Run, api: FakeApi) -> None:
        async def recorded(request: ReadJobOutputRequest) -> AsyncIterator[ReadJobOutputResponse]:
            assert list(request.selection.streams) == [OUTPUT_STREAM_TIMINGS]
            for rank in range(2):
                devices = [f"{rank}/0", f"{rank}/1"]
                lines = [
                    {"component": "rollout", "seconds": seconds + rank, "rank": rank, "devices": devices}
                    for seconds in (90, 58.9)
                ]
                data = "\n".join(map(json.dumps, lines)).encode()
                chunk = OutputChunk(component="rollout", rank=rank, stream=OUTPUT_STREAM_TIMINGS, data=data)
                yield ReadJobOutputResponse(chunk=chunk)

        api.on(methods.GET_JOB, GetJobResponse(job=objects.job("train-00")))
        api.on(methods.READ_JOB_OUTPUT, recorded)
        shown = run("profile", "train-00", "-o", "json")
        assert shown.exit_code == 0, shown.output
        (found,) = json.loads(shown.stdout)["measured"]
        assert (found["seconds"], found["gpus"], found["iterations"]) == (pytest.approx(59.9), 4, 1)

    async def test_what_real_workers_record_is_found_without_a_shared_file_system(
        self, cluster: RealCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(tmp_path / "elsewhere"))  # Not where its agents keep theirs.
        worker: dict[str, Any] = {"actor": "tests.support.timed_actor:Timed", "entry": "run", "workers": 2}
        submitted = await cluster.client.submit(job("timed", resources={"cpu": 1, "gpu": 1}, **worker))
        await submitted.finished(timeout=90)
        shown = await verb(cluster, "profile", "timed", "-o", "json")
        assert shown.exit_code == 0, shown.output
        (found,) = json.loads(shown.stdout)["measured"]
        assert (found["component"], found["gpus"], found["iterations"]) == ("rollout", 2, 2)

    def test_one_without_timings_says_how_to_record_them(self, run: Run, api: FakeApi) -> None:
        async def nothing(_: ReadJobOutputRequest) -> AsyncIterator[ReadJobOutputResponse]:
            yield ReadJobOutputResponse(caught_up=True)

        api.on(methods.GET_JOB, GetJobResponse(job=objects.job("train-00")))
        api.on(methods.READ_JOB_OUTPUT, nothing)
        shown = run("profile", "train-00")
        assert shown.exit_code == 1
        assert "ctx.timed" in shown.stderr
