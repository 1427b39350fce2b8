"""A control plane for the Ray actors of RL training.

Importing this package is cheap: a public name loads its module when it is first asked for
(PEP 562), so a trainer that only describes a job pays for neither gRPC nor Ray.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from callboard._version import __version__ as __version__

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.client import Client as Client
    from callboard.model import ComponentSpec as ComponentSpec
    from callboard.model import InvalidInput as InvalidInput
    from callboard.model import JobSpec as JobSpec
    from callboard.model import PgPoolSpec as PgPoolSpec
    from callboard.model import PoolSpec as PoolSpec
    from callboard.model import PreemptionPolicy as PreemptionPolicy
    from callboard.wire.refusals import AlreadyExists as AlreadyExists
    from callboard.wire.refusals import CallboardError as CallboardError
    from callboard.wire.refusals import InvalidRequest as InvalidRequest
    from callboard.wire.refusals import NotFound as NotFound
    from callboard.wire.refusals import QuotaExceeded as QuotaExceeded
    from callboard.wire.refusals import Unavailable as Unavailable
    from callboard.wire.refusals import Unschedulable as Unschedulable
    from callboard.wire.refusals import WrongState as WrongState

# The public names and where each one lives.
_PUBLIC = MappingProxyType(
    {
        "AlreadyExists": "callboard.wire.refusals",
        "CallboardError": "callboard.wire.refusals",
        "Client": "callboard.client",
        "ComponentSpec": "callboard.model",
        "InvalidInput": "callboard.model",
        "InvalidRequest": "callboard.wire.refusals",
        "JobSpec": "callboard.model",
        "NotFound": "callboard.wire.refusals",
        "PgPoolSpec": "callboard.model",
        "PoolSpec": "callboard.model",
        "PreemptionPolicy": "callboard.model",
        "QuotaExceeded": "callboard.wire.refusals",
        "Unavailable": "callboard.wire.refusals",
        "Unschedulable": "callboard.wire.refusals",
        "WrongState": "callboard.wire.refusals",
    }
)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value: object = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # The next access finds it without coming here.
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
