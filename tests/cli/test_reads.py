"""What do reads show? Names for people in a table, ids with wide, everything in JSON and YAML."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from callboard._version import __version__
from callboard.agents.options import AgentOptions
from callboard.agents.system.devices import find_devices
from callboard.agents.system.inventory import inventory
from callboard.agents.system.nvidia import probe_nvml
from callboard.cli.show import verb_guard, words
from callboard.cli.watch import status
from callboard.client.calls import methods, watching
from callboard.client.calls.connection import Connection
from callboard.v1.common_pb2 import Device, DeviceDistance, Resources
from callboard.v1.event_pb2 import ListEventsResponse, WatchRequest, WatchResponse
from callboard.v1.inspection_pb2 import NodeInspection, RayObjectStore
from callboard.v1.job_pb2 import (
    ExplainJobResponse,
    Explanation,
    GetJobResponse,
    ListJobsRequest,
    ListJobsResponse,
    WorkerState,
)
from callboard.v1.node_pb2 import (
    DeviceUse,
    GetNodeResponse,
    InspectNodeRequest,
    InspectNodeResponse,
    ListNodesResponse,
    NodeState,
)
from callboard.v1.placement_group_pb2 import GetPlacementGroupResponse, ListPlacementGroupsResponse
from callboard.v1.pool_pb2 import GetPoolResponse, ListPoolsResponse
from callboard.v1.scheduler_pb2 import GetOverviewResponse, GetStatsResponse, Stats
from callboard.wire.refusals import ErrorReason, NotFound, Unavailable
from tests.cli import objects
from tests.cli.conftest import Run
from tests.support import nvml_library
from tests.support.fake_api import ALL_METHODS, FakeApi, ThreadedApi, unreleased
from tests.support.nvml_library import Gpu, Library

READS = [
    ("job", "list"),
    ("job", "get", "train-00"),
    ("pool", "list"),
    ("pool", "get", "rlhf"),
    ("pg", "list"),
    ("pg", "get", "pg-77"),
    ("node", "list"),
    ("node", "get", "node-1"),
    ("worker", "list"),
    ("worker", "list", "--job", "train-00"),
    ("status",),
    ("events",),
]
INTERNAL_IDS = ("uid-4711", "pg-77", "cb/uid", "abcdef0123", "feedbeef", "etag-9", "12345", "cause-1")

STORES = [
    RayObjectStore(ray_node_id="98fedcba10", used_bytes=0, total_bytes=2 << 30),
    RayObjectStore(ray_node_id="abcdef0123", used_bytes=(256 << 20) + 1, total_bytes=1 << 30),
]
"""Of a node of Ray that isn't ours, and of node-1."""


@pytest.fixture(autouse=True)
def filled(api: FakeApi) -> None:
    jobs = [objects.preempting_job(), objects.waiting_job(), objects.job("eval")]
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=jobs))
    api.on(methods.GET_JOB, GetJobResponse(job=jobs[0]))
    api.on(methods.LIST_POOLS, ListPoolsResponse(pools=[objects.pool()]))
    api.on(methods.GET_POOL, GetPoolResponse(pool=objects.pool()))
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=[objects.node()]))
    api.on(methods.GET_NODE, GetNodeResponse(node=objects.node()))
    api.on(methods.GET_PLACEMENT_GROUP, GetPlacementGroupResponse(placement_group=objects.group()))
    api.on(methods.LIST_PLACEMENT_GROUPS, ListPlacementGroupsResponse(placement_groups=[objects.group()]))
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(nodes={"READY": 1}, total_preemptions=1, uptime_ms=5000)))
    api.on(methods.GET_OVERVIEW, lambda _: overview(api))
    api.on(methods.LIST_EVENTS, ListEventsResponse(events=[objects.event()]))
    api.on(methods.INSPECT_NODE, InspectNodeResponse(inspection=NodeInspection(object_stores=STORES)))


def overview(api: FakeApi, **others: Any) -> GetOverviewResponse:
    """Of what the lists hold."""
    nodes = api.answer(methods.LIST_NODES).nodes
    return GetOverviewResponse(
        stats=api.answer(methods.GET_STATS).stats,
        pools=api.answer(methods.LIST_POOLS).pools,
        nodes=nodes,
        jobs=api.answer(methods.LIST_JOBS).jobs,
        ray_nodes={node.ray_node_id: words.node_id(node) for node in nodes},
        **others,
    )


