"""Does it matter how a config arrives? Files, mappings, Hydra's configs, jobs, and nodes as they joined."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from callboard.model.faults import InvalidInput
from callboard.placement import (
    Accelerator,
    Cluster,
    ComponentPlacement,
    HardwareUnit,
    Node,
    component_placement_for,
    placed_names,
    plan_placement,
)
from tests.placement.mutations import HETERO, REASONING, cluster
from tests.placement.support import faults, of, plan, refused, seen


@pytest.mark.parametrize("text", [HETERO.replace("4090, node_ranks", '"4090", node_ranks'), REASONING])
def test_a_mapping_means_what_its_file_means(text: str) -> None:
    from_file, from_mapping = plan_placement(text, cluster()), plan_placement(yaml.safe_load(text), cluster())
    assert from_file == from_mapping


class TestOmegaConf:
    """What Hydra hands over."""

    @pytest.mark.parametrize("text", [HETERO, REASONING], ids=["hetero", "reasoning"])
    def test_a_dictconfig_means_what_its_file_means(self, text: str) -> None:
        assert plan_placement(OmegaConf.create(text), cluster()) == plan_placement(text, cluster())

    def test_interpolations_are_resolved_where_they_are_read_and_nowhere_else(self) -> None:
        config = OmegaConf.create(
            "n: 2\nall: 0-${n}\nbroken: ${nowhere}\ncluster: {component_placement: {actor: '${all}', env: '${n}'}}"
        )
        assert len(plan_placement(config, Cluster.from_nodes("4")).workers) == 4

    @pytest.mark.parametrize("value", ["${nowhere}", "???"])
    def test_what_can_t_be_resolved_is_a_fault(self, value: str) -> None:
        config = OmegaConf.create({"cluster": {"component_placement": {"actor": value}}})
        with pytest.raises(InvalidInput, match="can't be resolved"):
            ComponentPlacement(config, Cluster.from_nodes("4"))

    def test_every_value_that_can_t_be_resolved_is_told_at_once(self) -> None:
        groups = [{"label": "g", "node_ranks": 0, "env_configs": [{"env_vars": [{"A": "${no.env}"}]}]}]
        placements = {"actor": "${no.where}", "env": {"placement": "???"}, "rollout": "0-9"}
        config = OmegaConf.create({"cluster": {"component_placement": placements, "node_groups": groups}})
        found = faults(config, "4")
        assert [fault.field for fault in found] == [
            "cluster.component_placement.actor",
            "cluster.component_placement.env.placement",
            "cluster.node_groups[0].env_configs[0].env_vars[0].A",
            "cluster.component_placement.rollout",
        ]
        assert all("can't be resolved" in fault.message for fault in found[:3])

    def test_hardware_settings_that_can_t_be_resolved_are_no_empty_text(self) -> None:
        hardware = {"type": "X", "configs": [{"node_rank": 0, "ip": "${nowhere}"}]}
        section = {
            "component_placement": {"a": 0},
            "node_groups": [{"label": "g", "node_ranks": 0, "hardware": hardware}],
        }
        (fault,) = faults(OmegaConf.create({"cluster": section}), "1")
        assert fault.field == "cluster.node_groups[0].hardware.configs[0].ip"

    def test_a_list_of_groups_is_a_list(self) -> None:
        groups = "[{label: a, node_ranks: 0}, {label: b, node_ranks: 1}]"
        text = of("env: {node_group: [a, b], placement: 0-3}", groups=groups)
        assert len(plan_placement(OmegaConf.create(text), Cluster.from_nodes("2+2")).workers) == 4


class TestInterpolations:
    """Files refer to themselves; Hydra is not needed to follow."""

    def test_a_reference_is_what_stands_there(self) -> None:
        text = (
            "runner: {task_type: reasoning}\nn: 4\nlast: 3\nactor: {model: {tensor_model_parallel_size: 2}}\n"
            "rollout: {tensor_parallel_size: '${actor.model.tensor_model_parallel_size}'}\n"
            "cluster: {num_nodes: '${one}', component_placement: {actor: '0-${last}', "
            "rollout: '${cluster.component_placement.actor}'}}\n"
            "one: 1\n"
        )
        found = plan(text, "4")
        assert [component.world_size for component in found.components] == [4, 2]

    @pytest.mark.parametrize(
        "placements",
        [
            "{actor: 0-1, rollout: '${.actor}'}",
            "{actor: '0-${..num_nodes}', rollout: '${...last}'}",
            "{actor: {placement: '${...num_nodes}'}, rollout: '${.actor.placement}'}",
            "{actor: '0:0-${...last}', rollout: '${cluster.num_nodes}-${...last}'}",
        ],
    )
    def test_one_may_be_relative_as_omegaconf_counts_the_dots(self, placements: str) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        text = f"last: 3\ncluster:\n  num_nodes: 1\n  component_placement: {placements}\n"
        assert plan(text, "4") == plan(omegaconf.OmegaConf.create(text), "4")

    @pytest.mark.parametrize("reference", ["${..last}", "${....last}", "${.actor}"])
    def test_one_that_leads_nowhere_stays_open(self, reference: str) -> None:
        text = f"last: 3\ncluster: {{component_placement: {{actor: '{reference}'}}}}\n"
        assert "nobody resolved" in refused(text, "4")

    def test_a_whole_section_may_be_one(self) -> None:
        text = "x: {actor: 0-1}\ncluster: {component_placement: '${x}'}"
        assert len(plan(text, "2").workers) == 2

    def test_faults_are_told_where_the_reference_stands(self) -> None:
        (fault,) = faults("x: 0-9\ncluster:\n  component_placement:\n    actor: ${x}\n", "2")
        assert (fault.line, fault.column) == (4, 12)

    @pytest.mark.parametrize(
        "reference", ["${x}", "${oc.env:HOME}", "${.y}", "${a}", "${a.b.c}", "${cluster}", "0-${b}"]
    )
    def test_what_can_t_be_followed_is_told_apart_from_a_mistake(self, reference: str) -> None:
        text = of(f"actor: '{reference}'", more="a: ${b}\nb: ${a}\n")
        assert faults(text, "1")
        assert faults(f"cluster: '{reference}'\na: ${{b}}\nb: ${{a}}\n", "1")

    @pytest.mark.parametrize("reference", ["${x}", "${oc.env:GPUS,0-3}", "${.a:b:c}", "0-${x}"])
    def test_an_unresolved_one_says_so_once_and_where(self, reference: str) -> None:
        (fault,) = faults(of(f'actor: "{reference}"'), "1")
        assert "is an interpolation, which nobody resolved" in fault.message
        assert of(f'actor: "{reference}"').splitlines()[1][fault.column - 1 :].startswith("${")

    def test_references_can_t_grow_without_end(self) -> None:
        names = "abcdefghijklmnopqrstuvwxyz"
        lines = [f"{one}: '${{{two}}}${{{two}}}'" for one, two in pairwise(names)]
        text = "\n".join([*lines, "z: '0,1,2,3,4,5,6,7,8,9'", "cluster: {component_placement: {actor: '${a}'}}"])
        with pytest.raises(InvalidInput):
            plan(text, "1")


@pytest.mark.parametrize("source", [None, 3, [], ["a"], b"a: b", Path("x.yaml")])
def test_what_is_no_config_is_a_fault(source: object) -> None:
    with pytest.raises(InvalidInput):
        component_placement_for(source, Cluster.from_nodes("1"))


class TestSections:
    """The three forms of a config."""

    def test_a_cluster_section_alone(self) -> None:
        assert len(plan("component_placement: {a: 0-1}\nnum_nodes: 1\n", "2").workers) == 2

    def test_a_job_whose_components_carry_their_texts(self) -> None:
        job = """
