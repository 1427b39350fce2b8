"""Traces of jobs for OpenTelemetry, made from the event log: submit, wait, start, run, yield, stop.

A job is one span from its submit to its end; each state is a span below it, and the start of each worker one below the
job's start. Where the client that submitted it was in a trace of its own (`traceparent`), the job's span is part of it.
Spans are made after the fact with the times of the event log, so tracing changes nothing and costs decisions nothing. A
restart of the controller begins new spans; those that were open are not sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from callboard._version import __version__
from callboard.controller.loop.driver import Listener
from callboard.scheduler import State
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.states import JobState

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

FOLLOWED = 10_000
"""Most jobs that are followed at one time; of further ones no trace is made."""

PHASES: Mapping[str, str] = {
    JobState.PENDING.value: "wait",
    JobState.STARTING.value: "start",
    JobState.RUNNING.value: "run",
    JobState.PREEMPTING.value: "yield",
    JobState.RECOVERING.value: "recover",
    JobState.STOPPING.value: "stop",
}
"""The span of each state."""


@dataclass(slots=True)
class _Followed:
    """A job whose span is open, with the span of its present state."""

    job: Span
    within: Context
    phase: Span | None = None
    phase_context: Context | None = None


def provider_for(endpoint: str) -> TracerProvider:
    """A provider that sends spans to a collector by OTLP over gRPC, in the background.

    Args:
        endpoint: of the collector, e.g. ``http://127.0.0.1:4317``; ``https`` for TLS.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(
        resource=Resource.create({"service.name": "callboard-controller", "service.version": __version__})
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https:"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Traces(Listener):
    """Follows the driver and makes spans. Everything here runs on its loop."""

    def __init__(self, provider: TracerProvider, state: Callable[[], State]) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("callboard", __version__)
        self._state = state
        self._open: dict[str, _Followed] = {}
        self._parents: OrderedDict[str, str] = OrderedDict()

    def submitted(self, uid: str, traceparent: str) -> None:
        """Says in which trace a job is about to be submitted.

        Args:
            traceparent: of the W3C's trace context, as the client sent it; what is none is ignored.
        """
        self._parents[uid] = traceparent
        while len(self._parents) > FOLLOWED:
            self._parents.popitem(last=False)

    def close(self) -> None:
        """Sends what has ended."""
        self._provider.shutdown()

    # ---- Listener ----

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - what was before is not sent
        """A term began; what was open before it stays unsent."""
        self._open.clear()

    def publish(self, events: Sequence[EventRecord]) -> None:
        """Begins and ends spans."""
        for event in events:
            facts = dict(event.facts)
            if event.type == f"job.{event.state.lower()}" and "uid" in facts:
                self._job(facts["uid"], event)
            elif event.type == "worker.ready" and "generation" in facts:
                self._worker(int(facts["generation"]), event)

    def _job(self, uid: str, event: EventRecord) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context  # noqa: PLC0415 - an extra

        at_ns = event.at_ms * 1_000_000
        followed = self._open.get(uid)
        if followed is None:
            if event.state != JobState.PENDING.value or len(self._open) >= FOLLOWED:
                return
            spec = self._state().specs.get(uid)
            about = {"callboard.job": event.subject.removeprefix("jobs/"), "callboard.job.uid": uid}
            if spec is not None:
                about |= {"callboard.pool": spec.spec.pool}
            span = self._tracer.start_span("job", self._parent(uid), attributes=about, start_time=at_ns)
            followed = self._open[uid] = _Followed(span, set_span_in_context(span))
        if followed.phase is not None:
            followed.phase.end(at_ns)
            followed.phase = followed.phase_context = None
        if event.state in PHASES:
            followed.phase = self._tracer.start_span(
                PHASES[event.state],
                followed.within,
                attributes={"callboard.reason": event.reason, "callboard.cause": event.cause},
                start_time=at_ns,
            )
            followed.phase_context = set_span_in_context(followed.phase)
            return
        if event.state == JobState.FAILED.value:
            followed.job.set_status(Status(StatusCode.ERROR, event.reason))
        followed.job.set_attribute("callboard.state", event.state)
        followed.job.end(at_ns)
        del self._open[uid]

    def _worker(self, generation: int, event: EventRecord) -> None:
        worker = self._state().workers.get(generation)
        followed = None if worker is None else self._open.get(worker.job)
        if worker is None or followed is None:
            return
        span = self._tracer.start_span(
            "worker",
            followed.phase_context or followed.within,
            attributes={
                "callboard.worker": f"{worker.component}/{worker.rank}",
                "callboard.node": worker.node_id,
                "callboard.spare": worker.warm,
            },
            start_time=(event.at_ms - worker.start_ms) * 1_000_000,
        )
        span.end(event.at_ms * 1_000_000)

    def _parent(self, uid: str) -> Context | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        if traceparent := self._parents.pop(uid, ""):
            return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        return None
