"""What runs in the workers of the benchmarks beside it: one that fills its card, and says which card that is."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

GIB = 1 << 30

_WRITES_TO_NOTHING = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wrong()
{
    .reg .b64 %to;
    .reg .b32 %what;
    mov.u64 %to, 3735928560;
    mov.u32 %what, 1;
    st.global.u32 [%to], %what;
    ret;
}
"""
"""A kernel in PTX that writes to an address that nobody allocated."""


class Card:
    """Holds memory of its card while it runs."""

    def __init__(self, share: float, hangs: bool = False, device: str = "cuda") -> None:
        """
        Args:
            share: of the card's memory to fill, from 0 to 1.
            hangs: cancel() never returns.
            device: where it computes.
        """
        self.share, self.hangs, self.device = share, hangs, device
        self.stop = threading.Event()
        self.starts = 0

    def setup(self, ctx: Any) -> None:
        """Keep who this is."""
        self.ctx = ctx

    def run(self) -> None:
        """Work until told to stop."""
        self.stop.wait()

    def fill(self) -> float:
        """Take the memory; returns GiB."""
        import torch  # noqa: PLC0415 - what a start costs is what is measured

        _, total = torch.cuda.mem_get_info()
        self.held = torch.ones(int(total * self.share), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return len(self.held) / GIB

    def first(self) -> float:
        """The first result of the card."""
        import torch  # noqa: PLC0415

        return float(torch.ones(8, device=self.device).sum())

    def take(self, gib: float) -> tuple[float, float]:
        """Take so much memory; returns GiB of the card that were free before, and all that it has."""
        import torch  # noqa: PLC0415

        free, total = torch.cuda.mem_get_info() if self.device == "cuda" else (0, 0)
        self.held = torch.ones(int(gib * GIB), dtype=torch.uint8, device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return free / GIB, total / GIB

    def limit(self) -> tuple[int, bool, bool]:
        """Bytes of the card that this worker was promised; and whether it gets 0.9 of them, and 1.1 of them."""
        import torch  # noqa: PLC0415

        promised = int(os.environ["CALLBOARD_GPU_MEMORY_BYTES"])
        got = []
        for tenths in (9, 11):
            try:
                torch.empty(promised * tenths // 10, dtype=torch.uint8, device="cuda")
                got.append(True)
            except torch.OutOfMemoryError:
                got.append(False)
            torch.cuda.empty_cache()
        return promised, got[0], got[1]

    def cards(self) -> tuple[str, str]:
        """UUIDs of the card: as CUDA sees it, and as the driver knows the id that the scheduler gave."""
        import pynvml  # noqa: PLC0415
        import torch  # noqa: PLC0415

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(self.ctx.devices[0]))
        return f"GPU-{torch.cuda.get_device_properties(0).uuid}", str(pynvml.nvmlDeviceGetUUID(handle))

    def child(self) -> tuple[str, str]:
        """UUIDs of the cards of this worker and of a Ray task that it starts inside its group."""
        import ray  # noqa: PLC0415
        import torch  # noqa: PLC0415

        @ray.remote(num_gpus=1, num_cpus=0)
        def card() -> str:
            return str(torch.cuda.get_device_properties(0).uuid)

        return str(torch.cuda.get_device_properties(0).uuid), str(ray.get(card.remote(), timeout=120))

    def sum_of_ranks(self) -> float:
        """All ranks add up their numbers through NCCL."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        distributed.init_process_group("nccl")
        number = torch.tensor([float(self.ctx.rank + 1)], device="cuda")
        distributed.all_reduce(number)
        distributed.destroy_process_group()
        return float(number)

    def where(self) -> dict[str, Any]:
        """Which devices it has, and which CPUs: those that it was told of, and those that it may run on."""
        cpus = sorted(os.sched_getaffinity(0))
        return {"devices": list(self.ctx.devices), "affinity": os.environ["CALLBOARD_CPU_AFFINITY"], "cpus": cpus}

    def fault(self) -> int:
        """Write to memory that isn't there; the error that CUDA says. Its driver alone, so that nothing is imported."""
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        steps = (
            cuda.cuInit(0),
            cuda.cuDeviceGet(ctypes.byref(device), 0),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            cuda.cuCtxSetCurrent(context),
            cuda.cuModuleLoadData(ctypes.byref(module), _WRITES_TO_NOTHING),
            cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"wrong"),
            cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None),
        )
        if any(steps):
            raise RuntimeError(f"the kernel could not be launched: CUDA errors {steps}")
        return int(cuda.cuCtxSynchronize())

    def restore(self, state: str) -> None:
        """Count the starts."""
        self.starts = int(state)

    def checkpoint(self) -> bytes:
        """The count of starts."""
        return str(self.starts + 1).encode()

    def started(self) -> int:
        """Starts before this one."""
        return self.starts

    def cancel(self) -> None:
        """Stop, or hang."""
        if self.hangs:
            time.sleep(10**6)
        self.stop.set()
