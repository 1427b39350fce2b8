"""Whether one run of an agent asks its workers to yield before it kills them, and gives them the time it was told.

What counts is what the worker's host was asked and when, and the commands that reached the agent. A worker that was
never reported ready has no hooks yet. One whose lease is over must not be waited for, one whose part in Ray is over
can't be asked, and an agent that leaves has its own time for its workers.
"""

from __future__ import annotations

from callboard.security.processes import ProcessId
from callboard.simulation.world.machines import Machine, Running, Tree
from callboard.simulation.world.network import Message
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site

SLACK_MS = 50
"""For a request on its way to the host."""

UNASKED = "agent"
"""What a stop is for, as hooks are told, that no command asked for; its time is the agent's own choice."""


class Yielding:
    """Follows the stops that one run of an agent carries out."""

    def __init__(self, site: Site, machine: Machine) -> None:
        self._site = site
        self._machine = machine
        self._since_ms = site.timeline.now_ms
        self.leaving = False
        """Whether the agent was told to end."""
        self._until_ms: dict[int, int] = {}
        """By generation: until when its hooks may take, by the commands that reached this agent."""
        self._saves: dict[int, None] = {}
        """Generations whose checkpoint is wanted."""

    def received(self, message: Message) -> None:
        kind, content = message
        if kind == "command" and content.HasField("stop_worker"):
            stop = content.stop_worker
            until_ms = self._site.timeline.now_ms + stop.cancel_timeout_ms
            self._until_ms[stop.generation] = min(until_ms, self._until_ms.get(stop.generation, until_ms))
            if stop.checkpoint:
                self._saves[stop.generation] = None
        elif kind == "welcome":
            # Its node was given up meanwhile: nobody waits any more for what the worker would leave. That a Welcome
            # leaves out nothing that still counts is for the witness to check.
            kept = {each.generation for each in content.keep}
            for generation in self._until_ms.keys() - kept:
                self._until_ms[generation] = min(self._site.timeline.now_ms, self._until_ms[generation])

    def said(self, message: Message) -> None:
        kind, content = message
        if kind == "report" and content.HasField("worker_ready"):
            for tree in self._machine.trees.values():
                if tree.generation == content.worker_ready.generation:
                    tree.ready = True

    def kills(self, leader: ProcessId) -> None:
        """The agent kills a worker's tree."""
        tree = self._machine.trees.get(leader)
        if tree is None or not tree.ready or tree.leader.gone or tree.leader.dies_ms or self._is_cut_short(tree):
            return
        until_ms = self._until_ms.get(tree.generation)
        if until_ms is None:
            return
        if wrong := self._what_is_wrong(tree, until_ms):
            message = f"the agent of {self._machine.node_id} kills g{tree.generation}, which {wrong}"
            self._site.timeline.fail(RuleBroken("R5/hooks", message, tree.key[0]))
        self._site.count("worker asked to yield before its kill")

    def _is_cut_short(self, tree: Tree) -> bool:
        machine, lease, raylet = self._machine, self._machine.lease, tree.leader.root
        assert isinstance(raylet, Running)
        lost = raylet.gone or raylet.dies_ms > 0 or machine.raylet not in self._site.ray.raylets
        over = lease is None or lease.until_s <= self._site.timeline.time()
        return self.leaving or lost or (tree.strict and over)

    def _what_is_wrong(self, tree: Tree, until_ms: int) -> str:
        now_ms = self._site.timeline.now_ms
        if "cancel" not in tree.asked:
            return "was not asked to yield" if now_ms < until_ms else ""
        asked_ms, notice = tree.asked["cancel"]
        told_ms = asked_ms + round(notice["left_s"] * 1_000)
        own = asked_ms >= self._since_ms and notice["kind"] != UNASKED
        if own and told_ms < until_ms - SLACK_MS:
            return f"was told of {notice['left_s']} s and has {until_ms - asked_ms} ms"
        if "cancel" not in tree.answered:
            left_ms = min(told_ms, until_ms) - now_ms
            return f"has {left_ms} ms left to answer" if left_ms > SLACK_MS else ""
        if tree.generation in self._saves and "checkpoint" not in tree.asked and own and now_ms < until_ms:
            return "was not asked for its checkpoint"
        return ""