@pytest.mark.parametrize("verb", READS, ids=" ".join)
def test_a_table_has_no_internal_ids(run: Run, verb: tuple[str, ...]) -> None:
    """MU-05."""
    shown = run(*verb)
    assert shown.exit_code == 0, shown.output
    assert [name for name in INTERNAL_IDS if name in shown.output] == []
    assert "train-00" in shown.output or "rlhf" in shown.output or "rollout-01" in shown.output


def test_an_older_controller_has_the_same_status(run: Run, api: FakeApi) -> None:
    newer = run("status").output
    assert "train-00" in newer
    api.lacks = unreleased()
    older = run("status")
    assert older.exit_code == 0, older.output
    stores, untold = (
        next(line for line in shown.splitlines() if "Object store" in line) for shown in (newer, older.output)
    )
    assert untold.startswith("Object store: not known, the controller at")
    assert older.output.replace(untold, stores) == newer
    assert f"{api.address} (from CALLBOARD_CONTROLLER) with node-1" in run("demand").stderr


@pytest.mark.parametrize("verb", READS, ids=" ".join)
def test_wide_adds_internal_ids(run: Run, verb: tuple[str, ...]) -> None:
    shown = run(*verb, "-o", "wide")
    assert any(name in shown.output for name in INTERNAL_IDS)


@pytest.mark.parametrize("verb", READS, ids=" ".join)
def test_json_and_yaml_say_the_same(run: Run, verb: tuple[str, ...]) -> None:
    as_json: Any = json.loads(run(*verb, "-o", "json").stdout)
    assert as_json
    as_yaml = yaml.safe_load(run(*verb, "-o", "yaml").stdout)
    assert as_json == as_yaml


def test_a_waiting_job_says_what_it_waits_for_though_a_list_carries_no_reasons(run: Run, api: FakeApi) -> None:
    waiting = objects.waiting_job()
    api.on(methods.GET_JOB, GetJobResponse(job=waiting))
    listed = objects.waiting_job()
    listed.ClearField("waiting_for")
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[listed]))
    line = next(line for line in run("job", "list").stdout.splitlines() if "rollout-01" in line)
    assert "PENDING" in line
    assert "5.5 of 6 CPU used" in line


def test_a_job_shows_its_gpu_and_who_made_room(run: Run) -> None:
    shown = run("job", "get", "train-00").stdout
    assert "rollout-01 yielded to train-00 in 40 ms (cooperative)" in shown
    assert "node-1" in shown


def test_only_live_jobs_are_listed_unless_all_are_asked_for(run: Run, api: FakeApi) -> None:
    run("job", "list")
    run("job", "list", "--all")
    run("job", "list", "--state", "failed")
    live, everything, failed = (len(request.states) for request in api.seen(ListJobsRequest))
    assert (live, everything, failed) == (6, 0, 1)


def test_status_draws_who_is_on_which_gpu(run: Run) -> None:
    shown = run("status").stdout
    assert "GPU0 [    train-00    ]" in shown
    assert "GPU1 [ kept for a PG  ]" in shown


def test_status_of_a_large_cluster_is_one_screen_and_says_what_it_leaves_out(run: Run, api: FakeApi) -> None:
    api.on(methods.GET_OVERVIEW, lambda _: overview(api, more_nodes=950, more_jobs=9_950, more_pools=1))
    shown = run("status").stdout
    assert "and 950 more nodes: `callboard node list` shows all" in shown
    assert "and 9950 more jobs: `callboard job list` shows all" in shown
    assert "and 1 more pool: `callboard pool list` shows all" in shown
    assert not api.seen(ListJobsRequest)
    assert len(json.loads(run("status", "-o", "json").stdout)["jobs"]) == 3
    assert api.seen(ListJobsRequest)


