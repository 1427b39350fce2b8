"""Reasons in a list of jobs: a list carries none, so the first jobs that wait are asked for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from callboard.client.client import Client
from callboard.v1.job_pb2 import Job, JobState
from callboard.wire.refusals import NotFound

MOST = 50
"""Jobs that are asked: what fits a screen. Each costs the controller a planning."""


async def with_reasons(client: Client, jobs: Sequence[Job], *, most: int = MOST) -> list[Job]:
    """``jobs``, the first that wait with what they wait for; at most ``most`` of them."""
    waiting = [job for job in jobs if job.state == JobState.JOB_STATE_PENDING and not job.waiting_for][:most]
    asked = await asyncio.gather(*(_ask(client, job) for job in waiting))
    known = {job.uid: job for job in asked}
    return [known.get(job.uid, job) for job in jobs]


async def _ask(client: Client, job: Job) -> Job:
    try:
        return (await client.get_job(job.uid)).job
    except NotFound:
        return job  # It ended and was forgotten meanwhile.
