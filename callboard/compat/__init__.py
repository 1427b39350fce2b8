"""The names of other schedulers, over callboard's API, so that programs written for them read the same.

``SimpleScheduler`` and what belongs to it: a program changes its import line and nothing else::

    from callboard.compat import PreemptionAggressiveness, SimpleScheduler, SimpleTaskSpec
"""

from types import MappingProxyType
from typing import TYPE_CHECKING

from callboard._lazy import lazily

if TYPE_CHECKING:
    # What a type checker sees.
    from callboard.compat.simple_scheduler import PreemptionAggressiveness as PreemptionAggressiveness
    from callboard.compat.simple_scheduler import SimpleScheduler as SimpleScheduler
    from callboard.compat.simple_scheduler import SimpleTaskSpec as SimpleTaskSpec

_PUBLIC = MappingProxyType(
    {
        "PreemptionAggressiveness": "callboard.compat.simple_scheduler",
        "SimpleScheduler": "callboard.compat.simple_scheduler",
        "SimpleTaskSpec": "callboard.compat.simple_scheduler",
    }
)

__getattr__, __dir__ = lazily(__name__, _PUBLIC)
