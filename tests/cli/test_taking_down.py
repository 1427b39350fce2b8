"""Is the end of a cluster proved, also where the kernel takes its time and where something stays?"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from callboard.agents.ray.ray_command import free_port
from callboard.cli.local import taking_down
from callboard.cli.local.plan import free_block, network_of
from callboard.cli.local.ports import listeners, listening_in
from callboard.cli.local.taking_down import Leftovers, end_cluster
from callboard.client.clusters import ClusterRecord, cluster_directory


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    """A cluster whose programs have all ended."""
    directory = cluster_directory("gone", tmp_path)
    directory.mkdir(parents=True, mode=0o700)
    return ClusterRecord(
        name="gone",
        controller=f"127.0.0.1:{free_port()}",
        directory=directory,
        block=free_block(()),
        ray_token_path="",
    )


@pytest.fixture
def stranger(record: ClusterRecord) -> Iterator[socket.socket]:
    """Somebody who listens on an address of the cluster's."""
    with socket.socket() as listening:
        listening.bind((network_of(record.block).replace("0/24", "7"), 0))
        listening.listen()
        yield listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()
    return f"{host}:{port}"


async def test_a_port_that_stays_open_is_named_with_its_process(
    record: ClusterRecord, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_down, "PROOF_S", 0.2)
    with pytest.raises(Leftovers) as raised:
        await end_cluster(record, hurry=asyncio.Event())
    assert raised.value.what == (f"port {address_of(stranger)} is still open (process {os.getpid()})",)
    assert not record.directory.exists()


async def test_a_port_that_the_kernel_closes_late_is_waited_for(
    record: ClusterRecord, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def look(network: str) -> list[str]:
        looks.append(listening_in(network))
        stranger.close()
        return looks[-1]

    address = address_of(stranger)
    monkeypatch.setattr(taking_down, "listening_in", look)
    await end_cluster(record, hurry=asyncio.Event())
    assert looks == [[address], []]
    assert not record.directory.exists()


async def test_what_listens_for_others_is_not_left_of_a_controller_alone(
    record: ClusterRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded with block 0, which is everybody's: one that was killed must not keep every cluster from starting."""
    monkeypatch.setattr(taking_down, "PROOF_S", 0.2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        await end_cluster(replace(record, block=0), hurry=asyncio.Event())
    assert not record.directory.exists()


def test_who_listens(stranger: socket.socket) -> None:
    address = address_of(stranger)
    assert listeners(address) == [os.getpid()]
    stranger.close()
    assert listeners(address) == []
