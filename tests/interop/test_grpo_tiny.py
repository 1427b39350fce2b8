"""Is examples/grpo_tiny a loop that learns, in every layout the same, and do its components keep their turns?"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.grpo_tiny import workers
from examples.grpo_tiny.loop import ORDER, Layout, Loop, Way, layout_of, spec
from examples.grpo_tiny.policy import Policy, Sizes, advantages, grpo_loss

SIZES = Sizes(vocabulary=32, width=32, layers=2, heads=2, prompt=4, answer=8, group=8, prompts=4, pieces=4, rate=3e-3)

COLLOCATED = dict.fromkeys(ORDER, (0,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch cost these sizes more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Context:
    """What `setup` is told, with what was timed."""

    devices = ("0",)
    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.blocks: list[str] = []

    @contextlib.contextmanager
    def timed(self, component: str, **_: int) -> Iterator[None]:
        self.blocks.append(component)
        yield


class Handle:
    """A worker in this process that is called like one of a job; every call starts when its turn comes."""

    def __init__(self, worker: Any, calls: list[tuple[str, str]]) -> None:
        self._worker, self._calls, self._turn = worker, calls, asyncio.Lock()

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        return SimpleNamespace(
            remote=lambda *arguments: (
                self._stream(method, arguments)
                if name == "generate"
                else asyncio.ensure_future(self._call(method, arguments))
            )
        )

    async def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        async with self._turn:
            values = [await each if asyncio.isfuture(each) else each for each in arguments]
            self._calls.append((self._worker.name, method.__name__))
            return method(*values)

    async def _stream(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> AsyncIterator[Any]:
        for piece in method(*arguments):
            self._calls.append((self._worker.name, method.__name__))
            made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            made.set_result(piece)
            yield made
            await asyncio.sleep(0)


def run(layout: Layout, iterations: int, *, way: Way = Way.LEAVING) -> tuple[list[float], list[tuple[str, str]]]:
    """(mean reward of each iteration, calls of all workers in their order), with one worker of each component."""
    calls: list[tuple[str, str]] = []

    async def run() -> list[float]:
        handles = {}
        for name in ORDER:
            worker = getattr(workers, name.capitalize())(**asdict(SIZES))
            worker.setup(Context())
            handles[name] = [Handle(worker, calls)]
        loop = Loop(SimpleNamespace(workers=handles.__getitem__), layout, SIZES, way=way)  # type: ignore[arg-type]
        if way is Way.STAYING:
            await loop.enter(0)
        return [(await loop.iteration(number))[1] for number in range(iterations)]

    return asyncio.run(run()), calls


def test_a_cache_changes_no_logits() -> None:
    torch.manual_seed(1)
    policy = Policy(SIZES)
    tokens = torch.randint(SIZES.vocabulary, (3, SIZES.length))
    shape = (3, SIZES.heads, SIZES.length, SIZES.width // SIZES.heads)
    caches = [(torch.empty(shape), torch.empty(shape)) for _ in policy.blocks]
    with torch.no_grad():
        whole = policy(tokens)
        parts = [policy(tokens[:, :5], caches), *(policy(tokens[:, at : at + 1], caches, at) for at in range(5, 12))]
    assert torch.allclose(whole, torch.cat(parts, 1), atol=1e-5)


def test_grpo_prefers_what_is_better_than_its_group_and_clips() -> None:
    advantage = advantages(torch.tensor([0.0, 1.0, 3.0, 3.0]), group=2)
    assert advantage[0] < 0 < advantage[1]
    assert advantage[2:].tolist() == [0, 0]
    old = torch.zeros(1, 1)
    for gain, inside, outside in ((1.0, 0.1, 0.5), (-1.0, -0.1, -0.5)):
        for start, moves in ((inside, True), (outside, False)):
            new = torch.full((1, 1), start, requires_grad=True)
            grpo_loss(new, old, torch.tensor([gain])).backward()
            assert (new.grad.abs().item() > 0) is moves


def test_the_policy_learns_the_rule_the_same_in_every_layout() -> None:
    collocated, _ = run(COLLOCATED, 40)
    assert sum(collocated[-5:]) / 5 > sum(collocated[:5]) / 5 + 0.1
    split, _ = run({"rollout": [0], "inference": [1], "actor": [2]}, 10)
    assert split == pytest.approx(collocated[:10])


def test_components_on_one_gpu_take_turns() -> None:
    _, calls = run(COLLOCATED, 1)
    names = [name for name, method in calls if method != "load"]
    assert sorted(names, key=ORDER.index) == names
    assert calls[0] == ("rollout", "reload")
    assert [call for call in calls if call[1] == "offload"] == [(name, "offload") for name in ORDER]


def test_components_that_stay_on_one_gpu_take_turns_and_move_nothing() -> None:
    _, calls = run(COLLOCATED, 1, way=Way.STAYING)
    # First everybody comes from wherever another loop has left it.
    assert calls[:3] == [(name, "reload") for name in ORDER]
    names = [name for name, method in calls[3:] if method != "load"]
    assert sorted(names, key=ORDER.index) == names
    assert {method for _, method in calls[3:]}.isdisjoint({"offload", "reload"})


def test_components_on_gpus_of_their_own_work_at_the_same_time_and_never_leave() -> None:
    for layout, way in (
        ({"rollout": [0], "inference": [1], "actor": [2]}, Way.LEAVING),
        (COLLOCATED, Way.AT_ONCE),
    ):
        _, calls = run(layout, 1, way=way)
        assert {method for _, method in calls}.isdisjoint({"offload", "reload"})
        assert calls.index(("inference", "score")) < len(calls) - calls[::-1].index(("rollout", "generate"))


def test_the_job_says_who_lies_where() -> None:
    job = spec("g", layout_of("rollout: 0-1; inference,actor: 2-3", 4), {"layers": 1})
    assert '"inference,actor": "2-3"' in str(job.placement_config)
    with pytest.raises(SystemExit, match="the components are rollout, inference, actor"):
        layout_of("rollout: all", 4)
