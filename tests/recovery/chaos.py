"""Faults at random instants in a real cluster under load: programs are killed and stopped, connections cut and doubled.

A controller, agents and workers as programs of their own (with ``--standby`` two controllers on a PostgreSQL, which is
killed, too); clients submit, cancel, cordon; agents join and leave. Each round draws its load and its faults from the
seed and its number. When a round is over, everything is started again, and then must hold:

* no operation that was acknowledged is lost, and none was done twice;
* no device was ever given twice: each worker, and what it started, holds a lock of the kernel for each of its devices;
* what the controller says runs is what runs: the same processes, on the same devices;
* events were followed without a gap.

At the end everything is cancelled and leaves; then no process and no file may be left. ``scripts/chaos`` runs it.
"""
# ruff: noqa: T201 - a program that prints a report

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

import psutil

from callboard.client.client import Client
from callboard.client.jobs import ENDED
from callboard.security.tokens import TOKEN_NAME
from callboard.v1.node_pb2 import Node, NodeState
from callboard.wire.enums import text_of
from callboard.wire.refusals import CallboardError, DeadlineExceeded, Unavailable
from tests.recovery.load import Load, lives, ready, unlike
from tests.recovery.programs import DOWN, SETTLE_S, UP, Agent, Proxy, Violation
from tests.support.controller_process import ControllerProcess
from tests.support.members import Members
from tests.support.postgres import Postgres

CALL_S = 60.0
"""Deadline of a client's call: longer than the controller is away."""

TIMES = ("--lease-ms=3000", "--heartbeat-ms=1000", "--reconcile-grace-ms=4000")


Fault: TypeAlias = Callable[[random.Random], Coroutine[Any, Any, None]]


