"""Do the verbs do what they say, against a real controller and real worker processes?"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from callboard.agents.ray.ray_command import free_port
from callboard.cli.show import verb_guard
from callboard.client import Client
from callboard.client.diagnosis import Evidence, Finding, diagnose
from callboard.controller.services import node as node_service
from callboard.controller.sessions import outputs
from callboard.security.dialing import open_channel
from callboard.v1 import job_pb2, node_pb2
from callboard.v1.inspection_pb2 import NodeInspection, RayPlacementGroup
from callboard.wire.refusals import CallboardError, NotFound
from tests.cli.cluster import RealCluster, first_line, job, program, verb
from tests.cli.machine import Machine, wait_for_line


class TestReads:
    async def test_mu_05_a_status_of_three_jobs_shows_no_internal_ids(self, cluster: RealCluster) -> None:
        for number in range(3):
            await cluster.client.submit(job(f"job-{number}"))
        await (await cluster.client.get_job("job-0")).running(timeout=90)
        uids = [found.uid for found in await cluster.client.list_jobs()]
        for line in (("status",), ("job", "list"), ("worker", "list"), ("node", "get", "n0")):
            shown = await verb(cluster, *line)
            assert shown.exit_code == 0, shown.output
            assert "job-0" in shown.stdout
            assert [uid for uid in uids if uid in shown.stdout or uid.removeprefix("j-") in shown.stdout] == []
        assert uids[0] in (await verb(cluster, "job", "list", "-o", "wide")).stdout

    async def test_mu_07_a_resource_error_names_the_controller_and_its_nodes(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job("huge", resources={"cpu": 1, "gpu": 16})))
        shown = await verb(shared, "job", "submit", str(file))
        assert shown.exit_code == 3
        assert f"controller {shared.address}" in shown.stderr
        assert "with n0" in shown.stderr

    async def test_every_service_is_found_by_reflection(self, bare: RealCluster) -> None:
        async with open_channel(bare.address) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # made for both
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=60)]
            listed = {service.name for service in answer.list_services_response.service}
            described = reflection_pb2.ServerReflectionRequest(file_containing_symbol="callboard.v1.JobService")
            (found,) = [answer async for answer in stub.ServerReflectionInfo(iter([described]), timeout=60)]
        ours = {"Agent", "Event", "Job", "Node", "Placement", "PlacementGroup", "Pool", "Scheduler"}
        assert listed == {f"callboard.v1.{name}Service" for name in ours} | {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert found.file_descriptor_response.file_descriptor_proto


class TestVerbs:
    @pytest.mark.timeout(300)
    async def test_a_job_is_followed_with_its_log_to_its_end(self, shared: RealCluster, tmp_path: Path) -> None:
        talker = job("talk", "tests.support.actors:Talker", kwargs={"gate": str(tmp_path / "gate")}, entry="run")
        handle = await shared.client.submit(talker)
        await handle.running(timeout=90)
        watching = await program(shared, "job", "watch", "talk")
        following = await program(shared, "job", "logs", "talk", "--follow")
        assert "Job talk is RUNNING" in await first_line(watching)
        assert await first_line(following) == "hello from the worker"
        (tmp_path / "gate").touch()
        (states, _), (lines, _) = await watching.communicate(), await following.communicate()
        assert (watching.returncode, following.returncode) == (0, 0)
        assert states.decode().splitlines()[-1].startswith("Job talk is SUCCEEDED")
        assert lines.decode() == "goodbye\n"

    async def test_ft_c10_every_verb_says_when_what_is_being_stopped_is_killed(self, cluster: RealCluster) -> None:
        stubborn = job("stubborn", "tests.support.actors:Hanging", args=["sleep"], entry="run")
        handle = await cluster.client.submit(stubborn)
        await handle.running(timeout=90)
        canceled = await verb(cluster, "job", "cancel", "stubborn", "--grace", "9m")
        said = re.compile(r"killed at the latest in (\d+ s|[89] min)")
        missing = []
        verbs = ("job get stubborn", "job list", "job explain stubborn", "worker list", "node get n0", "node list")
        assert said.search(canceled.stderr)
        for line in (*verbs, "status"):
            shown = await verb(cluster, *line.split())
            if not said.search(" ".join(shown.stdout.split())):
                missing.append(line)
        assert missing == []
        await verb(cluster, "node", "drain", "n0", "--deadline", "1s")
        assert (await handle.finished(timeout=60)).state == job_pb2.JOB_STATE_CANCELLED

    async def test_ft_a1_output_of_a_job_that_ended_is_read_from_anywhere(
        self, shared: RealCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "gate").touch()
        quick = job("quick", "tests.support.actors:Talker", kwargs={"gate": str(tmp_path / "gate")}, entry="run")
        await (await shared.client.submit(quick)).finished(timeout=90)
        monkeypatch.setenv("CALLBOARD_RUN_DIR", str(tmp_path / "elsewhere"))  # As on another machine.
        shown = await verb(shared, "job", "logs", "quick", "--tail", "1")
        assert (shown.exit_code, shown.stdout) == (0, "goodbye\n"), shown.output
        unknown = await verb(shared, "job", "logs", "quick", "--rank", "7")
        assert (unknown.exit_code, "had no worker of rank 7" in unknown.stderr) == (1, True), unknown.stderr

    async def test_a_pool_is_changed_and_ended(self, cluster: RealCluster) -> None:
        shown = await verb(cluster, "pool", "set", "rlhf", "nominal.gpu=2", "labels.team=a", "-o", "json")
        assert shown.exit_code == 0, shown.output
        spec = json.loads(shown.stdout)["spec"]
        assert (spec["nominal"]["cpu_milli"], spec["nominal"]["gpu_milli"], spec["labels"]) == (
            8000,
            2000,
            {"team": "a"},
        )
        stale = await verb(cluster, "pool", "set", "rlhf", "nominal.gpu=1", "--etag", "1")
        assert stale.exit_code == 1
        assert "changed since it was read" in stale.stderr
        await (await cluster.client.submit(job("holds"))).running(timeout=90)
        refused = await verb(cluster, "pool", "delete", "rlhf")
        assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
        assert (await verb(cluster, "pool", "delete", "rlhf", "--force")).exit_code == 0
        await (await cluster.client.get_job("holds")).finished(timeout=90)
        # The job has ended; its placement group goes after it, and the pool last.
        async for event in cluster.client.watch(start_revision=1, types=["pool."]):
            if event.state == "DELETED":
                break
        with pytest.raises(NotFound):
            await cluster.client.get_pool("rlhf")

    async def test_a_node_is_drained_and_taken_back(self, cluster: RealCluster) -> None:
        handle = await cluster.client.submit(job("moves"))
        await handle.running(timeout=90)
        assert (await verb(cluster, "node", "drain", "n0", "--within", "5s")).exit_code == 0
        await handle.until(lambda found: found.state == job_pb2.JobState.JOB_STATE_PENDING, "yield", 30)
        assert "DRAINING" in (await verb(cluster, "node", "get", "n0")).stdout
        assert (await verb(cluster, "node", "uncordon", "n0")).exit_code == 0
        await handle.running(timeout=90)
        assert handle.job.attempt == 2

    async def test_an_elastic_component_is_scaled(self, shared: RealCluster) -> None:
        elastic = job("grows", resources={"cpu": 1}, min_workers=1, max_workers=3)
        handle = await shared.client.submit(elastic)
        await handle.running(timeout=90)
        for count in (1, 2):
            shown = await verb(shared, "job", "scale", "grows", "w", str(count))
            assert shown.exit_code == 0, shown.output
            await handle.until(partial(has_ready, count), f"{count} workers", 30)
        with pytest.raises(CallboardError):
            await handle.scale("w", 9)

    async def test_a_session_owned_job_lives_as_long_as_its_client(self, shared: RealCluster) -> None:
        owner = Client(shared.address)
        spec = job("owned") | {"owner": {"session": {"lease": "1s"}}}
        uid = (await owner.submit(spec)).job.uid
        handle = await shared.client.get_job(uid)
        await handle.running(timeout=90)
        with pytest.raises(TimeoutError):
            await handle.finished(timeout=2.5)  # More than two leases.
        await owner.close()
        ended = await handle.finished(timeout=90)
        assert ended.state == job_pb2.JobState.JOB_STATE_CANCELLED


def test_mu_07_two_controllers_and_no_address_is_an_error_that_lists_them(machine: Machine) -> None:
    """Also: a controller on port 0 registers the port it got."""
    state = machine.run_dir.parent
    first = machine.start("controller", "--listen", "127.0.0.1:0", "--state-dir", str(state / "a"))
    wait_for_line(first, "listening")
    (record,) = machine.clusters()
    assert not record.controller.endswith(":0")
    assert record.controller in machine.run("status").stdout
    port = free_port()
    second = machine.start("controller", "--listen", f"127.0.0.1:{port}", "--state-dir", str(state / "b"))
    wait_for_line(second, "listening")
    shown = machine.run("job", "list")
    assert shown.returncode == 2
    assert record.controller in shown.stderr
    assert f"127.0.0.1:{port}" in shown.stderr
    for controller in (first, second):
        controller.send_signal(signal.SIGTERM)
        controller.communicate(timeout=120)
    assert machine.clusters() == []


def has_ready(count: int, found: job_pb2.Job) -> bool:
    return count == sum(worker.state == job_pb2.WorkerState.WORKER_STATE_READY for worker in found.workers)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that waits for agents for half a second only, and verbs that don't ask it again. Asked for before
    the controller is."""
    monkeypatch.setattr(verb_guard, "RETRY_S", 0.1)
    monkeypatch.setattr(node_service, "INSPECTION_S", 0.5)
    monkeypatch.setattr(outputs, "OPEN_S", 0.5)


