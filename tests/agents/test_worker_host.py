"""What runs inside a worker process? Asked of plain processes, over the same host that Ray actors run."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from callboard.agents.host.worker_process import load_class
from callboard.agents.runtime import HostError, Launch
from callboard.agents.supplies.worker_env import NodeIdentity, import_path, worker_environment, worker_name, worker_plan
from callboard.agents.system.devices import CUDA
from callboard.agents.system.processes import exited
from callboard.agents.worker.process_runtime import HostedProcess, ProcessRuntime
from callboard.v1 import agent_pb2
from tests.support.actors import Plain
from tests.support.fake_controller import start_worker

Assigned: TypeAlias = tuple[HostedProcess, dict[str, Any]]
Host: TypeAlias = Callable[..., Awaitable[Assigned]]

MANY = {"SECRET_OF_THE_AGENT": "x", "WANDB_API_KEY": "k", "HF_HOME": "/hf", "MINE": "m"}


def identity() -> NodeIdentity:
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", **MANY}
    return NodeIdentity(
        cluster="test",
        controller="127.0.0.1:1",
        runtime="process",
        vendor=CUDA,
        run_dir="/nowhere",
        devices=("3", "5", "7"),
        environment=environment,
        import_path=import_path(""),
    )


def environment_of(command: agent_pb2.StartWorker) -> dict[str, str]:
    return worker_environment(command, identity())


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """Starts hosts and assigns them; ends them at the end."""
    runtime = ProcessRuntime(logs=tmp_path, sockets=tmp_path, successor_s=0.0)
    started: list[HostedProcess] = []

    async def start(actor: str, *args: Any, **fields: Any) -> Assigned:
        command = start_worker(actor, **fields)
        variables = environment_of(command)
        plan = worker_plan(command, identity(), variables) | {"args": list(args)}
        hosted = await runtime.launch(Launch(worker_name(command), sys.executable, variables))
        started.append(hosted)
        return hosted, await hosted.control("assign", plan)

    yield start
    for hosted in started:
        os.killpg(hosted.process.pid, signal.SIGKILL)
        await exited(hosted.process)
        hosted.release()


async def call(hosted: HostedProcess, method: str, *args: Any) -> Any:
    return await hosted.control("call", {"method": method, "args": list(args), "kwargs": {}})


class TestEnvironment:
    async def test_a_worker_sees_exactly_its_devices(self, host: Host) -> None:
        hosted, answer = await host("Plain", devices=("3", "1"))
        environment = await call(hosted, "environment")
        assert answer["visible_devices"] == environment["CUDA_VISIBLE_DEVICES"] == "3,1"
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"

    async def test_gv_11_a_cpu_worker_sees_the_empty_string(self, host: Host) -> None:
        hosted, answer = await host("Plain")
        assert answer["visible_devices"] == ""
        assert (await call(hosted, "environment"))["CUDA_VISIBLE_DEVICES"] == ""

    async def test_it_is_the_allow_list_what_is_declared_and_what_the_scheduler_owns(self, host: Host) -> None:
        hosted, _ = await host(
            "Plain", devices=("1",), env={"LEVEL": "9"}, pass_env=["MINE", "ABSENT"], rank=3, world_size=4, local_rank=1
        )
        environment = await call(hosted, "environment")
        expected = {
            "HOME": "/root",
            "LOG_LEVEL": "INFO",
            "WANDB_API_KEY": "k",
            "HF_HOME": "/hf",
            "MINE": "m",
            "LEVEL": "9",
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "CALLBOARD_JOB": "job-1",
            "CALLBOARD_COMPONENT": "main",
            "CALLBOARD_RANK": "3",
            "CALLBOARD_GENERATION": "1",
            "CALLBOARD_RUNTIME": "process",
            "CALLBOARD_WORKER": "test/job-1/main/3/g1",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert "SECRET_OF_THE_AGENT" not in environment
        assert "ABSENT" not in environment

    async def test_gv_07_local_rank_counts_the_workers_own_devices(self, host: Host) -> None:
        """Two groups with local ranks 0 and 1 on one node: each rank indexes its own list, none collides."""
        seen = set()
        for job, devices in {"a": ("0", "1"), "b": ("2", "3")}.items():
            for rank in (0, 1):
                hosted, _ = await host("Plain", job=job, rank=rank, local_rank=rank, devices=(devices[rank],))
                environment = await call(hosted, "environment")
                seen.add(environment["CUDA_VISIBLE_DEVICES"].split(",")[int(environment["LOCAL_RANK"])])
        assert seen == {"0", "1", "2", "3"}

    async def test_gv_08_a_program_the_worker_starts_sees_the_workers_devices_and_no_others(self, host: Host) -> None:
        hosted, _ = await host("Plain", devices=tuple(str(index) for index in range(2, 8)))
        assert await call(hosted, "seen_by_a_child") == "2,3,4,5,6,7"


class TestSyncClass:
    async def test_it_is_built_and_called_on_one_thread(self, host: Host) -> None:
        hosted, _ = await host("Plain", 1, "two", kwargs_json='{"three": 3}')
        assert await call(hosted, "built_with") == [[1, "two"], {"three": 3}, True]

    async def test_one_at_a_time_means_one_at_a_time(self, host: Host, tmp_path: Path) -> None:
        hosted, _ = await host("Plain")
        all_called = tmp_path / "called"
        calls = [asyncio.create_task(call(hosted, "company", str(all_called))) for _ in range(3)]
        while (await hosted.control("ping"))["in_flight"] < 3:
            pass
        all_called.write_text("now")
        assert await asyncio.gather(*calls) == [1, 1, 1]

    async def test_ft_b4_one_that_takes_one_call_at_a_time_lives_on_the_main_thread(
        self, host: Host, tmp_path: Path
    ) -> None:
        hosted, answer = await host("OnMain", max_concurrency=1)
        assert answer["ok"], answer
        assert await call(hosted, "thread") == [True, 1]
        assert await call(hosted, "thread") == [True, 2]
        # What controls it lives elsewhere.
        busy = asyncio.create_task(call(hosted, "wait_for", str(tmp_path / "done")))
        while (await hosted.control("ping"))["in_flight"] == 0:
            pass
        (tmp_path / "done").touch()
        await busy

    async def test_an_entry_that_the_class_lacks_is_told_with_those_it_has(self, host: Host) -> None:
        _, answer = await host("Busy", "python", entry="runn")
        assert "entry names the method runn, which Busy does not have; it has run" in str(answer)

    @pytest.mark.parametrize("entry", ["", "enter"])
    async def test_ft_b4_one_that_takes_more_is_built_on_the_main_thread_and_runs_there(
        self, host: Host, entry: str
    ) -> None:
        hosted, answer = await host("OnMain", max_concurrency=2, entry=entry)
        assert answer["ok"], answer
        if entry:
            assert (await hosted.control("report"))["succeeded"]
        (on_main, _), *_ = await asyncio.gather(call(hosted, "thread"), call(hosted, "thread"))
        assert not on_main

    async def test_more_at_once_if_asked(self, host: Host) -> None:
        hosted, _ = await host("Plain", max_concurrency=2)
        await asyncio.gather(call(hosted, "meet"), call(hosted, "meet"))

    async def test_what_it_raises_reaches_the_caller(self, host: Host) -> None:
        hosted, _ = await host("Plain")
        with pytest.raises(HostError, match="RuntimeError: as asked"):
            await call(hosted, "fail")

    @pytest.mark.parametrize("limit", [1, 2])
    async def test_a_next_that_ran_out_is_an_error_and_not_a_call_that_never_ends(self, host: Host, limit: int) -> None:
        hosted, _ = await host("Plain", max_concurrency=limit)
        with pytest.raises(HostError, match=r"RuntimeError: a next\(\) in it had nothing left"):
            await call(hosted, "fail", "a next()")

    async def test_half_a_surrogate_pair_reaches_nobody(self, host: Host) -> None:
        hosted, _ = await host("Plain")
        with pytest.raises(HostError, match=r"RuntimeError: \?$"):
            await call(hosted, "fail", "\ud800")

    async def test_private_and_unknown_methods_are_refused(self, host: Host) -> None:
        hosted, _ = await host("Plain")
        for method in ("__init__", "_x", "unknown"):
            with pytest.raises(HostError, match="AttributeError"):
                await call(hosted, method)

    async def test_it_streams(self, host: Host) -> None:
        hosted, _ = await host("Plain")
        request = {"method": "count", "args": [50], "kwargs": {}}
        assert await hosted.control("stream", request) == list(range(50))


class TestAsyncClass:
    async def test_its_calls_overlap_up_to_the_limit(self, host: Host) -> None:
        hosted, _ = await host("Asynchronous", max_concurrency=10)
        await asyncio.gather(*(call(hosted, "meet") for _ in range(10)))

    async def test_it_streams(self, host: Host) -> None:
        hosted, _ = await host("Asynchronous")
        request = {"method": "count", "args": [50], "kwargs": {}}
        assert await hosted.control("stream", request) == list(range(50))


class TestControl:
    @pytest.mark.parametrize("how", ["python", "sleep"])
    async def test_it_answers_while_run_is_busy(self, host: Host, how: str) -> None:
        hosted, _ = await host("Busy", how, entry="run")
        entry = asyncio.create_task(hosted.control("report"))
        while (await hosted.control("ping"))["in_flight"] == 0:
            pass
        assert (await hosted.control("progress"))["in_flight"] == 1
        assert not entry.done()
        entry.cancel()

    async def test_an_assignment_asked_twice_is_one(self, host: Host) -> None:
        hosted, first = await host("Plain")
        assert await hosted.control("assign", {}) == first

    async def test_a_cancelled_worker_takes_no_more_calls(self, host: Host) -> None:
        hosted, _ = await host("Plain")
        await hosted.control("cancel")
        with pytest.raises(HostError, match="WorkerStopping"):
            await call(hosted, "echo", 1)

    async def test_hooks_get_what_their_signature_takes(self, host: Host) -> None:
        hosted, answer = await host("Yielding", job_name="my-job")
        assert set(answer["hooks"]) == {"restore", "cancel", "checkpoint", "progress"}
        assert await hosted.control("cancel") == {"hook": True, "error": ""}

    async def test_an_async_hook_of_a_sync_class_leaves_run_sync(self, host: Host) -> None:
        hosted, _ = await host("AsyncHookOfSyncClass")
        run = asyncio.create_task(call(hosted, "run"))
        while (await hosted.control("ping"))["in_flight"] == 0:
            pass
        await hosted.control("cancel")
        assert await run >= 0

    async def test_a_checkpoint_is_handed_to_the_next_attempt(self, host: Host) -> None:
        hosted, _ = await host("Yielding", checkpoint=agent_pb2.Checkpoint(data=b"41"))
        answer = await hosted.control("checkpoint", {"wait_s": 0, "take": True})
        assert base64.b64decode(answer["data"]) == b"41"

    @pytest.mark.parametrize(("kind", "expected"), [("huge", "2097152 bytes"), ("odd", "returned int")])
    async def test_an_impossible_checkpoint_is_named(self, host: Host, kind: str, expected: str) -> None:
        hosted, _ = await host("Yielding", kind)
        answer = await hosted.control("checkpoint", {"wait_s": 0, "take": True})
        assert expected in answer["error"]
        assert "data" not in answer

    async def test_progress_is_what_the_hook_says(self, host: Host) -> None:
        hosted, _ = await host("Yielding")
        assert (await hosted.control("progress"))["progress"] == {"steps": 0}


class TestStart:
    async def test_a_constructor_that_raises_gives_its_traceback(self, host: Host) -> None:
        _, answer = await host("Broken")
        assert answer["failure"] == "CONSTRUCTOR"
        assert answer["message"] == "ValueError: no weights here"
        assert "tests/support/actors.py" in answer["traceback"]
        assert "worker_host.py" not in answer["traceback"], "our frames help nobody"

    @pytest.mark.parametrize("actor", ["Missing", "TYPE_CHECKING", "wait_for_file"])
    async def test_what_is_no_class_is_a_failed_import(self, host: Host, actor: str) -> None:
        _, answer = await host(actor)
        assert answer["failure"] == "IMPORT"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere_at_all.workers:Actor", "No module named 'nowhere_at_all'; the worker looked in "),
        (
            "found_but_broken:Actor",
            "No module named 'missing_in_it', which found_but_broken imports; the worker looked in ",
        ),
    ],
)
def test_ft_c12_the_directories_and_the_ways_to_add_one_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    (tmp_path / "found_but_broken.py").write_text("import missing_in_it\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, *(f"/usr/{'x' * 500}{n}" for n in range(50))])
    with pytest.raises(ModuleNotFoundError) as refused:
        load_class(path)
    text = str(refused.value)
    assert text.startswith(words)
    assert str(tmp_path)[-80:] in text
    for way in (
        "env: {PYTHONPATH: /the/directory}",
        "working_dir: the/directory",
        f"install the package for {sys.executable}",
    ):
        assert way in text
    assert len(text) <= 1_000, "all of it is shown"


def test_ft_c12_a_module_that_lacks_the_class_is_named_with_its_file() -> None:
    with pytest.raises(AttributeError, match=r"tests.support.actors has no Missing; it was imported from .*/actors.py"):
        load_class("tests.support.actors:Missing")


def test_ft_i3_a_class_of_rays_decorator_is_unwrapped() -> None:
    found = load_class("tests.support.ray_actor:Decorated")
    assert isinstance(found, type)
    assert found().echo(3) == 3
    assert load_class("tests.support.actors:Plain") is Plain
    with pytest.raises(TypeError, match="is not a class but ActorOptionWrapper"):
        load_class("tests.support.ray_actor:WithOptions")