name: train
pool: rlhf
node_groups: [{label: g, node_ranks: 1}]
components:
  - {name: actor, actor: "p:A", component_placement: 0-1}
  - {name: env, actor: "p:E", component_placement: {node_group: g, placement: 0}}
  - {name: free, actor: "p:F", resources: {cpu: 1}}
"""
        found = plan(job, "2+1")
        assert seen(found, "env") == [(1, ("0",))]
        assert "free" not in found.by_name

    def test_a_job_with_a_cluster_section(self) -> None:
        found = plan("components: [{name: a, actor: 'p:A'}]\ncluster: {component_placement: {a: 0-1}}", "2")
        assert len(found.workers) == 2

    def test_a_job_may_place_some_in_its_section_and_some_at_themselves(self) -> None:
        job = "components: [{name: a, actor: 'p:A'}, {name: b, component_placement: 1}]\n"
        found = plan(job + "cluster: {num_nodes: 1, component_placement: {a: 0}}", "2+2")
        assert (seen(found, "a"), seen(found, "b")) == ([(0, ("0",))], [(0, ("1",))])
        twice = "components: [{name: a, component_placement: 1}]\ncluster: {component_placement: {a: 0}}"
        assert "the component a is placed twice, first in line 2" in refused(twice, "2")

    def test_faults_of_a_job_are_where_they_are(self) -> None:
        job = "components:\n  - {name: a, actor: 'p:A', component_placement: 0-9}\n"
        (fault,) = faults(job, "2")
        assert (fault.field, fault.line, fault.column) == ("components[0].component_placement", 2, 50)

    def test_merged_and_aliased_values_count(self) -> None:
        text = "x: &x {actor: 0-1}\ncluster: {component_placement: {<<: *x, env: &e 0, critic: *e}}"
        assert sorted(plan(text, "2").by_name) == ["actor", "critic", "env"]


class TestNames:
    """Who is placed, before it is known whether they fit."""

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("cluster: {component_placement: {'a, b': 0, c: {node_group: nowhere, placement: 9}}}", ["a", "b", "c"]),
            ("component_placement: {a: x}\nnum_nodes: 7", ["a"]),
            ("p: {a: 0}\ncluster: {component_placement: '${p}'}", ["a"]),
            ("p: &p {a: 0}\ncluster: {component_placement: {<<: *p, 1b: 0}}", ["a"]),
            ("runner: {}", []),
        ],
    )
    def test_names_are_those_of_the_config(self, text: str, names: list[str]) -> None:
        assert placed_names(text) == names

    def test_what_should_be_a_name_and_is_none_is_a_fault(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            placed_names("cluster: {component_placement: {1a: 0, 'b c': 1}}")
        assert [(fault.line, fault.column) for fault in caught.value.faults] == [(1, 33), (1, 41)]


class TestDescribedNodes:
    """``nodes`` of a config."""

    def test_a_text_describes_them(self) -> None:
        assert len(plan("cluster: {nodes: 2+3, component_placement: {a: all}}").workers) == 5

    def test_a_list_describes_them(self) -> None:
        text = """
