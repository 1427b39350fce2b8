"""Are modules that a pool preloads imported before a start takes the spare, and only where that changes nothing?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.host.worker_preload import touched_device
from callboard.agents.worker.preloads import Preloads, Wish
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, started_by
from tests.support.fake_controller import FakeController, FakeSession, start_worker, stop_worker


class Node:
    """One agent that is told to preload a module, which writes down who imported it."""

    def __init__(self, controller: FakeController, session: FakeSession, run_dir: Path, folder: Path) -> None:
        self.controller = controller
        self.session = session
        self.run_dir = run_dir
        self.folder = folder

    def module(self, name: str, code: str = "") -> None:
        """A module that the node's workers find."""
        noted = f"import os, pathlib; pathlib.Path({str(self.folder)!r}, f'{name}-{{os.getpid()}}').touch()\n"
        (self.folder / f"{name}.py").write_text(noted + textwrap.dedent(code))

    def imported_by(self, name: str) -> set[int]:
        """Pids of the processes that imported a module."""
        return {int(file.name.rpartition("-")[2]) for file in self.folder.glob(f"{name}-*")}

    async def aim(self, count: int, *lists: tuple[str, ...]) -> None:
        """Tell the target."""
        preloads = [agent_pb2.Preload(modules=each) for each in lists]
        await self.session.send(spare_target=agent_pb2.SpareTarget(count=count, preloads=preloads))

    def spares(self, *modules: str) -> list[int]:
        """Pids of the spares that are ready with these modules."""
        file = self.run_dir / "processes.json"
        records = json.loads(file.read_text()) if file.exists() else []
        ready = [each for each in records if each["role"] == "spare" and each["pid"]]
        return [each["pid"] for each in ready if tuple(each["facts"].get("preload", ())) == modules]

    async def has(self, count: int, *modules: str, other_than: tuple[int, ...] = ()) -> list[int]:
        """Wait until so many are ready with these modules. Every heartbeat (0.05 s) is an occasion to look."""
        ready: list[int] = []

        def found() -> bool:
            ready[:] = self.spares(*modules)
            return len(ready) == count and not set(ready) & set(other_than)

        await self.controller.until(found)
        return ready

    async def start(self, *modules: str, **fields: Any) -> agent_pb2.WorkerReady:
        """Start a worker of a pool that preloads these modules."""
        report = await self.controller.do(start_worker=start_worker("Plain", preload=modules, **fields))
        assert report.HasField("worker_ready"), report
        return report.worker_ready

    async def refused(self, *modules: str) -> str:
        """Why the node doesn't preload them, as its heartbeats say."""

        def found() -> str:
            states = [state for beat in self.session.heartbeats for state in beat.preloads.states]
            return next((each.refused for each in states if tuple(each.modules) == modules and each.refused), "")

        why: str = await self.controller.until(found)
        return why


