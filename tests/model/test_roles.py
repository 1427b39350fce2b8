"""What does a role give a component that says little, and what do members of a group share?"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from callboard.model.describe import MASK, job_to_mapping
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec, read_yaml
from callboard.model.inputs.groups import faults_of_groups, settled
from callboard.model.inputs.located import Misfits
from callboard.model.inputs.role_file import read_role_file, role_file
from callboard.model.quantities import Resources
from callboard.model.requests import ComponentSpec, JobSpec
from callboard.model.roles import PER_PROCESS, PRESETS, fused, unfused
from callboard.model.specs import COLOCATED_CONCURRENCY, Strategy
from callboard.model.specs import ComponentSpec as Exact
from callboard.model.specs import JobSpec as ExactJob
from callboard.wire.specs import job_spec_from_proto, job_spec_to_proto
from tests.support import specs

TABLE = {
    "rollout_worker": (1, 0, 100),
    "trainer": (4, 1, 1),
    "trainer_remote": (1, 0, 10),
    "trajectory_pool": (1, 0, 100),
    "data_loader": (1, 0, 10),
    "weight_sync": (1, 0, 10),
    "validator": (1, 0, 10),
    "inference": (4, 1, 100),
    "environment": (1, 0, 10),
}
"""Role → cpu, gpu, max_concurrency."""


def part(name: str = "c", **keys: Any) -> dict[str, Any]:
    return {"name": name, "actor": "a:B", **keys}


def job(*components: dict[str, Any]) -> ExactJob:
    return job_spec({"name": "j", "pool": "p", "components": list(components)})


def one(**keys: Any) -> Exact:
    return settled(job(part(**keys))).components[0]


def faults_of(*components: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        job(*components)
    return {fault.field: fault.message for fault in caught.value.faults}


class TestAPreset:
    @pytest.mark.parametrize("role", TABLE)
    def test_fills_in_what_is_not_stated(self, role: str) -> None:
        cpu, gpu, at_once = TABLE[role]
        found = one(role=role)
        assert found.resources == Resources(cpu_milli=cpu * 1000, gpu_milli=gpu * 1000)
        assert found.max_concurrency == at_once

    def test_knows_the_whole_table(self) -> None:
        assert set(PRESETS) == set(TABLE)
        assert all(preset.profile for preset in PRESETS.values())

    def test_yields_to_what_is_stated_field_by_field(self) -> None:
        found = one(role="trainer", resources={"cpu": 8, "memory": "2GiB"}, max_concurrency=3)
        assert found.resources == Resources(cpu_milli=8000, gpu_milli=1000, memory_bytes=2 << 30)
        assert found.max_concurrency == 3

    def test_yields_to_a_stated_nothing(self) -> None:
        assert one(role="trainer", resources={"gpu": 0}).resources == Resources(cpu_milli=4000)

    def test_leaves_placed_workers_the_devices_of_their_places(self) -> None:
        found = one(role="trainer", places=[{"node": "n1", "devices": [0, 1]}])
        assert found.resources == Resources(cpu_milli=4000)
        assert found.resources_of(0).gpu_milli == 2000

    def test_says_the_same_by_way_of_a_message_as_of_a_file(self) -> None:
        for asked in (part(role="trainer"), part(role="trainer", resources={"gpu": 0}, max_concurrency=2)):
            sent = job_spec_to_proto(job(asked))
            assert settled(job_spec_from_proto(sent)) == settled(job(asked))

    def test_is_stated_in_what_is_shown_so_that_asking_for_that_means_the_same(self) -> None:
        for asked in (part(role="trainer"), part(role="trainer", resources={"gpu": 0})):
            shown = settled(job(asked))
            assert settled(job_spec(job_to_mapping(shown))) == shown
            assert job_spec_from_proto(job_spec_to_proto(shown)) == shown
            (component,) = job_to_mapping(shown)["components"]
            assert component["max_concurrency"] == 1
            assert component["resources"]["cpu"] == 4

    def test_of_an_unknown_role_is_a_fault_with_a_guess(self) -> None:
        with pytest.raises(Misfits) as caught:
            settled(job(part("a", role="trianer"), part("b", role="xyz")))
        first, second = caught.value.found
        assert (first.place, "did you mean trainer?" in first.message) == (("components", 0, "role"), True)
        assert "there are data_loader, environment" in second.message

    def test_may_be_a_users_own(self, tmp_path: Path) -> None:
        file = tmp_path / "roles.yaml"
        file.write_text("roles:\n  sim: {cpu: 2, memory: 4GiB, licence: 1}\n  trainer: {cpu: 8, max_concurrency: 2}\n")
        presets = read_role_file(file).presets
        found = settled(job(part("a", role="sim"), part("b", role="trainer"), part("c", role="validator")), presets)
        assert [component.resources for component in found.components] == [
            Resources.of(cpu_milli=2000, memory_bytes=4 << 30, custom={"licence": 1000}),
            Resources(cpu_milli=8000),
            Resources(cpu_milli=1000),
        ]
        assert [component.max_concurrency for component in found.components] == [100, 2, 10]

    @pytest.mark.parametrize(
        ("text", "path", "words"),
        [
            ("roles: {a: {gpu: 1.5}}", "roles.a.gpu", "only whole ones"),
            ("roles: {a: {max_concurrency: 0}}", "roles.a.max_concurrency", "1 to 10000"),
            ("roles: {a: {cpu: 1, max_concurency: 3}}", "roles.a.max_concurency", "did you mean max_concurrency?"),
            ("roles: {a: {resources: {cpu: 1}}}", "roles.a.resources", "a role holds its amounts itself"),
            ("roles: {a: 3}", "roles.a", "not a mapping"),
            ("roles: {'x/y': {cpu: 1}}", 'roles["x/y"]', "not a name"),
            ("roles: {a: {cpu: 1}, a: {cpu: 2}}", "roles.a", "twice"),
            ("roles: {a: {cpu: 1}}\nrolls: {}", "rolls", "did you mean roles?"),
        ],
    )
    def test_of_a_user_is_checked(self, text: str, path: str, words: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            role_file(read_yaml(text))
        fault = caught.value.faults[0]
        assert words in fault.message
        assert fault.field in (path, "")
        assert fault.line

    def test_file_may_describe_pools_and_nodes_too(self) -> None:
        text = """
            pools:
              cpu_pool: {nominal: {cpu: 64}, node_selector: {node_group: cpu}}
              gpu_pool: {nominal: {gpu: 4}}
            nodes: 2x(2gpu,32cpu)+(64cpu)
        """
        found = role_file(read_yaml(text))
        assert found.presets == dict(PRESETS)
        assert [(pool.name, pool.nominal, pool.node_selector) for pool in found.pools] == [
            ("cpu_pool", (("cpu", 64_000),), (("node_group", "cpu"),)),
            ("gpu_pool", (("gpu", 4_000),), ()),
        ]
        assert [(node.gpus, node.cpu_milli) for node in found.nodes] == [(2, 32_000), (2, 32_000), (0, 64_000)]

    def test_file_tells_every_fault_at_its_place(self) -> None:
        text = (
            "pools: {a: {nominl: 1, name: x}, b: 3, 'x/y': {nominal: {cpu: -1}}}\nnodes: 8+x\nroles: {s: {cpu: -1}}\n"
        )
        with pytest.raises(InvalidInput) as caught:
            role_file(read_yaml(text))
        assert [(fault.line, fault.field) for fault in caught.value.faults] == [
            (1, "pools.a.nominl"),
            (1, "pools.a.name"),
            (1, "pools.b"),
            (1, 'pools["x/y"]'),
            (1, 'pools["x/y"].nominal.cpu'),
            (2, "nodes"),
            (3, "roles.s.cpu"),
        ]

    @pytest.mark.parametrize("text", ["{}", "roles:\n", "pools: null\nnodes: null\n"])
    def test_file_that_says_nothing_is_a_fault(self, text: str) -> None:
        with pytest.raises(InvalidInput, match="says nothing"):
            role_file(read_yaml(text))

    def test_file_that_is_missing_is_a_fault(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="can't be read"):
            read_role_file(tmp_path / "none.yaml")


class TestConcurrency:
    """Stated, else the preset's, else 100 alone and 10 in a group; per member."""

    @pytest.mark.parametrize(
        ("keys", "at_once"),
        [
            ({}, 100),
            ({"colocation_group": "g"}, 10),
            ({"role": "trajectory_pool", "colocation_group": "g"}, 100),
            ({"role": "trainer"}, 1),
            ({"role": "trainer", "max_concurrency": 7}, 7),
            ({"colocation_group": "g", "ray_options": {"max_concurrency": 5}}, 5),
            ({"role": "trainer", "ray_options": {"max_concurrency": 6}}, 6),
        ],
    )
    def test_of_a_component(self, keys: dict[str, Any], at_once: int) -> None:
        found = unfused(settled(job(part(**keys)))).components[0]
        assert found.max_concurrency == at_once

    def test_of_a_group_without_roles_is_a_default_that_is_not_written(self) -> None:
        (shown,) = job_to_mapping(job(part(colocation_group="g")))["components"]
        assert "max_concurrency" not in shown
        assert COLOCATED_CONCURRENCY == 10


