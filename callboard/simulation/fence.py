"""What ends a strict worker when its lease is over and its agent can't?

The rules of ``callboard.agents.fence``: a process beside the agent that reads when the controller was heard last. It
lives on when the agent is killed or stopped, and dies with the machine.
"""

from __future__ import annotations

from callboard.simulation.machines import Machine, Tree
from callboard.simulation.site import Site

SLACK_MS = 500
"""After the lease: its slack and the time between two looks."""


def guard(site: Site, machine: Machine, tree: Tree, stuck_ms: int) -> None:
    """Ends a strict tree once the machine's lease is over.

    Args:
        stuck_ms: how long the tree can't be killed from the first attempt on.
    """

    def look() -> None:
        if machine.trees.get(tree.generation) is not tree:
            return
        now_ms = site.timeline.now_ms
        left_ms = machine.lease_until_ms + SLACK_MS - now_ms
        if left_ms > 0:
            site.timeline.after(left_ms, look)
            return
        site.count("worker ended by its fence")
        if stuck_ms and not tree.stuck_until_ms:
            tree.stuck_until_ms = now_ms + stuck_ms
        gone_ms = max(now_ms + tree.kill_ms, tree.stuck_until_ms)
        site.timeline.after(gone_ms - now_ms, lambda: site.machines.end(machine, tree))

    look()
