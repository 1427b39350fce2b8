"""Worker hosts: a worker's process with the user's class in it, as its agent can ask it, drawn by chance.

Answers what ``callboard.agents.host.worker_host`` does; nothing of it depends on whether the agent lives or is stopped.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

from callboard.agents.supplies.worker_env import WORKER_MARKER
from callboard.model.frozen import dataclass
from callboard.simulation.options import Fault
from callboard.simulation.world.machines import CRASH, Machine, Running, Tree
from callboard.simulation.world.site import Site

Answer = asyncio.Future[Any]


class HostDied(Exception):
    """The process ended before it answered."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the user's code and the machine will do, drawn once. Times in milliseconds."""

    launch_ms: int
    construct_ms: int
    problem: str
    """"HOST", "CONSTRUCTOR" or "DIED"; empty: none."""
    kill_ms: int
    stuck_ms: int
    children: int
    hook_ms: int
    returns_when_cancelled: bool
    life_ms: int
    entry_ms: int
    entry_works: bool
    leaves_checkpoint: bool


def draw(site: Site) -> Behaviour:
    """What will become of a worker. Every draw is made, so that faults don't shift later ones."""
    chance = site.chance.workers
    slow = site.strikes(Fault.WORKER, 0.02)
    problem = ""
    for failure, share in (("CONSTRUCTOR", 0.02), ("HOST", 0.02), ("DIED", 0.01)):
        if site.strikes(Fault.WORKER, share):
            problem = failure
    hangs = site.strikes(Fault.WORKER, 0.1)
    stuck = site.strikes(Fault.WORKER, 0.02)
    dies = site.strikes(Fault.WORKER, 0.06)
    construct_ms, slow_ms = chance.randint(100, 2_000), chance.randint(2_500, 40_000)
    return Behaviour(
        launch_ms=chance.randint(10, 400),
        construct_ms=slow_ms if slow else construct_ms,
        problem=problem,
        kill_ms=chance.randint(5, 300),
        stuck_ms=chance.randint(1_000, 90_000) if stuck else 0,
        children=chance.choice([0, 0, 0, 1, 4]),
        hook_ms=10**9 if hangs else chance.choice([0, 5, 100, 400, 900]),
        returns_when_cancelled=chance.random() < 0.7,
        life_ms=chance.randint(100, 90_000) if dies else 10**9,
        entry_ms=round(chance.expovariate(1 / 40_000)) + 500,
        entry_works=not site.strikes(Fault.WORKER, 0.04),
        leaves_checkpoint=chance.random() < 0.5,
    )


class Host:
    """One process that becomes a worker.

    Args:
        raylet: its parent.
        generation: that it is made for; 0: it waits for one.
    """

    def __init__(self, site: Site, machine: Machine, raylet: Running, generation: int) -> None:
        self.plan = draw(site)
        self._site = site
        self._machine = machine
        leader = site.machines.begin(
            machine, "worker", raylet, kill_ms=self.plan.kill_ms, stuck_ms=self.plan.stuck_ms, on_end=self._died
        )
        self.tree = Tree(leader, generation)
        site.machines.launch(machine, self.tree)
        self._answers: dict[str, Answer] = {}
        self._up = self._once("up", self.plan.launch_ms, self._come_up)

    @property
    def alive(self) -> bool:
        return not self.tree.leader.gone

    async def up(self) -> None:
        """Return once it answers.

        Raises:
            HostDied: it ended before.
        """
        await asyncio.shield(self._up)

    async def ask(self, method: str, argument: Any) -> Any:
        """A control method of a worker's host.

        Raises:
            HostDied: it ended before it answered.
        """
        if not self.alive:
            raise HostDied
        if method in ("cancel", "checkpoint"):
            # Hooks run once, however often they are asked for.
            self.tree.asked.setdefault(method, (self._site.timeline.now_ms, argument["notice"]))
        match method:
            case "assign":
                if "assign" not in self._answers:
                    self._become(argument)
                answer = self._once("assign", self.plan.construct_ms, self._construct)
            case "report":
                answer = self._once("report", self.plan.entry_ms, lambda: self._entry_ended(self.plan.entry_works))
            case "cancel":
                answer = self._once("cancel", self.plan.hook_ms, self._cancelled)
            case "checkpoint":
                data = b"step %d" % self.tree.generation
                left = {"data": base64.b64encode(data).decode()} if self.plan.leaves_checkpoint else {}
                return {"in_flight": 0, "error": "", **(left if argument["take"] else {})}
            case "ping":
                return {"building": ""}
            case "secrets":
                return []
            case _:
                raise AssertionError(f"nobody simulates {method}")
        return await asyncio.shield(answer)

    def _once(self, what: str, wait_ms: int, do: Callable[[], Any]) -> Answer:
        """The answer to something that is done once, by the process itself."""
        if what not in self._answers:
            answer = self._answers[what] = self._site.timeline.create_future()

            def act() -> None:
                if self.alive and not answer.done():
                    value = do()
                    # None: it doesn't come to an answer.
                    if value is not None and not answer.done():
                        answer.set_result(value)

            self._site.timeline.after(wait_ms, act)
        return self._answers[what]

    def _come_up(self) -> bool | None:
        if self.plan.problem == "HOST":
            self.crash()
            return None
        return True

    def _become(self, plan: dict[str, Any]) -> None:
        told = plan["context"]
        self.tree.marker = f"{WORKER_MARKER}={plan['env'][WORKER_MARKER]}"
        key = (told["job_id"], told["component"], told["rank"])
        self._site.machines.use(self._machine, self.tree, key, told["generation"], [(i, m) for i, m in plan["gpus"]])
        for _ in range(self.plan.children):
            child = self._site.machines.begin(
                self._machine, "child", self.tree.leader, kill_ms=self.plan.kill_ms, stuck_ms=self.plan.stuck_ms
            )
            self.tree.children.append(child)

    def _construct(self) -> dict[str, Any] | None:
        if self.plan.problem == "DIED":
            self.crash()
            return None
        if self.plan.problem == "CONSTRUCTOR":
            message = "the constructor raised ValueError"
            return {"ok": False, "failure": "CONSTRUCTOR", "message": message, "traceback": "ValueError: no"}
        self._site.timeline.after(self.plan.life_ms, self.crash)
        devices = ",".join(str(index) for index, _ in self.tree.devices)
        return {"ok": True, "visible_devices": devices, "hooks": ["cancel", "checkpoint"]}

    def _cancelled(self) -> dict[str, Any]:
        self.tree.answered["cancel"] = None
        entry = self._answers.get("report")
        if entry is not None and not entry.done() and self.plan.returns_when_cancelled:
            entry.set_result(self._entry_ended(self.plan.entry_works))
        return {"hook": True, "error": ""}

    @staticmethod
    def _entry_ended(works: bool) -> dict[str, Any]:
        return {"succeeded": works, "traceback": "" if works else "ValueError: no"}

    def crash(self) -> None:
        """Its process ends by itself; what it started lives on."""
        self._site.machines.kill(self._machine, self.tree.leader, CRASH, 0)

    def give_up(self) -> None:
        """Ray kills it: for Ray it is dead at once, and its process ends as soon as it can."""
        self._site.machines.kill(self._machine, self.tree.leader)
        self._died()

    def _died(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(HostDied())
                answer.exception()  # Nobody need have asked.
