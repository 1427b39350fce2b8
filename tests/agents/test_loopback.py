"""Which address do a node's Ray services listen on?"""

from __future__ import annotations

import pytest

from callboard.agents.options import AgentOptions
from callboard.agents.ray.loopback import NoAddress, NodeAddress, host_addresses


def test_every_node_of_a_machine_gets_a_loopback_address_of_its_own() -> None:
    nodes = [NodeAddress(AgentOptions(node_id=f"n{number}")) for number in range(3)]
    first = {node.ip for node in nodes}
    assert len(first) == 3
    assert "127.0.0.1" not in first, "Ray would replace it"
    for node in nodes:
        node.close()
    again = NodeAddress(AgentOptions(node_id="n0"))
    assert again.ip in first
    again.close()


def test_what_is_asked_for_is_taken() -> None:
    assert NodeAddress(AgentOptions(node_id="n0", node_ip="127.0.9.1")).ip == "127.0.9.1"


@pytest.mark.parametrize("controller", ["localhost:7700", "[::1]:7700"])
def test_loopback_has_several_names(controller: str) -> None:
    node = NodeAddress(AgentOptions(node_id="n0", controller=controller))
    assert node.ip.startswith("127.0.0.")
    node.close()


UNKNOWN = "198.51.100.7"
"""Of a range that documents use (RFC 5737): no host has it."""


@pytest.mark.parametrize(
    "ip", ["127.0.0.2", *(each for each in host_addresses() if ":" not in each and " " not in each)]
)
def test_pg_13_every_address_of_the_host_may_be_chosen(ip: str) -> None:
    node = NodeAddress(AgentOptions(node_id="n0", node_ip=ip))
    assert node.ip == ip
    node.close()


@pytest.mark.parametrize("ip", [UNKNOWN, "2001:db8::7"])
def test_pg_13_an_address_that_the_host_does_not_have_is_refused_with_those_it_has(ip: str) -> None:
    with pytest.raises(NoAddress) as refused:
        NodeAddress(AgentOptions(node_id="n0", node_ip=ip))
    assert f"no address {ip}" in str(refused.value)
    for known in host_addresses():
        assert known in str(refused.value)