class TestObjectStores:
    def test_are_shown_by_node_the_fullest_first(self, run: Run, api: FakeApi) -> None:
        shown = run("status").stdout
        assert "Object store: 257MiB/3GiB; node-1 257MiB/1GiB, Ray node 98fedcba 0B/2GiB\n" in shown
        (asked,) = api.seen(InspectNodeRequest)
        assert (asked.name, asked.ask.object_stores) == ("nodes/node-1", True)

    def test_are_bytes_in_json_ours_first(self, run: Run) -> None:
        found = json.loads(run("status", "-o", "json").stdout)
        ours = {"node_id": "node-1", "ray_node_id": "abcdef0123", "used_bytes": (256 << 20) + 1, "total_bytes": 1 << 30}
        theirs = {"node_id": "", "ray_node_id": "98fedcba10", "used_bytes": 0, "total_bytes": 2 << 30}
        assert found["object_stores"] == [ours, theirs]
        assert found["object_stores_unknown"] == ""

    def test_that_can_t_be_asked_for_say_why_and_hold_nothing_up(
        self, run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        silent = NodeInspection(unknown=["Ray did not tell of its object stores within 2 s"])
        api.on(methods.INSPECT_NODE, InspectNodeResponse(inspection=silent))
        assert "not known, node-1: Ray did not tell of its object stores within 2 s" in run("status").stdout
        monkeypatch.setattr(status, "_STORES_S", 0.01)
        api.on(methods.INSPECT_NODE, lambda _: asyncio.Event().wait())
        found = json.loads(run("status", "-o", "json").stdout)
        assert found["object_stores"] is None
        assert found["object_stores_unknown"] == "no answer within 0.01 s"

    def test_are_not_asked_for_without_ray(self, run: Run, api: FakeApi) -> None:
        node = objects.node()
        node.ClearField("ray_node_id")
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node]))
        assert "Object store" not in run("status").stdout
        assert not api.seen(InspectNodeRequest)


def test_amounts_are_exact_numbers_in_json(run: Run) -> None:
    (found,) = json.loads(run("pool", "list", "-o", "json").stdout)
    assert found["used"]["cpu_milli"] == 1500
    assert found["spec"]["stop_policy"] == "UNSPECIFIED"


def test_an_explanation_says_why_and_what_would_help(run: Run, api: FakeApi) -> None:
    explanation = Explanation(
        verdict="WAIT", summary="pool rlhf is full", unblock=["raise pool rlhf cpu by 1"], queue_position=1
    )
    api.on(methods.EXPLAIN_JOB, ExplainJobResponse(explanation=explanation))
    shown = run("job", "explain", "rollout-01").stdout
    assert "pool rlhf is full" in shown
    assert "raise pool rlhf cpu by 1" in shown


def test_a_worker_shows_its_job_its_place_and_why_its_start_was_cold(run: Run, api: FakeApi) -> None:
    job = objects.job()
    job.workers[0].cold_reason = "no spare is ready"
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[job]))
    line = run("worker", "list").stdout.splitlines()[1]
    assert line.split()[:6] == ["train-00", "actor", "0", "READY", "node-1", "0"]
    assert "cold in 350 ms" in line
    assert "no spare is ready" not in line
    assert "no spare is ready" in run("worker", "list", "-o", "wide").stdout
    assert json.loads(run("worker", "list", "--node", "node-9", "-o", "json").stdout) == []


def test_nothing_there_is_said_on_stderr_and_json_is_still_json(run: Run, api: FakeApi) -> None:
    api.on(methods.LIST_JOBS, ListJobsResponse())
    shown = run("job", "list")
    assert (shown.stdout, shown.exit_code) == ("", 0)
    assert "No jobs" in shown.stderr
    assert json.loads(run("job", "list", "-o", "json").stdout) == []


def test_what_others_wrote_is_shown_as_it_is_and_steers_no_terminal(run: Run, api: FakeApi) -> None:
    """A message of a user's exception, the words of a machine's notice."""
    said = "can't read [/data/x] or [bold]y[/bold] :smile: \x1b[31m\x07\x9b1m\u202eend"
    node, job = objects.node(), objects.job()
    node.state, node.state_reason, job.state_reason = NodeState.NODE_STATE_DRAINING, said, said
    for worker in job.workers:
        worker.state_reason = said
    job.traceback = f"Traceback:\n\t{said}"
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node]))
    api.on(methods.GET_NODE, GetNodeResponse(node=node))
    api.on(methods.GET_JOB, GetJobResponse(job=job))
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[job]))
    for verb in (("node", "list"), ("node", "get", "node-1"), ("job", "list"), ("job", "get", "train-00"), ("status",)):
        shown = run(*verb)
        assert shown.exit_code == 0, shown.output
        assert not set("\x1b\x07\x9b\u202e") & set(shown.output)
    assert "can't read [/data/x] or [bold]y[/bold] :smile: \ufffd[31m" in run("node", "list").stdout


