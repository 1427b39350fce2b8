"""The placement of a job: each placed component gets its workers' places.

Without I/O, so that a controller on its nodes and a plan on described ones say the same, fault by fault.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import yaml

from callboard.model.describe import masked
from callboard.model.inputs.located import Misfit, Misfits, Place
from callboard.model.quantities import MILLI, format_milli, piece_name, pieces
from callboard.model.roles import groups_of
from callboard.model.specs import ComponentSpec, JobSpec, WorkerPlace
from callboard.placement.cluster.cluster import Cluster
from callboard.placement.layout.plan import PlacementPlan, PlannedComponent, PlannedWorker
from callboard.placement.render import as_asked, plan_placement

PieceShares = Mapping[tuple[str, int], tuple[tuple[str, int], ...]]
"""(component, rank) → (piece of its node's declared hardware, share in milli) of each piece that the worker uses."""


def place_job(spec: JobSpec, cluster: Cluster) -> JobSpec:
    """The job with a place for each worker that its text places; a job without a text as it is.

    Args:
        spec: the job, as it was read.
        cluster: the nodes that its ranks count.

    Raises:
        InvalidInput: every fault of the text.
        Misfits: what the job says beside it and differently.
    """
    return place_by(spec, plan_of(spec, cluster)) if spec.placement_config else spec


def plan_of(spec: JobSpec, cluster: Cluster) -> PlacementPlan:
    """What the text of a job means on these nodes.

    Raises:
        InvalidInput: every fault of the text.
    """
    asking = [component.name for component in spec.components if component.resources.gpu_milli]
    return plan_placement(spec.placement_config, cluster, gpu_components=asking)


def place_by(spec: JobSpec, plan: PlacementPlan) -> JobSpec:
    """The job with the places of its plan.

    Raises:
        Misfits: what the job and its placement say differently.
    """
    places = _places(spec, plan)
    misfits = list(_misfits(spec, plan, places))
    if misfits:
        raise Misfits(misfits)
    components = tuple(
        component if component.name not in places else _with_places(component, places[component.name])
        for component in spec.components
    )
    return replace(
        spec, components=components, placement_config=_kept(plan), placement_digest=digest_of(spec.placement_config)
    )


def _places(spec: JobSpec, plan: PlacementPlan) -> dict[str, tuple[WorkerPlace, ...]]:
    """The places of each component that the plan places."""
    shares = hardware_shares(plan)
    found = {name: tuple(place_of(worker, shares) for worker in part.workers) for name, part in plan.by_name.items()}
    groups = [[spec.components[index].name for index in indexes] for indexes in groups_of(spec.components).values()]
    together = {
        name: _of_one_process(found[name], [found.get(each, ()) for each in names])
        for names in groups
        for name in names
        if name in found
    }
    return found | together


def _of_one_process(
    own: tuple[WorkerPlace, ...], members: Sequence[tuple[WorkerPlace, ...]]
) -> tuple[WorkerPlace, ...]:
    """The places of a component that shares its processes with others: each process holds of its devices what the text
    charges all that are in it. Where others have other places it is told by whoever joins them."""
    if any(_held_at(places) != _held_at(own) for places in members):
        return own
    return tuple(
        replace(
            place,
            devices=tuple((at, sum(dict(each.devices)[at] for each in alike)) for at, _ in place.devices),
            hardware=tuple((piece, sum(dict(each.hardware)[piece] for each in alike)) for piece, _ in place.hardware),
        )
        for place, *alike in zip(own, *members, strict=True)
    )


def _held_at(places: Sequence[WorkerPlace]) -> list[object]:
    return [(each.node_id, [at for at, _ in each.devices], [piece for piece, _ in each.hardware]) for each in places]


def digest_of(text: str) -> str:
    """What tells a placement text from others once only its normal form is kept."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _kept(plan: PlacementPlan) -> str:
    """The text that a job keeps: the placement alone, in its normal form. A whole config may hold secrets, and so may
    the variables of its node groups, which are kept with the places
    (:mod:`callboard.controller.journal.secret_store`)."""
    config = as_asked(plan)
    for group in config["cluster"].get("node_groups", ()):
        for settings in group.get("env_configs", ()):
            if "env_vars" in settings:
                settings["env_vars"] = [masked(tuple(pair.items())) for pair in settings["env_vars"]]
    kept: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    return kept


def hardware_shares(plan: PlacementPlan) -> PieceShares:
    """How much of each piece of declared hardware every worker holds that uses it: those who share one have equal
    parts, as with a GPU, and all of it together. What a config alone declares is not counted, since no node says that
    it has it."""
    declared = {
        node.node_id: {piece for piece, _ in pieces(unit.type for unit in node.hardware).custom_milli}
        for node in plan.cluster.nodes
        if node.hardware
    }
    using = [
        (worker, [piece for piece in _pieces_of(worker) if piece in declared.get(worker.node_id, ())])
        for component in plan.components
        for worker in component.workers
    ]
    users = Counter((worker.node_id, piece) for worker, used in using for piece in used)
    served = Counter[tuple[str, str]]()
    shares: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
    for worker, used in using:
        held = {}
        for piece in used:
            each, more = divmod(MILLI, users[worker.node_id, piece])
            served[worker.node_id, piece] += 1
            held[piece] = max(1, each + (served[worker.node_id, piece] <= more))
        if held:
            shares[worker.component, worker.placement.rank] = tuple(sorted(held.items()))
    return shares


def _pieces_of(worker: PlannedWorker) -> list[str]:
    if not worker.hardware:
        return []
    positions = worker.placement.local_hardware_ranks
    return [piece_name(unit.type, at) for unit, at in zip(worker.hardware, positions, strict=True)]


def _with_places(component: ComponentSpec, places: tuple[WorkerPlace, ...]) -> ComponentSpec:
    return replace(
        component,
        min_workers=len(places),
        max_workers=len(places),
        resources=replace(component.resources, gpu_milli=0),
        places=places,
    )


def place_of(worker: PlannedWorker, shares: PieceShares) -> WorkerPlace:
    """Where one worker must run.

    Args:
        worker: what the plan says of it.
        shares: :func:`hardware_shares` of the plan.
    """
    settings = ",".join(unit.config_json for unit in worker.hardware)
    return WorkerPlace(
        node_id=worker.node_id,
        devices=tuple((device.position, device.milli) for device in worker.devices),
        observes=worker.observer,
        env=worker.env,
        interpreter=worker.interpreter,
        node_group=worker.placement.node_group_label or "",
        hardware_json=f"[{settings}]" if settings else "",
        hardware=shares.get((worker.component, worker.placement.rank), ()),
    )


def _misfits(spec: JobSpec, plan: PlacementPlan, places: Mapping[str, tuple[WorkerPlace, ...]]) -> Iterable[Misfit]:
    """What the job and its placement say differently."""
    known = {component.name for component in spec.components}
    for name in plan.by_name:
        if name not in known:
            listed = ", ".join(sorted(known))
            said = f"places {name}, but the job's components are {listed}"
            yield Misfit(("cluster", "component_placement"), said)
    for index, component in enumerate(spec.components):
        planned = plan.by_name.get(component.name)
        if planned is None:
            continue
        place = ("components", index)
        if component.elastic:
            said = f"{component.name} has a placement, so its number of workers is fixed"
            yield Misfit((*place, "min_workers"), said)
        elif component.places and _where(component.places) != _where(places[component.name]):
            # What a job says of itself has both, and equal, so it may be submitted again.
            said = f"{component.name} states places, and its placement gives others; state one of the two"
            yield Misfit((*place, "places"), said)
        elif component.min_workers not in (1, planned.world_size):
            said = (
                f"{component.name} states {component.min_workers} workers, its placement makes {planned.world_size}; "
                "leave workers out or correct one of the two"
            )
            yield Misfit((*place, "workers"), said)
        yield from _gpu_misfits((*place, "resources", "gpu"), component, planned)


def _where(places: Iterable[WorkerPlace]) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    return [(place.node_id, place.devices) for place in places]


def _gpu_misfits(place: Place, component: ComponentSpec, planned: PlannedComponent) -> Iterable[Misfit]:
    asked = component.resources.gpu_milli
    if not asked:
        return
    for worker in planned.workers:
        held, whole = sum(device.milli for device in worker.devices), len(worker.devices) * MILLI
        # Equal parts may differ by a thousandth of each device.
        if asked != whole and abs(asked - held) > len(worker.devices):
            said = (
                f"{component.name} asks {format_milli(asked)} GPU a worker, its placement gives rank "
                f"{worker.placement.rank} {format_milli(held)}; leave gpu out or correct one of the two"
            )
            yield Misfit(place, said)
            return
