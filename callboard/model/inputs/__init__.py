"""What did the user mean? Plain mappings in human units become frozen specs, or every fault at once.

A mapping comes from YAML (:func:`read_yaml`), JSON, or the SDK's request classes (:mod:`callboard.model.requests`).
Messages of the API pass through the same models with :class:`Exact` amounts (:mod:`callboard.wire`), so that one set
of rules guards every entry. What is not stated takes the default of :mod:`callboard.model.specs`.

Not checked here: whether pools, nodes, interpreters or quotas exist — that needs the state of the cluster.
"""

from __future__ import annotations

from callboard.model.inputs.exact import Exact, JsonText
from callboard.model.inputs.job import job_spec
from callboard.model.inputs.policy import policy_overrides, preemption_policy
from callboard.model.inputs.pool import pool_spec
from callboard.model.inputs.source import SourceMapping, read_yaml

__all__ = [
    "Exact",
    "JsonText",
    "SourceMapping",
    "job_spec",
    "policy_overrides",
    "pool_spec",
    "preemption_policy",
    "read_yaml",
]