class Chaos:
    """One run."""

    def __init__(self, folder: Path, *, seed: int, longest_stop_s: float, nodes: int, ray: bool, standby: bool) -> None:
        self.folder = folder
        self.seed = seed
        self.longest_stop_s = longest_stop_s
        self.ray = ray
        self.counts: Counter[str] = Counter()
        self.settle_s: list[float] = []
        self._direct: dict[str, Client] = {}
        self._database = asyncio.Lock()
        """Held while a controller starts, or the database is down."""
        self._nodes = nodes
        self._controllers: list[ControllerProcess] = []
        self._starting: set[ControllerProcess] = set()
        self._postgres = Postgres() if standby else None
        self._stack = AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None
        self.agents: list[Agent] = []
        self.clients: list[Client] = []
        self.proxies: list[Proxy] = []

    # ── start and end

    async def __aenter__(self) -> Self:
        (self.folder / "devices").mkdir()
        token = self.folder / "state" / TOKEN_NAME
        os.environ["CALLBOARD_TOKEN_FILE"] = str(token)
        addresses = await (self._start_pair() if self._postgres else self._start_one())
        for number in range(self._nodes):
            more: dict[str, Any] = {}
            if self.ray:
                more = {
                    "runtime": "ray",
                    "ray_head": number == 0,
                    "ray_port": 0,
                    "object_store_bytes": 100 << 20,
                    "cpu_milli": 8000,
                }
            self.agents.append(Agent(self.folder, f"n{number}", token, addresses[number], more))
        for address in addresses[self._nodes :]:
            self.clients.append(await self._stack.enter_async_context(Client(address, timeout=CALL_S, retry=CALL_S)))
        self.load = Load(self.folder, self.clients[0], seed=self.seed, families=not self.ray)
        for agent in self.agents:
            agent.wanted = True
            await agent.ensure()
        await self.clients[0].set_policy({"cancel_timeout": 0.4, "kill_timeout": 3})
        await self.clients[0].ensure_pool("p", pg_pool={"max_dynamic": 64})
        self._watching = asyncio.create_task(self._follow())
        await self._until(self._at_rest, "the nodes to be ready")
        return self

    async def _start_one(self) -> list[str]:
        """A controller alone; the address for each agent and client, with a proxy of its own."""
        controller = ControllerProcess(self.folder / "state", *TIMES)
        self._controllers.append(controller)
        await controller.start()
        host, _, port = controller.address.rpartition(":")
        for _ in range(self._nodes + 3):
            self.proxies.append(await self._stack.enter_async_context(Proxy(host, int(port))))
        return [proxy.address for proxy in self.proxies]

    async def _start_pair(self) -> list[str]:
        """A leader and a standby, each behind a proxy that all share: a standby names the leader's to those who ask."""
        assert self._postgres is not None
        url = self._postgres.url(self._postgres.new_database())
        for name in ("state", "standby"):
            proxy = await self._stack.enter_async_context(Proxy("127.0.0.1", 0))
            options = ("--store", url, "--store-lease-ms", "2000", "--advertise", proxy.address, *TIMES)
            controller = ControllerProcess(self.folder / name, *options)
            if self._controllers:
                controller.state_dir.mkdir(mode=0o700)
                shutil.copy(self.folder / "state" / "secrets.key", controller.state_dir)
            self._controllers.append(controller)
            await controller.start()
            await controller.said("follows" if self.proxies else "term begins")
            proxy.target = ("127.0.0.1", int(controller.address.rpartition(":")[2]))
            self.proxies.append(proxy)
        return [",".join(proxy.address for proxy in self.proxies)] * (self._nodes + 3)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._stack.aclose()
        # What a failed run leaves behind; a good one has left nothing.
        for agent in self.agents:
            await agent.kill()
            for pid in agent.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for controller in self._controllers:
            if controller.exit_code is None:
                await controller.kill()
        if self._postgres is not None:
            self._postgres.close()

    async def finish(self) -> None:
        """Cancels and ends everything, and looks for what is left.

        Raises:
            Violation: something is.
        """
        client = await self._asked()
        await client.uncordon_node("n1")
        for job in await client.list_jobs():
            if text_of(job) not in ENDED:
                await (await client.get_job(job.uid)).cancel()

        async def all_ended() -> str:
            alive = [job.spec.name for job in await client.list_jobs() if text_of(job) not in ENDED]
            held = [entry["pid"] for entry in self.load.held() if lives(entry)]
            return f"jobs {alive} and workers {held} live on" if alive or held else ""

        await self._until(all_ended, "every job to end")
        stats = await client.stats()
        self.counts["preemptions"] = stats.total_preemptions
        if stats.used.gpu_milli:
            raise Violation(f"nothing runs, and {stats.used.gpu_milli} milli-GPU are used")
        assert self._watching is not None
        if self._watching.done():
            self._watching.result()
        for agent in reversed(self.agents):
            await agent.leave()
            if "Traceback" in agent.log.read_text():
                raise Violation(f"the agent of {agent.node} met a defect; see {agent.log}")
            left = agent.processes()
            files = {each.name for each in agent.run_dir.iterdir()} if agent.run_dir.exists() else set()
            if left or not files <= {"output"}:
                raise Violation(f"{agent.node} left the processes {sorted(left)} and the files {sorted(files)}")
        for controller in self._controllers:
            controller.signal(signal.SIGTERM)
            if code := await controller.ended():
                raise Violation(f"the controller ended with {code}")

    # ── a round

    async def round(self, number: int) -> None:
        """One round of load and faults, and what must hold after it.

        Raises:
            Violation: something doesn't.
        """
        chance = random.Random(f"{self.seed}/{number}")
        count = chance.choice((1, 1, 2, 3))
        kinds = [chance.choice(self._faults()) for _ in range(count)]
        over = asyncio.Event()
        loads = [
            asyncio.create_task(self.load.work(client, random.Random(f"{self.seed}/{number}/{place}"), over))
            for place, client in enumerate(self.clients)
        ]
        try:
            async with asyncio.TaskGroup() as faults:
                for place, kind in enumerate(kinds):
                    faults.create_task(self._fault(kind, random.Random(f"{self.seed}/{number}/f{place}")))
        except* Violation as found:
            first: BaseException = found
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            over.set()
            await asyncio.gather(*loads)
        for proxy in self.proxies:
            proxy.heal()
            if proxy.doubled:
                proxy.doubled = False
                proxy.cut()
        await self._ensure()
        began = time.monotonic()
        await self._until(self._at_rest, "the cluster to be at rest")
        await self._compare()
        self.settle_s.append(time.monotonic() - began)
        names = ", ".join(kind.__name__.strip("_") for kind in kinds)
        print(
            f"round {number}: {names}; at rest after {self.settle_s[-1]:.1f} s; {dict(self.counts + self.load.counts)}",
            flush=True,
        )

    def _faults(self) -> list[Fault]:
        common: list[Fault] = [
            self._kill_controller,
            self._kill_agent,
            self._kill_agent,
            self._kill_worker,
            self._kill_worker,
            self._kill_both,
            self._stop_controller,
            self._stop_agent,
            self._stop_worker,
            self._cut,
            self._cut,
            self._hold,
            self._leave_and_join,
            # A cordon that comes again after it was taken back counts, and rightly: not where it has no proxy alone.
            *((self._kill_postgres, self._kill_controller) if self._postgres else (self._double,)),
        ]
        return [*common, self._kill_raylet, self._kill_raylet, self._kill_head] if self.ray else common

    async def _fault(self, kind: Fault, chance: random.Random) -> None:
        # The instant is the scenario's input.
        await asyncio.sleep(chance.uniform(0, 1.5))
        if kind not in (self._kill_controller, self._kill_both):
            self.counts[kind.__name__.strip("_")] += 1
        await kind(chance)

    # ── faults

    async def _kill_controller(self, chance: random.Random) -> None:
        controller = chance.choice(self._controllers)
        if controller.exit_code is not None or controller in self._starting:
            return
        said = [line["event"] for line in controller.lines if line["event"] in ("term begins", "follows")]
        self.counts["kill_standby" if said[-1:] == ["follows"] else "kill_controller"] += 1
        await controller.kill()
        await asyncio.sleep(chance.choice((0, 0, 0.5, 2)))
        await self._start_controller(controller)

    async def _start_controller(self, controller: ControllerProcess) -> None:
        if controller in self._starting:
            return
        self._starting.add(controller)
        try:
            while controller.exit_code is not None:
                if controller.exit_code != -signal.SIGKILL:
                    raise Violation(f"the controller ended by itself with {controller.exit_code}")
                async with self._database:  # it does not start without one, and says so
                    try:
                        await controller.start()
                    except AssertionError as error:
                        if await controller.ended() != -signal.SIGKILL:
                            raise Violation(f"the controller did not start: {error}") from error
        finally:
            self._starting.discard(controller)

    async def _kill_postgres(self, chance: random.Random) -> None:
        assert self._postgres is not None
        async with self._database:
            await asyncio.to_thread(self._postgres.kill)
            await asyncio.sleep(chance.choice((0, 0, 0.5, 4)))
            await asyncio.to_thread(self._postgres.start)

    async def _kill_agent(self, chance: random.Random) -> None:
        agent = chance.choice(self.agents)
        await agent.kill()
        await asyncio.sleep(chance.choice((0, 0, 0.5, 2)))
        await agent.ensure()

    async def _kill_both(self, chance: random.Random) -> None:
        async with asyncio.TaskGroup() as kills:
            kills.create_task(self._kill_agent(chance))
            kills.create_task(self._kill_controller(chance))

    async def _kill_worker(self, chance: random.Random) -> None:
        if (entry := self._some_worker(chance)) is not None:
            # The process, and never what it started: that has to be found.
            with suppress(ProcessLookupError):
                os.kill(entry["pid"], signal.SIGKILL)

    async def _stop_worker(self, chance: random.Random) -> None:
        if (entry := self._some_worker(chance)) is not None:
            await self._stopped(entry["pid"], chance)

    async def _stop_controller(self, chance: random.Random) -> None:
        controller = chance.choice(self._controllers)
        if controller.exit_code is None and controller not in self._starting:
            await self._stopped(controller.pid, chance)

    async def _stop_agent(self, chance: random.Random) -> None:
        agent = chance.choice(self.agents)
        if agent.up:
            assert agent.process is not None
            await self._stopped(agent.process.pid, chance)

    async def _stopped(self, pid: int, chance: random.Random) -> None:
        seconds = chance.choice((0.5, self.longest_stop_s / 2, self.longest_stop_s))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def _cut(self, chance: random.Random) -> None:
        chance.choice(self.proxies).cut()

    async def _hold(self, chance: random.Random) -> None:
        proxy = chance.choice(self.proxies)
        proxy.hold(*chance.choice(((UP,), (DOWN,), (UP, DOWN))))
        await asyncio.sleep(chance.choice((0.5, self.longest_stop_s)))
        if chance.random() < 0.5:
            proxy.cut()  # What was held back never arrives.
        proxy.heal()

    async def _double(self, chance: random.Random) -> None:
        # Not the first client's: a cordon that comes again after it was taken back counts, and rightly.
        proxy = chance.choice([proxy for place, proxy in enumerate(self.proxies) if place != self._nodes])
        proxy.doubled = True
        proxy.cut()

    async def _leave_and_join(self, chance: random.Random) -> None:
        agent = self.agents[-1]
        if agent.wanted and agent.up and not agent.killed:
            await agent.leave()
            await asyncio.sleep(chance.choice((0, 1)))
            agent.wanted = True
            await agent.ensure()

    async def _kill_raylet(self, chance: random.Random) -> None:
        await self._kill_program("raylet", chance.choice(self.agents))

    async def _kill_head(self, chance: random.Random) -> None:
        await self._kill_program("gcs_server", self.agents[0])

    async def _kill_program(self, name: str, agent: Agent) -> None:
        for pid in agent.processes():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == name:
                    os.kill(pid, signal.SIGKILL)

    def _some_worker(self, chance: random.Random) -> dict[str, Any] | None:
        alive = [entry for entry in self.load.held() if lives(entry)]
        return chance.choice(alive) if alive else None

    async def _asked(self) -> Client:
        """Who is asked for how things are: the controller that decides, and not a standby that may not know yet."""
        if self._postgres is None:
            return self.clients[0]
        for controller in self._controllers:
            client = self._direct.get(controller.address)
            if client is None:
                client = await self._stack.enter_async_context(Client(controller.address, timeout=5, retry=0))
                self._direct[controller.address] = client
            if not (await client.stats()).standby:
                return client
        raise Unavailable("no controller leads")

    async def _ensure(self) -> None:
        for controller in self._controllers:
            await self._start_controller(controller)
        for agent in self.agents:
            await agent.ensure()

    async def _follow(self) -> None:
        """Follows the event log from its beginning, to the end of the run.

        Raises:
            Violation: an event is missing, or came twice.
        """
        expected = 1
        async for event in self.clients[-1].watch(start_revision=1):
            if event.revision < expected:
                raise Violation(f"event {event.revision} came after {expected - 1}")
            expected = event.revision + 1
            self.load.told.revision = event.revision

    # ── what must hold

    async def _at_rest(self) -> str:
        """What is not yet as it will be; empty: nothing."""
        if (self.folder / "taken_twice").exists():
            raise Violation(f"a device was given twice: {(self.folder / 'taken_twice').read_text()}")
        if self._watching is not None and self._watching.done():
            self._watching.result()
            raise Violation("the watch ended")
        await self._ensure()
        client = await self._asked()
        nodes = {node.name.removeprefix("nodes/"): node for node in await client.list_nodes()}
        for agent in self.agents:
            node = nodes.get(agent.node)
            if node is None or node.state not in (NodeState.NODE_STATE_READY, NodeState.NODE_STATE_CORDONED):
                return f"{agent.node} is {'unknown' if node is None else NodeState.Name(node.state)}"
        jobs = await client.list_jobs()
        moving = [
            f"{job.spec.name} {text_of(job)}" for job in jobs if text_of(job) not in {*ENDED, "RUNNING", "PENDING"}
        ]
        used = (await client.stats()).used.gpu_milli
        charged = sum(share.milli for worker in ready(jobs) for share in worker.allocation.devices)
        if not moving and used != charged:
            return f"the ledger charges {used} milli-GPU, and workers have {charged}"
        return ", ".join(moving) or unlike(jobs, self.load.held())

    async def _compare(self) -> None:
        """Compares what was acknowledged with what is.

        Raises:
            Violation: they differ.
        """
        told, client = self.load.told, await self._asked()
        jobs = await client.list_jobs()
        by_name = Counter(job.spec.name for job in jobs)
        if twice := [name for name, count in by_name.items() if count > 1]:
            raise Violation(f"submitted once, there twice: {twice}")
        uids = {job.spec.name: job.uid for job in jobs}
        if lost := {
            name: uid
            for name, uid in told.jobs.items()
            if uids.get(name) != uid and not (name in told.ended and name not in uids)
        }:
            raise Violation(f"acknowledged jobs are lost: {lost}")
        if strange := set(uids) - set(told.jobs) - told.unsure:
            raise Violation(f"jobs that nobody submitted: {strange}")
        self._look_for_defects()
        for job in jobs:
            self.load.see(job)
            if job.spec.name in told.cancelled and text_of(job) not in ENDED:
                raise Violation(f"job {job.spec.name} was cancelled and is {text_of(job)}")
            if job.spec.name in told.unsure:
                told.jobs[job.spec.name] = job.uid
        told.unsure.clear()
        if lost_pools := told.pools - {pool.name.removeprefix("pools/") for pool in await client.list_pools()}:
            raise Violation(f"acknowledged pools are lost: {lost_pools}")
        await self._until(self._unlike_cordoned, "n1 to be as it was told")  # not while it is out of touch again
        read = told.revision  # before the answer, beside which later events come
        if revision := max(read - (await client.stats()).revision, 0):
            raise Violation(f"the state is {revision} revisions before an event that was read")
        if self._postgres is not None:
            await self._until(self._unlike_standby, "the standby to know what the leader knows")

    async def _unlike_cordoned(self) -> str:
        """How the node that is cordoned now and then differs from what it was told last; empty: not at all."""
        told = self.load.told.cordoned
        node: Node = await (await self._asked()).get_node("n1")
        wanted = NodeState.NODE_STATE_CORDONED if told else NodeState.NODE_STATE_READY
        if told is None or node.state == wanted:
            return ""
        return f"n1 was {'' if told else 'un'}cordoned and is {NodeState.Name(node.state)}"

    def _look_for_defects(self) -> None:
        for controller in self._controllers:
            said = [line for line in controller.lines if "defect" in line["event"]]
            if said or any("Traceback" in line for line in controller.other):
                raise Violation(f"the controller met a defect: {said or controller.other}")

    async def _unlike_standby(self) -> str:
        """How a standby differs from the leader; empty: not at all."""
        found = [await Members.stats_of(each) for each in self._controllers]
        if sorted(each.standby for each in found) != [False, True]:
            return f"of two controllers {sum(not each.standby for each in found)} lead"
        if found[0].revision == found[1].revision:
            return ""
        return f"it knows {[each.revision for each in found if each.standby]} of {max(each.revision for each in found)}"

    async def _until(self, missing: Callable[[], Awaitable[str]], what: str) -> None:
        """Waits until nothing is missing.

        Raises:
            Violation: something still was in the end.
        """
        deadline = time.monotonic() + SETTLE_S
        found = ""
        while time.monotonic() < deadline:
            try:
                found = await missing()
            except (Unavailable, DeadlineExceeded) as error:
                found = str(error)
            if not found:
                return
            await asyncio.sleep(0.1)  # Between two looks at processes, which tell nobody.
        raise Violation(f"waited {SETTLE_S:g} s for {what}: {found}")


