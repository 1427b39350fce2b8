"""The faults of GPUs, as NVIDIA's driver reports them (NVML): memory that broke, what it asks for to recover, and the
Xids that it raised.

An Xid is the driver's number for something that went wrong on a GPU. Some numbers are a program's own doing, and end no
more than that program; after any other the GPU itself is not to be trusted (NVIDIA's catalog of Xids; the first set is
the one that NVIDIA's own device plugin for Kubernetes leaves to programs, and what the catalog answers with "restart
the application" or with nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from callboard.agents.system.nvml import NoDriver, failures, initialised, unsaid
from callboard.model.frozen import dataclass
from callboard.v1 import common_pb2

XIDS_OF_PROGRAMS = frozenset({8, 13, 31, 43, 45, 68, 94, 109})
"""Illegal accesses, endless kernels, the end of a process that the driver cleaned up; 94: broken memory that hit one
program only. Rows of memory that are replaced by the next reset are seen apart from it."""

XIDS_OF_NO_FAULT = frozenset({63, 92})
"""What is only written down: a row of memory that will be replaced, many errors that ECC corrected."""

XID_NAMES: Mapping[int, str] = {
    48: "an error of its memory that ECC could not correct",
    64: "rows of its memory that broke can't be replaced",
    74: "NVLink failed",
    79: "it has fallen off the bus",
    95: "an error of its memory that could hit any program",
    119: "its own processor (GSP) does not answer",
    120: "its own processor (GSP) failed",
    140: "an error of its memory that ECC could not correct",
}
"""What the most frequent ones mean."""

_RECOVERIES: Mapping[int, str] = {
    1: "it must be reset",
    2: "the machine must be restarted",
    3: "programs on the GPUs connected with it must end",
    4: "its programs must end, and it must be reset",
    5: "its NVLink domain must be recovered",
    6: "its bus must be reset",
    7: "the machine must be restarted",
}

MOST_EVENTS = 256
"""Xids that are read at most in one look; the others in the next."""


@dataclass(frozen=True, slots=True)
class Health:
    """What the driver says of a device.

    Attributes:
        uncorrected: errors since the driver was loaded that ECC found and couldn't correct.
        needs_reset: why the device must be reset or replaced; empty: nothing is known.
    """

    uncorrected: int = 0
    needs_reset: str = ""

    def worse_than(self, first: Health) -> str:
        """What has broken since; empty: nothing."""
        more = self.uncorrected - first.uncorrected
        return f"ECC found {more} errors of its memory that it could not correct" if more > 0 else ""

    @property
    def warning(self) -> str:
        """What is unusual about it."""
        return (
            f"ECC found {self.uncorrected} uncorrectable errors since its driver was loaded" if self.uncorrected else ""
        )


def health_of(nvml: Any, handle: Any) -> Health:
    """Devices without ECC, parts, and drivers that are older than a question have nothing to tell there."""
    silent = (*unsaid(nvml), nvml.NVMLError_NoPermission)
    uncorrected, needs_reset = 0, ""
    with suppress(*silent):
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        uncorrected = int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))
    with suppress(*silent):
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if failed:
            needs_reset = "rows of its memory that broke can't be replaced any more"
        elif pending:
            needs_reset = "rows of its memory broke and are replaced by its next reset"
    with suppress(*silent):
        (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if answer.nvmlReturn == 0 and answer.value.uiVal and not needs_reset:
            why = _RECOVERIES.get(answer.value.uiVal, f"recovery action {answer.value.uiVal}")
            needs_reset = f"its driver says that {why}"
    return Health(uncorrected, needs_reset)


class XidWatch:
    """The Xids of a node's devices that are faults of theirs. The driver tells of those that come while somebody
    listens; what came is kept until the device is well again in the eyes of whoever asks (:meth:`forget`)."""

    def __init__(self, devices: Sequence[common_pb2.Device]) -> None:
        self._devices = devices
        self._nvml: Any = None
        self._set: Any = None
        self.faults: dict[int, int] = {}
        """Index of a device → the first Xid that was a fault of it."""

    def poll(self) -> Mapping[int, int]:
        """Reads what came since the last time, without waiting."""
        nvml = self._listening()
        if nvml is None:
            return self.faults
        try:
            for _ in range(MOST_EVENTS):
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
                xid = int(event.eventData)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError and is_a_fault(xid):
                    for index in self._devices_of(nvml, event.device):
                        self.faults.setdefault(index, xid)
        except nvml.NVMLError_Timeout:
            pass  # nothing more came
        except failures(nvml):
            self.close()  # the driver was loaded anew, or a device is lost: listen again next time
        return self.faults

    def forget(self, index: int) -> None:
        """A device is well again."""
        self.faults.pop(index, None)

    def close(self) -> None:
        """Listen no more."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(*failures(nvml)):
                nvml.nvmlEventSetFree(self._set)
            with suppress(*failures(nvml)):
                nvml.nvmlShutdown()

    def _listening(self) -> Any:
        """NVML while it listens for its devices; None: there is no driver, or none of them can tell."""
        if self._nvml is not None or not self._devices:
            return self._nvml
        try:
            nvml = initialised()
        except NoDriver:
            return None
        self._nvml, heard = nvml, 0
        try:
            self._set = nvml.nvmlEventSetCreate()
            for device in self._devices:
                with suppress(*failures(nvml)):
                    handle = _whole(nvml, nvml.nvmlDeviceGetHandleByUUID(device.uuid.encode()))
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                    heard += 1
        except failures(nvml):
            heard = 0
        if not heard:
            self.close()
        return self._nvml

    def _devices_of(self, nvml: Any, handle: Any) -> Iterable[int]:
        """The node's devices that are a GPU, or parts of it."""
        uuid = _uuid(nvml, handle)
        for device in self._devices:
            with suppress(*failures(nvml)):
                if _uuid(nvml, _whole(nvml, nvml.nvmlDeviceGetHandleByUUID(device.uuid.encode()))) == uuid:
                    yield device.index


def is_a_fault(xid: int) -> bool:
    """Whether an Xid means that its GPU is not to be trusted."""
    return xid not in XIDS_OF_PROGRAMS | XIDS_OF_NO_FAULT


def _whole(nvml: Any, handle: Any) -> Any:
    """The GPU that a part is of; a whole one itself."""
    try:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except failures(nvml):
        return handle


def _uuid(nvml: Any, handle: Any) -> str:
    found = nvml.nvmlDeviceGetUUID(handle)
    return found.decode() if isinstance(found, bytes) else str(found)