def training(**changes: Any) -> list[dict[str, Any]]:
    """The trainer, its pool of trajectories and its weight sync, in one group."""
    members = [part(role, role=role, colocation_group="training") for role in ("trainer", "trajectory_pool")]
    return [*members, part("weight_sync", role="weight_sync", colocation_group="training", **changes)]


class TestAColocationGroup:
    def test_costs_one_worker_with_the_most_that_a_member_asks(self) -> None:
        found = settled(job(*training(resources={"memory": "1GiB"}), part("loader", role="data_loader")))
        assert [component.name for component in found.components] == ["training", "loader"]
        group = found.components[0]
        assert group.resources == Resources(cpu_milli=4000, gpu_milli=1000, memory_bytes=1 << 30)
        assert [member.max_concurrency for member in group.members] == [1, 100, 10]
        assert found.ask() == Resources(cpu_milli=5000, gpu_milli=1000, memory_bytes=1 << 30)

    def test_runs_on_gpus_that_will_do_for_each_member(self) -> None:
        found = settled(job(*training(resources={"gpu_model": "A100", "gpu_memory_min": "80GiB"})))
        assert found.components[0].resources == Resources(4000, 1000, gpu_model="A100", gpu_memory_min_bytes=80 << 30)
        assert settled(job(part("a", role="trainer", resources={"gpu_model": "H200"}))).ask().gpu_milli == 1000

    def test_costs_what_a_stated_total_says(self) -> None:
        found = settled(job(*training(colocation_total={"cpu": 6, "gpu": 2})))
        assert found.components[0].resources == Resources(cpu_milli=6000, gpu_milli=2000)

    def test_is_shown_as_it_was_asked_for(self) -> None:
        asked = job(*training(secret_env={"DB": "abc123"}))
        shown = job_to_mapping(settled(asked))
        assert [component["name"] for component in shown["components"]] == ["trainer", "trajectory_pool", "weight_sync"]
        assert shown["components"][2]["secret_env"] == {"DB": MASK}
        message = job_spec_to_proto(settled(asked), mask=True)
        assert [component.colocation_group for component in message.components] == ["training"] * 3
        assert "abc123" not in str(message) + str(shown) + repr(settled(asked))

    @given(specs.jobs())
    @settings(max_examples=100, deadline=None)
    def test_comes_apart_again(self, spec: ExactJob) -> None:
        known = replace(spec, components=tuple(replace(each, role="") for each in spec.components))
        together = fused(known)
        assert fused(together) == together
        assert unfused(together) == known
        assert unfused(known) == known
        if known.components[0].colocation_group:
            assert len(together.components) == 1

    def test_needs_equal_counts(self) -> None:
        found = faults_of(part("a", colocation_group="g", workers=2), part("b", colocation_group="g", workers=3))
        expected = "All roles in colocation group 'g' must have the same count. Got: {'a': 2, 'b': 3}"
        assert found == {"components": expected}

    def test_has_each_role_once(self) -> None:
        found = faults_of(
            part("a", role="validator", colocation_group="g"), part("b", role="validator", colocation_group="g")
        )
        assert "validator is registered twice in colocation group 'g'" in found["components[1].role"]

    def test_has_no_role_with_the_name_of_another_member(self) -> None:
        found = faults_of(part("a", role="b", colocation_group="g"), part("b", colocation_group="g"))
        assert "b is the name of components[1]" in found["components[0].role"]

    def test_may_have_a_role_twice_outside(self) -> None:
        job(part("a", role="validator", colocation_group="g"), part("b", role="validator"))

    def test_has_a_name_that_no_other_component_has(self) -> None:
        found = faults_of(part("g"), part("b", colocation_group="g"))
        assert "g is the name of a colocation group too" in found["components[0].name"]

    def test_agrees_in_what_a_process_has_one_of(self) -> None:
        first = part("a", colocation_group="g", pool="x", interpreter="/usr/bin/a", colocation_total={"cpu": 1})
        second = part("b", colocation_group="g", pool="y", interpreter="/usr/bin/b", colocation_total={"cpu": 2})
        found = faults_of(
            first | {"env": {"K": "hidden1"}, "node_selector": {"zone": "a"}, "ray_options": {"name": "p"}},
            second | {"secret_env": {"K": "hidden2"}, "node_selector": {"zone": "b"}, "ray_options": {"name": "q"}},
        )
        assert set(found) == {
            "components[1].pool",
            "components[1].interpreter",
            "components[1].colocation_total",
            "components[1].ray_options.name",
            "components[1].secret_env.K",
            "components[1].node_selector.zone",
        }
        assert "hidden" not in str(found)

    @pytest.mark.parametrize(
        ("first", "second", "fits"), [(True, True, True), (True, False, False), (None, True, True)]
    )
    def test_asks_for_its_nodes_or_prefers_them(self, first: bool | None, second: bool, fits: bool) -> None:
        own = {} if first is None else {"node_selector": {"zone": "a"}, "node_selector_soft": first}
        other = {"node_selector": {"disk": "ssd"}, "node_selector_soft": second}
        parts = (part("a", colocation_group="g", **own), part("b", colocation_group="g", **other))
        if fits:
            (component,) = settled(job(*parts)).components
            assert component.node_selector_soft is second
        else:
            assert set(faults_of(*parts)) == {"components[1].node_selector_soft"}

    def test_lies_at_one_place(self) -> None:
        parts = [
            part(name, colocation_group="g", places=[{"node": "n1", "devices": [index]}])
            for index, name in enumerate("ab")
        ]
        with pytest.raises(Misfits, match="differs from that of a"):
            settled(job(*parts))


