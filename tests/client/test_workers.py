"""How are workers called? As Ray actors by name, by a handle that is only names."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from callboard.client import workers
from callboard.client.workers import NoActor, WorkerHandle

HANDLE = WorkerHandle(
    job="train-00", component="train", rank=0, generation=3, node="n1", devices=("1",), actor_name="cb/j1/train/0/g3"
)


class FakeActor:
    """What Ray's handle of a worker host looks like."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.call = self

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
