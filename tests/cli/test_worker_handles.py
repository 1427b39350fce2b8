"""Are the workers' handles plain Ray calls, from any driver, and do they follow? On a real Ray cluster."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from callboard.agents.ray.ray_command import free_port
from tests.cli.machine import ROOT, Machine

DRIVER = """
import asyncio, json, os, pickle, signal, sys, ray
from callboard import SyncClient, WorkerGone
shown = {}
with SyncClient() as cb:
    cb.connect_ray()
    cb.ensure_pool("rlhf", nominal={"cpu": 4, "gpu": 1})
    job = cb.submit({"name": "plain", "pool": "rlhf", "restart": {"max_restarts": 1, "backoff_base": "10ms"},
                     "components": [{"name": "w", "actor": "tests.support.actors:Plain",
                                     "resources": {"cpu": 1, "gpu": 1}}]})
    job.running(timeout=90)
    (handle,) = job.workers()
    shown["echo"] = ray.get(handle.echo.remote(7))
    shown["stream"] = [ray.get(ref) for ref in handle.options(stream=True).count.remote(12)]
    shown["two"] = ray.get(handle.options(num_returns=2).echo.remote((1, 2)))
    open(sys.argv[1], "wb").write(pickle.dumps(handle))
    ray.get(handle.say.remote("hello from the first"))
    calling = handle.company.remote("/never/there")
    first = handle.generation
    os.kill(job.job.workers[0].pid, signal.SIGKILL)
    try:
        ray.get(calling, timeout=60)
    except ray.exceptions.ActorDiedError as error:
        again = pickle.loads(pickle.dumps(error))
        shown["in_flight"] = [str(error), isinstance(error, WorkerGone), str(again) == str(error)]
    try:
        handle.options(follow=False).echo.remote(0)
    except WorkerGone as error:
        shown["gone"] = str(error)
    shown["followed"] = ray.get(handle.echo.remote(8), timeout=60)
    ray.get(handle.say.remote("hello from the second"))
    shown["later"] = handle.newest.generation > first

    # FT-F2: whoever must free the room himself is not stopped by his own call.
    hog = cb.submit({"name": "hog", "pool": "rlhf", "priority": 100,
                     "components": [{"name": "w", "actor": "tests.support.actors:Plain", "resources": {"cpu": 4}}]})
    hog.running(timeout=90)

    async def program():
        calls = [asyncio.ensure_future(handle.options(wait=90).echo.remote(number)) for number in range(2)]
        calls += handle.options(wait=90, num_returns=2).echo.remote((5, 6))
        streamed = handle.options(wait=90, stream=True).count.remote(3)
        await asyncio.sleep(0)
        shown["waiting"] = sum(not call.done() for call in calls)
        await asyncio.to_thread(hog.cancel)
        shown["async"] = await asyncio.gather(*calls)
        shown["async_stream"] = [await ref async for ref in streamed]
        shown["ready"] = await (await handle.ready()).echo.remote(9)
        await handle.say.remote("hello from the third")

    asyncio.run(program())
    shown["ray_address"] = cb.stats().ray_address
print(json.dumps(shown))
"""

OTHER_DRIVER = """
import json, os, pickle, sys
from callboard import SyncClient
from callboard.client.client import ray_of
with SyncClient() as cb:
    address, token = ray_of(cb.target, cb.stats())
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
import ray
ray.init(address=address, namespace="another", log_to_driver=False)
handle = pickle.loads(open(sys.argv[1], "rb").read())
print(json.dumps(ray.get(handle.echo.remote("from another namespace"), timeout=60)))
"""


FOREIGNERS = """
import json, ray
from callboard import SyncClient
with SyncClient() as cb:
    cb.connect_ray()
for name in ("theirs", "cb/lost/pg-999/1"):
    ray.get(ray.util.placement_group([{"CPU": 0.1}], name=name, lifetime="detached").ready(), timeout=60)

@ray.remote(num_cpus=0, lifetime="detached", name="stray")
class Stray:
    def ping(self):
        return "made"

