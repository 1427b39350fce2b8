"""Data-parallel training with `torch.distributed`, as it is written for `torchrun`: nothing here knows of callboard.

    callboard run --pool research --nodes 2 --cpus-per-node 2 --tail all -- \\
        torchrun --nproc-per-node 2 examples/programs/ddp.py --steps 20

Each rank has its own part of the data; the gradients are averaged over gloo (nccl with GPUs). With
CALLBOARD_CHECKPOINT_DIR set, rank 0 of each attempt goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch._dynamo  # The module that DistributedDataParallel loads later: see main().
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Fit a line to noisy points; every rank ends with the same weights.

    torch._dynamo must be there before the group is: loaded after it, it keeps the group, whose gloo threads then live
    until the interpreter ends and may abort it ("terminate called without an active exception", torch 2.13, PyTorch's
    issue 190489). And the model must go before the group: where it goes last, its end joins those threads and holds the
    interpreter's lock, while one of them may wait for that lock to forget the barrier: it would never end.
    """
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=20)
    steps: int = arguments.parse_args().steps
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    points = torch.rand(256, 1)
    values = 3 * points + 1 + 0.01 * torch.randn(256, 1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    saved = Path(os.environ.get("CALLBOARD_CHECKPOINT_DIR", ".")) / "ddp.pt"
    if saved.exists():
        model.load_state_dict(torch.load(saved, weights_only=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), values)
        loss.backward()
        optimizer.step()
    if "CALLBOARD_CHECKPOINT_DIR" in os.environ and os.environ["LOCAL_RANK"] == "0":
        torch.save(model.state_dict(), saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
    weight = model.module.weight.item()
    print(f"rank {rank} of {dist.get_world_size()}: weight {weight:.6f}", flush=True)
    dist.barrier()  # Nobody leaves before all have what they need of each other.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
