"""Who may join, and as what? The agent's whole program, against a real controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from callboard.agents import agent
from callboard.agents.agent import run_agent
from callboard.agents.link import session
from callboard.agents.options import AgentOptions
from callboard.client.client import Client
from callboard.controller.server import Controller
from callboard.security.tokens import BadToken, find_token
from callboard.v1.node_pb2 import NodeState
from callboard.wire.refusals import InvalidRequest
from tests.agents.conftest import cluster_of
from tests.controller.support import options_for, running
from tests.support.nvml_library import Gpu, Library, install


class Log:
    """What controller and agents say."""

    def __init__(self) -> None:
        self.entries: list[structlog.types.EventDict] = []
        self._more = asyncio.Event()

    def __call__(self, _logger: Any, _level: str, entry: structlog.types.EventDict) -> structlog.types.EventDict:
        self.entries.append(entry)
        self._more.set()
        raise structlog.DropEvent

    async def until(self, event: str, **fields: Any) -> None:
        """Waits until it is said."""
        wanted = fields | {"event": event}
        while not any(wanted.items() <= entry.items() for entry in self.entries):
            self._more.clear()
            await self._more.wait()


class Site:
    """A controller, and agents that are programs but for their process."""

    def __init__(self, folder: Path, controller: Controller, client: Client, log: Log) -> None:
        self.controller = controller
        self.client = client
        self.log = log
        self._folder = folder
        self._agents: dict[str, asyncio.Task[int]] = {}

    def start(self, node_id: str, **options: Any) -> asyncio.Task[int]:
        """Starts an agent; its exit code."""
        settings: dict[str, Any] = {
            "node_id": node_id,
            "controller": self.client.address,
            "runtime": "process",
            "cluster": cluster_of(self._folder),
            "cpu_milli": 1000,
            "memory_bytes": 1 << 30,
            "warm_spares": 0,
            "run_dir": str(self._folder / node_id),
            **options,
        }
        self._agents[node_id] = asyncio.create_task(run_agent(AgentOptions(**settings)))
        return self._agents[node_id]

    async def join(self, node_id: str, **options: Any) -> None:
        """Starts an agent and waits until its node takes work."""
        revision = (await self.client.stats()).revision
        agent = asyncio.ensure_future(self.start(node_id, **options))
        ready = asyncio.create_task(self.until(node_id, "READY", revision))
        await asyncio.wait([agent, ready], return_when=asyncio.FIRST_COMPLETED)
        assert not agent.done(), f"{node_id} ended with {agent.result()}"

    async def until(self, node_id: str, state: str, revision: int) -> None:
        """Waits until a node is in a state, after a revision."""
        async for event in self.client.watch(start_revision=revision + 1, subject=f"nodes/{node_id}"):
            if event.state == state:
                return

    async def vanish(self, node_id: str) -> None:
        """Ends an agent without its goodbye, as a crash would."""
        agent = self._agents.pop(node_id)
        there = node_id in self.controller.sessions.live
        agent.cancel()
        await asyncio.wait([agent])
        if there:  # The next agent of the node would be a second one until that was seen.
            await self.log.until("agent stream ended", node=node_id)

    async def give_up(self, node_id: str) -> None:
        """What follows when the lease of an agent that vanished is over, at once."""
        revision = (await self.client.stats()).revision
        self.controller.sessions.lost(node_id, self.controller.driver.state.nodes[node_id].epoch, 1)
        await self.until(node_id, "LOST", revision)

    async def ranks(self) -> dict[str, int]:
        """Rank of every node that is there."""
        nodes = await self.client.list_nodes()
        there = [node for node in nodes if node.state == NodeState.NODE_STATE_READY]
        return {node.name.removeprefix("nodes/"): node.rank for node in there}

    def refusals(self) -> list[str]:
        """Why agents were refused, in their words."""
        return [entry["why"] for entry in self.log.entries if entry["event"] == "controller_refused"]

    async def gpus(self) -> float:
        """GPUs of the cluster."""
        return (await self.client.stats()).capacity.gpu_milli / 1000


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Everything that is logged, in place of what an agent sets up."""
    before = structlog.get_config()
    kept = Log()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, kept])
    monkeypatch.setattr(agent, "configure", lambda *_: None)
    yield kept
    structlog.configure(**before)