class TestTheSdk:
    def test_has_every_key(self) -> None:
        component = ComponentSpec(
            "t",
            "a:B",
            role="trainer",
            min_workers=1,
            max_workers=4,
            colocation_group="g",
            colocation_total={"cpu": 2},
            secret_env={"DB": "x"},
            node_selector={"node": "n1"},
            scaling=[{"signal": "queue_depth", "above": 100, "action": "down", "cooldown": "10s"}],
        )
        found = job_spec(JobSpec(pool="p", components=[component])).components[0]
        assert found.colocation_total == Resources(cpu_milli=2000)
        assert found.node_selector == (("node", "n1"),)
        (rule,) = found.scaling
        assert (rule.above_milli, rule.cooldown_ms, rule.step) == (100_000, 10_000, 1)
        assert rule.holds(100_001)
        assert not rule.holds(100_000)


@pytest.mark.parametrize(
    ("rule", "path", "words"),
    [
        ({"signal": "q", "action": "up"}, "", "either above or below"),
        ({"signal": "q", "above": 1, "below": 2, "action": "up"}, "", "either above or below"),
        ({"signal": "q", "above": "x", "action": "up"}, ".above", "not a quantity"),
        ({"signal": "q", "above": 1, "action": "sideways"}, ".action", "use UP or DOWN"),
        ({"signal": "q", "above": 1, "action": "up", "step": 0}, ".step", "1 to 100000"),
        ("q > 100", "", "is not a rule"),
    ],
)
def test_scaling_rules_are_checked(rule: object, path: str, words: str) -> None:
    found = faults_of(part(min_workers=1, max_workers=2, scaling=[rule]))
    assert words in found[f"components[0].scaling[0]{path}"]