Stray.options(name="greedy", num_cpus=1000).remote()
print(json.dumps(ray.get(Stray.remote().ping.remote(), timeout=60)))
"""


def foreigners(machine: Machine) -> dict[str, str]:
    """What doctor finds in Ray that is not ours: kind → what to do."""
    findings = json.loads(machine.run("doctor", "-o", "json").stdout)["findings"]
    ours = ("foreign", "leftover", "pending-actor")
    return {each["kind"]: each["remedy"] for each in findings if each["kind"].startswith(ours)}


def do_what_doctor_says(found: dict[str, str]) -> None:
    for remedy in found.values():
        (command,) = re.findall("`([^`]+)`", remedy)
        name, *arguments = shlex.split(command)
        assert name in ("python", "kill")
        program = sys.executable if name == "python" else name
        subprocess.run([program, *arguments], cwd=ROOT, check=True, timeout=120)


def drive(program: str, *arguments: str) -> object:
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def rays_own_tools(machine: Machine) -> None:
    """In a shell, `callboard ray-env` is all that they need."""
    variables = machine.run("ray-env").stdout
    tasks = "import ray; ray.init(log_to_driver=False); print(sorted(ray.nodes()[0]['Labels']), ray.is_initialized())"
    shell = f"""{variables}
    until {sys.executable} -m ray.scripts.scripts status | tee /dev/stderr | grep -q 'Total Usage'; do :; done
    {sys.executable} -c {shlex.quote(tasks)}"""
    shown = subprocess.run(["bash", "-ec", shell], capture_output=True, text=True, check=True, timeout=120)
    assert "4.0 CPU" in shown.stderr, shown.stderr
    assert "'callboard-node'" in shown.stdout
    listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert not [place for place in listening if place and place.port == 44217], (
        "the figures of Ray's monitor, on every address and without a token"
    )


def programs_beside_it(machine: Machine) -> None:
    """`callboard exec` in an actor that Ray hosts: its devices and environment, and nothing of Ray's; its end, too."""
    shows = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], [n for n in os.environ if n[:4] == 'RAY_']); exit(7)"
    done = machine.run("exec", "plain", "--rank", "0", "--", "python", "-c", shows)
    assert (done.returncode, done.stdout) == (7, "0 []\n"), done
    beside = machine.start(
        "exec", "plain", "--", "bash", "-c", "trap '' TERM HUP; echo $$; while :; do sleep 1000; done"
    )
    assert beside.stdout is not None
    pid = int(beside.stdout.readline())
    assert machine.run("job", "cancel", "plain").returncode == 0
    said, _ = beside.communicate(timeout=60)
    assert (beside.returncode, psutil.pid_exists(pid) and psutil.Process(pid).status()) in (
        (137, False),
        (137, psutil.STATUS_ZOMBIE),
    ), said


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ft_a6_ft_a7_ft_c5_ft_f2_handles_call_and_follow_and_a_lost_call_says_why(
    machine: Machine, tmp_path: Path
) -> None:
    started = machine.run("up", "--detach", "--agents", "1", "--cpus-per-node", "4", "--port", str(free_port()))
    assert started.returncode == 0, started.stderr
    try:
        handle = str(tmp_path / "handle")
        shown = drive(DRIVER, handle)
        assert isinstance(shown, dict)
        assert (shown["echo"], shown["stream"], shown["two"]) == (7, list(range(12)), [1, 2])
        in_flight, is_gone, pickled = shown["in_flight"]
        assert in_flight.startswith("worker plain/w/0 ended in the middle of a call: "), in_flight
        assert "process" in in_flight or "signal" in in_flight
        assert "cb/" not in in_flight
        assert is_gone
        assert pickled
        assert "plain/w/0 is gone" in shown["gone"]
        assert (shown["followed"], shown["later"]) == (8, True)
        assert (shown["waiting"], shown["async"], shown["async_stream"]) == (4, [0, 1, 5, 6], [0, 1, 2])
        assert shown["ready"] == 9
        # The handle was pickled in its first generation.
        assert drive(OTHER_DRIVER, handle) == "from another namespace"
        listed = machine.run("worker", "list", "-o", "wide").stdout
        assert "plain" in listed
        rays_own_tools(machine)
        # FT-A6: only what the user printed.
        for attempt, said in (("1", "first"), ("2", "second"), ("3", "third")):
            logs = machine.run("job", "logs", "plain", "--attempt", attempt)
            assert (logs.returncode, logs.stdout) == (0, f"hello from the {said}\n"), logs.stderr
        last = machine.run("job", "logs", "plain", "--tail", "-1")
        assert last.stdout == "hello from the third\n"
        programs_beside_it(machine)
        # FT-C5: the leftover group may have been removed by its agent meanwhile.
        assert drive(FOREIGNERS) == "made"
        found = foreigners(machine)
        made = {"foreign-group", "foreign-actor", "pending-actor"}
        assert made <= set(found) <= {*made, "leftover-group"}
        do_what_doctor_says(found)
        while foreigners(machine):  # Ray hears of the actor's end a little later.
            pass
    finally:
        ended = machine.run("down")
    assert ended.returncode == 0, ended.stderr
    assert not machine.run_dir.exists()
