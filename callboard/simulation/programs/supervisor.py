"""The supervisor of one machine: it starts an agent again, and has the power switch."""

from __future__ import annotations

from callboard.simulation.programs.agent import Agent
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.site import Site

AGAIN_MS = 5_000
"""Before an agent is started again that ended by itself with an error."""


class Supervisor:
    """Keeps one machine's agent running."""

    def __init__(self, site: Site, machine: Machine, *, is_head: bool) -> None:
        self.machine = machine
        self.agent: Agent | None = None
        self._site = site
        self._is_head = is_head
        self._away_ms = AGAIN_MS

    @property
    def node_id(self) -> str:
        return self.machine.node_id

    def start(self) -> None:
        """Starts an agent, which first takes over from an earlier one."""
        if self.agent is None and self.machine.powered:
            self.agent = Agent(self._site, self.machine, is_head=self._is_head, on_exit=self._exited)

    def crash(self, back_after_ms: int) -> None:
        """The agent is killed; its raylet and its workers live on, and the next one goes on with them."""
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.crash()
            self._site.timeline.after(back_after_ms, self.start)

    def leave(self, back_after_ms: int) -> None:
        """The agent leaves on purpose, and joins again later."""
        self._away_ms = back_after_ms
        if self.agent is not None and not self.agent.leave():
            self.agent = None
            self._site.timeline.after(back_after_ms, self.start)

    def power_off(self, back_after_ms: int) -> None:
        """The machine loses its power."""
        if not self.machine.powered:
            return
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.lose_power()
        self._site.machines.power_off(self.machine)
        self._site.timeline.after(back_after_ms, self.power_on)

    def power_on(self) -> None:
        """The machine comes back, empty."""
        if not self.machine.powered:
            self.machine.powered = True
            self.start()

    def _exited(self, code: int) -> None:
        self.agent = None
        wait_ms = AGAIN_MS
        match code:
            case 0:
                wait_ms, self._away_ms = self._away_ms, AGAIN_MS
            case 2:
                self._site.count("agent refused by the controller")
            case _:
                self._site.count("agent left something behind")
        self._site.timeline.after(wait_ms, self.start)
