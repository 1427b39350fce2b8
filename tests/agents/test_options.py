"""Which options are refused at once?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.agents.options import AgentOptions, split_address
from callboard.model.options import OptionError


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\n", "x" * 300, "🙂", "%s", "", "1st"])
def test_se_05_strange_names_are_refused(name: str) -> None:
    with pytest.raises(OptionError):
        AgentOptions(node_id=name)
    with pytest.raises(OptionError):
        AgentOptions(node_id="n0", cluster=name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gpus", 10**9),
        ("gpus", -1),
        ("simulate_gpus", -1),
        ("cpu_milli", -1),
        ("cpu_milli", 10**12),
        ("cpu_milli", 1500),
        ("memory_bytes", -1),
        ("memory_bytes", 1 << 60),
        ("custom_milli", {"a/b": 1}),
        ("custom_milli", {"worker_unit": -1}),
        ("custom_milli", {"GPU": 4000}),
        ("hardware", (("gpu", ""),)),
        ("rank", -1),
        ("controller", "nowhere"),
        ("controller", "host:70000"),
        ("ray_address", "host"),
        ("ray_port", 80),
        ("port_base", 65_530),
        ("node_ip", "gpu-box.lan"),
        ("node_ip", "10.0.0"),
        ("node_ip", "0.0.0.0"),
        ("node_ip", "224.0.0.1"),
        ("node_ip", "127.0.0.1"),
        ("node_ip", "::1"),
        ("labels", {"": "x"}),
        ("labels", {"gpu": "a b"}),
        ("labels", {"node": "another"}),
        ("labels", {"node_group": "gpu"}),
        ("interpreters", ("python3",)),
        ("leave_s", float("nan")),
    ],
)
def test_se_07_impossible_values_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as refused:
        AgentOptions(node_id="n0", **{option: value})
    assert refused.value.option == option


def test_a_plain_process_node_has_no_part_in_ray() -> None:
    with pytest.raises(OptionError):
        AgentOptions(node_id="n0", runtime="process", ray_head=True)
    with pytest.raises(OptionError):
        AgentOptions(node_id="n0", runtime="process", node_ip="127.0.0.2")
    with pytest.raises(OptionError):
        AgentOptions(node_id="n0", ray_head=True, ray_address="127.0.0.10:6379")


def test_addresses_are_split() -> None:
    assert split_address("127.0.0.1:7700") == ("127.0.0.1", 7700)
    assert split_address("[::1]:7700") == ("::1", 7700)
