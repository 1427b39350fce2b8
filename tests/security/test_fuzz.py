"""Requests of the right shape with senseless content: each is answered or refused in words, and none is a defect.

A short run; ``scripts/fuzz --requests 100000`` is the long one, against a controller in a process of its own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import structlog

from callboard._version import __version__
from callboard.controller.options import Limits
from callboard.controller.services import guard
from callboard.v1 import agent_pb2
from callboard.wire.errors import parse_error
from tests.controller.support import options_for, running
from tests.security.fuzzing import HARMLESS, ORDER, OWNER, fuzz, revision_of, tokens_for

REQUESTS = 100
"""Of each caller."""

FIRST_MESSAGES = {
    "bytes": b"\xff\xff\xff\xff not a message",
    "nothing": b"",
    "a heartbeat": agent_pb2.SessionRequest(heartbeat=agent_pb2.Heartbeat(sequence=1)).SerializeToString(),
    "an empty Hello": agent_pb2.SessionRequest(hello=agent_pb2.Hello(version=__version__)).SerializeToString(),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fresh", [False, True], ids=["a known seed", "a fresh seed"])
async def test_senseless_requests_are_refused_in_words_and_change_nothing_for_those_who_may_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fresh: bool
) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if fresh else 7
    limits = Limits(client_requests_s=1_000_000, client_streams=1_000, client_refusals_s=1_000_000)
    (tmp_path / "state").mkdir(mode=0o700)
    tokens = tokens_for(tmp_path / "state")
    async with running(options_for(tmp_path, limits=limits)) as controller:
        for place, who in enumerate(ORDER):
            before = await revision_of(controller.address, tokens[OWNER])
            numbers = iter(range(place * REQUESTS, (place + 1) * REQUESTS))
            found = await fuzz(controller.address, tokens, seed=seed, numbers=numbers, who=who)
            assert not found.wrong
            assert found.codes[who].total() == REQUESTS
            assert who not in HARMLESS or before == await revision_of(controller.address, tokens[OWNER]), (seed, who)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("data", FIRST_MESSAGES.values(), ids=list(FIRST_MESSAGES))
async def test_a_flood_of_malformed_first_messages_of_agents_is_refused_in_words_and_leaves_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(guard, "REFUSALS_LOGGED", 3)
    (tmp_path / "state").mkdir(mode=0o700)
    metadata = (("authorization", f"Bearer {tokens_for(tmp_path / 'state')['agent']}"),)
    with structlog.testing.capture_logs() as lines:
        async with (
            running(options_for(tmp_path)) as controller,
            grpc.aio.insecure_channel(controller.address) as channel,
        ):
            for _ in range(10):
                session: Any = channel.stream_stream("/callboard.v1.AgentService/Session")(
                    timeout=30, metadata=metadata
                )
                await session.write(data)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await session.read()
                error = parse_error(caught.value)
                assert error.code == "INVALID_ARGUMENT", error
                assert "defect" not in error.message
                assert error.message.count(" ") > 5, "it says what, why and what to do"
            assert not controller.driver.state.nodes
    said = [line for line in lines if line.get("method") == "Session" or "decoded" in line["event"]]
    seen = [line for line in said if line["log_level"] != "debug"]
    assert 1 <= len(seen) <= 3
    assert not [line for line in lines if line["event"] == "agent stream ended" or line.get("exc_info")]
