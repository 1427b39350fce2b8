"""Jobs, pools and policies as messages; how each field lies there is declared beside it (:mod:`callboard.wire.schema`).

The name of a pool travels beside its spec: ``CreatePoolRequest.pool_id``, ``Pool.name``.
"""

from __future__ import annotations

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.job import JobInput
from callboard.model.inputs.pool import PolicyInput, PoolInput
from callboard.model.policy import PolicyOverrides, PreemptionPolicy
from callboard.model.roles import unfused
from callboard.model.specs import JobSpec, PoolSpec, WorkerPlace
from callboard.v1 import common_pb2, job_pb2, policy_pb2, pool_pb2
from callboard.wire.schema import Reader, written


def job_spec_to_proto(spec: JobSpec, *, mask: bool = False) -> job_pb2.JobSpec:
    """The message of ``spec``, every field set that is not left to a preset; members of groups apart, as asked for.

    Args:
        mask: mask the values of secret variables, for everything that is shown (SE-04). A masked message must not be
            submitted again.
    """
    return written(unfused(spec), job_pb2.JobSpec, mask=mask)


def job_spec_from_proto(message: job_pb2.JobSpec) -> JobSpec:
    """A job, which is the ``spec`` of a request, validated in full.

    Raises:
        InvalidInput: every fault.
    """
    reader = Reader("spec")
    return reader.validated(JobInput, reader.mapping(JobInput, message)).spec()


def place_to_proto(place: WorkerPlace, *, mask: bool = False) -> common_pb2.WorkerPlace:
    """The message of where one worker must run; ``mask`` as in :func:`job_spec_to_proto`."""
    return written(place, common_pb2.WorkerPlace, mask=mask)


def pool_spec_to_proto(spec: PoolSpec) -> pool_pb2.PoolSpec:
    """The message of ``spec``, without its name. Parts that say nothing are absent."""
    return written(spec, pool_pb2.PoolSpec)


def pool_spec_from_proto(name: str, message: pool_pb2.PoolSpec, *, name_field: str = "pool_id") -> PoolSpec:
    """A pool, validated in full.

    Args:
        name: name of the pool, not yet checked.
        message: the ``spec`` of a request.
        name_field: path of ``name`` in the request.

    Raises:
        InvalidInput: every fault.
    """
    reader = Reader("spec")
    try:
        found: PoolSpec = reader.validated(PoolInput, {"name": name} | reader.mapping(PoolInput, message)).spec()
    except InvalidInput as invalid:
        faults = [Fault(name_field, each.message) if each.field == "spec.name" else each for each in invalid.faults]
        raise InvalidInput(faults) from None
    return found


def policy_to_proto(policy: PreemptionPolicy) -> policy_pb2.PreemptionPolicy:
    """The cluster's policy, every field set."""
    return written(policy, policy_pb2.PreemptionPolicy)


def policy_from_proto(message: policy_pb2.PreemptionPolicy) -> PreemptionPolicy:
    """The cluster's policy; absent fields take their defaults.

    Raises:
        InvalidInput: every fault.
    """
    return overrides_from_proto(message, field="policy").over(PreemptionPolicy())


def overrides_from_proto(message: policy_pb2.PreemptionPolicy, *, field: str = "preemption") -> PolicyOverrides:
    """A pool's overrides; absent fields leave the cluster's value.

    Raises:
        InvalidInput: every fault.
    """
    reader = Reader(field)
    found: PolicyOverrides = reader.validated(PolicyInput, reader.mapping(PolicyInput, message)).spec()
    return found
