"""The life of a worker as its agent sees it: states, what may happen in each, and what follows.

`Life` is the one place where the state of a worker changes, by one table. It is a core without I/O: it neither waits
nor acts, and knows no loop, process or clock. `worker.Worker` tells it what happened and carries out the effects that
it answers with. A coroutine that walks through the life would be shorter by the table, but its states would be the
places where it waits: nobody could list them, and whatever came between two of them would have to be asked for at each.

What the table doesn't list can't happen; where it does, that is a defect, and is raised with the state and the event.
`docs/agents.md` shows the table, written from here by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from callboard.model.frozen import dataclass


class State(Enum):
    """Where a worker is in its life; the text is for `docs/agents.md`."""

    ADOPTED = "an earlier agent began it; its process is looked for"
    UNCLAIMED = "its start was not finished then; its start command has to come again"
    WAITING = "its older generation is not proved gone yet"
    GUARDING = "strict: the node's fence does not watch yet"
    LEASING = "strict: the node has no lease yet"
    UNPACKING = "its code is unpacked, its environment built"
    HOSTING = "its process comes up"
    BUILDING = "its class is imported and constructed"
    READY = "it serves calls"
    ASKING = "first rung of the stop: its signal is sent, `cancel()` runs"
    SAVING = "second rung: calls in flight end, `checkpoint()` runs"
    KILLING = "last rung: its process tree is killed, and the proof awaited"
    GIVING_UP = "it could not be started: what there is of it is killed, and the proof awaited"
    REAPING = "it ended unasked: what it left is killed, and the proof awaited"
    QUARANTINED = "something of it can't be killed; it is tried again for ever"
    GONE = "everything of it is proved gone"


class Event(Enum):
    """What may happen to a worker; the text is for `docs/agents.md`."""

    ORDER = "its start command comes (again)"
    FOUND_UNFINISHED = "it is looked for; its start was under way"
    FOUND_READY = "it is looked for; it was ready"
    FOUND_ENDING = "it is looked for; it was being ended"
    FOUND_ENDED = "it is looked for; it was being ended, and is dead"
    SUCCEEDED = "no older generation is left"
    GUARDED = "the fence watches, or need not"
    LEASED = "the lease runs, or need not"
    UNPACKED = "its code and environment are there, or it brings none"
    HOSTED = "its process is there"
    BUILT = "it is constructed"
    FAILED = "the start fails"
    DEADLINE = "`start_timeout` is over"
    STOP = "a stop is asked for"
    CANCELLED = "`cancel()` has returned"
    YIELDED = "nothing more is asked of it"
    EXIT = "its process ends, stalls or loses its host"
    ENTRY_ENDED = "its entry method ends"
    PROVED = "everything of it is proved gone"
    LEFT = "the time for the proof is over"


class Effect(Enum):
    """What the agent does about it; the text is for `docs/agents.md`."""

    HEED = "what came meanwhile happens now"
    START = "begin the start and its timeout"
    RECORD = "record how far it is"
    BECOME_READY = "report it ready"
    TELL_READY = "report it ready again"
    FOLLOW = "watch entry method and progress"
    ASK_TO_YIELD = "climb the ladder"
    ABANDON_HOST = "hurry its process to an end"
    GIVE_UP = "kill with the time of its stop, else 10 s"
    KILL = "kill with `kill_timeout`"
    REAP = "kill in 10 s, ask why it died"
    TRY_AGAIN = "kill again"
    REPORT_ENTRY = "report how it ended"
    REPORT_NOT_STARTED = "report why it was not started; answer stops"
    REPORT_STOPPED = "answer stops, with its checkpoint"
    REPORT_EXITED = "report its death"
    REPORT_STUCK = "answer stops: quarantined"
    REPORT_FREED = "report it out of quarantine"
    BURY = "forget it; answer later stops: already gone"


@dataclass(frozen=True, slots=True)
class Move:
    """What follows when something happens: the state, and what is done, in this order."""

    state: State
    effects: tuple[Effect, ...] = ()


class NotListed(AssertionError):
    """Something happened to a worker that can't happen in its state: a defect of the agent."""


def _stays(state: State, *more: Event) -> dict[Event, Move]:
    """What changes nothing of what is being done; what it tells is kept."""
    return dict.fromkeys((Event.ORDER, Event.STOP, Event.EXIT, *more), Move(state))


