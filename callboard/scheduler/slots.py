"""What wants room? One worker of a job that is to be placed."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, Labels, WorkerPlace


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that wants room.

    Attributes:
        place: where it must run; None: wherever there is room.
        selector: labels its node must have, besides those that the job and the pool ask for.
        prefers: labels its node had better have; it goes elsewhere where no such node has room.
    """

    component: str
    rank: int
    resources: Resources
    place: WorkerPlace | None = None
    selector: Labels = ()
    prefers: Labels = ()

    @classmethod
    def of(cls, component: ComponentSpec, rank: int) -> Slot:
        """The worker of a rank."""
        if not component.places:
            labels, soft = component.node_selector, component.node_selector_soft
            return cls(component.name, rank, component.resources, None, *(((), labels) if soft else (labels, ())))
        return cls(component.name, rank, component.resources_of(rank), component.place_of(rank))
