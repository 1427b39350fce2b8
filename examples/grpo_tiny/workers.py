"""The workers of the loop: plain classes with torch, no import of callboard or Ray.

Each keeps the policy on its own device, may leave that device (`offload`) and come back (`reload`), and records its
seconds with `ctx.timed` for `callboard profile`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from examples.grpo_tiny.policy import Policy, Sizes, advantages, grpo_loss, reward

Piece = dict[str, Any]
"""What travels: ``number``, ``tokens`` [batch, length], and from inference on ``old`` [batch, answer]; numpy arrays."""

SEED = 17


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on another device; in the host's memory it is pinned, so that copies run at the speed of the bus."""
    if device.type != "cpu" or tensor.device.type == "cpu":
        return tensor.to(device)
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)


class Holder:
    """What the three have in common: a policy on a device."""

    name = ""

    def __init__(self, folder: str = "", **sizes: Any) -> None:
        """
        Args:
            folder: where checkpoints are written; empty: nowhere.
            sizes: fields of :class:`~examples.grpo_tiny.policy.Sizes`.
        """
        self.folder, self.sizes = folder, Sizes(**sizes)

    def setup(self, ctx: Any) -> None:
        """Make the policy; the same for everybody."""
        self.ctx = ctx
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(SEED)
        self.policy = Policy(self.sizes)
        self.prepare()

    def prepare(self) -> None:
        """Put it where it works."""
        self.policy.to(self.device, self.kind)

    @contextlib.contextmanager
    def timed(self, what: str, iteration: int) -> Iterator[None]:
        """Record the block's seconds, once the device has done its work."""
        with self.ctx.timed(what, iteration=iteration, gpus=self.ctx.world_size if self.ctx.devices else 0):
            yield
            self.wait()

    def wait(self) -> None:
        """Return when the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def offload(self, iteration: int) -> None:
        """Leave the device's memory to others."""
        with self.timed(f"{self.name}_switch", iteration):
            self.move(torch.device("cpu"))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def reload(self, iteration: int) -> None:
        """Come back to the device."""
        with self.timed(f"{self.name}_switch", iteration):
            self.move(self.device)

    def move(self, device: torch.device) -> None:
        """Move what is kept between calls."""
        for parameter in self.policy.parameters():
            parameter.data = moved(parameter.data, device)

    @torch.no_grad()
    def load(self, weights: Sequence[np.ndarray]) -> None:
        """Take the actor's weights."""
        for parameter, new in zip(self.policy.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(new).view(self.kind))
        self.wait()

    def memory_gib(self) -> float:
        """The most of its GPU's memory that it has held so far; 0 without one."""
        return torch.cuda.max_memory_reserved() / (1 << 30) if self.device.type == "cuda" else 0.0

    def device_uuid(self) -> str:
        """UUID of the GPU it works on; "cpu" without one."""
        return str(torch.cuda.get_device_properties(0).uuid) if self.device.type == "cuda" else "cpu"


class Rollout(Holder):
    """Generates answers."""

    name = "rollout"

    def generate(self, iteration: int, numbers: Sequence[int]) -> Iterator[Piece]:
        """One piece after the other, as soon as it is done."""
        for number in numbers:
            with self.timed(self.name, iteration):
                generator = torch.Generator(self.device).manual_seed(iteration * self.sizes.pieces + number)
                shape = (self.sizes.prompts, self.sizes.prompt)
                prompts = torch.randint(self.sizes.vocabulary, shape, generator=generator, device=self.device)
                tokens = self.policy.generate(prompts.repeat_interleave(self.sizes.group, 0), generator).cpu().numpy()
            yield {"number": number, "tokens": tokens}


class Inference(Holder):
    """Says how probable the answers were under the policy that generated them."""

    name = "inference"

    @torch.no_grad()
    def score(self, iteration: int, piece: Piece) -> Piece:
        """The piece with ``old``."""
        with self.timed(self.name, iteration):
            tokens = torch.from_numpy(piece["tokens"]).to(self.device)
            return {**piece, "old": self.policy.log_probabilities(tokens).cpu().numpy()}


class Actor(Holder):
    """Trains: gradients of every piece, then one step. Several ranks add up their gradients."""

    name = "actor"

    def prepare(self) -> None:
        """Weights and optimizer in full precision; the forward pass in half, on a GPU."""
        self.policy.to(self.device)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.sizes.rate, weight_decay=0.0)
        self.rewards: list[float] = []
        if self.ctx.world_size > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def move(self, device: torch.device) -> None:
        """Move the weights and what the optimizer keeps."""
        super().move(device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = moved(value, device)

    def learn(self, iteration: int, piece: Piece) -> None:
        """Add the gradients of one piece."""
        with self.timed(self.name, iteration):
            tokens, old = (torch.from_numpy(piece[key]).to(self.device) for key in ("tokens", "old"))
            rewards = reward(tokens, self.sizes)
            with torch.autocast(self.device.type, self.kind, enabled=self.kind is not torch.float32):
                new = self.policy.log_probabilities(tokens)
            loss = grpo_loss(new, old, advantages(rewards, self.sizes.group))
            (loss / self.sizes.pieces).backward()
            self.rewards.append(float(rewards.mean()))

    def step(self, iteration: int) -> float:
        """Take a step; returns the mean reward of this rank's pieces."""
        with self.timed(self.name, iteration):
            if self.ctx.world_size > 1:
                for parameter in self.policy.parameters():
                    distributed.all_reduce(parameter.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        mean = sum(self.rewards) / len(self.rewards)
        self.rewards.clear()
        return mean

    @torch.no_grad()
    def weights(self) -> list[np.ndarray]:
        """The weights as the others keep them; half precision has no type in numpy and travels as integers."""
        carried = torch.int16 if self.kind is torch.bfloat16 else self.kind
        return [parameter.to(self.kind).view(carried).cpu().numpy() for parameter in self.policy.parameters()]

    def checkpoint(self) -> str | None:
        """Write the weights and the optimizer, if there is a folder for them; returns where."""
        if not self.folder:
            return None
        path = f"{self.folder}/actor-{self.ctx.rank}.pt"
        torch.save({"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        return path

    def restore(self, path: str) -> None:
        """Go on from a checkpoint."""
        kept = torch.load(path, map_location=self.device)
        self.policy.load_state_dict(kept["policy"])
        self.optimizer.load_state_dict(kept["optimizer"])
