"""A Ray driver: what an agent asks of Ray, answered by the simulated cluster.

A program of its own beside the agent: it goes on while the agent is stopped, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from callboard.agents.host.framing import Json, PeerGone, RemoteError
from callboard.simulation.options import Fault
from callboard.simulation.world.hosts import Host, HostDied
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.rayworld import Actor, Bundle
from callboard.simulation.world.site import Site
from callboard.simulation.world.virtual_time import Process

POLL_S = 0.3
"""Between looks at whether a placement group is ready."""


class Driver:
    """One run of the driver, as ``callboard.agents.ray.ray_driver_client`` talks to it."""

    def __init__(self, site: Site, machine: Machine, agent: Process) -> None:
        self._site = site
        self._ray = site.ray
        self._machine = machine
        self._program = Process(f"driver of {machine.node_id}")
        self._running = site.machines.begin(machine, "driver", agent, on_end=self._ended)
        self.process = self._running.id
        self._open: dict[asyncio.Future[Json], None] = {}
        self._unwanted: dict[str, None] = {}
        self._begun: dict[str, asyncio.Event] = {}
        self._methods: dict[str, Callable[..., Coroutine[Any, Any, Json]]] = {
            "connect": self._connect,
            "claim": self._claim,
            "launch": self._launch,
            "control": self._control,
            "kill": self._kill,
            "oom_of": self._oom_of,
            "book": self._book,
            "unbook": self._unbook,
            "groups": self._groups,
        }

    async def ask(self, method: str, argument: Json = None) -> Json:
        if self._running.gone:
            raise PeerGone("the other end closed the socket")
        answer: asyncio.Future[Json] = self._site.timeline.create_future()
        self._open[answer] = None
        if method == "ping":  # Asked all the time.
            self._site.timeline.after(1, lambda: self._settle(answer, None))
            return await answer
        # Its task lives as long as the driver does.
        _ = self._program.start(self._site.timeline, self._answer(answer, method, argument or {}))
        return await answer

    def close(self) -> None:
        self._site.machines.kill(self._machine, self._running)

    def reap(self) -> None:
        """Its process is gone."""

    async def _answer(self, answer: asyncio.Future[Json], method: str, argument: dict[str, Any]) -> None:
        await asyncio.sleep(0.001)
        try:
            value = await self._methods[method](**argument)
        except RemoteError as error:
            if not answer.done():
                answer.set_exception(error)
        except Exception as error:  # A rule was broken, wherever.
            self._site.timeline.fail(error)
            raise
        else:
            self._settle(answer, value)
        self._open.pop(answer, None)

    def _settle(self, answer: asyncio.Future[Json], value: Json) -> None:
        if not answer.done():
            answer.set_result(value)
        self._open.pop(answer, None)

    def _ended(self) -> None:
        self._program.kill()
        waiting, self._open = self._open, {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(PeerGone("the other end closed the socket"))
                answer.exception()  # Nobody need be waiting any more.

    # ---- its methods ----

    async def _connect(self, address: str, node_ip: str) -> Json:
        await asyncio.sleep(self._site.chance.agents.randint(200, 800) / 1000)
        ray_node_id = self._machine.raylet
        if ray_node_id not in self._ray.raylets or address != self._ray.address:
            raise RemoteError("ConnectionError", "Ray does not answer")
        return {"ray_node_id": ray_node_id, "gcs_address": address, "session": self._ray.session, "node_ip": node_ip}

    async def _claim(self, owner: str) -> Json:  # noqa: ARG002 - there is one controller
        self._check()
        return []

    async def _launch(self, actor_name: str, again: bool, **_: Any) -> Json:
        try:
            self._check()
            host = self._find(actor_name, again=again)
        finally:
            self._begin(actor_name).set()
        try:
            await host.up()
        except HostDied:
            if not host.alive:
                raise RemoteError("ActorDiedError", "the actor died while it was created") from None
        return {"pid": host.tree.leader.id.pid, "start_ticks": host.tree.leader.id.start_ticks}

    def _find(self, actor_name: str, *, again: bool) -> Actor:
        if again and (dead := self._ray.killed.get(actor_name)) is not None and dead.alive:
            return dead
        host = self._ray.actors.get(actor_name)
        if host is None or not host.alive:
            raylet = next(each for each in self._machine.table.values() if each.name == "raylet")
            last = actor_name.rpartition("/")[2]
            generation = int(last[1:]) if actor_name.count("/") == 4 and last.startswith("g") else 0
            host = self._ray.actors[actor_name] = Host(self._site, self._machine, raylet, generation)
        return host

    def _begin(self, actor_name: str) -> asyncio.Event:
        return self._begun.setdefault(actor_name, asyncio.Event())

    async def _control(self, actor_name: str, method: str, argument: Json) -> Json:
        host = self._ray.actors.get(actor_name)
        if host is None:
            raise RemoteError("ValueError", "Failed to look up the actor")
        try:
            return await host.ask(method, argument)
        except HostDied:
            raise RemoteError("ActorDiedError", "the actor is dead") from None

    async def _kill(self, actor_name: str, launching: bool) -> Json:
        if launching:
            await self._begin(actor_name).wait()
        self._begun.pop(actor_name, None)
        host = self._ray.actors.pop(actor_name, None)
        if host is not None and host.alive:
            self._ray.killed = {name: each for name, each in self._ray.killed.items() if each.alive}
            self._ray.killed[actor_name] = host
            host.give_up()
        return host is not None

    async def _oom_of(self, actor_name: str) -> Json:  # noqa: ARG002 - memory isn't simulated
        return ""

    async def _book(self, name: str, bundles: list[dict[str, Any]], timeout_s: float, certain: bool) -> Json:  # noqa: ARG002
        """Every group gets the devices that it asks for."""
        self._unwanted.pop(name, None)
        chance = self._site.chance.ray
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        wait_ms = chance.randint(20, 600)
        fails, hangs = self._site.strikes(Fault.RAY, 0.02), self._site.strikes(Fault.RAY, 0.01)
        self._check()
        asked: tuple[Bundle, ...] = tuple(
            (each["ray_node_id"], round(each["resources"].get("GPU", 0) * 1_000)) for each in bundles
        )
        self._ray.find_or_make(name, asked)
        await asyncio.sleep(timeout_s if hangs else wait_ms / 1000)
        why = "Ray raised" if fails else "not ready in time"
        if fails:
            self._site.count("group creation failed")
        while not fails and loop.time() < until_s:
            if name in self._unwanted:
                why = "it was removed while it was being made"
                break
            group = self._ray.try_place(name)
            if group is not None:
                return {"ray_id": group.ray_id, "devices": []}
            if name not in self._ray.groups:
                why = "its Ray session ended"
                break
            await asyncio.sleep(POLL_S)
        self._ray.remove(name)
        raise RemoteError("NotBooked", why)

    async def _unbook(self, name: str, ray_id: str) -> Json:
        self._unwanted[name] = None
        await asyncio.sleep(self._site.chance.ray.randint(20, 300) / 1000)
        self._check()
        self._ray.remove(name, ray_id)

    async def _groups(self, prefix: str) -> Json:
        self._check()
        return [
            {
                "name": name,
                "ray_id": group.ray_id,
                "nodes": sorted({node for node, _ in group.bundles}) if group.ready else [],
            }
            for name, group in self._ray.groups.items()
            if name.startswith(prefix)
        ]

    def _check(self) -> None:
        """Calls of a driver whose raylet is gone fail."""
        if self._machine.raylet not in self._ray.raylets:
            raise RemoteError("RaySystemError", "the raylet is gone")
