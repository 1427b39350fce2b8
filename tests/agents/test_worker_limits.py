"""Does PyTorch in a worker keep to the GPU memory that was promised, whenever it is imported? And it to its CPUs?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from callboard.agents.supplies.worker_env import worker_environment, worker_plan
from callboard.agents.system.devices import CUDA as CUDA_VENDOR
from callboard.agents.system.devices import DeviceFacts, NodeDevices
from callboard.agents.system.inventory import cpus_near
from tests.agents.test_worker_host import identity
from tests.support.fake_controller import start_worker

CUDA = """
QUEUED, SET = [], {}
class Facts:
    total_memory = 80 << 30
def device_count(): return 2
def get_device_properties(index): return Facts()
def set_per_process_memory_fraction(fraction, index): SET[index] = fraction
def _lazy_call(call): QUEUED.append(call)
def init():
    for call in QUEUED: call()
"""

PROGRAM = """
import json, sys
from callboard.agents.host.worker_limits import limit_gpu_memory
{before}
limit_gpu_memory({limit})
import importlib.util, torch
early = dict(torch.cuda.SET)
torch.cuda.init()
print(json.dumps([early, torch.cuda.SET, torch.cuda.__spec__.name, [type(f).__name__ for f in sys.meta_path]]))
"""


@pytest.mark.parametrize("before", ["", "import torch"], ids=["imported later", "preloaded"])
@pytest.mark.parametrize(
    ("limit", "expected"), [(20 << 30, {"0": 0.25, "1": 0.25}), (200 << 30, {"0": 1.0, "1": 1.0}), (0, {})]
)
def test_the_limit_is_set_once_cuda_is_initialised_and_not_before(
    tmp_path: Path, before: str, limit: int, expected: dict[str, float]
) -> None:
    package = tmp_path / "torch" / "cuda"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("import torch.cuda\n")
    (package / "__init__.py").write_text(CUDA)
    program = PROGRAM.format(before=before, limit=limit)
    path = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    early, found, name, finders = json.loads(done.stdout)
    assert early == {}
    assert found == expected
    assert name == "torch.cuda"
    assert limit == 0 or "_OnImport" not in finders


def test_a_program_without_pytorch_is_not_touched() -> None:
    limits = "from callboard.agents.host import worker_limits; worker_limits.limit_gpu_memory(1 << 30)"
    code = f"{limits}; import json, csv; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "ok\n"


@pytest.mark.parametrize("limited", [False, True])
def test_what_is_promised_on_each_gpu_is_exported_and_kept_to_only_if_asked(limited: bool) -> None:
    command = start_worker("Plain", devices=("5", "7"))
    command.allocation.resources.gpu_memory_bytes = 100 << 30
    command.limit_gpu_memory = limited
    variables = worker_environment(command, identity())
    assert variables["CALLBOARD_GPU_MEMORY_BYTES"] == str(50 << 30)
    assert worker_plan(command, identity(), variables)["gpu_memory_limit"] == (50 << 30 if limited else 0)


def test_without_an_amount_nothing_is_promised() -> None:
    assert worker_environment(start_worker("Plain"), identity())["CALLBOARD_GPU_MEMORY_BYTES"] == "0"


def test_the_cpus_near_a_gpu_are_those_of_its_numa_node_that_the_agent_may_use(tmp_path: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    for numa, cpus in ((0, f"{own[0]}"), (1, "99990-99999")):
        (tmp_path / f"node{numa}").mkdir()
        (tmp_path / f"node{numa}" / "cpulist").write_text(f"{cpus}\n")
    facts = tuple(DeviceFacts(str(i), numa_node=numa) for i, numa in enumerate((0, 1, 2, -1)))
    assert cpus_near(NodeDevices(CUDA_VENDOR, facts), tmp_path) == {"0": (own[0],)}, "of the others none is known"


@pytest.mark.parametrize(
    ("devices", "asked", "expected"),
    [
        (("5", "7"), True, [0, 1, 8]),
        (("5",), True, [0, 1]),
        (("5",), False, []),
        (("5", "6"), True, []),
        ((), True, []),
    ],
)
def test_a_worker_keeps_to_the_cpus_near_its_gpus_if_it_asks_for_them(
    devices: tuple[str, ...], asked: bool, expected: list[int]
) -> None:
    node = replace(identity(), near_cpus={"5": (0, 1), "7": (1, 8)})
    command = start_worker("Plain", devices=devices)
    command.cpu_affinity = asked
    variables = worker_environment(command, node)
    assert variables["CALLBOARD_CPU_AFFINITY"] == ",".join(map(str, expected))
    assert worker_plan(command, node, variables)["cpus"] == expected


def test_every_thread_and_what_it_starts_runs_on_these_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = f"""
import os, subprocess, sys, threading
from callboard.agents.host.worker_limits import run_on
go, found = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(), found.append(os.sched_getaffinity(0))))
thread.start()
run_on([{cpu}])
go.set()
thread.join()
child = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
print(os.sched_getaffinity(0), found[0], child.strip(), sep="|")
run_on([99999])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "|".join([str({cpu})] * 3)
    assert "this worker runs on any CPU, not on [99999]" in done.stderr
