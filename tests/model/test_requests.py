"""What does a person ask for in Python? Request classes, by way of the same readers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import callboard
from callboard.agents.host.worker_process import load_class
from callboard.model import requests
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec, pool_spec
from callboard.model.inputs.component import ComponentInput
from callboard.model.inputs.job import JobInput
from callboard.model.inputs.pool import PgPoolInput, PolicyInput, PoolInput
from callboard.model.inputs.reading import Input, keys_of
from callboard.model.names import is_name
from callboard.model.quantities import Resources
from callboard.model.requests import ComponentSpec, JobSpec, PgPoolSpec, PoolSpec, PreemptionPolicy
from tests.support import ray_actor
from tests.support.actors import Plain
from tests.support.specs import policy_overrides

TRAIN = ComponentSpec("train", "my_pkg.workers:Trainer", workers=4, resources={"cpu": 2, "gpu": 1})


class TestRequests:
    def test_the_job_of_the_design(self) -> None:
        request = JobSpec(pool="rlhf", priority=9, labels={"role": "train"}, components=[TRAIN])
        spec = job_spec(request)
        assert spec == job_spec(request.to_mapping())
        assert (spec.pool, spec.priority_milli, spec.components[0].min_workers) == ("rlhf", 9000, 4)
        assert spec.components[0].resources == Resources(cpu_milli=2000, gpu_milli=1000)

    def test_a_job_without_a_name_gets_one_and_keeps_it(self) -> None:
        request = JobSpec(pool="p", components=[TRAIN])
        assert request.name is not None
        assert request.name.startswith("train-")
        assert request.to_mapping()["name"] == request.to_mapping()["name"]
        assert JobSpec(pool="p", components=[TRAIN]).name != request.name

    @pytest.mark.parametrize("name", ["../x", "x" * 63, ""])
    def test_the_given_name_is_always_allowed(self, name: str) -> None:
        made = JobSpec(pool="p", components=[ComponentSpec(name, "a:B")]).name
        assert made is not None
        assert is_name(made)

    def test_components_may_be_mappings(self) -> None:
        spec = job_spec(JobSpec(name="j", pool="p", components=[{"name": "c", "actor": "a:B", "workers": 2}]))
        assert spec.components[0].min_workers == 2

    def test_paths_are_texts(self) -> None:
        asked = ComponentSpec("a", command=[Path("/bin/true"), "-x"], working_dir=Path("code"))
        assert asked.to_mapping() == {"name": "a", "command": ["/bin/true", "-x"], "working_dir": "code"}

    def test_pools_nest(self) -> None:
        request = PoolSpec(
            name="p",
            nominal={"cpu": 6},
            pg_pool=PgPoolSpec(reserved=[{"cpu": 2}], max_dynamic=2),
            preemption=PreemptionPolicy(label_rules={"role": {"train": ["rollout"]}}, cancel_timeout="0.5s"),
        )
        spec = pool_spec(request)
        assert spec.pg_pool.reserved == (Resources(cpu_milli=2000),)
        assert spec.preemption.cancel_timeout_ms == 500
        assert policy_overrides(PreemptionPolicy(aggressiveness="high")).aggressiveness == "HIGH"
        assert pool_spec({"name": "p", "pg_pool": PgPoolSpec()}).pg_pool.enable

    def test_faults_are_those_of_mappings(self) -> None:
        with pytest.raises(InvalidInput, match=r"components\[0\]\.workers: 0 is out of bounds"):
            job_spec(JobSpec(name="j", pool="p", components=[ComponentSpec("c", "a:B", workers=0)]))

    @pytest.mark.parametrize(
        ("request_class", "model"),
        [
            (JobSpec, JobInput),
            (ComponentSpec, ComponentInput),
            (PoolSpec, PoolInput),
            (PgPoolSpec, PgPoolInput),
            (PreemptionPolicy, PolicyInput),
        ],
    )
    def test_they_offer_every_key_that_a_file_may_have(self, request_class: type, model: type[Input]) -> None:
        assert {field.name for field in dataclasses.fields(request_class)} == {*keys_of(model), *model.internal}


class TestNamesOfThePackage:
    def test_callboard_offers_the_classes_people_write(self) -> None:
        for name in ("JobSpec", "ComponentSpec", "PoolSpec", "PgPoolSpec", "PreemptionPolicy"):
            assert getattr(callboard, name) is getattr(requests, name)

    def test_importing_the_model_loads_no_pydantic(self) -> None:
        program = "import callboard.model, callboard.model.requests, sys; print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert not {"pydantic", "yaml", "grpc"} & set(loaded.split())

    def test_every_name_of_the_model_loads_and_is_listed(self) -> None:
        from callboard import model

        for name in model._PUBLIC:
            assert getattr(model, name) is not None
            assert name in dir(model)
        with pytest.raises(AttributeError, match="no attribute 'Jobspec'"):
            _ = model.Jobspec


class TestClassesForTheirPaths:
    """FT-I3: a class, plain or decorated, is as good as its import path, if workers can import it."""

    @staticmethod
    def path_of(actor: object) -> str:
        spec = job_spec(JobSpec(name="j", pool="p", components=[ComponentSpec("w", actor)]))
        assert job_spec({"name": "j", "pool": "p", "components": [{"name": "w", "actor": actor}]}) == spec
        return spec.components[0].actor

    @staticmethod
    def why_not(actor: object) -> str:
        with pytest.raises(InvalidInput) as caught:
            job_spec(JobSpec(name="j", pool="p", components=[ComponentSpec("w", actor)]))
        (fault,) = caught.value.faults
        assert fault.field == "components[0].actor"
        return fault.message

    def test_ft_i3_a_class_is_accepted_and_unwrapped(self) -> None:
        assert self.path_of(Plain) == "tests.support.actors:Plain"
        assert self.path_of(ray_actor.Decorated) == "tests.support.ray_actor:Decorated"
        assert self.path_of(ray.remote(Plain)) == "tests.support.actors:Plain"
        inner = load_class("tests.support.ray_actor:Decorated.Inner")
        assert self.path_of(inner) == "tests.support.ray_actor:Decorated.Inner"

    @pytest.mark.parametrize("decorate", [lambda found: found, ray.remote])
    def test_ft_i3_a_class_that_no_worker_can_import_is_refused_with_what_to_do(
        self, decorate: Callable[[type], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Local:
            pass

        assert "defined inside" in (why := self.why_not(decorate(Local)))
        assert "'tests.model.test_requests:Local'" in why or "'test_requests:Local'" in why
        in_main = type("InMain", (), {"__module__": "__main__"})
        assert re.search(r"__main__.*move it to a module.*write '.*:InMain'", self.why_not(decorate(in_main)))
        made = type("Plain", (), {"__module__": "tests.support.actors"})
        assert "holds another Plain" in self.why_not(decorate(made))

    @pytest.mark.parametrize("what", [ray_actor.WithOptions, len, Plain(), 3], ids=lambda what: type(what).__name__)
    def test_ft_i3_what_is_no_class_is_refused(self, what: object) -> None:
        assert ", nor a class" in self.why_not(what)