def test_nodes_that_left_are_out_of_lists_unless_all_are_asked_for(run: Run, api: FakeApi) -> None:
    gone = objects.node()
    gone.name, gone.state = "nodes/gone-9", NodeState.NODE_STATE_LEFT
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=[objects.node(), gone]))
    assert "gone-9" not in run("node", "list").stdout
    assert "gone-9" in run("node", "list", "--all").stdout
    assert [node["name"] for node in json.loads(run("node", "list", "-o", "json").stdout)] == ["nodes/node-1"]


def test_a_gpu_of_a_node_that_takes_nothing_is_not_called_free(run: Run, api: FakeApi) -> None:
    states = {name: NodeState.Value(f"NODE_STATE_{name.upper()}") for name in ("lost", "draining", "cordoned")}
    node = objects.node()
    for use in node.devices:
        use.CopyFrom(DeviceUse(device=use.device))
    for state, value in {"free": NodeState.NODE_STATE_READY, **states}.items():
        node.state = value
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node]))
        boxes = [line for line in run("status").stdout.splitlines() if "GPU0 [" in line]
        assert boxes
        assert all(f" {state} " in line for line in boxes), boxes


def test_a_job_that_waits_again_is_nowhere() -> None:
    shown = objects.job("eval")
    assert words.places_of(shown)
    for worker in shown.workers:
        worker.state = WorkerState.WORKER_STATE_STOPPED
    assert not words.places_of(shown)


def test_a_quota_of_nothing_is_shown_as_a_quota() -> None:
    nothing = Resources(cpu_milli=1500)
    assert words.limits(nothing, ["gpu", "cpu"]) == "1.5 CPU, 0 GPU"
    assert words.limits(nothing, []) == ""


@pytest.mark.parametrize("verb", [("node", "get", "node-1"), ("status",)], ids=" ".join)
def test_ft_c13_wide_shows_which_hardware_each_gpu_is(
    api: FakeApi, run: Run, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(f"GPU-{letter * 8}", bus_id=f"00000000:0{number}:00.0") for number, letter in enumerate("abcd")]
    nvml_library.install(monkeypatch, Library(gpus))
    options = AgentOptions(node_id="node-1")
    found = find_devices({"CUDA_VISIBLE_DEVICES": "3,1,0"}, count=None, simulate=None, probe=probe_nvml)
    node = objects.node()
    node.ClearField("devices")
    node.devices.extend(DeviceUse(device=device) for device in inventory(options, found).devices)
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node]))
    api.on(methods.GET_NODE, GetNodeResponse(node=node))
    lines = run(*verb, "-o", "wide").stdout.splitlines()
    for index, (device, letter) in enumerate((("3", "d"), ("1", "b"), ("0", "a"))):
        words_of = [device, str(index), f"GPU-{letter * 8}", f"00000000:0{device}:00.0", "NVIDIA", "H100", "80GB"]
        assert any(" ".join(line.split()).find(" ".join(words_of)) >= 0 for line in lines), (words_of, lines)
    assert "GPU-dddd" not in run(*verb).stdout


def test_node_get_shows_how_its_gpus_are_connected(api: FakeApi, run: Run) -> None:
    node = objects.node()
    node.ClearField("devices")
    same, nvlink = DeviceDistance.DEVICE_DISTANCE_SAME, DeviceDistance.DEVICE_DISTANCE_NVLINK
    near = {frozenset({0, 1}): nvlink, frozenset({2, 3}): DeviceDistance.DEVICE_DISTANCE_PCI_SWITCH}
    for i in range(4):
        distances = [near.get(frozenset({i, j}), DeviceDistance.DEVICE_DISTANCE_SYSTEM) for j in range(4)]
        distances[i] = same
        node.devices.append(DeviceUse(device=Device(index=i, id=str(i), distances=distances)))
    api.on(methods.GET_NODE, GetNodeResponse(node=node))
    rows = [line.split() for line in run("node", "get", "node-1").stdout.splitlines()]
    for row in (
        ["BETWEEN", "0", "1", "2", "3"],
        ["0", "–", "NVLink", "system", "system"],
        ["1", "NVLink", "–", "system", "system"],
        ["3", "system", "system", "switch", "–"],
    ):
        assert row in rows, rows
    for use in node.devices:
        use.device.distances[:] = [same if i == use.device.index else nvlink for i in range(4)]
    api.on(methods.GET_NODE, GetNodeResponse(node=node))
    assert "Between each two GPUs: NVLink" in run("node", "get", "node-1").stdout


