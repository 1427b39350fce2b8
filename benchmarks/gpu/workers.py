"""What runs in the workers of `handover.py`: one that fills its card, and says which card that is."""

from __future__ import annotations

import threading
import time
from typing import Any

GIB = 1 << 30


class Card:
    """Holds memory of its card while it runs."""

    def __init__(self, share: float, hangs: bool = False) -> None:
        """
        Args:
            share: of the card's memory to fill, from 0 to 1.
            hangs: cancel() never returns.
        """
        self.share, self.hangs = share, hangs
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

        return float(torch.ones(8, device="cuda").sum())

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
