"""Traces of jobs: what they hold, whose trace they are part of, and that they end with the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from callboard.client.client import Client
from callboard.controller.metrics import traces
from callboard.controller.options import ControllerOptions
from callboard.model.options import OptionError
from callboard.v1 import event_pb2, job_pb2
from tests.controller.support import api_at, job, options_for, pool, running
from tests.support.fake_agent import FakeAgent


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a controller with `--otlp` sends."""
    exporter = InMemorySpanExporter()

    def provider_for(endpoint: str) -> TracerProvider:
        assert endpoint == "http://127.0.0.1:4317"
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return provider

    monkeypatch.setattr("callboard.controller.server.provider_for", provider_for)
    return exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def reached(name: str, state: str) -> Callable[[event_pb2.Event], bool]:
    return lambda event: event.subject == f"jobs/{name}" and event.state == state


async def test_a_job_is_a_trace_of_its_states_with_the_start_of_each_worker(
    tmp_path: Path, sent: InMemorySpanExporter
) -> None:
    options = options_for(tmp_path, otlp="http://127.0.0.1:4317")
    async with running(options) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=2):
            await api.submit(job("a", gpu=1000))
            await api.until(reached("a", "RUNNING"))
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a", reason="enough"))
            await api.until(reached("a", "CANCELLED"))
            spans = by_name(sent)
    assert set(spans) == {"job", "wait", "start", "worker", "run", "stop"}
    whole = spans["job"]
    assert whole.attributes is not None
    assert whole.attributes["callboard.job"] == "a"
    assert whole.attributes["callboard.pool"] == "rlhf"
    assert whole.attributes["callboard.state"] == "CANCELLED"
    assert {span.context.trace_id for span in spans.values()} == {whole.context.trace_id}
    phases = [spans[name] for name in ("wait", "start", "run", "stop")]
    assert all(span.parent is not None and span.parent.span_id == whole.context.span_id for span in phases)
    assert [span.start_time for span in phases[1:]] == [span.end_time for span in phases[:-1]], "no gap between states"
    assert (whole.start_time, whole.end_time) == (phases[0].start_time, phases[-1].end_time)
    worker = spans["worker"]
    assert worker.parent is not None
    assert worker.parent.span_id == spans["start"].context.span_id
    assert worker.attributes is not None
    assert worker.attributes["callboard.worker"] == "w/0"
    assert worker.attributes["callboard.node"] == "n1"


async def test_it_is_part_of_the_trace_of_the_program_that_submitted_it(
    tmp_path: Path, sent: InMemorySpanExporter
) -> None:
    tracer = TracerProvider().get_tracer("test")
    options = options_for(tmp_path, otlp="http://127.0.0.1:4317")
    async with running(options) as controller, Client(controller.address) as client:
        await client.ensure_pool("rlhf")
        with trace.use_span(tracer.start_span("training")) as mine:
            made = await client.submit(
                {"name": "a", "pool": "rlhf", "wait_for_nodes": "1h", "components": [{"name": "w", "actor": "a:B"}]}
            )
        await made.cancel("enough")
        await made.finished(timeout=30)
        span = by_name(sent)["job"]
    assert span.context.trace_id == mine.get_span_context().trace_id
    assert span.parent is not None
    assert span.parent.span_id == mine.get_span_context().span_id


async def test_what_is_no_trace_context_is_ignored_and_followed_jobs_are_bounded(
    tmp_path: Path, sent: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "FOLLOWED", 1)
    options = options_for(tmp_path, otlp="http://127.0.0.1:4317")
    async with running(options) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=2):
            for name in ("a", "b"):
                request = job_pb2.SubmitJobRequest(spec=job(name, gpu=1000))
                await api.jobs.SubmitJob(request, metadata=(("traceparent", "x" * 4000),))
            for name in ("a", "b"):
                await api.until(reached(name, "RUNNING"))
            for name in ("a", "b"):
                await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/{name}"))
                await api.until(reached(name, "CANCELLED"))
        jobs = [span for span in sent.get_finished_spans() if span.name == "job"]
    assert len(jobs) == 1
    assert jobs[0].parent is None


def test_an_endpoint_that_is_not_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"write e\.g\. http://127.0.0.1:4317"):
        ControllerOptions(state_dir=tmp_path, otlp="collector:4317")
