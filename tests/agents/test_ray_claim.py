"""Do agents of two controllers keep out of each other's Ray cluster? (GV-14, on real Ray)"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from callboard.v1 import agent_pb2
from tests.agents.conftest import assert_nothing_left
from tests.support.agents_on_ray import joined, run_node
from tests.support.fake_controller import FakeController

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


async def test_gv_14_the_agents_of_a_second_controller_stay_out_until_the_first_ones_are_gone(tmp_path: Path) -> None:
    agents: dict[str, Any] = {}
    async with FakeController().serving() as mine, FakeController().serving() as other:
        mine.welcome["controller_id"], other.welcome["controller_id"] = "mine", "other"
        agents["head"] = await run_node(mine, tmp_path, "head", ray_head=True, ray_port=0)
        head = await joined(mine, "head")
        external = {"ray_address": head.gcs_address, "ray_token_path": str(tmp_path / "head" / "ray-token")}
        try:
            # One of ours may join the same way.
            agents["friend"] = await run_node(mine, tmp_path, "friend", **external)
            assert (await joined(mine, "friend")).session == head.session
            agents["stranger"] = await run_node(other, tmp_path, "stranger", **external)
            session = await other.session("stranger")
            log = tmp_path / "stranger.log"
            # Looked at with every heartbeat.
            await other.until(lambda: "this Ray cluster is used by another controller" in log.read_text())
            assert not any(beat.ray.ray_node_id for beat in session.heartbeats), "it has no part in Ray"
            assert not session.ended.is_set(), "it tries again, and says so in its log"
            report = await other.do(
                "stranger",
                create_placement_group=agent_pb2.CreatePlacementGroup(
                    placement_group_id="pg-1", attempt=1, timeout_ms=2_000
                ),
            )
            assert report.HasField("placement_group_failed")
        finally:
            for agent in reversed(agents.values()):
                agent.send_signal(signal.SIGTERM)
            codes = [await agent.wait() for agent in agents.values()]
    assert codes == [0, 0, 0]
    for node in agents:
        assert_nothing_left(tmp_path / node)
