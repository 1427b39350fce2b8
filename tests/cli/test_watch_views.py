"""How do loads and findings read?"""

from __future__ import annotations

import io
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from callboard.cli.pools.views import groups_in_short
from callboard.cli.show.gpu_picture import GpuPicture
from callboard.cli.watch.views import environment_view, findings_view, top_view
from callboard.client.diagnosis import Finding, FindingKind
from callboard.v1.common_pb2 import Allocation, DeviceShare, WorkerKey
from callboard.v1.inspection_pb2 import CallLoad, DeviceLoad, DeviceUser, NodeInspection, WorkerInspection
from callboard.v1.job_pb2 import Job, JobSpec, Worker
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.pool_pb2 import PlacementGroupPoolStats as Stats

KEY = WorkerKey(job_id="u1", component="training", rank=0)
JOB = Job(uid="u1", spec=JobSpec(name="train"), gauges={"queue_depth": 120.5})


def read(picture: RenderableType) -> str:
    console = Console(file=StringIO(), width=200, no_color=True)
    console.print(picture)
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def test_top_has_a_line_per_member_and_says_what_waits() -> None:
    look = WorkerInspection(
        worker=KEY,
        cpu_milli=1500,
        memory_bytes=(2 << 30) + 5,
        peak_memory_bytes=3 << 30,
        calls=[CallLoad(member="trainer", in_flight=3, limit=1), CallLoad(member="pool", in_flight=40, limit=100)],
    )
    users = [DeviceUser(index=0, pid=7, memory_bytes=12 << 30, worker=KEY), DeviceUser(index=1, pid=9)]
    foreign = WorkerInspection(worker=WorkerKey(job_id="u2", component="x"))
    seen = {"n1": NodeInspection(workers=[look, foreign], device_users=users)}
    lines = [line.split() for line in read(top_view([JOB], seen, {"n2": "gone"})).splitlines()]
    assert lines[1] == [
        "train",
        "training",
        "0",
        "n1",
        "1.5",
        "2GiB",
        "3GiB",
        "-",
        "0:",
        "12GiB",
        *["trainer", "3/1,", "2", "wait"],
    ]
    assert lines[2] == ["pool", "40/100"]
    assert ["train", "queue_depth", "120.5"] in lines
    assert "n2 could not be asked: gone" in read(top_view([JOB], seen, {"n2": "gone"}))
    assert "No workers run." in read(top_view([], {}, {}))


@pytest.mark.parametrize(
    ("loads", "shown"),
    [
        ([], "-"),
        ([DeviceLoad(index=1, utilization_percent=87)], "1: 87%"),
        ([DeviceLoad(index=3, utilization_percent=0), DeviceLoad(index=1, utilization_percent=87)], "3: 0%, 1: 87%"),
        ([DeviceLoad(index=0, utilization_percent=50)], "-"),  # Another's.
        ([DeviceLoad(index=1)], "-"),  # A part of a partitioned device.
    ],
)
def test_top_says_how_busy_the_devices_of_a_worker_are(loads: list[DeviceLoad], shown: str) -> None:
    held = Allocation(devices=[DeviceShare(index=3, id="5"), DeviceShare(index=1, id="7")])
    job = Job(uid="u1", spec=JobSpec(name="train"), workers=[Worker(key=KEY, allocation=held)])
    seen = {"n1": NodeInspection(workers=[WorkerInspection(worker=KEY)], device_loads=loads)}
    head, row = read(top_view([job], seen, {})).splitlines()[:2]
    column = head.index("GPU ")
    assert row[column : head.index("GPU MEMORY")].strip() == shown


def test_a_worker_that_does_not_answer_says_why_instead_of_its_calls() -> None:
    look = WorkerInspection(worker=KEY, silent="it is still being started")
    assert "it is still being started" in read(top_view([JOB], {"n1": NodeInspection(workers=[look])}, {}))


def test_findings_come_with_what_to_do() -> None:
    finding = Finding(FindingKind.FOREIGN_ACTOR, "nodes/n1", "Ray's actor x is not callboard's", "End it.")
    shown = read(findings_view("host:1", 2, [finding]))
    assert "1 found at host:1, 2 nodes asked." in shown
    assert "foreign-actor: Ray's actor x is not callboard's\n  do: End it." in shown
    assert "Healthy: nothing wrong was found at host:1; 2 nodes were asked." in read(findings_view("host:1", 2, []))


def test_an_environment_is_sorted_and_a_missing_one_is_said() -> None:
    worker = Worker(key=KEY, members=["trainer", "pool"])
    shown = read(environment_view(JOB, [(worker, {"B": "2", "A": "1"}), (worker, {})], {}))
    assert "train/training: trainer, pool/0\n  A=1\n  B=2" in shown
    assert "has no process whose variables are known" in shown


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (Stats(), "none"),
        (Stats(total=1), "1 private"),
        (Stats(total=5, reserved=2, reserved_idle=1, dynamic=2), "2 reserved (1 idle), 2 dynamic, 1 private"),
    ],
)
def test_groups_are_counted_by_what_they_are_kept_for(stats: Stats, text: str) -> None:
    assert groups_in_short(stats) == text


class TestThePictureOfGpus:
    """Who is on which GPU, on a screen of any width."""

    @staticmethod
    def node(gpus: int) -> Node:
        node = Node(name="nodes/node-0", state=NodeState.NODE_STATE_READY)
        for place in range(gpus):
            use = node.devices.add()
            use.device.id, use.device.index = str(place), place
            if place < gpus // 2:
                use.workers.add(job="train-00")
        node.devices[-1].held_milli = 1000
        return node

    def drawn(self, gpus: int, width: int) -> list[str]:
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(GpuPicture([self.node(gpus)]))
        return [line.rstrip() for line in console.export_text().splitlines()]

    def test_a_box_per_gpu_where_there_is_room(self) -> None:
        assert self.drawn(2, 80) == ["node-0 CPU 0/0    GPU0 [    train-00    ] GPU1 [ kept for a PG  ]"]

    @pytest.mark.parametrize("gpus", [8, 16, 64])
    @pytest.mark.parametrize("width", [40, 80])
    def test_neighbours_share_a_box_where_there_is_not(self, gpus: int, width: int) -> None:
        lines = self.drawn(gpus, width)
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        half, last = gpus // 2, gpus - 1
        assert f"GPU0-{half - 1} [train-00] GPU{half}-{last - 1} [free] GPU{last} [kept for a PG]" in text
