"""What does a job need to start?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from callboard.model.quantities import Resources, total
from callboard.model.specs import JobSpec
from callboard.scheduler.slots import Slot


@dataclass(frozen=True, slots=True)
class Ask:
    """The workers of a job that are charged to one pool: they share one placement group.

    Attributes:
        resources: sum over the workers.
    """

    pool: str
    slots: tuple[Slot, ...]
    resources: Resources

    @classmethod
    def of(cls, pool: str, slots: Iterable[Slot]) -> Ask:
        """What these workers ask of a pool."""
        kept = tuple(slots)
        return cls(pool, kept, total(slot.resources for slot in kept))


def asks_of(spec: JobSpec) -> tuple[Ask, ...]:
    """What a job needs to start: the fewest workers of each component, by the pool they are charged to."""
    by_pool: dict[str, list[Slot]] = {}
    for component in spec.components:
        slots = by_pool.setdefault(spec.pool_of(component), [])
        slots.extend(Slot.of(component, rank) for rank in range(component.min_workers))
    return tuple(Ask.of(pool, slots) for pool, slots in by_pool.items())
