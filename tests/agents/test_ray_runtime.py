"""What does the agent do when its Ray driver or its Ray node goes away under a request?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callboard.agents.files.run_dir import RunDir
from callboard.agents.host.framing import Json, PeerGone
from callboard.agents.ray.ray_driver_client import DriverClient, DriverLost
from callboard.agents.ray.ray_runtime import RayHosted, RayRuntime
from callboard.agents.runtime import HostError, Launch
from callboard.security.processes import ProcessId


class Driver(DriverClient):
    """Loses every request; from the third one on, its node is in no Ray cluster."""

    connection = object()  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, method: str, argument: Json, *, within_s: float | None) -> Json:
        self.asked += 1
        if self.asked == 3:
            self.connection = None
        raise DriverLost("this node is in no Ray cluster" if self.connection is None else "the driver ended")


async def test_a_host_whose_ray_node_is_over_is_not_asked_again_and_again() -> None:
    driver = Driver()
    hosted = RayHosted(RayRuntime(driver, "c"), driver, "cb/j/main/0/g1", ProcessId(1, 1))
    asking = asyncio.ensure_future(hosted.control("report"))
    with pytest.raises(HostError, match="in no Ray cluster"):
        await asking
    assert driver.asked == 3


class Replaced(DriverClient):
    """Drivers that die: each request waits until the test answers it."""

    connection = SimpleNamespace(ray_node_id="n")  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, Json, asyncio.Future[Json]]] = asyncio.Queue()

    async def ask(self, method: str, argument: Json, *, within_s: float | None) -> Json:
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((method, argument, answer))
        return await answer


class Only:
    """The only driver there is: it answers until it ends."""

    def __init__(self) -> None:
        self.process, self.ended = ProcessId(9, 9), asyncio.Event()

    async def ask(self, method: str, argument: Json = None) -> Json:
        if self.ended.is_set():
            raise PeerGone("it ended")
        return dict.fromkeys(("ray_node_id", "gcs_address", "session", "node_ip"), "")

    def close(self) -> None: ...

    def reap(self) -> None: ...


async def test_a_request_that_waits_for_a_driver_ends_with_the_ray_node(tmp_path: Path) -> None:
    """Also a launch, which waits without limit: or its worker's room would be taken for as long as Ray is away."""
    only, replacing = Only(), asyncio.Event()

    async def begin(_: Any) -> Any:
        if only.ended.is_set():
            replacing.set()
            await asyncio.Event().wait()
        return only

    async def exited(_: ProcessId) -> None:
        await only.ended.wait()

    processes: Any = SimpleNamespace(exited=exited, send_signal=lambda *_: None)
    client = DriverClient(RunDir(tmp_path), processes, begin)
    await client.connect("", "", {})
    only.ended.set()
    launching = asyncio.ensure_future(RayRuntime(client, "c").launch(Launch("j/main/0/g1", sys.executable, {})))
    await replacing.wait()
    assert not launching.done()
    await client.disconnect()
    with pytest.raises(HostError, match="in no Ray cluster"):
        await launching


LOST = DriverLost("the driver ended")


async def test_a_launch_that_was_given_up_goes_on_until_its_process_is_known_and_its_kill_waits_for_it() -> None:
    """Found by simulation (seed 920017): the kill came first to the next driver, and the launch made a second host."""
    driver = Replaced()
    runtime = RayRuntime(driver, "c")
    launch = Launch("j/main/0/g466", sys.executable, {})
    launching = asyncio.ensure_future(runtime.launch(launch))
    _, argument, answer = await driver.asked.get()
    assert not argument["again"], "nobody can have made it before"
    runtime.abandon(launch)
    method, argument, killed = await driver.asked.get()
    assert (method, argument["launching"]) == ("kill", True)
    killed.set_exception(LOST)
    answer.set_exception(LOST)
    of_next = {method: (argument, answer) for method, argument, answer in [await driver.asked.get() for _ in range(2)]}
    assert of_next["launch"][0]["again"]
    assert of_next["kill"][0]["launching"]
    of_next["launch"][1].set_result({"pid": 2, "start_ticks": 3})
    assert (await launching).process == ProcessId(2, 3), "its process is known, so that its end can be proved"
    of_next["kill"][1].set_result(True)
    runtime.forget(launch.name)
    await runtime.close()


async def test_a_kill_of_what_nobody_launches_any_more_waits_for_nothing() -> None:
    driver = Replaced()
    runtime = RayRuntime(driver, "c")
    runtime.forget("cb/j/main/0/g1")
    _, argument, answer = await driver.asked.get()
    assert not argument["launching"]
    answer.set_result(True)
    await runtime.close()
