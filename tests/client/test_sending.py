"""Is code sent once, and only once?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.client import Client
from callboard.model.faults import InvalidInput
from tests.controller.support import options_for, running


class Counting(Connection):
    """A connection that counts what is sent of packages."""

    sent: ClassVar[list[int]] = []

    async def _call_once(self, method: Any, request: Any, timeout_s: float) -> Any:
        if method is methods.PUT_PACKAGE:
            self.sent.append(len(request.data))
        return await super()._call_once(method, request, timeout_s)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("callboard.client.client.Connection", Counting)
    Counting.sent = []
    return Counting.sent


@pytest.mark.timeout(120)
async def test_50_mb_are_sent_once_and_a_change_sends_only_what_changed(tmp_path: Path, sent: list[int]) -> None:
    code, module = tmp_path / "code", tmp_path / "mod"
    for folder in (code / "pkg", module):
        folder.mkdir(parents=True)
    (code / "weights.bin").write_bytes(os.urandom(50_000_000))
    for number in range(2_000):
        (code / "pkg" / f"m{number}.py").write_text(f"X = {number}\n")
    (module / "__init__.py").write_text("X = 1\n")
    parts = [{"name": "w", "command": ["true"], "working_dir": str(code), "py_modules": [str(module), str(module)]}]
    async with running(options_for(tmp_path)) as controller, Client(controller.address) as client:
        first = await client.send_code({"components": parts})
        assert 50_000_000 < sum(sent) < 50_200_000
        sent.clear()
        assert await client.send_code({"components": parts}) == first
        assert sent == [0, 0], "a question for each package"
        sent.clear()
        (module / "__init__.py").write_text("X = 2\n")
        second = await client.send_code({"components": parts})
        assert 0 < sum(sent) < 1_000
        assert second["components"][0]["working_dir"] == first["components"][0]["working_dir"]
        assert len(set(second["components"][0]["py_modules"])) == 1


@pytest.mark.usefixtures("sent")
async def test_what_cant_travel_is_told_at_its_field(tmp_path: Path) -> None:
    parts = [{"name": "w", "command": ["true"], "py_modules": [str(tmp_path / "none")]}]
    async with running(options_for(tmp_path)) as controller, Client(controller.address) as client:
        with pytest.raises(InvalidInput, match=r"components\[0\].py_modules\[0\]: .*none is not there"):
            await client.send_code({"components": parts})
