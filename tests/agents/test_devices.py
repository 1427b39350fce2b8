"""Which accelerators may a node offer, and under which names does a worker see them?"""

from __future__ import annotations

import pytest

from callboard.agents.system.devices import (
    ASCEND,
    CUDA,
    ROCM,
    DeviceError,
    DeviceFacts,
    NodeDevices,
    find_devices,
    parse_visible,
    visibility_variables,
)

FOUR = tuple(DeviceFacts(id=str(index), uuid=f"GPU-{index}abc", model="H100") for index in range(4))


def offered(
    visible: str | None,
    *,
    count: int | None = None,
    simulate: int | None = None,
    driver: tuple[DeviceFacts, ...] = FOUR,
) -> NodeDevices:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_devices(environment, count=count, simulate=simulate, probe=lambda: driver)


def ids(devices: NodeDevices) -> list[str]:
    return [device.id for device in devices.devices]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("0,1", ("0", "1")),
        (" 2 , ,3", ("2", "3")),
        ("1,-1,2", ("1",)),
        ("-1", ()),
        ("GPU-8f2c,MIG-1/2/0", ("GPU-8f2c", "MIG-1/2/0")),
        ("MIG-GPU-8f2c-99/3/0,GPU-8f2c-", ("MIG-GPU-8f2c-99/3/0", "GPU-8f2c-")),
        ("NoDevFiles", ()),
        ("0,-2,1", ("0",)),
        ("-7", ()),
    ],
)
def test_a_visible_list_is_read_as_cuda_reads_it(text: str, expected: tuple[str, ...]) -> None:
    assert parse_visible(text) == expected


ODD = (
    "none",
    "void",
    "all",
    "0,1,banana",
    "0;1",
    "00,01",
    "0 1",
    "+1",
    "-0",
    "1.0",
    "0x1",
    "0-3",
    "\u0661",
    "gpu-8f2c",
    "GPU-",
)


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", *ROCM.variables, *ASCEND.variables])
@pytest.mark.parametrize("text", [*ODD, "GPU-xyz", "MIG-", "x" * 10_000])
@pytest.mark.parametrize("simulate", [None, 1])
def test_ft_g5_what_is_no_device_is_refused_with_its_text(variable: str, text: str, simulate: int | None) -> None:
    with pytest.raises(DeviceError, match=f"{variable} is ") as refused:
        find_devices({variable: text}, count=None, simulate=simulate, probe=tuple)
    assert repr(text[:80]) in str(refused.value)
    assert len(str(refused.value)) < 500


def test_ft_g5_other_vendors_ids_are_no_names_of_a_device() -> None:
    assert ids(find_devices({"ROCR_VISIBLE_DEVICES": "GPU-8f2c,1"}, count=None, simulate=None, probe=tuple)) == [
        "GPU-8f2c",
        "1",
    ]
    for variable, text in (("HIP_VISIBLE_DEVICES", "MIG-8f2c"), ("ASCEND_RT_VISIBLE_DEVICES", "GPU-8f2c")):
        with pytest.raises(DeviceError, match="is not a device"):
            find_devices({variable: text}, count=None, simulate=None, probe=tuple)


def test_ft_g5_the_driver_of_one_vendor_is_not_asked_for_the_devices_of_another() -> None:
    found = find_devices({"HIP_VISIBLE_DEVICES": "7"}, count=None, simulate=None, probe=lambda: FOUR)
    assert found.devices == (DeviceFacts(id="7"),)


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles"])
def test_ft_g5_an_empty_list_offers_none(text: str) -> None:
    assert ids(offered(text)) == []


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(DeviceError, match="twice"):
        parse_visible("1,2,1")


def test_gv_01_positions_count_the_visible_list() -> None:
    devices = offered("1,2,3")
    assert ids(devices) == ["1", "2", "3"]
    assert visibility_variables(CUDA, ids(devices)[0:3])["CUDA_VISIBLE_DEVICES"] == "1,2,3"


def test_gv_02_two_agents_on_one_machine_offer_disjoint_devices() -> None:
    assert ids(offered("0,1")) == ["0", "1"]
    assert ids(offered("2,3")) == ["2", "3"]


@pytest.mark.parametrize(
    ("visible", "count", "driver"),
    [("1,2,3", 4, FOUR), (None, 2, ()), ("", 1, FOUR)],
)
def test_gv_10_more_than_is_visible_is_refused(
    visible: str | None, count: int, driver: tuple[DeviceFacts, ...]
) -> None:
    with pytest.raises(DeviceError, match=r"--simulate-gpus"):
        offered(visible, count=count, driver=driver)


def test_gv_10_fewer_than_visible_are_the_first() -> None:
    assert ids(offered("1,2,3", count=2)) == ["1", "2"]


def test_without_a_list_the_driver_is_asked() -> None:
    assert ids(offered(None)) == ["0", "1", "2", "3"]


def test_an_empty_list_means_none_whatever_the_driver_knows() -> None:
    assert ids(offered("")) == []


def test_a_device_the_driver_does_not_know_is_refused() -> None:
    with pytest.raises(DeviceError, match="7 isn't there"):
        offered("7")


def test_a_uuid_keeps_its_text_and_gets_the_facts() -> None:
    (device,) = offered("GPU-2").devices
    assert (device.id, device.model) == ("GPU-2", "H100")


def test_simulated_devices_are_ids_without_hardware() -> None:
    devices = offered(None, simulate=2, driver=())
    assert ids(devices) == ["0", "1"]
    assert devices.simulated
    assert {device.model for device in devices.devices} == {"simulated"}


def test_simulated_devices_take_their_ids_from_the_list() -> None:
    assert ids(offered("4,5", simulate=2)) == ["4", "5"]
    with pytest.raises(DeviceError):
        offered("4", simulate=2)


def test_counted_and_simulated_exclude_each_other() -> None:
    with pytest.raises(DeviceError):
        offered(None, count=1, simulate=1)


def test_gv_11_no_device_is_an_empty_string_for_every_vendor() -> None:
    assert visibility_variables(CUDA, [])["CUDA_VISIBLE_DEVICES"] == ""
    rocm = visibility_variables(ROCM, [])
    assert {name: rocm[name] for name in (*ROCM.variables, "CUDA_VISIBLE_DEVICES")} == dict.fromkeys(
        (*ROCM.variables, "CUDA_VISIBLE_DEVICES"), ""
    )


def test_other_vendors_have_their_own_variables() -> None:
    found = find_devices({"ASCEND_RT_VISIBLE_DEVICES": "2,6"}, count=None, simulate=None, probe=tuple)
    assert found.vendor is ASCEND
    assert visibility_variables(ASCEND, ["6"]) == {"ASCEND_RT_VISIBLE_DEVICES": "6"}


def test_cuda_indices_are_in_bus_order() -> None:
    assert visibility_variables(CUDA, ["1"])["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
