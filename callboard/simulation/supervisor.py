"""The supervisor of one machine: it starts an agent again, and has the power switch."""

from __future__ import annotations

import itertools

from callboard.simulation.agent import Agent
from callboard.simulation.machines import Machine
from callboard.simulation.site import Site

LOOK_MS = 100
"""Between looks for what an earlier run left. With processes that it can't end, no agent joins."""


class Supervisor:
    """Keeps one machine's agent running."""

    def __init__(self, site: Site, machine: Machine, *, is_head: bool) -> None:
        self.machine = machine
        self.agent: Agent | None = None
        self._site = site
        self._is_head = is_head
        self._runs = itertools.count(1)
        self._life = 0

    @property
    def node_id(self) -> str:
        """The node."""
        return self.machine.node_id

    def start(self) -> None:
        """Starts an agent, which first ends what an earlier one left."""
        if self.agent is not None or not self.machine.powered:
            return
        self._life += 1
        life = self._life
        for tree in self.machine.trees.values():
            wait_ms = max(tree.kill_ms, tree.stuck_until_ms - self._site.timeline.now_ms)
            self._site.timeline.after(wait_ms, lambda tree=tree: self._site.machines.end(self.machine, tree))  # type: ignore[misc]
        self._site.timeline.after(10, lambda: self._ready(life))

    def _ready(self, life: int) -> None:
        if life != self._life or self.agent is not None or not self.machine.powered:
            return
        if self.machine.trees:
            self._site.timeline.after(LOOK_MS, lambda: self._ready(life))
            return
        instance = f"{self.node_id}-run{next(self._runs)}"
        self.agent = Agent(self._site, self.machine, instance, is_head=self._is_head, on_refused=self._stop_and_return)
        self.agent.start()

    def notice_session(self) -> None:
        """The agent looks whether the session of its raylet still lives."""
        agent = self.agent
        if agent is not None:
            agent.later(0, agent.membership.notice)

    def crash(self, back_after_ms: int) -> None:
        """The agent is killed; its raylet and its workers live on until the next one ends them."""
        if self.agent is None:
            return
        agent, self.agent = self.agent, None
        agent.crash()
        self._back(back_after_ms, agent)

    def leave(self, back_after_ms: int) -> None:
        """The agent leaves on purpose, and joins again later."""
        agent = self.agent
        if agent is None or agent.leaving:
            return

        def left() -> None:
            if self.agent is agent:
                self.agent = None
                agent.crash()
                self._back(back_after_ms, agent)

        agent.leave(left)

    def power_off(self, back_after_ms: int) -> None:
        """The machine loses its power."""
        if not self.machine.powered:
            return
        self._life += 1
        self._site.machines.power_off(self.machine)
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.membership.drop()
            agent.lose_power()
        self._site.timeline.after(back_after_ms, self.power_on)

    def power_on(self) -> None:
        """The machine comes back, empty."""
        if not self.machine.powered:
            self.machine.powered = True
            self.start()

    def _back(self, wait_ms: int, agent: Agent) -> None:
        def again() -> None:
            agent.membership.drop()
            self.start()

        self._site.timeline.after(wait_ms, again)

    def _stop_and_return(self) -> None:
        self._site.count("agent refused by the controller")
        self.crash(5_000)
