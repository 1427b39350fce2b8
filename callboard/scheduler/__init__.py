"""The scheduler: who runs where, who waits, who yields. It knows no Ray, gRPC, asyncio or clock.

Events go in, changes and commands come out; the state between is a set of frozen records. ``handle`` is all of it or
nothing. Its rooms, each of which imports only those below it:

=========  ==========================================================================
machine    one event in, its changes and commands out
handlers   what each event changes, and what agents are owed then
account    for people: why a job waits, what would help, what is wanted and used
plan       views on the state: where a job fits, what it may use, who would yield
state      every record, the indexes over them, the one way to change it, invariants
records    the words: states and transitions, records, events, commands, refusals
=========  ==========================================================================

The invariants: I1 no device share above 1000; I2 a pool's usage is the sum of its live allocations; I3 a gang is
wholly placed or holds nothing; I4 resources are free only after the agent proved the process tree gone; I5 no job is
preempted by one it outranks, nor by itself; I6 every stop ends by its deadline in STOPPED or QUARANTINED; I7 what is
nominated goes to nobody but the nominee or one who may preempt it; I8 an accepted job is never lost; I9 stale
generations, epochs and terms change nothing; I10 free + held + used + quarantined = capacity on every node.

Importing this package is cheap: a name below loads its module when it is first asked for.
"""

from typing import TYPE_CHECKING

from callboard._lazy import lazily, public_names

if TYPE_CHECKING:
    # What a type checker sees; a test keeps it equal to _PUBLIC.
    from callboard.scheduler.account.explain import Explanation as Explanation
    from callboard.scheduler.account.explain import PlannedWorker as PlannedWorker
    from callboard.scheduler.account.stats import GroupStats as GroupStats
    from callboard.scheduler.machine import Outcome as Outcome
    from callboard.scheduler.machine import Scheduler as Scheduler
    from callboard.scheduler.records.refusals import ImpossibleTransition as ImpossibleTransition
    from callboard.scheduler.records.refusals import Reason as Reason
    from callboard.scheduler.records.refusals import Refusal as Refusal
    from callboard.scheduler.records.refusals import RefusalCode as RefusalCode
    from callboard.scheduler.state.invariants import InvariantBroken as InvariantBroken
    from callboard.scheduler.state.invariants import check_invariants as check_invariants
    from callboard.scheduler.state.ledger import DeviceUse as DeviceUse
    from callboard.scheduler.state.ledger import NodeUse as NodeUse
    from callboard.scheduler.state.ledger import PoolUse as PoolUse
    from callboard.scheduler.state.state import State as State

_PUBLIC = public_names(
    {
        "callboard.scheduler.account.explain": "Explanation PlannedWorker",
        "callboard.scheduler.account.stats": "GroupStats",
        "callboard.scheduler.machine": "Outcome Scheduler",
        "callboard.scheduler.records.refusals": "ImpossibleTransition Reason Refusal RefusalCode",
        "callboard.scheduler.state.invariants": "InvariantBroken check_invariants",
        "callboard.scheduler.state.ledger": "DeviceUse NodeUse PoolUse",
        "callboard.scheduler.state.state": "State",
    }
)


__getattr__, __dir__ = lazily(__name__, _PUBLIC)
