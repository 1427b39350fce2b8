"""Which start commands does a node refuse before anything is started?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from callboard.agents.worker_env import PlanRefused, early_variables, worker_environment, worker_plan
from tests.agents.test_worker_host import identity
from tests.support.fake_controller import start_worker


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "RANK", "CALLBOARD_JOB", "RAY_ADDRESS", "LD_PRELOAD", "PYTHONHOME", "A=B", ""]
)
@pytest.mark.parametrize("field", ["env", "pass_env"])
def test_se_06_variables_of_the_scheduler_are_refused(name: str, field: str) -> None:
    fields: dict[str, Any] = {field: {name: "x"} if field == "env" else [name]}
    with pytest.raises(PlanRefused, match=field):
        worker_environment(start_worker("Plain", **fields), identity())


@pytest.mark.parametrize(("letter", "count"), [("x", 1300), ("ü", 650)])
def test_an_environment_without_end_is_refused(letter: str, count: int) -> None:
    command = start_worker("Plain", env={f"V{number}": letter * 1000 for number in range(count)})
    with pytest.raises(PlanRefused, match=r"bytes.*The largest variables are"):
        worker_environment(command, identity())


@pytest.mark.parametrize(
    ("field", "value"),
    [("args_json", "{}"), ("args_json", "["), ("kwargs_json", "[]"), ("kwargs_json", "nonsense")],
)
def test_arguments_that_are_no_json_of_the_right_kind_are_refused(field: str, value: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(PlanRefused, match=field):
        worker_plan(start_worker("Plain", **fields), identity(), {})


@pytest.mark.parametrize("actor", ["", "os", "os.path", "a b:C", "m:C; import os", "m:"])
def test_an_actor_that_is_no_import_path_is_refused(actor: str) -> None:
    command = start_worker("Plain")
    command.actor = actor
    with pytest.raises(PlanRefused, match="actor"):
        worker_plan(command, identity(), {})


def test_a_prefix_passes_on_all_that_begin_so_but_what_nobody_may_state() -> None:
    own = {"NEXRL_USER": "a", "NEXRL_MODE": "ray", "NEXRL": "b", "LD_PRELOAD": "evil.so", "LD_LIBRARY_PATH": "/lib"}
    command = start_worker("Plain", pass_env=["NEXRL_*", "LD_*", "NOTHING_*"], env={"NEXRL_MODE": "mine"})
    node = replace(identity(), environment=own)
    variables = worker_environment(command, node)
    assert {name: variables[name] for name in own if name in variables} == {
        "NEXRL_USER": "a",
        "NEXRL_MODE": "mine",
        "LD_LIBRARY_PATH": "/lib",
    }
    assert set(early_variables(command, node, variables)) == set()
    with pytest.raises(PlanRefused, match="CALLBOARD_: the scheduler sets"):
        worker_environment(start_worker("Plain", pass_env=["CALLBOARD_*"]), node)