class TestAReasonThatWasSent:
    """What the controller says of why it can't is shown; that nobody answers is said only where nobody does."""

    VERBS = (
        *READS,
        ("top",),
        ("doctor",),
        ("job", "env", "train-00"),
        ("job", "explain", "train-00"),
        ("job", "logs", "train-00"),
        ("job", "cancel", "train-00"),
        ("job", "preempt", "train-00"),
        ("events", "--follow"),
        ("policy", "get"),
        ("node", "drain", "node-1"),
        ("pool", "delete", "rlhf"),
        ("demand",),
    )

    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    def test_ft_c4_a_journal_that_fails_is_the_reason_of_every_verb(
        self, api: FakeApi, run: Run, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verb_guard, "RETRY_S", 0.05)
        monkeypatch.setattr(watching, "AWAY_S", 0.1)

        def refuse(_: Any) -> Any:
            raise Unavailable("the controller can't use its journal: the disk is full", reason=ErrorReason.STORE_FAILED)

        for method in ALL_METHODS.values():
            api.on(method, refuse)
        result = run(*verb)
        assert result.exit_code == 4, result.output
        assert "The controller can't use its journal: the disk is full." in result.output
        assert "o controller answers" not in result.output

    def test_ft_c4_an_agent_that_does_not_answer_is_named_with_what_it_did(
        self, api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verb_guard, "RETRY_S", 0.05)

        def stopped(_: Any) -> Any:
            raise Unavailable("the agent of node node-1 did not answer within 10 s; try again")

        api.on(methods.INSPECT_NODE, stopped)
        for verb in (("top", "--once"), ("doctor",), ("job", "env", "train-00"), ("status",)):
            output = " ".join(run(*verb).output.split())
            assert "o controller answers" not in output
            if verb != ("status",):
                assert "the agent of node node-1 did not answer within 10 s" in output, verb

    def test_ft_c4_a_controller_that_hangs_is_told_from_one_that_is_not_there(
        self, api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def never(_: Any) -> Any:
            await asyncio.Event().wait()

        api.on(methods.LIST_JOBS, never)
        monkeypatch.setattr(verb_guard, "CALL_TIMEOUT_S", 0.3)
        result = run("job", "list")
        assert result.exit_code == 4
        assert "did not answer in time, although something listens there" in result.output
        assert "o controller answers" not in result.output

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is another kind of server"),
            (b"", "something listens there but does not answer"),
            (None, "nothing listens there"),
        ],
        ids=["web server", "stopped", "nobody"],
    )
    def test_ft_c4_what_listens_in_its_place_is_the_reason(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, said: bytes | None, why: str
    ) -> None:
        monkeypatch.setattr(verb_guard, "RETRY_S", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            monkeypatch.setenv("CALLBOARD_CONTROLLER", f"127.0.0.1:{listening.getsockname()[1]}")
            if said is None:
                listening.close()  # a controller that is stopped (SIGSTOP) accepts, too, and says nothing

            def answer() -> None:
                with ExitStack() as connections, suppress(OSError):
                    while True:
                        connected = connections.enter_context(listening.accept()[0])
                        connected.sendall(said or b"")

            thread = threading.Thread(target=answer, daemon=True) if said else None
            if thread is not None:
                thread.start()
            result = run("job", "list")
            if thread is not None:
                listening.shutdown(socket.SHUT_RDWR)
                thread.join()
        assert result.exit_code == 4
        assert why in result.output

    @pytest.mark.parametrize("is_gone", [True, False], ids=["its port is closed", "it goes in the middle of the call"])
    def test_ft_f1_a_verb_goes_on_through_a_restart(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, is_gone: bool
    ) -> None:
        """The controller is there again only after the verb's first try."""
        threaded = ThreadedApi()
        with threaded as api:
            address = api.address
            monkeypatch.setenv("CALLBOARD_CONTROLLER", address)
            wait_for, tries = Connection.ready, []

            async def ready(connection: Connection, timeout_s: float) -> bool:
                tries.append(timeout_s)
                if len(tries) == 1:
                    await asyncio.to_thread(threaded.do, api.start(address))
                return await wait_for(connection, timeout_s)

            async def go(_: Any) -> Any:
                await api.stop()

            monkeypatch.setattr(Connection, "ready", ready)
            api.on(methods.LIST_JOBS, go)
            if is_gone:
                threaded.do(api.stop())
            else:
                monkeypatch.setattr(verb_guard, "RETRY_S", 0.001)  # it was there, so it is waited for longer than that
            started = api.start

            async def start_and_answer(where: str) -> None:
                api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[objects.job()]))
                await started(where)

            monkeypatch.setattr(api, "start", start_and_answer)
            result = run("job", "list")
        assert result.exit_code == 0, result.output
        assert "train-00" in result.output
        assert tries