@pytest.fixture
async def node(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Node:
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    controller.welcome["heartbeat_ms"] = 50
    return Node(controller, await start_agent(warm_spares=1), tmp_path / "n0", folder)


def environment_of(pid: int) -> str:
    """What a process was started with."""
    return Path(f"/proc/{pid}/environ").read_text()


class TestAStart:
    async def test_takes_the_spare_that_has_imported_the_modules_and_it_is_made_again(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        (spare,) = await node.has(1, "heavy")
        (plain,) = await node.has(1)
        assert node.imported_by("heavy") == {spare}
        ready = await node.start("heavy", devices=("1",))
        assert (ready.pid, ready.warm, ready.preloaded, ready.preload_missed) == (spare, True, True, "")
        assert ready.visible_devices == "1", "a spare that imported has its devices chosen at its start"
        await node.has(1, "heavy", other_than=(spare,))
        assert node.spares() == [plain]

    async def test_of_a_pool_without_takes_a_plain_one(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        await node.has(1, "heavy")
        (plain,) = await node.has(1)
        ready = await node.start()
        assert (ready.pid, ready.preloaded, ready.preload_missed) == (plain, False, "")

    async def test_that_comes_too_early_takes_a_plain_one_and_says_so(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1)
        (plain,) = await node.has(1)
        ready = await node.start("heavy")
        assert (ready.pid, ready.warm, ready.preloaded) == (plain, True, False)
        assert ready.preload_missed == "no spare with these modules is ready"

    async def test_that_must_be_cold_says_that_it_has_no_modules_for_it(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        await node.has(1, "heavy")
        ready = await node.start("heavy", in_bundle=True)
        assert (ready.warm, ready.preloaded, ready.preload_missed) == (False, False, "it runs inside its bundle")

    async def test_pc_12_of_a_preloaded_spare_ends_with_all_that_hides(self, node: Node, tmp_path: Path) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        (spare,) = await node.has(1, "heavy")
        argument = json.dumps([str(tmp_path / "child")])
        command = start_worker("Stubborn", entry="run", args_json=argument, preload=["heavy"])
        assert (await node.controller.do(start_worker=command)).worker_ready.pid == spare
        child = int((tmp_path / "child").read_text())
        stopped = (await node.controller.do(stop_worker=stop_worker(command))).worker_stopped
        assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(child)

    async def test_masks_secrets_in_what_a_preloaded_module_logs(self, node: Node) -> None:
        node.module("logs", "import logging\nlogging.getLogger('x').addHandler(logging.StreamHandler())\n")
        await node.aim(1, ("logs",))
        (spare,) = await node.has(1, "logs")
        command = start_worker(
            "LogsSecret", preload=["logs"], entry="run", env={"MY_TOKEN": "very-hidden"}, args_json='["x", "MY_TOKEN"]'
        )
        ready = (await node.controller.do(start_worker=command)).worker_ready
        assert (ready.pid, ready.preloaded) == (spare, True)
        await node.controller.said("worker_finished")
        said = "".join(chunk.data.decode() for chunk in await node.controller.all_output("job-1"))
        assert "the secret is" in said
        assert "very-hidden" not in said


class TestVariables:
    async def test_that_native_code_reads_decide_and_spares_follow_what_starts_came_with(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        (spare,) = await node.has(1, "heavy")
        with_env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        first = await node.start("heavy", env=with_env)
        assert not first.preloaded
        assert "made with other values of PYTORCH_CUDA_ALLOC_CONF" in first.preload_missed
        (made,) = await node.has(1, "heavy", other_than=(spare,))
        assert "expandable_segments" in environment_of(made), "it is there when the module is imported"
        second = await node.start("heavy", env=with_env, generation=2)
        assert (second.pid, second.preloaded) == (made, True)

    async def test_that_the_imports_read_decide_whatever_their_names(self, node: Node) -> None:
        node.module("picky", "mode = os.environ.get('MY_MODE', 'slow')\n")
        await node.aim(1, ("picky",))
        await node.has(1, "picky")
        assert (await node.start("picky", env={"MY_OTHER": "1"})).preloaded, "nothing that it read differs"
        await node.has(1, "picky")
        other = await node.start("picky", env={"MY_MODE": "fast"}, generation=2)
        assert not other.preloaded
        assert "other values of MY_MODE" in other.preload_missed

    async def test_that_are_secret_are_in_no_spare(self, node: Node) -> None:
        node.module("hub", "token = os.environ.get('HUB_TOKEN')\n")
        await node.aim(1, ("hub",))
        await node.has(1, "hub")
        ready = await node.start("hub", env={"HUB_TOKEN": "s3cret"})
        assert ready.preload_missed == "HUB_TOKEN is secret, so no spare is made with it"
        again = await node.start("hub", generation=2)
        assert again.preloaded, "what a start with a secret came with changes no spare"

    def test_that_are_gone_through_all_count(self) -> None:
        known = Preloads({"PATH": "/bin"})
        known.learn(("m",), ["*"], 1)
        assert known.kind(("m",), {"PATH": "/bin"}) != known.kind(("m",), {"PATH": "/bin", "ANYTHING": "1"})
        own = {"PATH": "/bin", "CALLBOARD_JOB": "a", "CUDA_VISIBLE_DEVICES": "3"}
        assert known.kind(("m",), {"PATH": "/bin"}) == known.kind(("m",), own), "no spare has what is set at its start"


class TestARefusal:
    @pytest.mark.parametrize(
        ("code", "why"),
        [
            ("raise RuntimeError('no libfoo')", "`import bad` failed: RuntimeError: no libfoo"),
            ("raise SystemExit(3)", "`import bad` failed: SystemExit: 3"),
            ("import nowhere_to_be_found", "`import bad` failed: ModuleNotFoundError: No module named"),
            ("rank = os.environ.get('RANK')", "importing them reads RANK, which is set for each worker"),
            ("os.kill(os.getpid(), 9)", "importing them ended the process"),
        ],
    )
    async def test_has_its_reason_and_starts_go_on_without(self, node: Node, code: str, why: str) -> None:
        node.module("bad", code)
        await node.aim(1, ("bad",))
        assert (await node.refused("bad")).startswith(why)
        (plain,) = await node.has(1)
        await node.controller.until(lambda: started_by(node.run_dir) == [plain])
        ready = await node.start("bad")
        assert (ready.pid, ready.warm, ready.preloaded) == (plain, True, False)
        assert ready.preload_missed.startswith(f"this node does not preload bad: {why}")

    async def test_comes_of_more_memory_than_the_node_gives_to_it(
        self, controller: FakeController, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        controller.welcome["heartbeat_ms"] = 50
        node = Node(controller, await start_agent(preload_bytes=1 << 20), tmp_path / "n0", tmp_path)
        node.module("heavy")
        await node.aim(1, ("heavy",))
        assert (await node.refused("heavy")).endswith("all together may take 1 MiB (--preload-memory)")

    def test_comes_of_a_device_that_an_import_opened(self, tmp_path: Path) -> None:
        (tmp_path / "fd").mkdir()
        (tmp_path / "maps").write_text("")
        (tmp_path / "fd" / "3").symlink_to("/dev/nvidiactl")
        assert touched_device(tmp_path) == "", "NVML only asks"
        (tmp_path / "fd" / "4").symlink_to("/dev/nvidia-uvm")
        assert touched_device(tmp_path) == "opened /dev/nvidia-uvm"

    @pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in for CUDA's driver is compiled")
    @pytest.mark.parametrize(("answer", "says"), [(3, ""), (0, "initialized CUDA"), (100, "initialized CUDA")])
    def test_comes_of_cuda_that_was_initialized(self, tmp_path: Path, answer: int, says: str) -> None:
        library = tmp_path / f"libcuda.so.{answer}"
        (tmp_path / "cuda.c").write_text(f"int cuDeviceGetCount(int *count) {{ *count = 0; return {answer}; }}")
        subprocess.run(["cc", "-shared", "-o", library, tmp_path / "cuda.c"], check=True)
        (tmp_path / "fd").mkdir()
        (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 1    {library}\n")
        assert touched_device(tmp_path) == says

    def test_comes_of_the_jobs_own_code_for_that_job_alone(self, tmp_path: Path) -> None:
        known = Preloads({})
        (tmp_path / "torch").mkdir()
        own = Wish(("torch.nn",), {}, code=(str(tmp_path),))
        assert known.suits(own, 0.0) == "the job's own code has a module torch"
        assert not isinstance(known.suits(Wish(("torch.nn",), {}), 0.0), str)


class TestTheNumberOfSpares:
    async def test_is_none_while_nothing_is_about(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        await node.has(1, "heavy")
        await node.aim(1)
        await node.has(0, "heavy")
        await node.has(1)
        await node.aim(0)
        await node.has(0)
        assert started_by(node.run_dir) == []

    async def test_grows_with_a_gang(self, node: Node) -> None:
        node.module("heavy")
        await node.aim(1, ("heavy",))
        (first,) = await node.has(1, "heavy")
        commands = [
            await node.controller.command(start_worker=start_worker("Plain", rank=rank, preload=["heavy"]))
            for rank in (0, 1, 2)
        ]
        ready = [(await node.controller.report(each)).worker_ready for each in commands]
        assert [each.preloaded for each in ready] == [True, False, False]
        await node.has(3, "heavy", other_than=(first,))
        await node.controller.until(lambda: _last(node.session).ready == 3)
        assert _last(node.session).memory_bytes > 3 << 20

    def test_keeps_to_a_few_sets_of_variables_those_of_the_latest_starts(self) -> None:
        known = Preloads({})
        known.ask([("m",)])
        known.learn(("m",), [], 1)
        for number in range(9):
            known.suits(Wish(("m",), {"NCCL_DEBUG": str(number)}), float(number * 60))
        kinds = [dict(kind.variables)["NCCL_DEBUG"] for kind in known.wanted(1, 64)]
        assert kinds == ["8", "7", "6", "5"]


def _last(session: FakeSession) -> Any:
    return next(beat.preloads.states[0] for beat in reversed(session.heartbeats) if beat.preloads.states)


def test_torch_itself_can_be_preloaded() -> None:
    asked = (
        "import json; from callboard.agents.host.worker_preload import preload; print(json.dumps(preload(['torch'])))"
    )
    done = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert told["ok"], told
    assert "RANK" not in told["read"]
    assert told["bytes"] > 50 << 20
