"""The vocabulary: quantities, names, specs, faults.

Importing this package is cheap. The names below load their module when they are first asked for.
``JobSpec`` and its neighbours here are the classes people write, in human units (:mod:`callboard.model.requests`);
the frozen ones that the scheduler holds are in :mod:`callboard.model.specs` and :mod:`callboard.model.policy`.
"""

from typing import TYPE_CHECKING

from callboard._lazy import lazily, public_names

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.model.describe import job_to_mapping as job_to_mapping
    from callboard.model.faults import Fault as Fault
    from callboard.model.faults import InvalidInput as InvalidInput
    from callboard.model.inputs import job_spec as job_spec
    from callboard.model.inputs import pool_spec as pool_spec
    from callboard.model.inputs import preemption_policy as preemption_policy
    from callboard.model.inputs import read_yaml as read_yaml
    from callboard.model.quantities import Resources as Resources
    from callboard.model.requests import ComponentSpec as ComponentSpec
    from callboard.model.requests import JobSpec as JobSpec
    from callboard.model.requests import PgPoolSpec as PgPoolSpec
    from callboard.model.requests import PoolSpec as PoolSpec
    from callboard.model.requests import PreemptionPolicy as PreemptionPolicy

_PUBLIC = public_names(
    {
        "callboard.model.describe": "job_to_mapping",
        "callboard.model.faults": "Fault InvalidInput",
        "callboard.model.inputs": "job_spec pool_spec preemption_policy read_yaml",
        "callboard.model.quantities": "Resources",
        "callboard.model.requests": "ComponentSpec JobSpec PgPoolSpec PoolSpec PreemptionPolicy",
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
