"""Which devices do the workers of real jobs see, from the submit to the environment of a program they start? (GV-…)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from callboard.client.jobs import JobHandle
from tests.cli.cluster import RealCluster

WAIT_S = 90.0


def component(name: str, folder: Path, *, workers: int = 1, gpu: float = 1) -> dict[str, Any]:
    return {
        "name": name,
        "actor": "tests.support.actors:Recorder",
        "args": [str(folder)],
        "workers": workers,
        "resources": {"cpu": 0.1, "gpu": gpu},
    }


async def run(cluster: RealCluster, name: str, *components: dict[str, Any]) -> JobHandle:
    job = await cluster.client.submit({"name": name, "pool": "rlhf", "components": list(components)})
    await job.running(timeout=WAIT_S)
    return job


def seen(folder: Path) -> dict[str, dict[str, Any]]:
    """What each worker and its child saw, by component and rank."""
    return {file.stem: json.loads(file.read_text()) for file in folder.iterdir()}


@pytest.fixture
async def devices(bare: RealCluster) -> RealCluster:
    """A small node and a large one."""
    await bare.add_node("n0", gpus=1)
    await bare.add_node("n1", gpus=4)
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 5})
    return bare


async def test_gv_13_ids_are_those_of_the_workers_own_node(devices: RealCluster, tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    job = await run(devices, "both", component("actor", folder, workers=5))
    of_node: dict[str, list[str]] = {}
    for worker in job.job.workers:
        found = seen(folder)[f"actor-{worker.key.rank}"]["worker"]["CUDA_VISIBLE_DEVICES"]
        assert found == worker.visible_devices
        of_node.setdefault(worker.allocation.node_id, []).append(found)
    assert {node: sorted(ids) for node, ids in of_node.items()} == {"n0": ["0"], "n1": ["0", "1", "2", "3"]}


async def test_pg_16_each_worker_knows_how_many_are_on_its_own_node(devices: RealCluster, tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    job = await run(devices, "uneven", component("actor", folder, workers=5))
    expected = {"n0": "1", "n1": "4"}
    for worker in job.job.workers:
        each = seen(folder)[f"actor-{worker.key.rank}"]["worker"]
        assert each["LOCAL_WORLD_SIZE"] == expected[worker.allocation.node_id]
        assert each["WORLD_SIZE"] == "5"


async def test_gv_07_two_groups_on_one_node_never_meet_by_their_local_ranks(
    devices: RealCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    for name in ("a", "b"):
        await run(devices, name, component(name, folder, workers=2))
    by_local_rank: dict[str, set[str]] = {}
    for name, each in seen(folder).items():
        for who in ("worker", "child"):
            visible = each[who]["CUDA_VISIBLE_DEVICES"].split(",")
            by_local_rank.setdefault(name, set()).add(visible[int(each[who]["LOCAL_RANK"])])
    assert sorted(by_local_rank) == ["a-0", "a-1", "b-0", "b-1"]
    assert {len(ids) for ids in by_local_rank.values()} == {1}, "a worker and its child find the same device"
    workers = [worker for name in ("a", "b") for worker in (await devices.client.get_job(name)).job.workers]
    assert {worker.allocation.node_id for worker in workers} == {"n1"}
    assert set().union(*by_local_rank.values()) == {"0", "1", "2", "3"}


async def test_gv_08_what_a_worker_starts_sees_its_slice_and_no_card_has_two_owners(
    bare: RealCluster, tmp_path: Path
) -> None:
    await bare.add_node("n0", gpus=9)
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 9})
    folder = tmp_path / "seen"
    folder.mkdir()
    await run(bare, "split", component("actor", folder, workers=2), component("rollout", folder, gpu=6))
    await run(bare, "beside", component("beside", folder))
    found = seen(folder)
    engine = found["rollout-0"]["child"]["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(engine) == 6
    others = [found[name]["child"]["CUDA_VISIBLE_DEVICES"] for name in ("actor-0", "actor-1", "beside-0")]
    assert sorted([*engine, *others]) == [str(device) for device in range(9)]


async def test_gv_05_shares_of_a_card_are_seen_as_that_card(bare: RealCluster, tmp_path: Path) -> None:
    await bare.add_node("n0", gpus=2)
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 2})
    folder = tmp_path / "seen"
    folder.mkdir()
    await run(bare, "shared", component("w", folder, workers=3, gpu=0.4))
    cards = sorted(each["worker"]["CUDA_VISIBLE_DEVICES"] for each in seen(folder).values())
    assert cards in (["0", "0", "1"], ["0", "1", "1"]), "two on one, one on the other, none on both"


async def test_gv_11_a_worker_without_devices_sees_none(bare: RealCluster, tmp_path: Path) -> None:
    await bare.add_node("n0", gpus=2)
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 2, "cpu": 4})
    folder = tmp_path / "seen"
    folder.mkdir()
    await run(bare, "judge", component("w", folder, gpu=0))
    assert seen(folder)["w-0"]["child"]["CUDA_VISIBLE_DEVICES"] == ""
