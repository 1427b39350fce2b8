"""The scheduler as a whole: its policy and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from callboard._version import __version__
from callboard.controller.journal.journal import Member
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog
from callboard.controller.metrics.metrics import Metrics
from callboard.controller.services.job import JobService
from callboard.controller.services.node import NodeService
from callboard.controller.services.pool import PoolService
from callboard.controller.services.request_parts import Context, page_of, version_of
from callboard.controller.views.stats import demand_messages, stats_message
from callboard.model.frozen import dataclass
from callboard.scheduler.records.events import PolicySet
from callboard.security.audit_log import AuditLog
from callboard.v1 import scheduler_pb2, scheduler_pb2_grpc
from callboard.wire.alike import message_of, timestamp
from callboard.wire.refusals import invalid
from callboard.wire.specs import policy_from_proto, policy_to_proto


@dataclass(frozen=True, slots=True)
class Lists:
    """The services that have the long lists."""

    pools: PoolService
    nodes: NodeService
    jobs: JobService


@dataclass(eq=False)
class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Policy and figures.

    Attributes:
        lists: the services whose lists an overview begins.
        page_address: where the web page is; empty: nowhere.
        members: the controllers that share the journal; none: nobody else could.
    """

    driver: Driver
    events: EventLog
    metrics: Metrics
    audit: AuditLog
    lists: Lists
    page_address: Callable[[], str] = lambda: ""
    members: Callable[[], Sequence[Member]] = tuple
    _summed: tuple[int, int, scheduler_pb2.Stats] | None = None

    async def GetPolicy(
        self, request: scheduler_pb2.GetPolicyRequest, context: Context
    ) -> scheduler_pb2.GetPolicyResponse:
        return await self.driver.read(
            lambda state: scheduler_pb2.GetPolicyResponse(
                policy=policy_to_proto(state.meta.policy), etag=str(state.meta.policy_version)
            )
        )

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: Context
    ) -> scheduler_pb2.SetPolicyResponse:
        policy = policy_from_proto(request.policy)
        make = partial(PolicySet, policy=policy, expected_version=version_of(request.etag))
        if request.validate_only:
            await self.driver.trial(make)
            return scheduler_pb2.SetPolicyResponse(policy=policy_to_proto(policy))
        return await self.driver.ask(
            make,
            lambda outcome: scheduler_pb2.SetPolicyResponse(policy=policy_to_proto(policy), etag=str(outcome.result)),
            source="policy",
        )

    async def GetStats(
        self, request: scheduler_pb2.GetStatsRequest, context: Context
    ) -> scheduler_pb2.GetStatsResponse:
        """Figures, from memory: they wait for nothing, not even for a commit that is on its way (R7)."""
        return scheduler_pb2.GetStatsResponse(stats=self._stats())

    async def GetOverview(
        self, request: scheduler_pb2.GetOverviewRequest, context: Context
    ) -> scheduler_pb2.GetOverviewResponse:
        """What one screen shows; its size doesn't depend on that of the cluster, but for the names of Ray's nodes."""
        most_nodes = page_of(request.max_nodes, "", "nodes", field="max_nodes").size
        most_jobs = page_of(request.max_jobs, "", "jobs", field="max_jobs").size
        stats, state = self._stats(), self.driver.state
        ray_nodes = {node.ray.ray_node_id: node.node_id for node in state.nodes.values() if node.ray is not None}
        pools, more_pools = await self.lists.pools.foremost()
        nodes, more_nodes = await self.lists.nodes.foremost(most_nodes)
        jobs, more_jobs = await self.lists.jobs.foremost(most_jobs)
        await self.driver.journaled()
        return scheduler_pb2.GetOverviewResponse(
            stats=stats,
            pools=pools,
            more_pools=more_pools,
            nodes=nodes,
            more_nodes=more_nodes,
            jobs=jobs,
            more_jobs=more_jobs,
            ray_nodes=ray_nodes,
        )

    def _stats(self) -> scheduler_pb2.Stats:
        self.driver.check_readable()
        state = self.driver.state
        # Every change moves the revision on, so the sums of a revision are made once, however many ask.
        if self._summed is None or self._summed[:2] != (state.meta.term, state.meta.revision):
            self._summed = (state.meta.term, state.meta.revision, stats_message(state))
        stats = self._summed[2]
        stats.revision = self.events.revision
        stats.metrics_address = self.metrics.address
        stats.version = __version__
        stats.page_address = self.page_address()
        stats.uptime_ms = self.driver.now_ms() - self.driver.started_ms
        del stats.controllers[:]
        stats.controllers.extend(
            scheduler_pb2.ControllerMember(address=each.address, leads=each.leads) for each in self.members()
        )
        following = self.driver.following
        stats.standby, stats.age_ms = following is not None, self.driver.age_ms()
        return stats

    async def GetDemand(
        self, request: scheduler_pb2.GetDemandRequest, context: Context
    ) -> scheduler_pb2.GetDemandResponse:
        """What is wanted beyond what there is."""
        revision = self.events.revision
        demands = await self.driver.question(lambda scheduler: demand_messages(scheduler.state))
        return scheduler_pb2.GetDemandResponse(revision=revision, demands=demands)

    async def ListAudit(
        self, request: scheduler_pb2.ListAuditRequest, context: Context
    ) -> scheduler_pb2.ListAuditResponse:
        size = page_of(request.page_size, "", "audit").size
        if request.before < 0:
            raise invalid("before", "must not be negative")
        found = self.audit.newest(size, before=request.before, who=request.who)
        return scheduler_pb2.ListAuditResponse(
            entries=[message_of(scheduler_pb2.AuditEntry, entry, time=timestamp(entry.at_ms)) for entry in found]
        )
