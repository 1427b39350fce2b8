"""What may a component say of the code, the environment and the container that it runs in?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.model.describe import job_to_mapping
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec

PACKAGE = f"package:{'0' * 64}"


def job(**changes: Any) -> dict[str, Any]:
    return {"name": "j", "pool": "p", "components": [{"name": "c", "command": ["true"], **changes}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"env": {"requirements": "requirements.txt"}}, "env.requirements", "is not a package; a client packs and sends"),
    ({"env": {"conda": "/opt/envs/rl"}}, "env.conda", "a path goes into interpreter"),
    ({"env": {"conda": "a", "uv": PACKAGE}}, "env.uv", "is stated beside env.conda"),
    ({"env": {"conda": "a"}, "interpreter": "/usr/bin/python"}, "interpreter", "is stated beside env.conda"),
    ({"environment": {"LOG_LEVEL": "DEBUG"}}, "environment", "variables belong in env"),
    ({"environment": "pipenv:x"}, "environment", "is not an environment"),
    ({"container": "rl:1", "ray": True}, "container", "own Python and Ray. Leave container out, and say with env"),
    ({"container": "rl:1", "env": {"conda": "a"}}, "container", "is stated beside env.conda"),
    ({"container": "--privileged"}, "container", "is not the name of an image"),
    ({"container": "rl:1 -v /:/host"}, "container", "is not the name of an image"),
    ({"image": "rl:1"}, "image", "here it is called container"),
    ({"py_modules": [PACKAGE] * 33}, "py_modules", "33 items are too many; 32"),
]


@pytest.mark.parametrize(("changes", "field", "why"), REFUSED)
def test_what_makes_no_sense_is_refused_at_its_place(changes: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        job_spec(job(**changes))
    assert [fault.field for fault in caught.value.faults] == [f"components[0].{field}"]
    assert why in caught.value.faults[0].message


@pytest.mark.parametrize(
    "written",
    [{"env": {"requirements": PACKAGE, "A": "1"}}, {"env": {"A": "1"}, "environment": f"requirements:{PACKAGE}"}],
)
def test_an_environment_may_be_named_among_the_variables_and_is_read_back_as_it_is_shown(
    written: dict[str, Any],
) -> None:
    spec = job_spec(job(**written))
    assert (spec.components[0].environment, spec.components[0].env) == (f"requirements:{PACKAGE}", (("A", "1"),))
    assert spec.components[0].packages == (PACKAGE,)
    (described,) = job_to_mapping(spec)["components"]
    assert (described["environment"], described["env"]) == ({"requirements": PACKAGE}, {"A": "1"})
    assert job_spec({**job(), "components": [described]}) == spec
