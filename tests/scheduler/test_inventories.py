"""Is it seen that a node came back with less than it had?"""

from __future__ import annotations

import pytest

from tests.scheduler.world import World


@pytest.mark.parametrize(("again", "lost"), [(4, 0), (1, 3), (0, 4), (6, 0)])
def test_ps_13_a_node_that_used_to_have_devices_is_flagged(again: int, lost: int) -> None:
    world = World({"n0": 4})
    world.join("n0", again, instance="another", previous_alive=False)
    assert world.state.nodes["n0"].lost_devices == lost
    world.join("n0", 4, instance="third", previous_alive=False)
    assert world.state.nodes["n0"].lost_devices == max(0, again - 4)