@pytest.fixture
async def site(tmp_path: Path, log: Log) -> AsyncIterator[Site]:
    """A controller."""
    async with running(options_for(tmp_path)) as controller, Client(controller.address) as client:
        site = Site(tmp_path, controller, client, log)
        yield site
        for node_id in list(site._agents):
            await site.vanish(node_id)


async def test_an_agent_that_looked_for_the_token_before_there_was_one_looks_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start at one time: the call of the agent waits for the port, with what it knew when it began."""
    looks: list[str] = []

    def early(address: str, stated: Path | None = None) -> str:
        looks.append(address)
        return find_token(address, stated) if len(looks) > 2 else ""  # once for the stream, once for its call

    monkeypatch.setattr(session, "find_token", early)
    agent = site.start("n1")
    await site.until("n1", "READY", 0)
    assert not agent.done()
    assert len(looks) > 2


async def test_an_agent_goes_on_trying_while_its_token_file_is_broken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def broken_at_first(address: str, stated: Path | None = None) -> str:
        looks.append(address)
        if len(looks) < 3:
            raise BadToken("token", "is being replaced.")
        return find_token(address, stated)

    monkeypatch.setattr(session, "find_token", broken_at_first)
    agent = site.start("n1")
    await site.until("n1", "READY", 0)
    assert not agent.done()


async def test_nj_13_a_rank_is_nobodys_twice_and_one_that_is_not_asked_for_is_the_lowest_free(site: Site) -> None:
    await site.join("a", rank=0, simulate_gpus=1)
    assert await site.start("b", rank=0, simulate_gpus=1) == 2
    assert site.refusals() == ["rank 0 belongs to node a; ask for another or for none"]
    await site.join("c", simulate_gpus=1)
    await site.log.until("session_opened", node="c", rank=1)
    assert await site.ranks() == {"a": 0, "c": 1}


async def test_nj_13_a_text_that_needs_a_rank_which_nobody_has_is_refused(site: Site) -> None:
    await site.join("a", rank=0, simulate_gpus=1)
    await site.join("c", rank=2, simulate_gpus=1)
    await site.client.ensure_pool("p")
    groups = "[{label: g, node_ranks: 0-1}]"
    placement = "{w: {node_group: g, placement: 0-1}}"
    text = f"cluster: {{num_nodes: 2, component_placement: {placement}, node_groups: {groups}}}"
    spec = {"name": "j", "pool": "p", "components": [{"name": "w", "actor": "m:C"}], "placement_config": text}
    with pytest.raises(InvalidRequest, match="node_ranks: there is no node of rank 1; nodes are 0,2"):
        await site.client.submit(spec)


async def test_nj_01_devices_are_offered_once_also_by_an_agent_that_starts_anew_under_another_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Library([Gpu("GPU-aa"), Gpu("GPU-bb", bus_id="00000000:0B:00.0")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    await site.join("n1")
    refused = "node n1 offers the device GPU-aa already; give each agent devices of its own"
    assert await site.start("n2") == 2
    await site.vanish("n1")
    assert await site.start("n2") == 2, "its lease is still valid"
    assert site.refusals() == [refused, refused]
    assert await site.gpus() == 2
    await site.give_up("n1")
    await site.join("n2")
    assert (await site.ranks(), await site.gpus()) == ({"n2": 0}, 2)


async def test_a_node_that_was_drained_for_a_notice_takes_work_again_when_it_is_another_program(
    site: Site, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    looks = {"notice_command": f"cat {notice}", "notice_every_s": 0.05}
    await site.join("a", simulate_gpus=1, **looks)
    revision = (await site.client.stats()).revision
    notice.write_text("the pod is being ended\n")
    await site.until("a", "DRAINING", revision)
    await site.vanish("a")
    notice.unlink()
    await site.join("a", simulate_gpus=1, **looks)
    assert await site.ranks() == {"a": 0}
