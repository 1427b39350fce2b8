"""How are workers called? As Ray actors by name, by a handle that is only names."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from callboard.client import workers
from callboard.client.calls import methods
from callboard.client.errors import WorkerGone
from callboard.client.workers import NoActor, TypedWorkerHandle, WorkerHandle
from callboard.v1.common_pb2 import WorkerKey
from callboard.v1.event_pb2 import Event, WatchRequest, WatchResponse
from callboard.v1.job_pb2 import GetJobRequest, GetJobResponse, Job, JobSpec, JobState, Worker, WorkerState
from tests.support.fake_api import FakeApi, ThreadedApi

HANDLE = WorkerHandle(
    job="train-00", component="train", rank=0, generation=3, node="n1", devices=("1",), actor_name="cb/j1/train/0/g3"
)


class FakeActor:
    """What Ray's handle of a worker host looks like."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.asked: list[dict[str, Any]] = []
        self.call = self.stream = self
        self._actor_id = id(self).to_bytes(16, "big")

    def options(self, **options: Any) -> FakeActor:
        self.asked.append(options)
        return self

    def remote(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "reference"


def test_a_method_of_the_users_class_is_a_call_of_the_worker_host(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakeActor()
    monkeypatch.setattr(workers, "_actor", lambda name: actor if name == "cb/j1/train/0/g3" else None)
    assert HANDLE.run.remote(1, key="x") == "reference"
    HANDLE.method("rank").remote()
    assert actor.calls == [(("run", 1), {"key": "x"}), (("rank",), {})]


def test_a_handle_pickles_and_copies() -> None:
    assert pickle.loads(pickle.dumps(HANDLE)) == HANDLE
    assert copy.deepcopy(HANDLE) == HANDLE
    assert pickle.loads(pickle.dumps(HANDLE.run)) == HANDLE.run


def test_a_plain_process_is_no_actor() -> None:
    plain = WorkerHandle(job="j", component="c", rank=2, generation=1, node="n1", devices=(), actor_name="")
    with pytest.raises(NoActor, match="j/c/2"):
        plain.run.remote()


def test_hooks_of_the_language_are_not_methods_of_the_user() -> None:
    with pytest.raises(AttributeError):
        _ = HANDLE._something


def test_the_sdk_needs_no_ray_until_a_worker_is_called() -> None:
    code = (
        "import sys; from callboard.client import Client, WorkerHandle; assert 'ray' not in sys.modules;"
        "import callboard.client as c; print('ok')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "ok"


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    import callboard.client

    for name in callboard.client._PUBLIC:
        assert getattr(callboard.client, name).__name__ == name


async def test_ft_a7_a_lost_call_never_holds_up_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from callboard.client import lost_calls

    looked = threading.Event()

    def why_gone(**_: object) -> str:
        assert looked.wait(90)
        return "exit code 7"

    monkeypatch.setattr(lost_calls, "why_gone", why_gone)
    called = lost_calls.Called(label="j/w/0", uid="u-a7", controller="nowhere:1", actor_name="cb/u-a7/w/0/g1")
    error = lost_calls.CallLost(called)
    assert str(error).endswith("its controller has not said why yet")
    again = pickle.loads(pickle.dumps(error))
    looked.set()  # Had it waited for the reason, it would never have come here.
    assert await error.explained() == await again.explained() == "exit code 7"
    assert str(pickle.loads(pickle.dumps(error))) == "worker j/w/0 ended in the middle of a call: exit code 7"


def test_options_are_rays_and_the_handle_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakeActor()
    monkeypatch.setattr(workers, "_actor", lambda _: actor)
    HANDLE.options(stream=True).rollout.remote(8)
    HANDLE.options(num_returns=2).run.remote()
    HANDLE.run.remote()
    assert actor.asked == [{"num_returns": "streaming"}, {"num_returns": 2}]
    assert [call[0][0] for call in actor.calls] == ["rollout", "run", "run"]
    streaming = HANDLE.options(stream=True, follow=False)
    assert pickle.loads(pickle.dumps(streaming)) == streaming != HANDLE


class TestAWorkerThatIsGone:
    """Which generation answers, and what is said when none does?"""

    @pytest.fixture
    def actors(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeActor]:
        """The actors that Ray has."""
        living: dict[str, FakeActor] = {}

        def get(name: str) -> FakeActor:
            if name not in living:
                raise ValueError(f"no actor {name}")
            return living[name]

        monkeypatch.setattr(workers, "_actor", get)
        return living

    @pytest.fixture
    def api(self) -> Iterator[FakeApi]:
        with ThreadedApi() as fake:
            yield fake

    @staticmethod
    def job(state: JobState.ValueType, *generations: tuple[int, str], reason: str = "") -> GetJobResponse:
        found = [
            Worker(
                key=WorkerKey(job_id="j1", component="train", rank=0),
                generation=generation,
                actor_name=name,
                state=WorkerState.WORKER_STATE_READY,
            )
            for generation, name in generations
        ]
        spec = JobSpec(name="train-00")
        return GetJobResponse(job=Job(uid="j1", spec=spec, state=state, state_reason=reason, workers=found, revision=5))

    @staticmethod
    def handle(api: FakeApi, **options: Any) -> WorkerHandle:
        made = WorkerHandle(
            job="train-00",
            component="train",
            rank=0,
            generation=3,
            node="n1",
            devices=(),
            actor_name="cb/j1/train/0/g3",
            uid="j1",
            controller=api.address,
        )
        return made.options(**options)

    def test_pc_14_the_next_call_goes_to_its_next_generation(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        actors["cb/spare/n2-7"] = FakeActor()
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_RUNNING, (4, "cb/spare/n2-7")))
        handle = self.handle(api)
        handle.run.remote(1)
        handle.options(stream=True).run.remote(2)
        pickle.loads(pickle.dumps(handle)).run.remote(3)
        assert [args[1] for args, _ in actors["cb/spare/n2-7"].calls] == [1, 2, 3]
        assert len(api.requests) == 2, "looked for once, and remembered"

    def test_pc_14_one_that_was_being_stopped_when_it_was_looked_up_is_never_called(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        dying = actors["cb/j1/train/0/g3"] = FakeActor()
        handle = replace(self.handle(api), was_ready=False)
        with pytest.raises(WorkerGone, match="was not ready when it was looked up"):
            handle.options(follow=False).run.remote(1)
        actors["cb/j1/train/0/g4"] = FakeActor()
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_RUNNING, (4, "cb/j1/train/0/g4")))
        handle.run.remote(2)
        assert dying.calls == []
        assert [args[1] for args, _ in actors["cb/j1/train/0/g4"].calls] == [2]

    def test_one_that_was_being_started_when_it_was_looked_up_is_called_once_it_is_ready(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        actors["cb/spare/n2-7"] = FakeActor()
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_RUNNING, (3, "cb/spare/n2-7")))
        replace(self.handle(api), was_ready=False, actor_name="").run.remote(1)
        assert [args[1] for args, _ in actors["cb/spare/n2-7"].calls] == [1]

    def test_one_that_turns_out_to_be_a_plain_process_is_no_actor(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_RUNNING, (3, "")))
        with pytest.raises(NoActor, match="train-00/train/0"):
            replace(self.handle(api), was_ready=False, actor_name="").run.remote(1)
        assert actors == {}

    def test_it_is_waited_for(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_STARTING))
        actors["cb/j1/train/0/g4"] = FakeActor()

        async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
            api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_RUNNING, (4, "cb/j1/train/0/g4")))
            yield WatchResponse(revision=6, events=[{"revision": 6}])  # type: ignore[list-item]
            await asyncio.Event().wait()

        api.on(methods.WATCH, watch)
        assert self.handle(api).run.remote() == "reference"

    async def test_ft_f2_the_callers_event_loop_goes_on_while_a_worker_is_waited_for(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        """Its own tasks may be what the worker waits for: here one makes the room."""
        successor = actors["cb/j1/train/0/g4"] = FakeActor()
        came = self.job(JobState.JOB_STATE_RUNNING, (4, "cb/j1/train/0/g4"))
        room = threading.Event()
        api.on(methods.GET_JOB, lambda _: came if room.is_set() else self.job(JobState.JOB_STATE_PENDING))
        watched = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
            loop.call_soon_threadsafe(watched.set)
            await asyncio.to_thread(room.wait)
            yield WatchResponse(revision=6, events=[Event(revision=6)])
            await asyncio.Event().wait()

        api.on(methods.WATCH, watch)
        handle = self.handle(api, wait=60)
        first, second = handle.run.remote(1), handle.run.remote(2)
        pair = handle.options(num_returns=2).run.remote(3)
        items = handle.options(stream=True).run.remote(4)
        ready = asyncio.create_task(handle.ready())
        await watched.wait()
        assert successor.calls == []
        room.set()
        assert await ready is handle
        for call in (first, second, *pair):
            with pytest.raises(TypeError):  # the reference of the fake is a text, which nobody can await
                await call
        with pytest.raises(TypeError):
            await anext(items)
        assert [args[1] for args, _ in successor.calls] == [1, 2, 3, 4], "in their order"
        assert len(api.seen(WatchRequest)) == 1, "looked for once"
        assert handle.run.remote(5) == "reference", "Ray's own reference again"

    async def test_ft_f2_what_became_of_it_is_raised_by_the_await(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_FAILED, reason="out of memory"))
        call = self.handle(api).run.remote()
        with pytest.raises(WorkerGone, match="out of memory") as caught:
            await call
        assert (caught.value.job, caught.value.component, caught.value.rank) == ("train-00", "train", 0)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with pytest.raises(WorkerGone, match="not to wait for its next generation"):
            self.handle(api, follow=False).run.remote()
        with pytest.raises(WorkerGone):
            await self.handle(api, follow=False).ready()
        assert actors == {}

    async def test_ft_f2_who_gives_up_waiting_does_not_end_the_search_of_the_others(
        self, api: FakeApi, actors: dict[str, FakeActor]
    ) -> None:
        actors["cb/j1/train/0/g4"] = FakeActor()
        came, asked = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        async def get(_: object) -> GetJobResponse:
            loop.call_soon_threadsafe(asked.set)
            await asyncio.to_thread(came.wait)
            return self.job(JobState.JOB_STATE_RUNNING, (4, "cb/j1/train/0/g4"))

        api.on(methods.GET_JOB, get)
        handle = self.handle(api)
        impatient, patient = asyncio.create_task(handle.ready()), asyncio.create_task(handle.ready())
        await asked.wait()
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        came.set()
        assert await patient is handle
        assert len(api.seen(GetJobRequest)) == 2, "one search: the handle of the job, then the job"

    def test_who_does_not_follow_is_told_at_once(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        with pytest.raises(WorkerGone, match=r"train-00/train/0 is gone.*not to wait"):
            self.handle(api, follow=False).run.remote()
        assert api.requests == []
        assert actors == {}

    def test_of_a_job_that_ended_nothing_comes(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_FAILED, reason="worker train/0 was killed by signal 9"))
        with pytest.raises(WorkerGone, match="has ended: worker train/0 was killed"):
            self.handle(api).run.remote()
        assert actors == {}

    def test_patience_has_an_end(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        api.on(methods.GET_JOB, self.job(JobState.JOB_STATE_PENDING, (3, "cb/j1/train/0/g3")))

        async def watch(_: WatchRequest) -> AsyncIterator[WatchResponse]:
            await asyncio.Event().wait()
            yield WatchResponse()

        api.on(methods.WATCH, watch)
        with pytest.raises(WorkerGone, match="did not reach a later generation"):
            self.handle(api, wait=0.05).run.remote()
        assert actors == {}

    def test_a_controller_that_is_away_is_named(self, api: FakeApi, actors: dict[str, FakeActor]) -> None:
        with pytest.raises(WorkerGone, match=r"no controller answers at 127\.0\.0\.1:1"):
            replace(self.handle(api, wait=0.05), controller="127.0.0.1:1").run.remote()
        assert actors == {}


class Trainer:
    """A class of workers."""

    def run(self, steps: int) -> str:
        """Does work."""
        return str(steps)

    limit = 3


class TestHandlesThatKnowTheirClass:
    """``job.workers("train", type=Trainer)``."""

    @pytest.fixture
    def actor(self, monkeypatch: pytest.MonkeyPatch) -> FakeActor:
        made = FakeActor()
        monkeypatch.setattr(workers, "_actor", lambda _: made)
        return made

    def test_its_methods_are_called_by_name_or_as_they_are(self, actor: FakeActor) -> None:
        typed = TypedWorkerHandle.of(HANDLE, Trainer)
        typed.run.remote(3)
        _ = typed.call(Trainer.run, 4)
        _ = typed.options(follow=False).call(Trainer.run, steps=5)
        assert actor.calls == [(("run", 3), {}), (("run", 4), {}), (("run",), {"steps": 5})]
        assert pickle.loads(pickle.dumps(typed)) == typed

    def test_a_name_that_is_no_method_is_refused_before_anything_is_called(self, actor: FakeActor) -> None:
        typed = TypedWorkerHandle.of(HANDLE, Trainer)
        for name in ("rum", "limit"):
            with pytest.raises(AttributeError, match=f"Trainer has no method {name}; "):
                getattr(typed, name).remote()
        with pytest.raises(AttributeError, match=r"did you mean run\?"):
            typed.rum.remote()
        assert actor.calls == []
        assert "run" in dir(typed)
        assert "limit" not in dir(typed)

    def test_a_class_of_rays_decorator_counts_as_the_class_it_was_made_of(self, actor: FakeActor) -> None:
        decorated: Any = SimpleNamespace(__ray_actor_class__=Trainer)
        typed: TypedWorkerHandle[Any] = TypedWorkerHandle.of(HANDLE, decorated)
        typed.run.remote(1)
        assert typed.worker_type is Trainer
