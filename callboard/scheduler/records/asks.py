"""The ask of a job: what it needs to start, as slots of one worker each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from callboard.model.quantities import Resources, total
from callboard.model.specs import ComponentSpec, JobSpec, Labels, Strategy, WorkerPlace


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


INTERPRETER = "interpreter:"
"""Key that stands among the labels of a selector for a Python interpreter that the node must allow. No label of a
node can have it, because of the colon."""


AWAITED = "awaited:"
"""How the id of a node begins that a placement counts and that is still to come. No node can have it, because of the
colon."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that wants room.

    Attributes:
        place: where it must run; None: wherever there is room.
        selector: labels its node must have, besides those that the job and the pool ask for, and the interpreter that
            it must allow (:data:`INTERPRETER`).
        strategy: where it lies to the other workers of its component; None: to those of the job, as the job says.
        prefers: labels its node had better have; it goes elsewhere where no such node has room.
    """

    component: str
    rank: int
    resources: Resources
    place: WorkerPlace | None = None
    selector: Labels = ()
    prefers: Labels = ()
    strategy: Strategy | None = None

    @classmethod
    def of(cls, component: ComponentSpec, rank: int) -> Slot:
        """The worker of a rank."""
        place = component.place_of(rank)
        interpreter = (place.interpreter if place else "") or component.interpreter
        runs = ((INTERPRETER, interpreter),) if interpreter else ()
        if place is not None:
            return cls(component.name, rank, component.resources_of(rank), place, runs)
        labels, soft = component.node_selector, component.node_selector_soft
        hard = runs if soft else tuple(sorted((*labels, *runs)))
        preferred = labels if soft else ()
        return cls(component.name, rank, component.resources, None, hard, preferred, component.placement)
