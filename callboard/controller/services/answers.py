"""The scheduler's refusals as errors of the API."""

from __future__ import annotations

from callboard.model.faults import Fault, InvalidInput
from callboard.scheduler.records.refusals import Refusal, RefusalCode
from callboard.wire.refusals import (
    CallboardError,
    CallError,
    ErrorReason,
    InvalidRequest,
    QuotaViolation,
    code_of,
    exception_for,
)

MAX_REASONS = 8
"""Reasons that travel with an error; the whole account is what ExplainJob and validate_only are for."""


def error_of(error: Refusal | InvalidInput) -> CallboardError:
    """The error that says what ``error`` says."""
    if isinstance(error, InvalidInput):
        return InvalidRequest.of(error)
    reason = ErrorReason(error.code.value)
    metadata = {"subject": error.subject}
    for place, why in enumerate(error.reasons[:MAX_REASONS]):
        metadata[f"reason.{place}"] = f"{why.code} {why.message}"
    for place, change in enumerate(error.unblock[:MAX_REASONS]):
        metadata[f"unblock.{place}"] = change
    quota: tuple[QuotaViolation, ...] = ()
    if error.code is RefusalCode.QUOTA_EXCEEDED:
        short = [QuotaViolation(why.subject, why.message) for why in error.reasons if why.code == "QUOTA_SHORT"]
        quota = tuple(short) or (QuotaViolation(error.subject, error.message),)
    return exception_for(
        CallError(
            code_of(reason),
            reason,
            error.message,
            metadata,
            faults=(Fault(error.field, error.message),) if error.field else (),
            quota=quota,
        )
    )
