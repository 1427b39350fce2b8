"""Pools as input: quotas that are not negative, reserved shapes that hold something."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

from pydantic import Field, model_validator

from callboard.model.inputs.compounds import LabelMap, Quota, Shapes, list_of
from callboard.model.inputs.located import Misfit, Misfits
from callboard.model.inputs.policy import PolicyInput
from callboard.model.inputs.reading import Input, read
from callboard.model.inputs.scalars import (
    Duration,
    Flag,
    Name,
    PositiveTimeout,
    Priority,
    Ratio,
    choice,
    name,
    whole,
)
from callboard.model.specs import PgPoolSpec, PoolSpec, StopPolicy

MAX_MEMBERS = 1_000


class RetriesInput(Input):
    """How often a group's creation is tried."""

    attempts: Annotated[int, whole(1, 1000)] | None = None
    base: PositiveTimeout | None = None


class PgPoolInput(Input):
    """The keys of ``pg_pool``."""

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("high_priority_pg_specs", "pg_specs", "specs"), "reserved"),
            "enable_dynamic_pgs": "dynamic",
            "max_dynamic_pgs": "max_dynamic",
            "enable_pg_reuse": "reuse",
            "high_priority_threshold": "reserved_min_priority",
        }
    )

    enable: Flag | None = None
    reserved: Shapes | None = None
    dynamic: Flag | None = None
    max_dynamic: Annotated[int, whole(0, 10_000)] | None = None
    reuse: Flag | None = None
    reserved_min_priority_milli: Priority | None = Field(None, alias="reserved_min_priority")
    reserved_lendable: Flag | None = None
    reuse_slack_milli: Ratio | None = Field(None, alias="reuse_slack")
    idle_ttl_ms: Duration | None = Field(None, alias="idle_ttl")
    charge_reserved: Flag | None = None
    creation_timeout_ms: PositiveTimeout | None = Field(None, alias="creation_timeout")
    retries: RetriesInput | None = None

    @model_validator(mode="after")
    def _nothing_kept_when_off(self) -> PgPoolInput:
        if self.enable is False:
            kept = [
                Misfit((key,), "needs enable: true; without, no group outlives its job")
                for key, stated in (("reserved", self.reserved), ("reuse", self.reuse))
                if stated
            ]
            if kept:
                raise Misfits(kept)
        return self

    def spec(self) -> PgPoolSpec:
        """The frozen form. Where groups are not kept none is reused."""
        stated = self.stated("retries")
        if self.retries is not None:
            names = {"attempts": "retry_attempts", "base": "retry_base_ms"}
            stated |= {names[key]: amount for key, amount in self.retries.stated().items()}
        if self.enable is False:
            stated["reuse"] = False
        return PgPoolSpec(**stated)


class PoolInput(Input):
    """The keys of a pool."""

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("resources", "quota", "quotas", "limits", "capacity", "nominalQuota"), "nominal"),
            **dict.fromkeys(("borrowingLimit", "borrowing_limit"), "borrow_limit"),
            **dict.fromkeys(("lendingLimit", "lending_limit"), "lend_limit"),
            **dict.fromkeys(("high_priority_pg_specs", "reserved"), "pg_pool: {reserved: […]}"),
            "enable_dynamic_pgs": "pg_pool: {dynamic: …}",
            "max_dynamic_pgs": "pg_pool: {max_dynamic: …}",
            "enable_pg_reuse": "pg_pool: {reuse: …}",
            "label_preemption_rules": "preemption: {label_rules: …}",
            "stopPolicy": "stop_policy",
        }
    )

    name: Name
    nominal: Quota | None = None
    borrow_limit: Quota | None = None
    lend_limit: Quota | None = None
    cohort: Name | None = None
    labels: LabelMap | None = None
    node_selector: LabelMap | None = None
    protected: Flag | None = None
    stop_policy: Annotated[StopPolicy, choice(StopPolicy)] | None = None
    pg_pool: PgPoolInput | None = None
    preemption: PolicyInput | None = None
    members: Annotated[tuple[str, ...], list_of(name, "e.g. [alice]", MAX_MEMBERS, distinct=True)] | None = None

    def spec(self) -> PoolSpec:
        """The frozen form."""
        stated = self.stated("pg_pool", "preemption")
        if self.pg_pool is not None:
            stated["pg_pool"] = self.pg_pool.spec()
        if self.preemption is not None:
            stated["preemption"] = self.preemption.overrides()
        return PoolSpec(**stated)


def pool_spec(mapping: object) -> PoolSpec:
    """A pool from a mapping such as ``{"name": "rlhf", "nominal": {"cpu": 6, "memory": "8GiB"}}``.

    Quotas are sorted by resource. Without ``pg_pool`` the pool keeps no placement groups.

    Raises:
        InvalidInput: every fault.
    """
    return read(PoolInput, mapping).spec()
