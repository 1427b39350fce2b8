"""Pools and preemption policies as input: bounds that fit each other, reserved shapes that hold something."""

from __future__ import annotations

from types import MappingProxyType

from callboard.model.inputs.located import Misfit
from callboard.model.inputs.reading import Input, read
from callboard.model.policy import PolicyOverrides, PreemptionPolicy
from callboard.model.specs import PgPoolSpec, PoolSpec


class PgPoolInput(Input, of=PgPoolSpec):
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

    def consistent(self) -> list[Misfit]:
        """Nothing is kept where groups aren't."""
        kept = (("reserved", self.reserved), ("reuse", self.reuse)) if self.enable is False else ()
        return [
            Misfit((key,), "needs enable: true; without, no group outlives its job") for key, stated in kept if stated
        ]

    def spec(self) -> PgPoolSpec:
        """The frozen form. Where groups are not kept none is reused."""
        return PgPoolSpec(**self.stated() | ({"reuse": False} if self.enable is False else {}))


class PoolInput(Input, of=PoolSpec):
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
            **{amount: f"nominal: {{{amount}: …}}" for amount in ("cpu", "gpu", "memory")},
            "stopPolicy": "stop_policy",
        }
    )
    neighbours = MappingProxyType({PgPoolSpec: "pg_pool", PolicyOverrides: "preemption"})


class PolicyInput(Input, of=PolicyOverrides):
    """The keys of a preemption policy, for the cluster and for a pool alike."""


def pool_spec(mapping: object) -> PoolSpec:
    """A pool from a mapping such as ``{"name": "rlhf", "nominal": {"cpu": 6, "memory": "8GiB"}}``.

    Quotas are sorted by resource. Without ``pg_pool`` the pool keeps no placement groups.

    Raises:
        InvalidInput: every fault.
    """
    found: PoolSpec = read(PoolInput, mapping).spec()
    return found


def preemption_policy(mapping: object) -> PreemptionPolicy:
    """The cluster's policy from a mapping such as ``{"aggressiveness": "high", "cancel_timeout": "30s"}``.

    Raises:
        InvalidInput: every fault.
    """
    return PreemptionPolicy(**read(PolicyInput, mapping).stated())
