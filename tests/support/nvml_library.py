"""The C library below NVML's bindings, for tests: no test has a GPU.

The bindings themselves (nvidia-ml-py) are the real ones, so that names, structures, text as bytes and classes of errors
are theirs. `install` puts the library in the place of libnvidia-ml.so.1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

GIB = 1 << 30


@dataclass(eq=False)
class Gpu:
    """A device, or a part of one.

    Attributes:
        uuid: "GPU-…" or "MIG-…".
        name: its model.
        memory_bytes: its memory.
        bus_id: on the PCI bus, as NVML writes it.
        fails: name of a function → what it returns instead of an answer; "" for every one.
        parts: its parts, None for a gap between them; None: it is not partitioned.
        processes: pid → device memory that it holds; None: the driver doesn't say.
        busy_percent: how busy it is.
        unnamed_bytes: memory in use by no process that the driver names.
        uncorrected: errors of its memory that ECC found and could not correct.
        remapped: rows of its memory that a reset replaces, and those that nothing can.
        xids: that it raises; whoever listens reads each once.
        recovery: what it must do to be well again, as the driver numbers it.
        linked: UUIDs of those with which NVLink connects it.
        ancestors: by UUID of others, what connects them in the tree of PCIe; those left out: the driver doesn't say.
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * GIB
    bus_id: str = "00000000:07:00.0"
    fails: dict[str, int] = field(default_factory=dict)
    parts: Sequence[Gpu | None] | None = None
    processes: dict[int, int | None] = field(default_factory=dict)
    busy_percent: int = 0
    unnamed_bytes: int = 0
    uncorrected: int = 0
    remapped: tuple[int, int] = (0, 0)
    xids: list[int] = field(default_factory=list)
    recovery: int = 0
    linked: frozenset[str] = frozenset()
    ancestors: dict[str, int] = field(default_factory=dict)


class Library:
    """What answers the bindings.

    Attributes:
        gpus: the devices, in PCI order.
        init: what initialising it returns.
        lacks: functions that it is too old for.
        open: how often it was initialised and not shut down.
        heard: devices whose events somebody listens for; None: nobody listens.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), *, init: int = 0, lacks: Sequence[str] = ()) -> None:
        self.gpus = list(gpus)
        self.init = init
        self.lacks = frozenset(lacks)
        self.open = 0
        self.heard: list[Gpu] | None = None
        parts = [part for gpu in gpus for part in gpu.parts or () if part is not None]
        self._all = [*gpus, *parts]
        self._tokens = [pynvml.struct_c_nvmlDevice_t() for _ in self._all]
        self._functions: dict[str, Callable[..., int]] = {
            "nvmlInitWithFlags": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._by_index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetUUID": self._of_device(lambda gpu, out, _: _write(out, gpu.uuid)),
            "nvmlDeviceGetName": self._of_device(lambda gpu, out, _: _write(out, gpu.name)),
            "nvmlDeviceGetPciInfo_v3": self._of_device(_pci_info),
            "nvmlDeviceGetMemoryInfo": self._of_device(_memory_info),
            "nvmlDeviceGetUtilizationRates": self._of_device(_utilization),
            "nvmlDeviceGetTotalEccErrors": self._of_device(_ecc_errors),
            "nvmlDeviceGetRemappedRows": self._of_device(_remapped_rows),
            "nvmlDeviceGetMigMode": self._of_device(_mig_mode),
            "nvmlDeviceGetMaxMigDeviceCount": self._of_device(_most_parts),
            "nvmlDeviceGetMigDeviceHandleByIndex": self._of_device(self._part),
            "nvmlDeviceGetComputeRunningProcesses_v3": self._of_device(_processes),
            "nvmlDeviceGetP2PStatus": self._of_device(self._peers),
            "nvmlDeviceGetTopologyCommonAncestor": self._of_device(self._ancestor),
            "nvmlDeviceGetFieldValues": self._of_device(_recovery),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._of_device(self._whole),
            "nvmlEventSetCreate": self._listen,
            "nvmlDeviceRegisterEvents": self._of_device(self._hear),
            "nvmlEventSetWait_v2": self._event,
            "nvmlEventSetFree": self._deafen,
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = self.__dict__["_functions"].get(name)
        if function is None or name in self.lacks:
            raise AttributeError(name)
        if not name.startswith("nvmlDevice"):
            return function  # type: ignore[no-any-return]

        def named(*arguments: Any) -> int:
            self._called = name
            return int(function(*arguments)) if self.open else int(pynvml.NVML_ERROR_UNINITIALIZED)

        return named

    def _init(self, _flags: Any) -> int:
        self.open += not self.init
        return self.init

    def _shutdown(self) -> int:
        self.open -= 1
        return 0

    def _count(self, out: Any) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def _by_index(self, index: Any, out: Any) -> int:
        return self._handed(self.gpus[index.value], out)

    def _by_uuid(self, uuid: Any, out: Any) -> int:
        found = next((gpu for gpu in self._all if gpu.uuid == uuid.value.decode()), None)
        return int(pynvml.NVML_ERROR_NOT_FOUND) if found is None else self._handed(found, out)

    def _handed(self, gpu: Gpu, out: Any) -> int:
        out._obj.contents = self._tokens[self._all.index(gpu)]
        return self._fault(gpu)

    def _part(self, gpu: Gpu, index: Any, out: Any) -> int:
        part = (gpu.parts or ())[index.value]
        return int(pynvml.NVML_ERROR_NOT_FOUND) if part is None else self._handed(part, out)

    def _whole(self, part: Gpu, out: Any) -> int:
        whole = next((gpu for gpu in self.gpus if part in (gpu.parts or ())), None)
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT) if whole is None else self._handed(whole, out)

    def _listen(self, _out: Any) -> int:
        self.heard = []
        return 0

    def _hear(self, gpu: Gpu, _kinds: Any, _set: Any) -> int:
        if gpu not in self.gpus:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert self.heard is not None
        self.heard.append(gpu)
        return 0

    def _event(self, _set: Any, out: Any, timeout_ms: Any) -> int:
        assert timeout_ms.value == 0, "nobody waits"
        if self.heard is None:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        raised = next((gpu for gpu in self.heard if gpu.xids), None)
        if raised is None:
            return int(pynvml.NVML_ERROR_TIMEOUT)
        out._obj.device.contents = self._tokens[self._all.index(raised)]
        out._obj.eventType, out._obj.eventData = pynvml.nvmlEventTypeXidCriticalError, raised.xids.pop(0)
        return 0

    def _deafen(self, _set: Any) -> int:
        self.heard = None
        return 0

    def _peers(self, gpu: Gpu, other: Any, kind: Any, out: Any) -> int:
        assert kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        linked = self._at(other).uuid in gpu.linked
        out._obj.value = pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return 0

    def _ancestor(self, gpu: Gpu, other: Any, out: Any) -> int:
        found = gpu.ancestors.get(self._at(other).uuid)
        out._obj.value = found or 0
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED) if found is None else 0

    def _at(self, handle: Any) -> Gpu:
        places = [ctypes.addressof(token) for token in self._tokens]
        return self._all[places.index(ctypes.addressof(handle.contents))]

    def _of_device(self, answer: Callable[..., int]) -> Callable[..., int]:
        def function(handle: Any, *arguments: Any) -> int:
            gpu = self._at(handle)
            return self._fault(gpu) or answer(gpu, *arguments)

        return function

    def _fault(self, gpu: Gpu) -> int:
        return gpu.fails.get(self._called, gpu.fails.get("", 0))


def install(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
    """Puts a library in the place of NVML's; None: there is none."""

    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def _write(out: Any, text: str) -> int:
    out.value = text.encode()
    return 0


