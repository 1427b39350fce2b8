"""Does a spec survive being written for a person and read again?"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from callboard.model.describe import MASK, described, job_to_mapping
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec, pool_spec, preemption_policy, read_yaml
from callboard.model.policy import PolicyOverrides, PreemptionPolicy
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec
from tests.support import specs

JOB = JobSpec(name="j", pool="p", components=(ComponentSpec(name="c", actor="a:B"),))


class TestWhatIsWrittenIsReadAgain:
    @given(specs.jobs())
    @settings(max_examples=100, deadline=None)
    def test_a_job(self, spec: JobSpec) -> None:
        assert job_spec(job_to_mapping(spec, secrets=True)) == spec

    @given(specs.pools)
    @settings(max_examples=100, deadline=None)
    def test_a_pool(self, spec: PoolSpec) -> None:
        assert pool_spec(described(spec)) == spec

    @given(specs.policies)
    @settings(max_examples=100, deadline=None)
    def test_a_policy(self, policy: PreemptionPolicy) -> None:
        assert preemption_policy(described(policy)) == policy

    @given(specs.overrides)
    @settings(max_examples=100, deadline=None)
    def test_overrides(self, stated: PolicyOverrides) -> None:
        assert specs.policy_overrides(described(stated)) == stated

    @given(specs.jobs())
    @settings(max_examples=60, deadline=None)
    def test_a_job_by_way_of_a_file(self, spec: JobSpec) -> None:
        # Not allow_unicode=True: PyYAML then writes U+0085 as it is and reads it as a line break.
        text = yaml.safe_dump(job_to_mapping(spec, secrets=True), sort_keys=False)
        assert job_spec(read_yaml(text)) == spec

    @given(specs.pools)
    @settings(max_examples=60, deadline=None)
    def test_a_pool_by_way_of_a_file(self, spec: PoolSpec) -> None:
        assert pool_spec(read_yaml(yaml.safe_dump(described(spec)))) == spec


class TestWhatIsShown:
    def test_defaults_are_left_out(self) -> None:
        component = {"name": "c", "actor": "a:B", "workers": 1}
        assert job_to_mapping(JOB) == {"name": "j", "pool": "p", "components": [component]}
        assert described(PoolSpec(name="p")) == {"name": "p"}

    def test_secret_values_are_masked_unless_asked_for(self) -> None:
        component = ComponentSpec(name="c", actor="a:B", env=(("HF_TOKEN", "hf_123"), ("LOG", "x")))
        spec = JobSpec(name="j", pool="p", components=(component,))
        assert job_to_mapping(spec)["components"][0]["env"] == {"HF_TOKEN": MASK, "LOG": "x"}
        assert job_to_mapping(spec, secrets=True)["components"][0]["env"]["HF_TOKEN"] == "hf_123"
        assert "hf_123" not in repr(spec)

    def test_memory_that_has_no_short_text_stays_exact(self) -> None:
        spec = PoolSpec(name="p", nominal=(("memory", (10 << 30) + 1),))
        assert described(spec)["nominal"] == {"memory": f"{(10 << 30) + 1}B"}


def test_arguments_that_have_themselves_twice_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless |= {"a": endless, "b": endless}
    component = {"name": "main", "actor": "a:B", "kwargs": endless}
    with pytest.raises(InvalidInput, match=r"components\[0\].kwargs: there are more than \d+ values"):
        job_spec({"name": "j", "pool": "p", "components": [component]})
