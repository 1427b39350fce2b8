"""Which explicit places are read, and which are refused?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.model.describe import job_to_mapping
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec

PLACE = {"node": "n1", "hardware": {"Franka/1": 500, "ZED/0": 1000}, "hardware_json": '[{"ip": "10.0.0.1"}]'}


def job(place: dict[str, Any]) -> dict[str, Any]:
    component = {"name": "env", "actor": "pkg.workers:Env", "resources": {"cpu": 1}, "places": [place]}
    return {"name": "robots", "pool": "p", "components": [component]}


def test_hardware_is_part_of_what_a_worker_holds() -> None:
    spec = job_spec(job(PLACE))
    assert dict(spec.components[0].resources_of(0).items()) == {"cpu": 1000, "Franka/1": 500, "ZED/0": 1000}
    assert job_spec(job_to_mapping(spec)) == spec


@pytest.mark.parametrize(
    ("hardware", "why"),
    [
        ({"Franka": 1000}, "is not a piece of hardware"),
        ({"Franka/x": 1000}, "is not a piece of hardware"),
        ({"/0": 1000}, "is not a piece of hardware"),
        ({"Franka/0": 1001}, "1 to 1000"),
        ({"Franka/0": 0}, "1 to 1000"),
        ({"Franka/0": "1"}, "is not a whole number"),
        (["Franka/0"], "is not a mapping"),
    ],
)
def test_what_is_no_hardware_is_refused_where_it_stands(hardware: Any, why: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        job_spec(job(PLACE | {"hardware": hardware}))
    (fault,) = raised.value.faults
    assert fault.field.startswith("components[0].places[0].hardware")
    assert why in fault.message
