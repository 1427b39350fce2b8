"""Who runs where, who waits, who yields: the deterministic core. It knows no Ray, gRPC, asyncio or clock.

Events go in (:mod:`~callboard.scheduler.events`), changes and commands come out; the state between is a set of frozen
records (:mod:`~callboard.scheduler.records`). ``handle`` is all of it or nothing. The floor plan:

=============  ====================================================================
records        what is known (``node_record``, ``pool_records`` and the rest), in which
               ``states``; ``Put`` and ``Drop`` are the only changes
state, ledger  the records with their indexes (``roster`` of the nodes, ``job_index``, …);
               ``State.apply`` is the only mutator
deadlines      what is due, and when
transitions    which state may follow which
asks, shapes   what a job needs to start, and which jobs are alike in it
view, rooms    what would be free if …; ``fitting`` finds nodes and devices in it, by a
               ``greedy`` search, and an ``exhaustive`` one for what that may miss
grouping       which placement groups a job would use
preemption     must v yield to p; ``candidates`` who may be asked, and in which order
planning       puts all of it together
passes         who may start now
requests, workers, groups, nodes, elastic              what each event changes
starting, stopping, ending, preempting                 what becomes of a job
orders         what agents are owed
explain        why; of ``blockers``, ``awaited`` and ``remedies``
invariants     I1 … I10, computed again from the records
=============  ====================================================================

The invariants: I1 no device share above 1000; I2 a pool's usage is the sum of its live allocations; I3 a gang is
wholly placed or holds nothing; I4 resources are free only after the agent proved the process tree gone; I5 no job is
preempted by one it outranks, nor by itself; I6 every stop ends by its deadline in STOPPED or QUARANTINED; I7 what is
nominated goes to nobody but the nominee or one who may preempt it; I8 an accepted job is never lost; I9 stale
generations, epochs and terms change nothing; I10 free + held + used + quarantined = capacity on every node.

Importing this package is cheap: a name below loads its module when it is first asked for.
"""

from types import MappingProxyType
from typing import TYPE_CHECKING

from callboard._lazy import lazily

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.scheduler.explain import Explanation as Explanation
    from callboard.scheduler.explain import PlannedWorker as PlannedWorker
    from callboard.scheduler.invariants import InvariantBroken as InvariantBroken
    from callboard.scheduler.invariants import check_invariants as check_invariants
    from callboard.scheduler.ledger import DeviceUse as DeviceUse
    from callboard.scheduler.ledger import NodeUse as NodeUse
    from callboard.scheduler.ledger import PoolUse as PoolUse
    from callboard.scheduler.machine import Outcome as Outcome
    from callboard.scheduler.machine import Scheduler as Scheduler
    from callboard.scheduler.refusals import ImpossibleTransition as ImpossibleTransition
    from callboard.scheduler.refusals import Reason as Reason
    from callboard.scheduler.refusals import Refusal as Refusal
    from callboard.scheduler.refusals import RefusalCode as RefusalCode
    from callboard.scheduler.state import State as State
    from callboard.scheduler.stats import GroupStats as GroupStats

_PUBLIC = MappingProxyType(
    {
        "DeviceUse": "callboard.scheduler.ledger",
        "Explanation": "callboard.scheduler.explain",
        "GroupStats": "callboard.scheduler.stats",
        "ImpossibleTransition": "callboard.scheduler.refusals",
        "InvariantBroken": "callboard.scheduler.invariants",
        "NodeUse": "callboard.scheduler.ledger",
        "Outcome": "callboard.scheduler.machine",
        "PlannedWorker": "callboard.scheduler.explain",
        "PoolUse": "callboard.scheduler.ledger",
        "Reason": "callboard.scheduler.refusals",
        "Refusal": "callboard.scheduler.refusals",
        "RefusalCode": "callboard.scheduler.refusals",
        "Scheduler": "callboard.scheduler.machine",
        "State": "callboard.scheduler.state",
        "check_invariants": "callboard.scheduler.invariants",
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
