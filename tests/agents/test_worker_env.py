"""Which start commands does a node refuse before anything is started?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.agents.worker_env import PlanRefused, worker_environment, worker_plan
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


def test_an_environment_without_end_is_refused() -> None:
    command = start_worker("Plain", env={f"V{number}": "x" * 1000 for number in range(1300)})
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
