"""The refusals: why a request is turned down, as typed errors. A refused event changed nothing."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from callboard.model.frozen import dataclass
from callboard.model.specs import JobSpec


class RefusalCode(StrEnum):
    """Why, in one word; the API's error reasons of the same name."""

    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    UNSCHEDULABLE = "UNSCHEDULABLE"
    WRONG_STATE = "WRONG_STATE"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    INVALID_FIELD = "INVALID_FIELD"
    LIMIT_REACHED = "LIMIT_REACHED"
    NODE_TAKEN = "NODE_TAKEN"
    POOL_IN_USE = "POOL_IN_USE"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    PREEMPTION_REFUSED = "PREEMPTION_REFUSED"


@dataclass(frozen=True, slots=True)
class Reason:
    """One typed statement of why something waits, failed or was chosen.

    Attributes:
        code: kind, e.g. NODE_LACKS, QUOTA_SHORT, LABEL_MISMATCH, WAITING_FOR_VICTIM.
        subject: what it is about: ``nodes/n1``, ``pools/rlhf``, ``jobs/reward-00``, ``placementGroups/pg-3``.
        message: the statement as a sentence.
        resource: resource concerned, where there is one.
        asked, available: amounts in the units of Resources.
    """

    code: str
    subject: str
    message: str
    resource: str = ""
    asked: int = 0
    available: int = 0


@dataclass(slots=True)
class Refusal(Exception):
    """A request that is not carried out.

    Attributes:
        code: why, in one word.
        subject: what it is about: ``jobs/train-00``.
        message: what, why and what to do, as sentences.
        field: path of the request's field at fault; empty: none.
        reasons: the account behind the message.
        unblock: smallest changes by which the request would be taken.
        about: the job that can't be held. Its account takes long: the refusal is decided without it, and who tells
            somebody asks for it (``Scheduler.accounted``).
    """

    code: RefusalCode
    subject: str
    message: str
    field: str = ""
    reasons: tuple[Reason, ...] = ()
    unblock: tuple[str, ...] = ()
    about: JobSpec | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.message


class ImpossibleTransition(AssertionError):
    """A state change that the table does not know: a defect. The text tells the object's story; nothing changed."""
