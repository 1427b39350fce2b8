"""Is what we decided booked in Ray's terms, so that Ray always finds the room that we found?"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from callboard.agents.groups import ray_bundles
from callboard.v1 import agent_pb2, common_pb2


def bundle(*devices: tuple[int, int], cpu: int = 0, node: str = "r0") -> agent_pb2.Bundle:
    return agent_pb2.Bundle(
        node_id=node,
        ray_node_id=node,
        resources=common_pb2.Resources(cpu_milli=cpu, gpu_milli=sum(milli for _, milli in devices)),
        devices=[common_pb2.DeviceShare(index=index, milli=milli) for index, milli in devices],
    )


def booked(*bundles: agent_pb2.Bundle) -> list[dict[str, float]]:
    return [dict(each.resources) for each in ray_bundles(bundles)]


class TestBooking:
    def test_whole_devices_and_a_single_part_are_booked_as_they_are(self) -> None:
        assert booked(bundle((0, 1000), (1, 1000), cpu=2000), bundle((2, 500), cpu=500)) == [
            {"CPU": 2.0, "GPU": 2.0},
            {"CPU": 0.5, "GPU": 0.5},
        ]

    def test_declared_hardware_is_not_rays_business(self) -> None:
        robot = common_pb2.Resources(cpu_milli=1000, custom_milli={"Franka/0": 1000, "worker_unit": 500})
        assert booked(agent_pb2.Bundle(ray_node_id="r0", resources=robot)) == [{"CPU": 1.0, "worker_unit": 0.5}]

    def test_parts_of_one_device_are_one_amount(self) -> None:
        assert booked(bundle((0, 333), cpu=1000), bundle((0, 333), cpu=1000), bundle((0, 333))) == [
            {"CPU": 1.0, "GPU": 0.999},
            {"CPU": 1.0},
            {"memory": 1},
        ]

    def test_a_worker_with_parts_of_several_devices_gets_a_bundle_more_for_each(self) -> None:
        assert booked(bundle((0, 500), (1, 500), cpu=1000), bundle((0, 500)), bundle((1, 250))) == [
            {"CPU": 1.0, "GPU": 1.0},
            {"memory": 1},
            {"memory": 1},
            {"GPU": 0.75},
        ]

    def test_the_same_device_of_another_node_is_another_device(self) -> None:
        assert booked(bundle((0, 500)), bundle((0, 500), node="r1")) == [{"GPU": 0.5}, {"GPU": 0.5}]

    @given(
        st.lists(
            st.dictionaries(st.integers(0, 3), st.sampled_from([250, 333, 500, 1000]), max_size=3).map(dict.items),
            max_size=8,
        )
    )
    def test_every_amount_is_whole_or_below_one_and_each_device_is_booked_once(
        self, groups: list[list[tuple[int, int]]]
    ) -> None:
        bundles = [bundle(*devices) for devices in groups]
        amounts = [each.get("GPU", 0) for each in booked(*bundles)]
        taken = Counter[int]()
        for devices in groups:
            taken.update(dict(devices))
        assert round(sum(amounts) * 1000) == sum(taken.values())
        assert all(amount == int(amount) or max(taken.values()) > 1000 or amount < 1 for amount in amounts)
