"""RLinf's own laws of how long a component takes on g GPUs when it was measured once, by name.

They are kept so that answers can be compared with RLinf's (``toolkits/auto_placement`` at a3816b596), and because one
measurement is all that its users have. They are estimates: published measurements are missed by 21 … 136 % (actor,
log-probabilities, rollout), which is why a measured count always goes before a law, and why a law is never followed
beyond the size that was measured.
"""

from __future__ import annotations

import math

QUEUE_FREE_SHARE = 0.9
"""Share of ``max_running_requests`` that runs without waiting, from :data:`QUEUE_FROM` requests on."""

QUEUE_FROM = 128


def megatron_seconds(full_seconds: float, full_gpus: int, gpus: int) -> float:
    """Seconds of a training or log-probability step on ``gpus``, from the one on ``full_gpus``.

    ``t(W)·s / (1 + min(0.9, max(s/10, 0.1)))`` with ``s = W/g``: fewer ranks lose less to communication.

    Args:
        full_seconds: measured seconds on all GPUs.
        full_gpus: W, how many those were.
        gpus: g, fewer than W. The measured size itself is taken verbatim: here the law has a jump.
    """
    assert 0 < gpus < full_gpus
    scale = full_gpus / gpus
    return full_seconds * scale / (1 + min(0.9, max(scale / 10, 0.1)))


def rollout_seconds(
    full_seconds: float, full_gpus: int, gpus: int, *, instance_gpus: int, requests: int, max_running_requests: int
) -> float:
    """Seconds of a generation step on ``gpus``, from the one on ``full_gpus``.

    Flat while the instances take all requests at once, else inversely proportional to the GPUs.

    Args:
        full_seconds: measured seconds on all GPUs.
        full_gpus: W, how many those were.
        gpus: g, fewer than W.
        instance_gpus: GPUs of one engine: tensor × pipeline parallel size.
        requests: sequences of one iteration, ``rollout_batch_size · group_size``.
        max_running_requests: sequences that one engine runs at once.
    """
    assert 0 < gpus < full_gpus
    share = QUEUE_FREE_SHARE if max_running_requests >= QUEUE_FROM else 1
    at_once = gpus // instance_gpus * math.ceil(max_running_requests * share)
    return full_seconds if at_once >= requests else full_seconds * full_gpus / gpus


def envs_per_instance(env_num: int, instances: int) -> int | None:
    """Environments of the fullest instance; None when an instance would have none.

    ``ceil``, not floor: 40 environments on 3 instances make one of them step 14 (AP-10).
    """
    return math.ceil(env_num / instances) if instances <= env_num else None
