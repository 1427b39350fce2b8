"""Inputs: plain mappings in human units become frozen specs, or every fault at once.

A mapping comes from YAML (:func:`read_yaml`), JSON, or the SDK's request classes (:mod:`callboard.model.requests`).
Messages of the API pass through the same models with :class:`Exact` amounts (:mod:`callboard.wire`), so that one set
of rules guards every entry. What is not stated takes the default of :mod:`callboard.model.specs`.

Not checked here: whether pools, nodes, interpreters or quotas exist — that needs the state of the cluster.

Importing this package is cheap: a name below loads its module when it is first asked for.
"""

from typing import TYPE_CHECKING

from callboard._lazy import lazily, public_names

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.model.inputs.job import job_spec as job_spec
    from callboard.model.inputs.pool import pool_spec as pool_spec
    from callboard.model.inputs.pool import preemption_policy as preemption_policy
    from callboard.model.inputs.scalars import Exact as Exact
    from callboard.model.inputs.scalars import JsonText as JsonText
    from callboard.model.inputs.source import SourceMapping as SourceMapping
    from callboard.model.inputs.source import read_yaml as read_yaml

_PUBLIC = public_names(
    {
        "callboard.model.inputs.job": "job_spec",
        "callboard.model.inputs.pool": "pool_spec preemption_policy",
        "callboard.model.inputs.scalars": "Exact JsonText",
        "callboard.model.inputs.source": "SourceMapping read_yaml",
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
