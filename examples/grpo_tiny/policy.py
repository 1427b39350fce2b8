"""The policy: a small GPT in plain torch, with generation through a KV cache and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """How large everything is. The defaults keep a GPU busy: 168 M parameters, 2,048 answers at a time, 50 GiB.

    A smaller model waits for the CPU that launches its kernels, and then takes from run to run what the CPU takes.

    Attributes:
        vocabulary: number of tokens.
        width: of a hidden state.
        layers: number of blocks.
        heads: of each attention.
        prompt: tokens of a prompt.
        answer: tokens that are generated for it.
        group: answers to one prompt, which GRPO compares with each other.
        prompts: prompts of one piece, the unit that components hand on.
        pieces: of one iteration's batch.
        rate: learning rate.
    """

    vocabulary: int = 8192
    width: int = 2048
    layers: int = 3
    heads: int = 32
    prompt: int = 32
    answer: int = 48
    group: int = 16
    prompts: int = 128
    pieces: int = 6
    rate: float = 3e-5

    @property
    def length(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt + self.answer


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before_attention, self.before_feed = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.query_key_value = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.attended = nn.Linear(sizes.width, sizes.width, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, hidden: Tensor, cache: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        """Hidden states after this block, [batch, tokens, width].

        Args:
            hidden: [batch, tokens, width].
            cache: keys and values, each [batch, heads, length, width / heads], filled up to ``at``; None: no cache.
            at: place of the first token of ``hidden``.
        """
        batch, tokens, width = hidden.shape
        parts = self.query_key_value(self.before_attention(hidden)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            for kept, new in zip(cache, (key, value), strict=True):
                kept[:, :, at : at + tokens] = new
            key, value = (kept[:, :, : at + tokens] for kept in cache)
        # A single token sees all that came before it.
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1)
        hidden = hidden + self.attended(seen.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.feed(self.before_feed(hidden))


class Policy(nn.Module):
    """The policy."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, caches: list[tuple[Tensor, Tensor]] | None = None, at: int = 0) -> Tensor:
        """Logits, [batch, tokens, vocabulary], of tokens, [batch, tokens], that begin at place ``at``."""
        hidden = self.tokens(tokens) + self.places(torch.arange(at, at + tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, caches[number] if caches else None, at)
        return functional.linear(self.norm(hidden), self.tokens.weight)

    @torch.no_grad()
    def generate(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Prompts with sampled answers, [batch, length], of prompts, [batch, prompt]."""
        sizes, batch = self.sizes, len(prompts)
        shape = (batch, sizes.heads, sizes.length, sizes.width // sizes.heads)
        like = self.tokens.weight
        caches = [(like.new_empty(shape), like.new_empty(shape)) for _ in self.blocks]
        tokens = torch.empty(batch, sizes.length, dtype=torch.long, device=prompts.device)
        tokens[:, : sizes.prompt] = prompts
        logits = self(prompts, caches)[:, -1]
        for at in range(sizes.prompt, sizes.length):
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
            tokens[:, at : at + 1] = drawn
            if at + 1 < sizes.length:
                logits = self(drawn, caches, at)[:, -1]
        return tokens

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """Of each answer's tokens, [batch, answer], given tokens, [batch, length]."""
        logits = self(tokens[:, :-1])[:, self.sizes.prompt - 1 :].float()
        return -functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, self.sizes.prompt :].flatten(), reduction="none"
        ).view(len(tokens), -1)


def reward(tokens: Tensor, sizes: Sizes) -> Tensor:
    """Share of even tokens in each answer, [batch]: a rule that a policy drawn at random meets half the time."""
    return (tokens[:, sizes.prompt :] % 2 == 0).float().mean(-1)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better each answer is than its group, [batch] (GRPO, arXiv:2402.03300, 4.1.2)."""
    groups = rewards.view(-1, group)
    return ((groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(new: Tensor, old: Tensor, advantage: Tensor, clip: float = 0.2) -> Tensor:
    """The clipped objective, to minimise (the same paper, equation 3, without the term of a reference).

    Args:
        new: log-probabilities by the policy that is trained, [batch, answer].
        old: by the policy that generated, [batch, answer].
        advantage: [batch].
        clip: how far the ratio of the two counts.
    """
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    return -gain.mean()
