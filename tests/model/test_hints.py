"""Keys of other systems, answered with what they are called here."""

from __future__ import annotations

import re

import pytest

from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec, pool_spec
from callboard.model.inputs.component import ComponentInput
from callboard.model.inputs.job import JobInput
from callboard.model.inputs.pool import PgPoolInput, PoolInput
from callboard.model.inputs.reading import keys_of


class TestWordsOfOtherSystems:
    """A key that another system has is answered with what it is called here."""

    @pytest.mark.parametrize(
        ("where", "key", "here"),
        [
            ("pool", "resources", "nominal"),
            ("pool", "high_priority_pg_specs", "pg_pool: {reserved: […]}"),
            ("pool", "borrowingLimit", "borrow_limit"),
            ("job", "queue", "pool"),
            ("job", "backoffLimit", "restart: {max_restarts: …}"),
            ("component", "num_gpus", "resources: {gpu: …}"),
            ("component", "replicas", "workers"),
            ("component", "runtime_env", "working_dir, py_modules, env and container"),
        ],
    )
    def test_it_is_named(self, where: str, key: str, here: str) -> None:
        component = {"name": "a", "actor": "m:C"} | ({key: 1} if where == "component" else {})
        job = {"name": "j", "pool": "p", "components": [component]} | ({key: 1} if where == "job" else {})
        with pytest.raises(InvalidInput, match=re.escape(f"unknown key {key}; here it is called {here}")):
            pool_spec({"name": "p", key: 1}) if where == "pool" else job_spec(job)

    @pytest.mark.parametrize(
        ("where", "key", "belongs"),
        [
            ("component", "restart", "the job, beside components"),
            ("component", "priority", "the job, beside components"),
            ("job", "resources", "a component, in the list of components"),
            ("job", "workers", "a component, in the list of components"),
            ("job", "component_placement", "a component, in the list of components"),
            ("job", "backoff_base", "restart"),
            ("pool", "label_rules", "preemption"),
            ("pool", "idle_ttl", "pg_pool"),
        ],
    )
    def test_a_key_of_another_level_is_sent_there(self, where: str, key: str, belongs: str) -> None:
        component = {"name": "a", "actor": "m:C"} | ({key: 1} if where == "component" else {})
        job = {"name": "j", "pool": "p", "components": [component]} | ({key: 1} if where == "job" else {})
        with pytest.raises(InvalidInput, match=re.escape(f"unknown key {key}; it belongs to {belongs}")):
            pool_spec({"name": "p", key: 1}) if where == "pool" else job_spec(job)

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("memroy", "memory"),
            ("Memory", "memory"),
            ("gpu_memroy", "gpu_memory"),
            ("gpu_modle", "gpu_model"),
            ("gpumemory", "gpu_memory"),
        ],
    )
    def test_a_misspelt_resource_is_no_custom_one_that_is_nowhere(self, key: str, meant: str) -> None:
        amount = "H100" if meant == "gpu_model" else "4GiB"
        component = {"name": "a", "actor": "m:C", "resources": {"gpu": 1, key: amount}}
        with pytest.raises(InvalidInput) as caught:
            job_spec({"name": "j", "pool": "p", "components": [component]})
        (fault,) = caught.value.faults
        assert fault.message == f"{key} is not a resource; did you mean {meant}?"

    @pytest.mark.parametrize("key", ["tpu", "npu", "gpu2", "license", "slots"])
    def test_a_custom_resource_may_be_called_otherwise(self, key: str) -> None:
        component = {"name": "a", "actor": "m:C", "resources": {key: 1}}
        assert dict(job_spec({"name": "j", "pool": "p", "components": [component]}).components[0].resources.items())

    @pytest.mark.parametrize(
        ("key", "here"),
        [("gpus", "gpu"), ("num_CPUs", "cpu"), ("nvidia.com/gpu", "gpu"), ("ram", "memory")],
    )
    def test_a_resource_is_named_where_workers_ask_and_pools_limit(self, key: str, here: str) -> None:
        component = {"name": "a", "actor": "m:C", "resources": {key: "1GiB" if here == "memory" else 1}}
        amounts = component["resources"]
        for read in (
            lambda: job_spec({"name": "j", "pool": "p", "components": [component]}),
            lambda: pool_spec({"name": "p", "nominal": amounts}),
        ):
            with pytest.raises(InvalidInput) as caught:
                read()
            (fault,) = caught.value.faults
            assert fault.message == f"{key} is not a resource; here it is called {here}"

    def test_every_hint_names_a_key_that_there_is(self) -> None:
        for model in (ComponentInput, JobInput, PoolInput, PgPoolInput):
            for key, here in model.elsewhere.items():
                assert key not in keys_of(model)
                assert re.split(r"\W", here)[0] in keys_of(model), here
