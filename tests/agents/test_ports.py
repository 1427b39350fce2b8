"""Does each worker get ports of its own, that nobody uses?"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.supplies.worker_env import worker_name
from callboard.agents.worker.ports import UNUSED_S, NoPorts, Ports
from callboard.model.names import WORKER_PORTS
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent
from tests.agents.test_adoption import Lineage, node
from tests.support.actors import wait_for_file
from tests.support.fake_controller import FakeController, start_worker, stop_worker

__all__ = ["node"]

FEW = WORKER_PORTS[9_970:9_980]
"""Ports of these tests alone."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ports() -> Iterator[Ports]:
    made = Ports(FEW)
    yield made
    for name in ("a", "b", "c"):
        made.release(name)


def listening(port: int, host: str = "127.0.0.1") -> closing[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return closing(socket.create_server((host, port), family=family))


class TestPorts:
    def test_ft_e5_ports_are_given_once(self, ports: Ports) -> None:
        first, second = ports.give("a", 4), ports.give("b", 4)
        assert len({*first, *second}) == 8
        assert {*first, *second} < set(FEW)
        assert ports.give("a", 4) == first
        with pytest.raises(NoPorts, match="only 2 of 4 ports are free among 29970 … 29979"):
            ports.give("c", 4)
        assert len(ports.give("c", 2)) == 2
        ports.release("a")
        assert ports.give("b", 4) == second
        ports.release("c")
        assert len(ports.give("c", 6)) == 6

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "0.0.0.0", "::1"])
    def test_ft_e5_a_port_in_use_is_not_given(self, ports: Ports, host: str) -> None:
        with listening(FEW[3], host):
            assert set(ports.give("a", len(FEW) - 1)) == {*FEW} - {FEW[3]}

    def test_ft_e5_a_port_with_a_connection_is_not_given(self) -> None:
        ours = WORKER_PORTS[9_980:9_985]  # a port is in use for a while after its connection ended
        ports = Ports(ours)
        with listening(ours[3]) as server, closing(socket.create_connection(("127.0.0.1", ours[3]))):
            accepted, _ = server.accept()
            server.close()
            with closing(accepted):
                assert set(ports.give("a", 4)) == {*ours} - {ours[3]}
        ports.release("a")

    def test_ft_e5_agents_of_one_machine_share_no_port(self, ports: Ports) -> None:
        given = ports.give("a", 5)
        other = Ports(FEW)
        with pytest.raises(NoPorts):
            other.give("b", 6)
        rest = other.give("b", 5)
        assert {*given, *rest} == {*FEW}
        other.release("b")
        assert set(ports.give("b", 5)) == set(rest)

    def test_ft_e5_a_later_agent_claims_what_workers_that_go_on_were_given(self) -> None:
        earlier = Ports(FEW)
        rendezvous, given = earlier.reserve("a"), earlier.give("a", 5)
        said = json.loads(json.dumps(earlier.facts("a")))
        earlier.release("a")  # as its end does
        later = Ports(FEW)
        later.keep("a", said)
        assert (later.reserve("a"), later.give("a", 5)) == (rendezvous, given)
        assert set(later.give("b", 4)) == {*FEW} - {*given, rendezvous}
        later.release("a")
        later.release("b")

    def test_ft_g1_a_rendezvous_that_nobody_starts_is_released(self) -> None:
        clock = Clock()
        ports = Ports(FEW, clock=clock)
        used, unused = ports.reserve("a"), ports.reserve("b")
        assert used != unused
        ports.give("a", 0)
        clock.now += UNUSED_S + 1
        assert len(ports.give("c", 9)) == 9
        assert "a" in ports
        assert "b" not in ports
        ports.release("a")
        ports.release("c")
        assert ports.facts("a") == ports.facts("c") == {}


def seen(tmp_path: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(wait_for_file(str(tmp_path / f"environment-{rank}")))
    return found


def dumping(tmp_path: Path, rank: int = 0, **fields: Any) -> agent_pb2.StartWorker:
    file = tmp_path / f"environment-{rank}"
    return start_worker("DumpsEnvironment", entry="run", rank=rank, args_json=json.dumps([str(file)]), **fields)


async def test_ft_e5_workers_are_told_their_ports(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path
) -> None:
    await start_agent()
    commands = [dumping(tmp_path, rank, generation=rank + 1, ports=rank) for rank in range(3)]
    for command in commands:
        assert (await controller.do(start_worker=command)).HasField("worker_ready")
    environments = [seen(tmp_path, rank) for rank in range(3)]
    assert "CALLBOARD_PORTS" not in environments[0]
    given = [int(port) for each in environments[1:] for port in each["CALLBOARD_PORTS"].split(",")]
    assert len(set(given)) == len(given) == 3
    for port in given:
        with listening(port):
            pass


async def test_ft_e5_a_start_that_is_refused_holds_no_port(controller: FakeController, start_agent: StartAgent) -> None:
    session = await start_agent()
    assert session is not None
    holder = start_worker("Plain", devices=("0",))
    assert (await controller.do(start_worker=holder)).HasField("worker_ready")
    for refused in (
        start_worker("Plain", rank=1, generation=2, devices=("0",), ports=64),
        start_worker("Plain", rank=2, generation=3, ports=64, env={"RANK": "3"}),
    ):
        report = await controller.do(start_worker=refused)
        assert report.WhichOneof("content") in ("worker_start_failed", "command_refused")
    # The same agent would give the same ports again only if they were free.
    probe = Ports()
    for each in ("job-1/main/1/g2", "job-1/main/2/g3"):
        assert len(probe.give(each, 64)) == 64
        probe.release(each)


async def test_ft_e5_ports_outlive_the_agent_and_end_with_the_worker(
    controller: FakeController, node: Lineage, tmp_path: Path
) -> None:
    await node.begin()
    command = dumping(tmp_path, ports=2)
    assert (await controller.do(start_worker=command)).HasField("worker_ready")
    given = [int(port) for port in seen(tmp_path, 0)["CALLBOARD_PORTS"].split(",")]
    await node.kill()
    await node.begin()
    strangers = [Ports(range(port, port + 1)) for port in given]
    for stranger in strangers:
        with pytest.raises(NoPorts):
            stranger.give("stranger", 1)
    await controller.do(stop_worker=stop_worker(command))
    for stranger, port in zip(strangers, given, strict=True):
        assert stranger.give("stranger", 1) == (port,)
        stranger.release("stranger")
    await node.leave()


async def test_ft_g1_a_node_names_a_free_port_for_the_rendezvous(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path
) -> None:
    await start_agent()
    command = dumping(tmp_path, master_port=1, world_size=2)
    first = Ports()
    taken = first.reserve(worker_name(command))  # what the node would choose
    ask = agent_pb2.ReservePort(worker=command.worker, generation=command.generation)
    reserved = (await controller.do(reserve_port=ask)).port_reserved
    assert reserved.generation == command.generation
    assert reserved.port in WORKER_PORTS
    assert reserved.port != taken
    first.release(worker_name(command))
    with listening(reserved.port):
        pass
