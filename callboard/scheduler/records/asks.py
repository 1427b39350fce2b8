"""The ask of a job: what it needs to start, as slots of one worker each."""

from __future__ import annotations

from collections.abc import Iterable

from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources, total
from callboard.model.specs import ComponentSpec, JobSpec, Labels, Strategy, WorkerPlace


class Ask:
    """The workers of a job that are charged to one pool: they share one placement group.

    Attributes:
        parts: components, and which ranks of them.
        count: how many workers that are.
        resources: sum over the workers.
    """

    __slots__ = ("_slots", "count", "parts", "pool", "resources")

    def __init__(self, pool: str, parts: Iterable[tuple[ComponentSpec, range]]) -> None:
        self.pool = pool
        self.parts = tuple(parts)
        self.count = sum(len(ranks) for _, ranks in self.parts)
        self.resources = total(_together(component, ranks) for component, ranks in self.parts)
        self._slots: tuple[Slot, ...] | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """A slot for each worker, made when somebody asks: most questions about 100 000 workers are answered by their
        sum."""
        if self._slots is None:
            self._slots = tuple(Slot.of(component, rank) for component, ranks in self.parts for rank in ranks)
        return self._slots

    @property
    def placed(self) -> bool:
        """Whether some of the workers must run at certain places."""
        return any(component.places for component, _ in self.parts)


def _together(component: ComponentSpec, ranks: range) -> Resources:
    if not component.places:
        return component.resources.scaled(len(ranks))
    return total(component.resources_of(rank) for rank in ranks)


def asks_of(spec: JobSpec) -> tuple[Ask, ...]:
    """What a job needs to start: the fewest workers of each component, by the pool they are charged to."""
    by_pool: dict[str, list[tuple[ComponentSpec, range]]] = {}
    for component in spec.components:
        by_pool.setdefault(spec.pool_of(component), []).append((component, range(component.min_workers)))
    return tuple(Ask(pool, parts) for pool, parts in by_pool.items())


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
        place = component.place_of(rank)
        interpreter = (place.interpreter if place else "") or component.interpreter
        runs = ((INTERPRETER, interpreter),) if interpreter else ()
        if place is not None:
            return cls(component.name, rank, component.resources_of(rank), place, runs)
        labels, soft = component.node_selector, component.node_selector_soft
        hard = runs if soft else tuple(sorted((*labels, *runs)))
        preferred = labels if soft else ()
        return cls(component.name, rank, component.resources, None, hard, preferred, component.placement)