async def test_ft_c4_ft_c5_a_stopped_agent_is_the_reason_and_goes_on(
    impatient: None,
    cluster: RealCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await (await cluster.client.submit(job("train"))).running(timeout=90)
    pid = (await cluster.client.get_node("n0")).agent_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asked: list[tuple[str, ...]] = [("top", "--once"), ("top", "-o", "json"), ("job", "env", "train")]
        asked += [("job", "env", "train", "-o", "json"), ("job", "logs", "train"), ("doctor",)]
        outputs_of = [" ".join((await verb(cluster, *line)).output.split()) for line in asked]
        for line, output in zip(asked, outputs_of, strict=True):
            assert re.search("the agent of (node )?n0 did not answer within 0.5 s", output), (line, output)
            assert "o controller answers" not in output, (line, output)
        commands = set(re.findall("`(kill[^`]+)`", outputs_of[-1]))
        assert commands == {f"kill -CONT {pid}"}
        assert await (await asyncio.create_subprocess_exec(*commands.pop().split())).wait() == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(node_service, "INSPECTION_S", 30.0)
    revision = (await cluster.client.stats()).revision
    if (await cluster.client.get_node("n0")).state == node_pb2.NodeState.NODE_STATE_SUSPECT:
        async for event in cluster.client.watch(start_revision=revision + 1, types=["node."]):
            if event.state == "READY":
                break
    shown = await verb(cluster, "doctor")
    assert shown.exit_code == 0, shown.output
    assert "could not be asked" not in (await verb(cluster, "top", "--once")).output


async def test_ft_c5_what_doctor_says_of_a_group_that_ray_lost_helps(cluster: RealCluster) -> None:
    """What the nodes see is made up, for plain processes are in no Ray; the commands and what they change are real."""
    client = cluster.client
    handle = await client.submit(job("train"))
    await handle.running(timeout=90)

    async def found() -> list[Finding]:
        groups = await client.list_placement_groups()
        for group in groups:
            group.ray_placement_group_id = group.name
        others = [
            RayPlacementGroup(id=group.name, name="cb/x", state="CREATED") for group in groups if group.name != lost
        ]
        seen = {"n0": NodeInspection(ray_listed=True, placement_groups=others)}
        findings = diagnose(
            Evidence(await client.list_nodes(), [(await client.get_job("train")).job], groups, seen, {})
        )
        return [each for each in findings if each.kind == "missing-group"]

    (group,) = await client.list_placement_groups()
    lost = group.name
    (finding,) = await found()
    commands = re.findall("`callboard ([^`]+)`", finding.remedy)
    assert len(commands) == 2
    for command in commands:
        result = await verb(cluster, *command.split())
        assert result.exit_code == 0, (command, result.output)
    async for _ in client.watch(start_revision=1, types=["group."]):
        if lost not in {each.name for each in await client.list_placement_groups()}:
            break
    await (await client.get_job("train")).running(timeout=90)
    assert await found() == []
