"""The exception for a broken rule."""

from __future__ import annotations


class RuleBroken(AssertionError):
    """Something that must never happen did.

    Attributes:
        rule: which rule, e.g. ``"R2/I4"``.
        job: uid of the job concerned; empty: none.
    """

    def __init__(self, rule: str, message: str, job: str = "") -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.job = job
