"""Does what doctor says to do help? Every kind of finding is brought about, its commands are run, and it is gone.

The controller, the verbs and the signals are real. What Ray, the devices and the workers' processes say is made up by
the agent, and follows what the commands change: a process that is gone uses no GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from callboard.client.diagnosis import FindingKind
from callboard.controller.logs import configure_logs
from callboard.controller.services import node as node_service
from callboard.v1 import agent_pb2, common_pb2, inspection_pb2
from tests.cli import test_worker_handles
from tests.cli.cluster import ACTOR, RealCluster, real_cluster, verb
from tests.support.fake_agent import GIB, FakeAgent, worker_exited, worker_stopped

RAY = agent_pb2.RayNode(gcs_address="127.0.0.1:6379", session="s", ray_node_id="a1", head=True)

Steps = AsyncIterator[None]


class SeeingAgent(FakeAgent):
    """An agent that says what it is told to see, as long as its process isn't stopped."""

    def __init__(self, address: str, node_id: str, sleeper: subprocess.Popen[bytes]) -> None:
        super().__init__(
            address,
            node_id,
            cpu_milli=4000,
            gpus=2,
            runtime=agent_pb2.RUNTIME_RAY,
            ray=RAY if node_id == "n0" else None,
        )
        self.hello.pid = sleeper.pid
        self.sees: Callable[[], inspection_pb2.NodeInspection] = inspection_pb2.NodeInspection
        self.pid_of_workers = 0

    @property
    def stopped(self) -> bool:
        return Path(f"/proc/{self.hello.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    async def live(self) -> None:
        """Sends heartbeats while its process runs."""
        while True:
            if not self.stopped:
                with suppress(asyncio.InvalidStateError):
                    await self.say(heartbeat=agent_pb2.Heartbeat(ray=self.hello.ray))
            await asyncio.sleep(0.1)

    async def _take(self, message: agent_pb2.SessionResponse) -> None:
        await super()._take(message)
        if message.WhichOneof("message") == "inquiry" and not self.stopped:
            answer = agent_pb2.InquiryAnswer(inquiry_id=message.inquiry.inquiry_id, inspection=self.sees())
            await self.say(inquiry_answer=answer)

    def obey(self, command: agent_pb2.Command) -> agent_pb2.Report:
        """As a good agent on Ray."""
        report = super().obey(command)
        if report.HasField("worker_ready"):
            ready = report.worker_ready
            ready.actor_name = f"cb/{ready.worker.job_id}/{ready.worker.component}/0/g{ready.generation}"
            ready.pid = self.pid_of_workers or ready.pid
        if report.HasField("placement_group_ready"):
            report.placement_group_ready.ray_placement_group_id = (
                f"ray-{report.placement_group_ready.placement_group_id}"
            )
        return report

    def looks(self, **fields: Any) -> list[inspection_pb2.WorkerInspection]:
        """What is seen of each worker that it runs."""
        return [
            inspection_pb2.WorkerInspection(
                worker=command.start_worker.worker, generation=command.start_worker.generation, **fields
            )
            for command in self.got("start_worker")
            if command.start_worker.generation in self.workers
        ]


class Scene:
    """A controller, one node, and what a test starts."""

    def __init__(self, cluster: RealCluster, directory: Path) -> None:
        self.cluster = cluster
        self.file = directory / "job.json"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[SeeingAgent] = []
        self.printed = ""
        self._beating: list[asyncio.Task[None]] = []

    @property
    def agent(self) -> SeeingAgent:
        return self.agents[0]

    async def join(self, node_id: str, **hello: str) -> SeeingAgent:
        agent = SeeingAgent(self.cluster.address, node_id, self.process())
        for name, value in hello.items():
            setattr(agent.hello, name, value)
        self.agents.append(agent)
        await agent.join()
        self._beating.append(asyncio.create_task(agent.live()))
        return agent

    def process(self) -> subprocess.Popen[bytes]:
        self.processes.append(subprocess.Popen(["sleep", "600"]))
        return self.processes[-1]

    async def run_job(self, **fields: Any) -> None:
        await self.cluster.client.submit(train(**fields))
        await (await self.cluster.client.get_job("train")).running(timeout=30)

    async def node_is(self, state: str) -> None:
        async for event in self.cluster.client.watch(start_revision=1, types=["node."]):
            if event.subject == "nodes/n0" and event.state == state:
                return

    async def findings(self, kind: FindingKind) -> list[dict[str, str]]:
        shown = await verb(self.cluster, "doctor", "-o", "json")
        found = json.loads(shown.stdout)
        assert shown.exit_code == (1 if found["findings"] else 0), shown.output
        return [each for each in found["findings"] if each["kind"] == kind]

    async def do(self, command: str) -> None:
        """Runs one command of a remedy."""
        name, *arguments = shlex.split(command)
        if name == "callboard":
            shown = await verb(self.cluster, *(str(self.file) if each == "FILE" else each for each in arguments))
            assert shown.exit_code == 0, (command, shown.output)
            self.printed = " ".join(shown.output.split())
            return
        assert name == "kill", command
        (target,) = (process for process in self.processes if process.pid == int(arguments[-1]))
        assert await (await asyncio.create_subprocess_exec(name, *arguments)).wait() == 0
        if "-CONT" not in arguments:
            await asyncio.to_thread(target.wait)

    async def gone(self, kind: FindingKind) -> None:
        """Waits until doctor doesn't find it any more, looking whenever something changed."""
        revision = (await self.cluster.client.stats()).revision
        if not await self.findings(kind):
            return
        async for _ in self.cluster.client.watch(start_revision=revision + 1):
            if not await self.findings(kind):
                return

    async def clear(self) -> None:
        for task in self._beating:
            task.cancel()
        await asyncio.gather(*self._beating, return_exceptions=True)
        for agent in self.agents:
            await agent.cut()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def train(memory: str = "1GiB", **component: Any) -> dict[str, Any]:
    stated = {"name": "trainer", "actor": ACTOR, "resources": {"cpu": 1, "gpu": 1, "memory": memory}} | component
    return {"name": "train", "pool": "rlhf", "components": [stated]}


def seen(**fields: Any) -> Callable[[], inspection_pb2.NodeInspection]:
    return lambda: inspection_pb2.NodeInspection(**fields)


def is_there(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


# One finding each: what brings it about, and after the ``yield`` what the words of the remedy ask of a person, before
# its commands are run. After a second ``yield``: what is to do with what they printed.


async def a_cordoned_node(scene: Scene) -> Steps:
    await scene.do("callboard node cordon n0")
    yield


async def a_drained_node(scene: Scene) -> Steps:
    await scene.do("callboard node drain n0")
    yield


async def a_lost_node(scene: Scene) -> Steps:
    await scene.do("callboard policy set kill_timeout=1s")  # It is added to the silence that is borne.
    agent = await scene.join("n1")
    os.kill(agent.hello.pid, signal.SIGSTOP)
    async for event in scene.cluster.client.watch(start_revision=1, types=["node."]):
        if (event.subject, event.state) == ("nodes/n1", "LOST"):
            break
    yield


async def a_suspect_node(scene: Scene) -> Steps:
    os.kill(scene.agent.hello.pid, signal.SIGSTOP)
    await scene.node_is("SUSPECT")
    yield


async def a_node_outside_ray(scene: Scene) -> Steps:
    fault = common_pb2.RayFault(code=common_pb2.RAY_FAULT_CODE_VERSION_MISMATCH, message="Ray 2.1, not 2.2")
    agent = scene.agent
    agent.hello.ray.CopyFrom(agent_pb2.RayNode(head=True, fault=fault))
    await agent.join()
    yield
    agent.hello.ray.CopyFrom(RAY)  # Its Ray is installed anew.
    agent.hello.instance = "restarted"
    await agent.join()


async def a_stopped_agent(scene: Scene) -> Steps:
    os.kill(scene.agent.hello.pid, signal.SIGSTOP)
    yield


async def a_moment_without_an_answer(scene: Scene) -> Steps:
    told = [["Ray did not list its actors within 5 s"]]
    scene.agent.sees = lambda: inspection_pb2.NodeInspection(unknown=told.pop() if told else [])
    yield


async def versions_that_differ(scene: Scene) -> Steps:
    agent = await scene.join("n1", python_version="3.11.4")
    scene.agent.hello.python_version = "3.11.9"
    await scene.agent.join()
    yield
    yield
    agent.hello.python_version, agent.hello.instance = "3.11.9", "restarted"
    await agent.join()


def actor(process: subprocess.Popen[bytes], **fields: Any) -> Callable[[], inspection_pb2.NodeInspection]:
    stated: dict[str, Any] = {"id": "1", "pid": process.pid, "state": "ALIVE", "ray_node_id": "a1"} | fields

    def sees() -> inspection_pb2.NodeInspection:
        actors = [inspection_pb2.RayActor(**stated)] if is_there(process) else []
        return inspection_pb2.NodeInspection(actors=actors)

    return sees


async def an_actor_that_waits(scene: Scene) -> Steps:
    program = scene.process()
    scene.agent.sees = actor(program, state="PENDING_CREATION", pid=0, ray_node_id="", program_pid=program.pid)
    yield


async def a_foreign_actor(scene: Scene) -> Steps:
    scene.agent.sees = actor(scene.process(), class_name="Stray")
    yield


async def a_leftover_actor(scene: Scene) -> Steps:
    scene.agent.sees = actor(scene.process(), name="cb/u0/x/0/g1")
    yield


async def a_lost_actor(scene: Scene) -> Steps:
    await scene.run_job()
    lost = {*scene.agent.workers}

    def sees() -> inspection_pb2.NodeInspection:
        looks = scene.agent.looks()
        names = [(look, f"cb/{look.worker.job_id}/trainer/0/g{look.generation}") for look in looks]
        actors = [inspection_pb2.RayActor(name=name) for look, name in names if look.generation not in lost]
        return inspection_pb2.NodeInspection(ray_listed=True, workers=looks, actors=actors)

    scene.agent.sees = sees
    yield


def without_groups(scene: Scene) -> None:
    """Ray has lost all groups that there are now."""
    lost = {command.create_placement_group.placement_group_id for command in scene.agent.got("create_placement_group")}

    def sees() -> inspection_pb2.NodeInspection:
        made = [each.create_placement_group for each in scene.agent.got("create_placement_group")]
        there = [each.placement_group_id for each in made if each.placement_group_id not in lost]
        groups = [inspection_pb2.RayPlacementGroup(id=f"ray-{name}", name=f"cb/x/{name}/1") for name in there]
        actors = [
            inspection_pb2.RayActor(name=f"cb/{look.worker.job_id}/trainer/0/g{look.generation}")
            for look in scene.agent.looks()
        ]
        return inspection_pb2.NodeInspection(ray_listed=True, placement_groups=groups, actors=actors)

    scene.agent.sees = sees


async def a_lost_group(scene: Scene) -> Steps:
    await scene.run_job()
    without_groups(scene)
    yield


async def an_idle_lost_group(scene: Scene) -> Steps:
    await scene.do("callboard pool set rlhf pg_pool.dynamic=true pg_pool.max_dynamic=2")
    await scene.run_job()
    without_groups(scene)
    await scene.do("callboard job cancel train --wait")
    yield


async def a_reserved_lost_group(scene: Scene) -> Steps:
    shape = "pg_pool.reserved=[{cpu: 1, gpu: 1, memory: 1GiB}]"
    await scene.do(f"callboard pool set rlhf pg_pool.reserved_lendable=true '{shape}'")
    async for event in scene.cluster.client.watch(start_revision=1, types=["group."]):
        if event.state == "READY":
            break
    await scene.run_job()
    without_groups(scene)
    yield
    yield
    await (await scene.cluster.client.get_job("train")).running(timeout=30)
    await scene.agent.until(lambda: len(scene.agent.got("create_placement_group")) > 1)


async def a_foreign_process(scene: Scene) -> Steps:
    process = scene.process()

    def sees() -> inspection_pb2.NodeInspection:
        users = [inspection_pb2.DeviceUser(index=0, pid=process.pid)] if is_there(process) else []
        return inspection_pb2.NodeInspection(device_users=users)

    scene.agent.sees = sees
    yield


async def a_gpu_that_somebody_fills(scene: Scene) -> Steps:
    process = scene.process()
    foreign = common_pb2.DeviceProcess(pid=process.pid, user="alice", memory_bytes=70 * GIB)
    closed = common_pb2.DeviceState(index=0, foreign=[foreign], closed=f"pid {process.pid} of alice holds 70 GiB")
    await scene.agent.heartbeat(devices=agent_pb2.DeviceStates(states=[closed]))
    yield
    yield
    assert not is_there(process)
    await scene.agent.heartbeat(devices=agent_pb2.DeviceStates(states=[common_pb2.DeviceState(index=0)]))


async def a_gpu_whose_memory_broke(scene: Scene) -> Steps:
    warned = common_pb2.DeviceState(index=0, warning="ECC found 2 uncorrectable errors")
    await scene.agent.heartbeat(devices=agent_pb2.DeviceStates(states=[warned]))
    yield
    yield
    await scene.agent.heartbeat(devices=agent_pb2.DeviceStates(states=[common_pb2.DeviceState(index=0)]))


async def modules_that_are_not_there(scene: Scene) -> Steps:
    refused = common_pb2.PreloadState(modules=["torch"], refused="`import torch` failed: No module named 'torch'")
    await scene.agent.heartbeat(preloads=agent_pb2.PreloadStates(states=[refused]))
    yield
    yield
    await scene.agent.heartbeat(preloads=agent_pb2.PreloadStates(states=[common_pb2.PreloadState(modules=["torch"])]))


def until_mended(scene: Scene, wrong: dict[str, Any], right: dict[str, Any]) -> None:
    """What a worker's code does wrong until it is mended; a process that runs goes on as it began."""
    bad = {*scene.agent.workers}
    of_the_order(
        scene,
        lambda order: {"visible_devices": visible(order)} | (wrong if order.generation in bad else right),
    )


def visible(order: agent_pb2.StartWorker) -> str:
    return ",".join(share.id for share in order.allocation.devices)


async def a_gpu_that_nobody_was_given(scene: Scene) -> Steps:
    await scene.run_job()
    bad = {*scene.agent.workers}

    def sees() -> inspection_pb2.NodeInspection:
        users = [
            inspection_pb2.DeviceUser(index=1, pid=9, worker=look.worker)
            for look in scene.agent.looks()
            if look.generation in bad
        ]
        return inspection_pb2.NodeInspection(device_users=users)

    scene.agent.sees = sees
    yield


async def devices_that_its_code_changed(scene: Scene) -> Steps:
    await scene.run_job()
    until_mended(scene, {"visible_devices": "0,1"}, {})
    yield


async def a_model_on_the_cpu(scene: Scene) -> Steps:
    await scene.run_job()
    until_mended(scene, {"framework": "torch"}, {"framework": "torch", "uses_device": True})
    yield


async def a_worker_that_says_nothing(scene: Scene) -> Steps:
    await scene.run_job()
    until_mended(scene, {"silent": "it did not answer within 2 s"}, {})
    yield


def of_the_order(scene: Scene, look: Callable[[agent_pb2.StartWorker], dict[str, Any]]) -> None:
    """What is seen of each worker follows from what it was started with."""

    def sees() -> inspection_pb2.NodeInspection:
        orders = [command.start_worker for command in scene.agent.got("start_worker")]
        return inspection_pb2.NodeInspection(
            workers=[
                inspection_pb2.WorkerInspection(worker=order.worker, generation=order.generation, **look(order))
                for order in orders
                if order.generation in scene.agent.workers
            ]
        )

    scene.agent.sees = sees


async def calls_that_queue(scene: Scene) -> Steps:
    await scene.run_job(max_concurrency=1)
    of_the_order(scene, lambda order: {"calls": [inspection_pb2.CallLoad(in_flight=5, limit=order.max_concurrency)]})
    yield
    scene.file.write_text(json.dumps(train(max_concurrency=8)))


async def more_memory_than_asked_for(scene: Scene) -> Steps:
    await scene.run_job()
    of_the_order(scene, lambda _: {"memory_bytes": 2 * GIB})
    yield
    scene.file.write_text(json.dumps(train("3GiB")))


async def a_trainer_without_a_gpu(scene: Scene) -> Steps:
    await scene.run_job(resources={"cpu": 1})
    of_the_order(
        scene,
        lambda order: {
            "framework": "torch",
            "visible_devices": visible(order),
            "uses_device": bool(order.allocation.devices),
        },
    )
    yield
    scene.file.write_text(json.dumps(train()))


async def a_worker_lost_for_lack_of_memory(scene: Scene) -> Steps:
    await scene.run_job()
    start = await scene.agent.command("start_worker")
    exited = worker_exited(start, "out of memory: the kernel ended it")
    exited.worker_exited.out_of_memory = True
    exited.worker_exited.peak_memory_bytes = 2 * GIB
    del scene.agent.workers[start.start_worker.generation]
    await scene.agent.reported(exited)
    await (await scene.cluster.client.get_job("train")).finished(timeout=30)
    yield
    scene.file.write_text(json.dumps(train("3GiB")))


async def a_job_that_waits(scene: Scene) -> Steps:
    await scene.do("callboard pool set rlhf nominal.cpu=1")
    await scene.run_job()
    await scene.cluster.client.submit(train() | {"name": "waits"})
    yield
    yield
    (more,) = re.findall(r"raise pool rlhf cpu by (\d+)", scene.printed)
    await scene.do(f"callboard pool set rlhf nominal.cpu={1 + int(more)}")


async def a_process_that_does_not_end(scene: Scene) -> Steps:
    process = scene.process()
    agent = scene.agent
    agent.hold, agent.pid_of_workers = {"stop_worker"}, process.pid
    await scene.run_job()
    await scene.do("callboard job preempt train")
    stop = await agent.command("stop_worker")
    await agent.reported(worker_stopped(stop, agent_pb2.STOP_OUTCOME_QUARANTINED))
    yield
    yield
    assert not is_there(process)
    del agent.workers[stop.stop_worker.generation]
    agent.pid_of_workers = 0
    await agent.reported(worker_stopped(stop, agent_pb2.STOP_OUTCOME_KILLED))


ON_REAL_RAY: dict[FindingKind, Callable[..., None]] = dict.fromkeys(
    (FindingKind.FOREIGN_GROUP, FindingKind.LEFTOVER_GROUP, FindingKind.PENDING_ACTOR),
    test_worker_handles.test_ft_a6_ft_a7_ft_c5_ft_f2_handles_call_and_follow_and_a_lost_call_says_why,
)
"""Where only Ray itself can tell: who runs their commands."""

CASES: dict[FindingKind, list[Callable[[Scene], Steps]]] = {
    FindingKind.NODE_STATE: [a_cordoned_node, a_drained_node, a_suspect_node, a_lost_node, a_node_outside_ray],
    FindingKind.NODE_SILENT: [a_stopped_agent],
    FindingKind.UNKNOWN: [a_moment_without_an_answer],
    FindingKind.VERSIONS: [versions_that_differ],
    FindingKind.PENDING_ACTOR: [an_actor_that_waits],
    FindingKind.FOREIGN_ACTOR: [a_foreign_actor],
    FindingKind.LEFTOVER_ACTOR: [a_leftover_actor],
    FindingKind.MISSING_ACTOR: [a_lost_actor],
    FindingKind.MISSING_GROUP: [a_lost_group, an_idle_lost_group, a_reserved_lost_group],
    FindingKind.FOREIGN_PROCESS: [a_foreign_process, a_gpu_that_nobody_was_given],
    FindingKind.PENDING: [a_job_that_waits],
    FindingKind.OUT_OF_MEMORY: [a_worker_lost_for_lack_of_memory],
    FindingKind.QUARANTINED: [a_process_that_does_not_end],
    FindingKind.PRELOAD: [modules_that_are_not_there],
    FindingKind.DEVICE: [a_gpu_that_somebody_fills, a_gpu_whose_memory_broke],
    FindingKind.WORKER_SILENT: [a_worker_that_says_nothing],
    FindingKind.CONCURRENCY: [calls_that_queue],
    FindingKind.MEMORY: [more_memory_than_asked_for],
    FindingKind.NO_GPU: [a_trainer_without_a_gpu],
    FindingKind.VISIBLE_DEVICES: [devices_that_its_code_changed],
    FindingKind.MODEL_ON_CPU: [a_model_on_the_cpu],
}


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """A controller that soon gives up who is silent, and one node."""
    monkeypatch.setattr(node_service, "INSPECTION_S", 0.5)
    configure_logs("console", "error")
    async with real_cluster(tmp_path, lease_ms=1_500, heartbeat_ms=500) as cluster:
        await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})
        built = Scene(cluster, tmp_path)
        try:
            await built.join("n0")
            yield built
        finally:
            await built.clear()


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=f"{kind}-{case.__name__}") for kind, cases in CASES.items() for case in cases],
)
async def test_ft_c5_what_doctor_says_to_do_helps(
    scene: Scene, kind: FindingKind, case: Callable[[Scene], Steps]
) -> None:
    async with asyncio.timeout(40):
        steps = case(scene)
        await anext(steps)
        finding, *_ = await scene.findings(kind)
        await anext(steps, None)
        commands = re.findall("`([^`]+)`", finding["remedy"])
        assert commands or case is a_node_outside_ray, "what a command can't mend"
        for command in commands:
            await scene.do(command)
        await anext(steps, None)
        await scene.gone(kind)


def test_ft_c5_every_kind_of_finding_has_a_case() -> None:
    assert {*CASES, *ON_REAL_RAY} == {*FindingKind}