nodes:
  - {node_id: a, accelerators: [GPU-1, GPU-2], accelerator_type: NVIDIA H100, node_group: fast}
  - {node_id: b, rank: 5, accelerators: 1, labels: {zone: z}, cpu: 8, memory: 1GiB}
component_placement: {x: all, y: {node_group: fast, placement: 1}}
"""
        found = plan(text)
        assert seen(found, "x") == [(0, ("GPU-1",)), (0, ("GPU-2",)), (5, ("0",))]
        assert seen(found, "y") == [(0, ("GPU-2",))]

    def test_a_cluster_can_be_made_of_them_alone(self) -> None:
        made = Cluster.from_mapping({"nodes": "2+2", "node_groups": [{"label": "g", "node_ranks": 1}]})
        assert (made.num_nodes, made.num_accelerators) == (2, 4)
        assert list(made.groups_by_label) == ["cluster", "node", "g"]

    @pytest.mark.parametrize(
        "nodes",
        [
            "8+9z",
            "[]",
            "{}",
            "[x]",
            "[{node_id: a, rank: 0}, {node_id: b, rank: 0}]",
            "[{node_id: a}, {node_id: a}]",
            "[{node_id: 1a}]",
            "[{accelerators: [a, a]}]",
            "[{accelerators: ['a,b']}]",
            "[{accelerators: -1}]",
            "[{accelerators: {}}]",
            "[{rank: x}]",
            "[{cpu: x}]",
            "[{memory: 1XB}]",
            "[{labels: [a]}]",
            "[{labels: {a: '/'}}]",
            "[{hardware: {type: X}}]",
            "[{hardware: [{}]}]",
            "[{interpreters: python}]",
            "[{accelerators: [{type: a}]}]",
        ],
    )
    def test_nodes_that_are_none_are_refused(self, nodes: str) -> None:
        assert faults(f"cluster: {{component_placement: {{a: {{node_group: node, placement: 0}}}}, nodes: {nodes}}}")
        with pytest.raises(InvalidInput):
            Cluster.from_mapping(f"nodes: {nodes}")

    @pytest.mark.parametrize(("written", "instead"), [("[0, 2]", "0,2"), ("[0-3, 5]", "0-3,5"), ("[]", "0-3")])
    def test_a_list_is_told_how_it_is_written(self, written: str, instead: str) -> None:
        assert f"write it as one text: {instead}" in refused(
            f"cluster: {{nodes: 8, component_placement: {{a: {written}}}}}"
        )

    def test_without_any_nodes_nothing_is_known(self) -> None:
        assert "which nodes are there?" in refused("cluster: {component_placement: {a: 0}}")


GPU = (Accelerator("0"), Accelerator("1"))
ROBOTS = (HardwareUnit("Franka", '{"arm":"left"}'), HardwareUnit("Franka", '{"arm":"right"}'))


class TestJoined:
    """What agents said when they joined."""

    def joined(self, **robot: Any) -> Cluster:
        return Cluster(
            (
                Node(node_id="a", rank=0, accelerators=GPU, node_group="fast"),
                Node(node_id="b", rank=1, accelerators=GPU),
                Node(node_id="c", rank=2, **{"node_group": "lab", "hardware": ROBOTS, **robot}),
            )
        )

    def test_a_group_that_nodes_joined_with_needs_no_config(self) -> None:
        assert seen(plan(of("x: {node_group: fast, placement: all}"), self.joined()), "x") == [(0, ("0",)), (0, ("1",))]

    def test_its_declared_hardware_has_the_ranks(self) -> None:
        found = plan(of("x: {node_group: lab, placement: all}"), self.joined())
        assert [worker.hardware[0].config_json for worker in found.workers] == ['{"arm":"left"}', '{"arm":"right"}']

    def test_with_gpus_beside_it_only_if_the_config_says_so(self) -> None:
        both = self.joined(accelerators=GPU)
        assert plan(of("x: {node_group: lab, placement: 0}"), both).workers[0].devices
        groups = "[{label: lab, hardware: {type: Franka}}]"
        found = plan(of("x: {node_group: lab, placement: all}", groups=groups), both)
        assert [unit.type for worker in found.workers for unit in worker.hardware] == ["Franka", "Franka"]

    def test_a_config_may_leave_node_ranks_to_those_who_joined(self) -> None:
        groups = "[{label: fast, env_configs: [{env_vars: [{A: b}]}]}]"
        assert plan(of("x: {node_group: fast, placement: 0}", groups=groups), self.joined()).workers[0].env == (
            ("A", "b"),
        )

    def test_a_config_can_t_state_more_than_a_node_declared(self) -> None:
        three = ", ".join(f"{{node_rank: 2, n: {i}}}" for i in range(3))
        groups = f"[{{label: r, node_ranks: 2, hardware: {{type: Franka, configs: [{three}]}}}}]"
        message = refused(of("x: {node_group: r, placement: all}", groups=groups), self.joined())
        assert "node 2 declared 2 of this hardware when it joined, and the config of the group r states 3" in message

    def test_se_06_an_interpreter_is_one_that_the_node_allows(self) -> None:
        groups = "[{label: r, node_ranks: 2, env_configs: [{python_interpreter_path: /opt/x}]}]"
        config = of("x: {node_group: r, placement: 0}", groups=groups)
        assert "node 2 (c) does not allow /opt/x; it allows only its own" in refused(
            config, self.joined(interpreters=())
        )
        assert plan(config, self.joined(interpreters=("/opt/x",))).workers[0].interpreter == "/opt/x"

    @pytest.mark.parametrize("path", ["python", "../x", "/a/../b", "''", "on", "/x\\ny"])
    def test_se_06_an_interpreter_is_an_absolute_path(self, path: str) -> None:
        quoted = f'"{path}"' if "\\" in path else path
        groups = f"[{{label: r, node_ranks: 2, env_configs: [{{python_interpreter_path: {quoted}}}]}}]"
        assert faults(of("x: {node_group: r, placement: 0}", groups=groups), self.joined())

    @pytest.mark.parametrize(
        "name",
        [
            "CUDA_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "CUDA_DEVICE_ORDER",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "NODE_RANK",
            "MASTER_PORT",
            "CALLBOARD_X",
            "RAY_ADDRESS",
            "LD_PRELOAD",
        ],
    )
    def test_se_06_variables_of_the_scheduler_are_refused(self, name: str) -> None:
        groups = f"[{{label: r, node_ranks: 2, env_configs: [{{env_vars: [{{{name}: x}}]}}]}}]"
        assert f"{name} can't be set from a config" in refused(of("x: 0", groups=groups), self.joined())

    def test_se_04_no_fault_and_no_repr_shows_a_value(self) -> None:
        secret = "hunter2"
        groups = f"[{{label: r, node_ranks: 2, env_configs: [{{env_vars: [{{A: [{secret}]}}, {{RANK: {secret}}}]}}]}}]"
        assert all(secret not in str(fault) for fault in faults(of("x: 0", groups=groups), self.joined()))
        groups = f"[{{label: r, node_ranks: 2, env_configs: [{{env_vars: [{{A: {secret}}}]}}]}}]"
        assert secret not in repr(plan(of("x: {node_group: r, placement: 0}", groups=groups), self.joined()))
