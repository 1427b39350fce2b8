"""Which text do a job's placements become? The file as it is, or what a mapping holds, with nothing guessed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec, read_yaml
from callboard.model.specs import JobSpec

HEAD = "name: j\npool: p\n"


def of_file(text: str) -> JobSpec:
    return job_spec(read_yaml(HEAD + text))


def of_mapping(*components: dict[str, Any], **more: Any) -> JobSpec:
    return job_spec({"name": "j", "pool": "p", "components": [{"actor": "m:C", **each} for each in components], **more})


class TestFiles:
    """Lines, columns and scalars stay those of the user's file."""

    @pytest.mark.parametrize(
        "text",
        [
            "components: [{name: a, actor: 'm:C', component_placement: 1:0}]\n",
            "cluster: {component_placement: {a: 010}}\ncomponents: [{name: a, actor: 'm:C'}]\n",
            "labels: &x {a: b}\ncomponents:\n- {name: a, actor: 'm:C', component_placement: 0, node_selector: *x}\n",
        ],
    )
    def test_a_file_is_its_own_text(self, text: str) -> None:
        assert of_file(text).placement_config == HEAD + text

    def test_a_json_file_is_its_own_text(self) -> None:
        text = (
            '{"name": "j", "pool": "p", "cluster": {"component_placement": {"a": "1:0"}},'
            ' "components": [{"name": "a", "actor": "m:C"}]}'
        )
        assert job_spec(read_yaml(text)).placement_config == text

    def test_a_job_without_placements_carries_none(self) -> None:
        assert not of_file("components: [{name: a, actor: 'm:C', component_placement: ~}]").placement_config

    def test_groups_may_stand_beside_components(self) -> None:
        text = (
            "node_groups: [{label: g, node_ranks: 1}]\nnum_nodes: 2\n"
            "components: [{name: a, actor: 'm:C', component_placement: {node_group: g, placement: 0}}]\n"
        )
        assert of_file(text).placement_config == HEAD + text

    def test_a_placement_is_stated_once(self) -> None:
        text = "placement_config: 'cluster: {}'\ncomponents: [{name: a, actor: 'm:C', component_placement: 0}]\n"
        with pytest.raises(InvalidInput, match="placement_config: the job states its placement beside it too"):
            of_file(text)

    def test_groups_without_any_placement_are_a_mistake(self) -> None:
        with pytest.raises(InvalidInput, match="unknown key 'node_groups'"):
            of_file("node_groups: [{label: g, node_ranks: 1}]\ncomponents: [{name: a, actor: 'm:C'}]\n")


class TestMappings:
    """What was parsed elsewhere."""

    def test_placements_stand_where_they_do_in_the_job(self) -> None:
        spec = of_mapping({"name": "a"}, {"name": "b", "component_placement": "1:0"})
        assert yaml.safe_load(spec.placement_config) == {
            "components": [{}, {"name": "b", "component_placement": "1:0"}]
        }

    def test_both_forms_together(self) -> None:
        cluster = {"num_nodes": 2, "component_placement": {"a": 0}}
        spec = of_mapping({"name": "a"}, {"name": "b", "component_placement": {"placement": 59}}, cluster=cluster)
        assert yaml.safe_load(spec.placement_config) == {
            "cluster": cluster,
            "components": [{}, {"name": "b", "component_placement": {"placement": 59}}],
        }

    @pytest.mark.parametrize(
        "section",
        [
            OmegaConf.create({"n": 0, "cluster": {"component_placement": {"a": "${n}"}}}).cluster,
            MappingProxyType({"component_placement": MappingProxyType({"a": 0})}),
        ],
        ids=["omegaconf", "proxy"],
    )
    def test_mappings_of_any_library(self, section: Any) -> None:
        spec = of_mapping({"name": "a"}, cluster=section)
        assert yaml.safe_load(spec.placement_config) == {"cluster": {"component_placement": {"a": 0}}}

    @pytest.mark.parametrize(
        ("component", "more", "field"),
        [
            ({"component_placement": 60}, {}, "components[0].component_placement"),
            ({"component_placement": {"placement": 80}}, {}, "components[0].component_placement.placement"),
            ({}, {"cluster": {"component_placement": {"a": 61}}}, "cluster.component_placement.a"),
            (
                {},
                {"cluster": {"component_placement": {"a": {"placement": 3600}}}},
                "cluster.component_placement.a.placement",
            ),
        ],
    )
    def test_ps_01_a_number_that_may_have_been_a_pair_is_refused(
        self, component: dict[str, Any], more: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(InvalidInput) as caught:
            of_mapping({"name": "a", **component}, **more)
        (fault,) = caught.value.faults
        assert (fault.field, "may be what a YAML reader made of" in fault.message) == (field, True)

    def test_other_numbers_are_no_pairs(self) -> None:
        spec = of_mapping({"name": "a", "component_placement": {"placement": 0, "share": 500}})
        assert "share: 500" in spec.placement_config

    @pytest.mark.parametrize("value", [object(), {1}, b"0"])
    def test_what_yaml_can_t_carry_is_a_fault(self, value: object) -> None:
        with pytest.raises(InvalidInput, match=r"components\[0\].component_placement: .* is not a text, number"):
            of_mapping({"name": "a", "component_placement": value})

    def test_a_mapping_that_holds_itself_ends(self) -> None:
        circle: dict[str, Any] = {}
        circle["component_placement"] = circle
        with pytest.raises(InvalidInput, match="nested deeper than 64"):
            of_mapping({"name": "a"}, cluster=circle)
