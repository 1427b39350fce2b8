"""What wants room? One worker of a job that is to be placed."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, WorkerPlace


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker that wants room.

    Attributes:
        place: where it must run; None: wherever there is room.
    """

    component: str
    rank: int
    resources: Resources
    place: WorkerPlace | None = None

    @classmethod
    def of(cls, component: ComponentSpec, rank: int) -> Slot:
        """The worker of a rank."""
        if not component.places:
            return cls(component.name, rank, component.resources)
        return cls(component.name, rank, component.resources_of(rank), component.place_of(rank))
