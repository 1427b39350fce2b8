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
        ],
    )
    def test_a_key_of_another_level_is_sent_there(self, where: str, key: str, belongs: str) -> None:
        component = {"name": "a", "actor": "m:C"} | ({key: 1} if where == "component" else {})
        job = {"name": "j", "pool": "p", "components": [component]} | ({key: 1} if where == "job" else {})
        with pytest.raises(InvalidInput, match=re.escape(f"unknown key {key}; it belongs to {belongs}")):
            job_spec(job)

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
