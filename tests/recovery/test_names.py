"""To whom does a job's name lead while one job of that name goes and the next one comes? On real Ray."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

import pytest

from tests.recovery.conftest import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600), pytest.mark.ray, pytest.mark.slow]

ROUNDS = 6
"""Gaps between two jobs. Lookups go on all through each, and at least two meet each job."""


@pytest.mark.parametrize("site", ["ray"], indirect=True)
async def test_pc_14_a_lookup_in_the_gap_gives_the_new_worker_or_a_clear_error(site: Site) -> None:
    address = (await site.client.stats()).ray_address
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.lookups", site.controller.address),
        *(str(site.run_dir / "ray-token"), address.rsplit(":", 1)[0], str(ROUNDS)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()[-4000:]
    shown = json.loads(output.splitlines()[-1])
    assert len(set(shown["uids"])) == ROUNDS + 1, "the name was free each time"

    lookups = shown["lookups"]
    told = Counter(each["error"] for each in lookups if each["error"])
    assert set(told) <= {"NoWorkers", "WorkerGone", "CallLost", "WorkerStopping", "NotAssigned"}, told
    answered = [each for each in lookups if each["answered"]]
    # Every job answered, and none once its cancel was acknowledged: neither a call nor a handle of the dying actor.
    assert {each["answered"][0] for each in answered} == set(shown["uids"])
    late = [each for each in answered if shown["cancelled"].get(each["answered"][0], each["asked_s"]) < each["asked_s"]]
    assert late == []
    assert [each for each in lookups if each["dying"]] == []
    assert told["WorkerGone"] + told["NoWorkers"] > 0, "the gap was met"
    await site.assert_no_worker_but_spares()