class TestWatching:
    """`--watch` shows a read again after every change."""

    def test_programs_get_a_line_per_change_and_an_error_as_json(self, run: Run, api: FakeApi) -> None:
        streams = iter([WatchResponse(events=[objects.event()])])

        async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
            response = next(streams, None)
            if response is None:
                raise NotFound("there is no more")
            yield response

        api.on(methods.WATCH, watch)
        shown = run("pool", "list", "--watch", "-o", "json")
        assert shown.exit_code == 1
        first, second = (json.loads(line) for line in shown.stdout.splitlines())
        assert first == second == json.loads(run("pool", "list", "-o", "json").stdout)
        error = json.loads(shown.stderr)["error"]
        assert (error["what"], error["reason"], error["exit_code"]) == ("There is no more.", "NOT_FOUND", 1)
        assert api.address in error["controller"]

    def test_a_later_command_line_is_not_watched(self, run: Run) -> None:
        assert run("pool", "list").stdout.startswith("NAME")


def test_faults_of_a_file_are_data_for_programs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("pool: rlhf\ncomponents: [{name: a, actor: 'm:C', wrokers: 2}]\n")
    shown = run("job", "submit", str(tmp_path / "job.yaml"), "-o", "json")
    assert shown.exit_code == 2
    assert shown.stdout == ""
    faults = json.loads(shown.stderr)["error"]["faults"]
    assert ("components[0].wrokers", 2) in [(fault["field"], fault["line"]) for fault in faults]


class TestVersion:
    def test_it_is_said_without_a_controller(self, api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CALLBOARD_CONTROLLER", "127.0.0.1:1")
        assert run("version").stdout.strip() == f"callboard {__version__}"
        own = json.loads(run("version", "-o", "json").stdout)
        assert own["callboard"] == __version__
        assert own["python"] == platform.python_version()

    def test_those_of_the_cluster_are_compared(self, api: FakeApi, run: Run) -> None:
        here = {"python_version": platform.python_version(), "ray_version": importlib.metadata.version("ray")}
        node, gone = objects.node(), objects.node(2)
        gone.state, gone.version = NodeState.NODE_STATE_LEFT, "0.0.1"
        node.version = __version__
        for name, version in here.items():
            setattr(node, name, version)
        api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(version=__version__)))
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node, gone]))
        shown = run("version", "--check")
        assert shown.exit_code == 0, shown.output
        assert "All fit together." in shown.stdout
        node.version, node.python_version, node.ray_version = "0.0.2", "2.7.18", "1.0"
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[node]))
        shown = run("version", "--check")
        assert shown.exit_code == 1
        for differs in (f"callboard: 0.0.2, {__version__}", "Ray: 1.0, ", "Python: 2.7, 3."):
            assert differs in shown.stdout
        told = json.loads(run("version", "--check", "-o", "json").stdout)
        assert (told["fits"], len(told["differ"]), len(told["programs"])) == (False, 3, 3)

    def test_a_controller_that_says_none_is_older(self, api: FakeApi, run: Run) -> None:
        api.on(methods.LIST_NODES, ListNodesResponse())
        api.on(methods.GET_STATS, GetStatsResponse(stats=Stats()))
        shown = run("version", "--check")
        assert shown.exit_code == 1
        assert f"callboard: {__version__}, an older one that does not say; install the same everywhere" in shown.stdout