@pytest.mark.parametrize("name", PER_PROCESS)
def test_what_a_process_has_one_of_is_agreed_on_and_kept(name: str) -> None:
    """A field that is added to components is one of these, unless the rules of fusing name it: it is never lost."""
    default = next(field.default for field in fields(Exact) if field.name == name)
    samples: dict[type, tuple[Any, Any]] = {
        str: ("x", "y"),
        int: (1, 2),
        bool: (not default, default),
        Resources: (Resources(cpu_milli=1000), Resources(cpu_milli=2000)),
        type(None): (Strategy.SPREAD, Strategy.PACK),
        tuple: (("x",), ("y",)),
    }
    one, other = samples[type(default)]

    def members(*stated: dict[str, Any]) -> tuple[Exact, ...]:
        return tuple(
            Exact(name=f"m{index}", actor="a:B", colocation_group="g", **each) for index, each in enumerate(stated)
        )

    agreed = members({}, {name: one}, {name: one})
    assert faults_of_groups(agreed) == []
    (process,) = fused(ExactJob(name="j", pool="p", components=agreed)).components
    assert (process.resources if name == "colocation_total" else getattr(process, name)) == one
    (fault,) = faults_of_groups(members({name: one}, {name: other}))
    assert "differs from that of m0" in fault.message
