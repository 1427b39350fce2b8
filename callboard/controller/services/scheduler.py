"""The scheduler as a whole: its policy and its figures."""

from __future__ import annotations

from typing import Any

import grpc.aio

from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog
from callboard.controller.metrics.metrics import Metrics
from callboard.controller.services.requests import DEFAULT_PAGE, LARGEST_PAGE, invalid, version_of
from callboard.controller.views.common import timestamp
from callboard.controller.views.demand import demand_messages
from callboard.controller.views.stats import stats_message
from callboard.scheduler.records.events import PolicySet
from callboard.security.audit import AuditLog
from callboard.v1 import scheduler_pb2, scheduler_pb2_grpc
from callboard.wire.specs import policy_from_proto, policy_to_proto

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Policy and figures."""

    def __init__(self, driver: Driver, events: EventLog, metrics: Metrics, audit: AuditLog) -> None:
        self._driver = driver
        self._events = events
        self._metrics = metrics
        self._audit = audit
        self._summed: tuple[int, int, scheduler_pb2.Stats] | None = None

    async def GetPolicy(
        self, request: scheduler_pb2.GetPolicyRequest, context: Context
    ) -> scheduler_pb2.GetPolicyResponse:
        """The cluster's policy."""
        return await self._driver.read(
            lambda state: scheduler_pb2.GetPolicyResponse(
                policy=policy_to_proto(state.meta.policy), etag=str(state.meta.policy_version)
            )
        )

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: Context
    ) -> scheduler_pb2.SetPolicyResponse:
        """Replaces the cluster's policy."""
        policy = policy_from_proto(request.policy)
        expected = version_of(request.etag)

        def make(now_ms: int, cause: str) -> PolicySet:
            return PolicySet(now_ms=now_ms, cause=cause, policy=policy, expected_version=expected)

        if request.validate_only:
            await self._driver.trial(make)
            return scheduler_pb2.SetPolicyResponse(policy=policy_to_proto(policy))
        return await self._driver.ask(
            make,
            lambda outcome: scheduler_pb2.SetPolicyResponse(policy=policy_to_proto(policy), etag=str(outcome.result)),
            source="policy",
        )

    async def GetStats(
        self, request: scheduler_pb2.GetStatsRequest, context: Context
    ) -> scheduler_pb2.GetStatsResponse:
        """Figures, from memory: they wait for nothing, not even for a commit that is on its way (R7)."""
        self._driver.check_serving()
        state = self._driver.state
        # Every change moves the revision on, so the sums of a revision are made once, however many ask.
        if self._summed is None or self._summed[:2] != (state.meta.term, state.meta.revision):
            self._summed = (state.meta.term, state.meta.revision, stats_message(state))
        stats = self._summed[2]
        stats.revision = self._events.revision
        stats.metrics_address = self._metrics.address
        stats.uptime_ms = self._driver.now_ms() - self._driver.started_ms
        return scheduler_pb2.GetStatsResponse(stats=stats)

    async def GetDemand(
        self, request: scheduler_pb2.GetDemandRequest, context: Context
    ) -> scheduler_pb2.GetDemandResponse:
        """What is wanted beyond what there is."""
        revision = self._events.revision
        demands = await self._driver.question(lambda scheduler: demand_messages(scheduler.state))
        return scheduler_pb2.GetDemandResponse(revision=revision, demands=demands)

    async def ListAudit(
        self, request: scheduler_pb2.ListAuditRequest, context: Context
    ) -> scheduler_pb2.ListAuditResponse:
        """Who changed what."""
        if not 0 <= request.page_size <= LARGEST_PAGE:
            raise invalid("page_size", f"{request.page_size} is out of bounds; allowed is 1 to {LARGEST_PAGE}")
        if request.before < 0:
            raise invalid("before", "must not be negative")
        found = self._audit.newest(request.page_size or DEFAULT_PAGE, before=request.before, who=request.who)
        return scheduler_pb2.ListAuditResponse(
            entries=[
                scheduler_pb2.AuditEntry(
                    number=entry.number,
                    time=timestamp(entry.at_ms),
                    who=entry.who,
                    role=entry.role,
                    method=entry.method,
                    subject=entry.subject,
                    peer=entry.peer,
                    code=entry.code,
                    why=entry.why,
                )
                for entry in found
            ]
        )