def _step(state: State, done: Event, follower: State, *effects: Effect) -> dict[Event, Move]:
    """A step of the start: whatever comes before it is done ends the start."""
    hurry = (Effect.ABANDON_HOST,) if state is State.HOSTING else ()
    cut = Move(State.GIVING_UP, (*hurry, Effect.GIVE_UP))
    can_fail = state in (State.UNPACKING, State.HOSTING, State.BUILDING)
    return {
        Event.ORDER: Move(state),
        done: Move(follower, effects),
        **dict.fromkeys((Event.STOP, Event.EXIT, Event.DEADLINE), cut),
        **({Event.FAILED: Move(State.GIVING_UP, (Effect.GIVE_UP,))} if can_fail else {}),
    }


def _ending(state: State, report: Effect, *more: Event) -> dict[Event, Move]:
    """The end of a worker: nothing is reported before the proof, or before it is sure that there is none yet (I4)."""
    return {
        **_stays(state, *more),
        Event.PROVED: Move(State.GONE, (report, Effect.BURY)),
        Event.LEFT: Move(State.QUARANTINED, (report, Effect.TRY_AGAIN)),
    }


def _told(state: State) -> dict[Event, Move]:
    return {Event.ENTRY_ENDED: Move(state, (Effect.REPORT_ENTRY,))}


_GIVE_UP = Move(State.GIVING_UP, (Effect.GIVE_UP,))
_KILL = Move(State.KILLING, (Effect.KILL,))

MOVES: Mapping[State, Mapping[Event, Move]] = {
    State.ADOPTED: {
        **_stays(State.ADOPTED, Event.HOSTED),
        Event.FOUND_UNFINISHED: Move(State.UNCLAIMED, (Effect.HEED,)),
        Event.FOUND_READY: Move(State.READY, (Effect.FOLLOW, Effect.HEED)),
        Event.FOUND_ENDING: Move(State.ASKING, (Effect.ASK_TO_YIELD,)),
        Event.FOUND_ENDED: Move(State.REAPING, (Effect.REAP,)),
    },
    State.UNCLAIMED: {
        Event.ORDER: Move(State.WAITING, (Effect.START,)),
        Event.STOP: _GIVE_UP,
        Event.EXIT: _GIVE_UP,
    },
    State.WAITING: _step(State.WAITING, Event.SUCCEEDED, State.GUARDING),
    State.GUARDING: _step(State.GUARDING, Event.GUARDED, State.LEASING),
    State.LEASING: _step(State.LEASING, Event.LEASED, State.UNPACKING),
    State.UNPACKING: _step(State.UNPACKING, Event.UNPACKED, State.HOSTING, Effect.RECORD),
    State.HOSTING: _step(State.HOSTING, Event.HOSTED, State.BUILDING, Effect.RECORD),
    State.BUILDING: _step(State.BUILDING, Event.BUILT, State.READY, Effect.BECOME_READY, Effect.RECORD, Effect.FOLLOW),
    State.READY: {
        **_told(State.READY),
        Event.ORDER: Move(State.READY, (Effect.TELL_READY,)),
        Event.STOP: Move(State.ASKING, (Effect.ASK_TO_YIELD,)),
        Event.EXIT: Move(State.REAPING, (Effect.REAP,)),
    },
    State.ASKING: {
        **_stays(State.ASKING),
        **_told(State.ASKING),
        Event.CANCELLED: Move(State.SAVING),
        Event.YIELDED: _KILL,
    },
    State.SAVING: {**_stays(State.SAVING), **_told(State.SAVING), Event.YIELDED: _KILL},
    State.KILLING: {**_ending(State.KILLING, Effect.REPORT_STOPPED), **_told(State.KILLING)},
    State.GIVING_UP: _ending(State.GIVING_UP, Effect.REPORT_NOT_STARTED, Event.HOSTED),
    State.REAPING: {**_ending(State.REAPING, Effect.REPORT_EXITED), **_told(State.REAPING)},
    State.QUARANTINED: {
        **_ending(State.QUARANTINED, Effect.REPORT_STUCK, Event.HOSTED),
        **_told(State.QUARANTINED),
        Event.PROVED: Move(State.GONE, (Effect.REPORT_FREED, Effect.BURY)),
    },
    State.GONE: {},
}
"""In each state: what may happen, and what follows."""


class Life:
    def __init__(self, *, adopted: bool) -> None:
        self.state = State.ADOPTED if adopted else State.WAITING

    def on(self, event: Event) -> tuple[Effect, ...]:
        """Something happens: go to the state that follows; what there is to do, in this order.

        Raises:
            NotListed: it can't happen now.
        """
        move = MOVES[self.state].get(event)
        if move is None:
            raise NotListed(f"{event.name} happened to a worker that is {self.state.name}: the table doesn't list it")
        self.state = move.state
        return move.effects
