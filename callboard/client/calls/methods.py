"""The calls a client makes, each with its message types and whether it may be repeated.

A call whose connection was lost is repeated only if doing it twice equals doing it once: reads, calls that are
idempotent by design, a submit, whose request id makes it so, and removals, which are done when nothing is left to
remove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

from google.protobuf.message import Message

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.v1 import event_pb2, job_pb2, node_pb2, placement_group_pb2, pool_pb2, scheduler_pb2

Fields = ParamSpec("Fields")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@contextmanager
def carried() -> Iterator[None]:
    """Around what makes a message of a caller's values. A number of too many digits, or half of a surrogate pair, is
    refused as input.

    Raises:
        InvalidInput: no message can carry a value.
    """
    try:
        yield
    except InvalidInput:
        raise
    except (ValueError, OverflowError) as error:
        raise InvalidInput([Fault("", f"no message can carry a value of the call: {error}")]) from error


@dataclass(frozen=True, slots=True)
class Method(Generic[Fields, Request, Response]):
    """One method of the API.

    Attributes:
        path: "Service/Method" in package `callboard.v1`.
        request: type of its request.
        response: type of its response.
        repeatable: doing it twice equals doing it once.
        gone_is_done: it removes what it names, so NOT_FOUND at a repeat says that it was done before.
    """

    path: str
    request: Callable[Fields, Request]
    response: type[Response]
    repeatable: bool = True
    gone_is_done: bool = False

    @property
    def full_path(self) -> str:
        return f"/callboard.v1.{self.path}"

    def may_repeat(self, request: Message) -> bool:
        """Whether doing this request twice equals doing it once. A change that is based on an etag does not: the
        second finds the etag of the first."""
        return self.repeatable and (self.gone_is_done or not getattr(request, "etag", ""))


SUBMIT_JOB = Method("JobService/SubmitJob", job_pb2.SubmitJobRequest, job_pb2.SubmitJobResponse)
GET_JOB = Method("JobService/GetJob", job_pb2.GetJobRequest, job_pb2.GetJobResponse)
LIST_JOBS = Method("JobService/ListJobs", job_pb2.ListJobsRequest, job_pb2.ListJobsResponse)
CANCEL_JOB = Method("JobService/CancelJob", job_pb2.CancelJobRequest, job_pb2.CancelJobResponse)
COMPLETE_JOB = Method("JobService/CompleteJob", job_pb2.CompleteJobRequest, job_pb2.CompleteJobResponse)
# Done twice, it stops what the first let start again.
PREEMPT_JOB = Method("JobService/PreemptJob", job_pb2.PreemptJobRequest, job_pb2.PreemptJobResponse, repeatable=False)
# The number is absolute, so a repeat changes nothing.
SCALE_JOB = Method("JobService/ScaleJob", job_pb2.ScaleJobRequest, job_pb2.ScaleJobResponse)
RENEW_JOBS = Method("JobService/RenewJobs", job_pb2.RenewJobsRequest, job_pb2.RenewJobsResponse)
# A gauge that is reported twice is the same gauge.
REPORT_SIGNALS = Method("JobService/ReportSignals", job_pb2.ReportSignalsRequest, job_pb2.ReportSignalsResponse)
EXPLAIN_JOB = Method("JobService/ExplainJob", job_pb2.ExplainJobRequest, job_pb2.ExplainJobResponse)
READ_JOB_OUTPUT = Method("JobService/ReadJobOutput", job_pb2.ReadJobOutputRequest, job_pb2.ReadJobOutputResponse)
EXEC_WORKER = Method("JobService/ExecWorker", job_pb2.ExecWorkerRequest, job_pb2.ExecWorkerResponse, repeatable=False)
PUT_PACKAGE = Method("JobService/PutPackage", job_pb2.PutPackageRequest, job_pb2.PutPackageResponse)

CREATE_POOL = Method("PoolService/CreatePool", pool_pb2.CreatePoolRequest, pool_pb2.CreatePoolResponse)
GET_POOL = Method("PoolService/GetPool", pool_pb2.GetPoolRequest, pool_pb2.GetPoolResponse)
LIST_POOLS = Method("PoolService/ListPools", pool_pb2.ListPoolsRequest, pool_pb2.ListPoolsResponse)
UPDATE_POOL = Method("PoolService/UpdatePool", pool_pb2.UpdatePoolRequest, pool_pb2.UpdatePoolResponse)
DELETE_POOL = Method(
    "PoolService/DeletePool", pool_pb2.DeletePoolRequest, pool_pb2.DeletePoolResponse, gone_is_done=True
)

GET_NODE = Method("NodeService/GetNode", node_pb2.GetNodeRequest, node_pb2.GetNodeResponse)
LIST_NODES = Method("NodeService/ListNodes", node_pb2.ListNodesRequest, node_pb2.ListNodesResponse)
CORDON_NODE = Method("NodeService/CordonNode", node_pb2.CordonNodeRequest, node_pb2.CordonNodeResponse)
DRAIN_NODE = Method("NodeService/DrainNode", node_pb2.DrainNodeRequest, node_pb2.DrainNodeResponse)
REMOVE_NODE = Method(
    "NodeService/RemoveNode", node_pb2.RemoveNodeRequest, node_pb2.RemoveNodeResponse, gone_is_done=True
)
INSPECT_NODE = Method("NodeService/InspectNode", node_pb2.InspectNodeRequest, node_pb2.InspectNodeResponse)
UNCORDON_NODE = Method("NodeService/UncordonNode", node_pb2.UncordonNodeRequest, node_pb2.UncordonNodeResponse)

LIST_PLACEMENT_GROUPS = Method(
    "PlacementGroupService/ListPlacementGroups",
    placement_group_pb2.ListPlacementGroupsRequest,
    placement_group_pb2.ListPlacementGroupsResponse,
)
GET_PLACEMENT_GROUP = Method(
    "PlacementGroupService/GetPlacementGroup",
    placement_group_pb2.GetPlacementGroupRequest,
    placement_group_pb2.GetPlacementGroupResponse,
)
DELETE_PLACEMENT_GROUP = Method(
    "PlacementGroupService/DeletePlacementGroup",
    placement_group_pb2.DeletePlacementGroupRequest,
    placement_group_pb2.DeletePlacementGroupResponse,
    gone_is_done=True,
)

GET_POLICY = Method("SchedulerService/GetPolicy", scheduler_pb2.GetPolicyRequest, scheduler_pb2.GetPolicyResponse)
SET_POLICY = Method("SchedulerService/SetPolicy", scheduler_pb2.SetPolicyRequest, scheduler_pb2.SetPolicyResponse)
GET_STATS = Method("SchedulerService/GetStats", scheduler_pb2.GetStatsRequest, scheduler_pb2.GetStatsResponse)
GET_OVERVIEW = Method(
    "SchedulerService/GetOverview", scheduler_pb2.GetOverviewRequest, scheduler_pb2.GetOverviewResponse
)
LIST_AUDIT = Method("SchedulerService/ListAudit", scheduler_pb2.ListAuditRequest, scheduler_pb2.ListAuditResponse)
GET_DEMAND = Method("SchedulerService/GetDemand", scheduler_pb2.GetDemandRequest, scheduler_pb2.GetDemandResponse)

LIST_EVENTS = Method("EventService/ListEvents", event_pb2.ListEventsRequest, event_pb2.ListEventsResponse)
WATCH = Method("EventService/Watch", event_pb2.WatchRequest, event_pb2.WatchResponse)