async def run(
    folder: Path,
    *,
    seed: int,
    rounds: int,
    longest_stop_s: float,
    nodes: int = 3,
    ray: bool = False,
    standby: bool = False,
) -> Chaos:
    """A whole run.

    Raises:
        Violation: a promise did not hold.
    """
    made = Chaos(folder, seed=seed, longest_stop_s=longest_stop_s, nodes=nodes, ray=ray, standby=standby)
    async with made as chaos:
        for number in range(rounds):
            try:
                await chaos.round(number)
            except CallboardError as error:
                raise Violation(f"round {number}: {error!r}") from error
        await chaos.finish()
        return chaos


def main() -> int:
    """Runs and reports."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--longest-stop", type=float, default=10.0, metavar="SECONDS", help="of a stopped program")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="on real Ray, whose programs are killed, too")
    parser.add_argument("--standby", action="store_true", help="two controllers on a PostgreSQL; both are killed, too")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and journal")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    # A short name: paths of Unix sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="cb-chaos-", dir="/tmp"))
    try:
        chaos = asyncio.run(
            run(
                folder,
                seed=given.seed,
                rounds=given.rounds,
                longest_stop_s=given.longest_stop,
                nodes=given.nodes,
                ray=given.ray,
                standby=given.standby,
            )
        )
    except Violation as found:
        print(f"NOT HELD (seed {given.seed}): {found}\nlogs: {folder}")
        return 1
    settled = sorted(chaos.settle_s)
    print(
        f"{given.rounds} rounds, seed {given.seed}: nothing lost, nothing given twice, nothing left\n"
        f"{len(chaos.load.told.jobs)} jobs; at rest after {settled[len(settled) // 2]:.1f} s (median), "
        f"{settled[-1]:.1f} s at most; {dict(chaos.counts + chaos.load.counts)}"
    )
    if not given.keep:
        _remove(folder)
    return 0


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
