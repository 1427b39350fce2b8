"""Is a message the same as the record that it is made of, and the other way round?"""

from __future__ import annotations

import pytest

from callboard.model.quantities import Resources
from callboard.model.ray_fault import RayFault, RayFaultCode
from callboard.scheduler.records.node_record import DeviceInfo, DeviceShare
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.v1 import agent_pb2, common_pb2, node_pb2
from callboard.wire.alike import message_of, record_of


def test_fields_of_the_same_names_are_the_same_both_ways() -> None:
    device = DeviceInfo("GPU-7", uuid="u", model="a model of a name too long", memory_bytes=1 << 40, numa_node=1)
    message = message_of(common_pb2.Device, device, index=3)
    assert message == common_pb2.Device(
        index=3, id="GPU-7", uuid="u", model=device.model, memory_bytes=1 << 40, numa_node=1
    )
    assert record_of(DeviceInfo, message) == device
    assert record_of(DeviceInfo, message, lambda text: text[:7], uuid="v").model == "a model"


def test_enums_amounts_and_records_within_become_what_the_field_says() -> None:
    fault = message_of(common_pb2.RayFault, RayFault(RayFaultCode.START_FAILED, "no port", permanent=True))
    assert fault.code == common_pb2.RAY_FAULT_CODE_START_FAILED
    bundle = BundleRecord(node_id="n1", resources=Resources.of(cpu_milli=1500), devices=(DeviceShare(0, "0", 500),))
    held = message_of(agent_pb2.Bundle, bundle, ray_node_id="r1")
    assert held.resources.cpu_milli == 1500
    assert [(share.index, share.milli) for share in held.devices] == [(0, 500)]


def test_a_field_of_a_message_that_nobody_states_is_a_defect() -> None:
    with pytest.raises(TypeError, match="no job for WorkerName; state it"):
        message_of(node_pb2.WorkerName, DeviceInfo("0"), component="a", rank=0)
