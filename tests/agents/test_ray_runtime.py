"""What does the agent do when its Ray driver or its Ray node goes away under a request?"""

from __future__ import annotations

import asyncio

import pytest

from callboard.agents.host.framing import Json
from callboard.agents.ray.driver_client import DriverClient, DriverLost
from callboard.agents.ray.ray_runtime import RayHosted, RayRuntime
from callboard.agents.runtime import HostError
from callboard.agents.system.process_tree import ProcessId


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
