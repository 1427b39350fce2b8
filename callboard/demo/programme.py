"""The programme: the acts in order, and what the audience should know before each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from callboard.demo import acts
from callboard.demo.setting import CANCEL_TIMEOUT_S
from callboard.demo.stage import Stage
from callboard.demo.story import Verdict


@dataclass(frozen=True, slots=True)
class Act:
    """One act.

    Attributes:
        title: its title.
        scene: what the audience should know before.
        play: plays it.
    """

    title: str
    scene: str
    play: Callable[[Stage], Awaitable[Verdict]]


ACTS = (
    Act(
        "Rollouts fill the house",
        "Two rollouts of low priority want a GPU each. Reserved placement groups are not for them, "
        "so two dynamic ones are made.",
        acts.rollouts_start,
    ),
    Act(
        "The reward model finds its reserved place",
        "A reward model of priority 8.5 arrives. A reserved placement group was made for such jobs in advance: "
        "nobody has to yield.",
        acts.reward_starts,
    ),
    Act(
        "The trainer needs room",
        "A trainer of priority 9 arrives. The second reserved group is idle, but the pool has too few CPUs left of "
        "its quota. Somebody must yield: by the rules, train goes before reward and rollout.",
        acts.train_preempts,
    ),
    Act(
        "A more urgent rollout",
        "A rollout of priority 4.5 arrives; plain ones have 3. No label rule ranks rollouts, but within a pool "
        "a gap of 1.5 is enough. The group that the trainer's victim left is idle and of the right size.",
        acts.extra_reuses,
    ),
    Act(
        "Somebody does not want to go",
        "A rollout whose cancel() hangs for 8 seconds must yield to an urgent one. "
        f"It gets {CANCEL_TIMEOUT_S} s, then its process tree is killed. "
        "Meanwhile the controller has to answer others.",
        acts.slow_cancel,
    ),
    Act(
        "Curtain",
        "Everything ends. Nothing may be left: not in the controller, not in Ray, not on this machine.",
        acts.curtain,
    ),
)
