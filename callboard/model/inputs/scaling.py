"""Scaling rules as input: one signal each, one side of one threshold, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from callboard.model.inputs.compounds import list_of
from callboard.model.inputs.located import Misfit, Misfits, Refused, shown
from callboard.model.inputs.reading import Input, check
from callboard.model.inputs.scalars import Duration, Name, choice, milli, whole
from callboard.model.quantities import MAX_MILLI
from callboard.model.specs import ScalingAction, ScalingRule

MAX_RULES = 64
"""Most rules of a component."""

Gauge = Annotated[int, milli(-MAX_MILLI, MAX_MILLI)]


class RuleInput(Input):
    """The keys of one scaling rule."""

    signal: Name
    above: Gauge | None = None
    below: Gauge | None = None
    action: Annotated[ScalingAction, choice(ScalingAction)]
    step: Annotated[int, whole(1, 100_000)] | None = None
    cooldown: Duration | None = None

    @model_validator(mode="after")
    def _one_side(self) -> RuleInput:
        if (self.above is None) == (self.below is None):
            raise Misfits([Misfit((), "state either above or below, the value from which the rule acts")])
        return self

    def spec(self) -> ScalingRule:
        """The frozen form."""
        stated: dict[str, Any] = self.stated("above", "below", "cooldown")
        if self.cooldown is not None:
            stated["cooldown_ms"] = self.cooldown
        return ScalingRule(above_milli=self.above, below_milli=self.below, **stated)


def _rule(value: Any) -> ScalingRule:
    if not isinstance(value, Mapping):
        raise Refused(f"{shown(value)} is not a rule; write e.g. {{signal: queue_depth, above: 100, action: down}}")
    return check(RuleInput, value).spec()


Scaling = Annotated[
    tuple[ScalingRule, ...],
    BeforeValidator(list_of(_rule, "e.g. [{signal: queue_depth, above: 100, action: down}]", MAX_RULES).func),
]
