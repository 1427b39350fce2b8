"""Which start commands does a node refuse before anything is started?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from callboard.agents.supplies.worker_env import PlanRefused, early_variables, worker_environment, worker_plan
from callboard.agents.system.devices import CUDA, ROCM, DeviceFacts, NodeDevices, renderers
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


def test_ft_e3_variables_of_a_job_name_facts_of_the_worker() -> None:
    stated = {
        "RENDERER": "{device}",
        "ALL": "{devices}",
        "SEED": "17{rank}",
        "WHERE": "n{node_rank}/{local_rank}",
        "OF": "{world_size}:{local_world_size}",
        "CONFIG": '{"rank": {rank}, "deep": {"of": {world_size}}}',
        "LITERAL": "{{rank}} of {{world_size}}",
    }
    command = start_worker("Plain", rank=3, devices=("5", "7"), env=stated)
    command.local_rank, command.node_rank, command.world_size, command.local_world_size = 1, 2, 8, 4
    variables = worker_environment(command, identity())
    assert {name: variables[name] for name in stated} == {
        "RENDERER": "5",
        "ALL": "5,7",
        "SEED": "173",
        "WHERE": "n2/1",
        "OF": "8:4",
        "CONFIG": '{"rank": 3, "deep": {"of": 8}}',
        "LITERAL": "{rank} of {world_size}",
    }
    assert worker_environment(start_worker("Plain", env={"RENDERER": "{device}"}), identity())["RENDERER"] == ""


@pytest.mark.parametrize(
    "value",
    [
        '{"rank": 1, "rules": {"a": {"b": {}}}}',
        "${rank} ${{rank}} {{ rank }} {% rank %}",
        "{epoch}-{RANK}-{ranks}-{local-rank}-{ rank }-{rank!r}-{rank:03d}",
        "{}{{}}{0}{{rank}{",
        "{rank",
        "rank}",
    ],
)
def test_ft_e3_values_with_other_braces_stay_as_they_are(value: str) -> None:
    wanted = value.replace("{{rank}{", "{0{")  # the inner one is a placeholder
    assert worker_environment(start_worker("Plain", env={"V": value}), identity())["V"] == wanted


def test_ft_e3_the_renderer_is_told_where_the_number_of_its_device_is_known() -> None:
    gpus = tuple(DeviceFacts(id=name, uuid=f"GPU-{name}") for name in ("3", "5"))
    known = renderers(NodeDevices(CUDA, (*gpus, DeviceFacts(id="GPU-7", uuid="GPU-7"), DeviceFacts(id="9"))))
    assert known == {"3": "3", "5": "5"}
    assert renderers(NodeDevices(CUDA, gpus, simulated=True)) == {}
    assert renderers(NodeDevices(ROCM, gpus)) == {}
    node = replace(identity(), renderers=known)
    names = ("EGL_DEVICE_ID", "MUJOCO_EGL_DEVICE_ID")

    def told(**fields: Any) -> list[str | None]:
        return [worker_environment(start_worker("Plain", **fields), node).get(name) for name in names]

    assert told(devices=("5", "3")) == ["5", "5"]
    assert told(devices=("9",)) == told() == [None, None]
    assert told(devices=("5",), env={"EGL_DEVICE_ID": "0"}) == ["0", "5"]