def _pci_info(gpu: Gpu, out: Any) -> int:
    out._obj.busId = gpu.bus_id.encode()
    return 0


def _memory_info(gpu: Gpu, out: Any) -> int:
    used = sum(held or 0 for held in gpu.processes.values()) + gpu.unnamed_bytes
    out._obj.total, out._obj.used, out._obj.free = gpu.memory_bytes, used, gpu.memory_bytes - used
    return 0


def _utilization(gpu: Gpu, out: Any) -> int:
    # Parts have none of their own.
    if gpu.uuid.startswith("MIG-"):
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    out._obj.gpu = gpu.busy_percent
    return 0


def _ecc_errors(gpu: Gpu, _kind: Any, _counter: Any, out: Any) -> int:
    out._obj.value = gpu.uncorrected
    return 0


def _remapped_rows(gpu: Gpu, corrected: Any, uncorrected: Any, pending: Any, failed: Any) -> int:
    corrected._obj.value = uncorrected._obj.value = 0
    pending._obj.value, failed._obj.value = gpu.remapped
    return 0


def _mig_mode(gpu: Gpu, current: Any, pending: Any) -> int:
    current._obj.value = pending._obj.value = int(gpu.parts is not None)
    return 0


def _most_parts(gpu: Gpu, out: Any) -> int:
    out._obj.value = len(gpu.parts or ())
    return 0


def _processes(gpu: Gpu, count: Any, out: Any) -> int:
    if out is None:
        count._obj.value = len(gpu.processes)
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE) if gpu.processes else 0
    unsaid = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    for place, (pid, held) in enumerate(gpu.processes.items()):
        out[place].pid, out[place].usedGpuMemory = pid, unsaid if held is None else held
    count._obj.value = len(gpu.processes)
    return 0


def _recovery(gpu: Gpu, count: Any, values: Any) -> int:
    (asked,) = values._obj
    assert (count.value, asked.fieldId) == (1, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    asked.value.uiVal = gpu.recovery
    return 0
