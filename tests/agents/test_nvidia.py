"""Which devices does an agent offer, by what NVIDIA's driver says? With a stand-in for NVML's library."""

from __future__ import annotations

import sys
from pathlib import Path

import pynvml
import pytest
from typer.testing import CliRunner

from callboard.agents.options import AgentOptions
from callboard.agents.system.devices import DeviceError, DeviceFacts, NodeDevices, find_devices
from callboard.agents.system.inventory import inventory
from callboard.agents.system.nvidia import probe_nvml
from callboard.cli.local.machine_gpus import machine_gpus
from callboard.cli.main import app
from tests.support.nvml_library import GIB, Gpu, Library, install

LOST = {"": pynvml.NVML_ERROR_GPU_IS_LOST}


def offered(visible: str | None = None, *, count: int | None = None) -> NodeDevices:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_devices(environment, count=count, simulate=None, probe=probe_nvml)


def ids(devices: NodeDevices) -> list[str]:
    return [device.id for device in devices.devices]


def three(second: dict[str, int]) -> Library:
    return Library([Gpu("GPU-aa"), Gpu("GPU-bb", fails=second), Gpu("GPU-cc")])


class TestTheDriver:
    def test_facts_of_mixed_models(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        node = tmp_path / "0000:0b:00.0" / "numa_node"
        node.parent.mkdir()
        node.write_text("1\n")
        large = Gpu("GPU-aa", "NVIDIA H200", 141 * GIB, "00000000:07:00.0")
        small = Gpu("GPU-bb", "NVIDIA L4", 24 * GIB, "00000000:0B:00.0")
        library = Library([large, small])
        install(monkeypatch, library)
        assert probe_nvml(tmp_path) == (
            DeviceFacts("0", "GPU-aa", "00000000:07:00.0", "NVIDIA H200", 141 * GIB, -1),
            DeviceFacts("1", "GPU-bb", "00000000:0B:00.0", "NVIDIA L4", 24 * GIB, 1),
        )
        assert library.open == 0

    def test_how_far_they_are_from_each_other(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Two pairs with NVLink, each on a socket of its own; of the last the driver says nothing."""
        single, system = pynvml.NVML_TOPOLOGY_SINGLE, pynvml.NVML_TOPOLOGY_SYSTEM
        library = Library(
            [
                Gpu("GPU-a", linked=frozenset({"GPU-b"}), ancestors={"GPU-c": system}),
                Gpu("GPU-b", linked=frozenset({"GPU-a"}), ancestors={"GPU-c": system}),
                Gpu("GPU-c", bus_id="00000000:0B:00.0", ancestors={"GPU-a": system, "GPU-b": system, "GPU-d": single}),
                Gpu("GPU-d", bus_id="00000000:0C:00.0", ancestors={"GPU-c": single}),
            ]
        )
        for bus, numa in (("07", 0), ("0b", 1), ("0c", 1)):
            file = tmp_path / f"0000:{bus}:00.0" / "numa_node"
            file.parent.mkdir()
            file.write_text(f"{numa}\n")
        install(monkeypatch, library)

        def offering(visible: str | None) -> list[list[int]]:
            devices = find_devices(
                {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible},
                count=None,
                simulate=None,
                probe=lambda: probe_nvml(tmp_path),
            )
            return [list(each.distances) for each in inventory(AgentOptions(node_id="n"), devices).devices]

        same, nvlink, switch, far = 1, 2, 3, 7
        assert offering(None) == [
            [same, nvlink, far, far],
            [nvlink, same, far, far],
            [far, far, same, switch],
            [far, far, switch, same],
        ], "where the driver says nothing, NUMA nodes do"
        assert offering("3,0,2") == [[same, far, switch], [far, same, far], [switch, far, same]], "in the list's order"
        assert offering("1") == [[]], "there is nothing to tell of one"
        assert library.open == 0

    def test_of_which_no_driver_tells_how_far_they_are(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        old = ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor")
        install(monkeypatch, Library([Gpu("GPU-a"), Gpu("GPU-b")], lacks=old))
        assert [each.distances for each in probe_nvml(tmp_path)] == [(), ()]

    @pytest.mark.parametrize("library", [None, Library(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), Library()])
    def test_without_one_nothing_is_offered(self, monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
        install(monkeypatch, library)
        assert offered() == NodeDevices(offered().vendor, ())
        assert machine_gpus("auto", {}).real is False

    def test_without_its_bindings_nothing_is_offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert ids(offered()) == []

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML/RM version mismatch"),
            (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
            (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        ],
    )
    def test_one_that_does_not_answer_is_no_node_without_gpus(
        self, monkeypatch: pytest.MonkeyPatch, code: int, said: str
    ) -> None:
        install(monkeypatch, Library([Gpu("GPU-aa")], init=code))
        with pytest.raises(DeviceError, match=f"{said}.*CUDA_VISIBLE_DEVICES"):
            offered()
        assert ids(offered("")) == [], "what the sentence says to do"

    def test_one_that_is_older_than_the_bindings_still_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lacks = ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetNumaNodeId"]
        install(monkeypatch, Library([Gpu("GPU-aa")], lacks=lacks))
        assert ids(offered()) == ["0"]

    def test_a_device_that_shares_the_machines_memory_is_offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fails = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
        install(monkeypatch, Library([Gpu("GPU-aa", "NVIDIA GB10", fails=fails)]))
        (device,) = offered().devices
        assert (device.model, device.memory_bytes) == ("NVIDIA GB10", 0)


class TestADeviceThatIsLost:
    @pytest.mark.parametrize(
        "function", ["", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3"]
    )
    def test_takes_no_other_with_it(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        install(monkeypatch, three({function: pynvml.NVML_ERROR_GPU_IS_LOST}))
        devices = offered()
        assert ids(devices) == ["GPU-aa", "GPU-cc"], "CUDA may not count it: then the third has another index there"
        assert [(device.id, device.fault) for device in devices.left_out] == [("1", "GPU is lost")]
        assert machine_gpus("auto", {}).ids == ("GPU-aa", "GPU-cc")

    def test_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, three(LOST))
        with pytest.raises(DeviceError, match="device 1 can't be offered: GPU is lost"):
            offered("0,1")
        assert ids(offered("0,2")) == ["GPU-aa", "GPU-cc"]

    def test_is_named_where_it_is_missed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, three(LOST))
        assert ids(offered(count=2)) == ["GPU-aa", "GPU-cc"]
        with pytest.raises(DeviceError, match=r"3 GPUs asked for, 2 visible \(GPU-aa, GPU-cc; not 1: GPU is lost\)"):
            offered(count=3)


def test_a_machine_with_one_gpu_says_that_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([Gpu("GPU-aa")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = CliRunner().invoke(app, ["up", "--agents", "2", "--machine-gpus", "auto", "--name", "never"])
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "GPU 1 is not available: this machine has 1 GPU." in text
    assert "2 nodes of 1 GPU would take 2; the ids of those that are there: 0." in text


class TestAPartitionedDevice:
    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = [Gpu(f"MIG-{name}", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB) for name in ("a1", "b1")]
        gap = [parts[0], None, parts[1]]
        install(monkeypatch, Library([Gpu("GPU-aa"), Gpu("GPU-bb", parts=gap, bus_id="00000000:0B:00.0")]))

    def test_offers_its_parts_and_not_itself(self) -> None:
        devices = offered()
        assert ids(devices) == ["GPU-aa", "MIG-a1", "MIG-b1"]
        part = devices.devices[1]
        assert (part.memory_bytes, part.bus_id) == (10 * GIB, "00000000:0B:00.0")
        assert part.model.endswith("MIG 1g.10gb")
        (whole,) = devices.left_out
        assert whole.fault == "it is partitioned (MIG), and only its parts can be used: MIG-a1, MIG-b1"

    def test_is_refused_by_index_with_the_names_of_its_parts(self) -> None:
        with pytest.raises(DeviceError, match=r"device 1 can't be offered.*MIG-a1, MIG-b1"):
            offered("1")
        assert [(device.id, device.memory_bytes) for device in offered("MIG-b1").devices] == [("MIG-b1", 10 * GIB)]

    def test_without_parts_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, Library([Gpu("GPU-aa", parts=[])]))
        assert ids(offered()) == []
        assert offered().left_out[0].fault.endswith("it has none yet")

    def test_a_part_of_another_container_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = Gpu("MIG-a1", fails={"": pynvml.NVML_ERROR_NO_PERMISSION})
        install(monkeypatch, Library([Gpu("GPU-aa", parts=[closed, Gpu("MIG-b1")])]))
        assert ids(offered()) == ["MIG-b1"]


class TestAList:
    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, three({}))

    def test_names_no_device_twice_in_two_ways(self) -> None:
        with pytest.raises(DeviceError, match="GPU-bb and 1 are one device"):
            offered("1,GPU-bb")

    @pytest.mark.parametrize("name", ["3", "GPU-dd"])
    def test_names_only_what_the_driver_knows(self, name: str) -> None:
        with pytest.raises(DeviceError, match=f"device {name} isn't there; the driver knows 0, 1, 2"):
            offered(name)

    def test_a_beginning_of_several_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, Library([Gpu("GPU-aa"), Gpu("GPU-ab"), Gpu("GPU-cc")]))
        with pytest.raises(DeviceError, match="GPU-a is the beginning of several: GPU-aa, GPU-ab"):
            offered("GPU-a")
        assert ids(offered("GPU-c,0")) == ["GPU-c", "0"]

    def test_ft_g5_a_part_that_the_driver_does_not_know_is_refused(self) -> None:
        with pytest.raises(DeviceError, match="device MIG-0 isn't there"):
            offered("MIG-0")
        assert ids(offered("MIG-GPU-aa/1/0")) == ["MIG-GPU-aa/1/0"], "the older name, which drivers don't tell"
