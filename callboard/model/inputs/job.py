"""Which jobs make sense? At least one component, workers that can be counted, no variable of the scheduler's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from callboard.model.faults import InvalidInput
from callboard.model.inputs.arguments import ArgsJson, KwargsJson
from callboard.model.inputs.compounds import Amounts, Env, LabelMap, PassEnv, sequence
from callboard.model.inputs.located import Misfit, Misfits, Refused, as_mapping, shown, shown_text
from callboard.model.inputs.placement_config import placement_text, with_placement_config
from callboard.model.inputs.places import places_of
from callboard.model.inputs.reading import Input, check, faults_of, read
from callboard.model.inputs.scalars import (
    Actor,
    Duration,
    Flag,
    Interpreter,
    Method,
    Name,
    PositiveDuration,
    PositiveTimeout,
    Priority,
    Text,
    Timeout,
    choice,
    whole,
)
from callboard.model.quantities import NOTHING
from callboard.model.specs import (
    ComponentSpec,
    Fencing,
    JobSpec,
    OnPreempt,
    RestartPolicy,
    Strategy,
    WorkerPlace,
)

MAX_COMPONENTS = 64
"""Most components of a job."""

MAX_WORKERS = 100_000
"""Most workers of a component, and of a job."""

Workers = Annotated[int, whole(1, MAX_WORKERS)]
Concurrency = Annotated[int, whole(1, 10_000)]


class RayOptionsInput(Input):
    """Options of Ray that the scheduler doesn't own."""

    alias: Name | None = Field(None, alias="name")
    memory: Any = None
    max_concurrency: Concurrency | None = None


def read_ray_options(value: object) -> RayOptionsInput:
    """The options; any other is refused by its name, because the scheduler decides about it."""
    if isinstance(value, Mapping):
        foreign = [key for key in value if key not in ("name", "memory", "max_concurrency")]
        if foreign:
            why = "is refused: the scheduler decides about it; name, memory and max_concurrency are allowed"
            raise Misfits([Misfit((str(key),), f"{shown_text(str(key))} {why}") for key in foreign])
    return check(RayOptionsInput, value)


class ComponentInput(Input):
    """The keys of a component."""

    later = frozenset({"secret_env", "working_dir", "py_modules", "scaling", "colocation_total"})

    name: Name
    actor: Actor
    role: Name | None = None
    args_json: ArgsJson | None = Field(None, alias="args")
    kwargs_json: KwargsJson | None = Field(None, alias="kwargs")
    entry: Method | None = None
    workers: Workers | None = None
    min_workers: Workers | None = None
    max_workers: Workers | None = None
    resources: Amounts | None = None
    max_concurrency: Concurrency | None = None
    env: Env | None = None
    pass_env: PassEnv | None = None
    pool: Name | None = None
    colocation_group: Name | None = None
    in_bundle: Flag | None = None
    interpreter: Interpreter | None = None
    ray_options: Annotated[RayOptionsInput, PlainValidator(read_ray_options)] | None = None
    placement: Any = None  # became a part of placement_config before a model sees it
    places: Annotated[tuple[WorkerPlace, ...], places_of(MAX_WORKERS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ComponentInput:
        misfits = [*self._wrong_counts(), *self._wrong_options(), *self._wrong_places()]
        if misfits:
            raise Misfits(misfits)
        return self

    def _wrong_counts(self) -> list[Misfit]:
        low, high = self.min_workers, self.max_workers
        if low is None and high is None:
            return []
        if self.workers is not None:
            return [Misfit(("workers",), "state either workers or min_workers and max_workers")]
        if low is None or high is None:
            missing = "min_workers" if low is None else "max_workers"
            return [Misfit((missing,), "min_workers and max_workers are stated together")]
        if low > high:
            return [Misfit(("min_workers",), f"{low} is more than max_workers, {high}")]
        return []

    def _wrong_places(self) -> list[Misfit]:
        if not self.places:
            return []
        misfits = []
        if self.min_workers is not None:
            misfits.append(Misfit(("places",), "an elastic component has no fixed places; state workers, or no places"))
        elif self.workers not in (None, len(self.places)):
            misfits.append(Misfit(("places",), f"{len(self.places)} places for {self.workers} workers"))
        if (self.resources or NOTHING).gpu_milli:
            misfits.append(Misfit(("resources", "gpu"), "is what each worker's place says; leave it out here"))
        return misfits

    def _wrong_options(self) -> list[Misfit]:
        options = self.ray_options
        if options is None:
            return []
        misfits = []
        if options.memory is not None:
            try:
                asked = check(_MemoryInput, {"memory": {"memory": options.memory}}).memory
            except Misfits as error:
                return [Misfit(("ray_options", "memory"), misfit.message) for misfit in error.found]
            own = (self.resources or NOTHING).memory_bytes
            if own and own != asked.memory_bytes:
                misfits.append(Misfit(("ray_options", "memory"), "differs from resources.memory; state one of them"))
        asked_at_once = options.max_concurrency
        if asked_at_once is not None and self.max_concurrency not in (None, asked_at_once):
            message = "differs from max_concurrency; state one of them"
            misfits.append(Misfit(("ray_options", "max_concurrency"), message))
        return misfits

    def spec(self) -> ComponentSpec:
        """The frozen form."""
        stated = self.stated("workers", "ray_options", "placement")
        workers = len(self.places) if self.places else self.workers
        if workers is not None:
            stated |= {"min_workers": workers, "max_workers": workers}
        if self.ray_options is not None:
            stated |= self.ray_options.stated("memory")
            if self.ray_options.memory is not None:
                memory = check(_MemoryInput, {"memory": {"memory": self.ray_options.memory}}).memory
                stated["resources"] = replace(self.resources or NOTHING, memory_bytes=memory.memory_bytes)
        return ComponentSpec(**stated)


class _MemoryInput(Input):
    """An amount of memory alone."""

    memory: Amounts


class RestartInput(Input):
    """The keys of ``restart``."""

    max_restarts: Annotated[int, whole(0, 10_000)] | None = None
    backoff_base_ms: PositiveTimeout | None = Field(None, alias="backoff_base")
    backoff_max_ms: PositiveTimeout | None = Field(None, alias="backoff_max")
    window_ms: Duration | None = Field(None, alias="window")

    @model_validator(mode="after")
    def _rising(self) -> RestartInput:
        spec = self.spec()
        if spec.backoff_base_ms > spec.backoff_max_ms:
            raise Misfits([Misfit(("backoff_base",), "is longer than backoff_max")])
        return self

    def spec(self) -> RestartPolicy:
        """The frozen form."""
        return RestartPolicy(**self.stated())


class SessionInput(Input):
    """The keys of ``owner.session``."""

    lease: PositiveDuration


class OwnerInput(Input):
    """The keys of ``owner``, where it isn't the word ``detached``."""

    session: SessionInput


class WaitInput(Input):
    """The keys of ``wait_for_nodes``."""

    timeout: Duration


def _owner(value: object) -> object:
    """``detached`` is "not stated"."""
    if isinstance(value, str):
        if value.strip().lower() == "detached":
            return None
        raise Refused(f"{shown(value)} is unknown; use detached or {{session: {{lease: 30s}}}}")
    return value


def _wait(value: object) -> object:
    """``wait_for_nodes: 5m`` is short for ``{timeout: 5m}``."""
    return {"timeout": value} if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def _components(value: object) -> object:
    found = sequence(value, "a list of components, each with name and actor", MAX_COMPONENTS)
    if not found:
        raise Refused("a job needs at least one component")
    return found


class JobInput(Input):
    """The keys of a job."""

    name: Name
    pool: Name
    priority_milli: Priority | None = Field(None, alias="priority")
    labels: LabelMap | None = None
    components: Annotated[tuple[ComponentInput, ...], BeforeValidator(_components)]
    placement: Annotated[Strategy, choice(Strategy)] | None = None
    gang: Flag | None = None
    owner: Annotated[OwnerInput | None, BeforeValidator(_owner)] = None
    preemptible: Flag | None = None
    min_runtime_ms: Timeout | None = Field(None, alias="min_runtime")
    grace_ms: Timeout | None = Field(None, alias="grace")
    on_preempt: Annotated[OnPreempt, choice(OnPreempt)] | None = None
    restart: RestartInput | None = None
    ttl_after_finished_ms: Duration | None = Field(None, alias="ttl_after_finished")
    estimated_duration_ms: Duration | None = Field(None, alias="estimated_duration")
    wait_for_nodes: Annotated[WaitInput | None, BeforeValidator(_wait)] = None
    fencing: Annotated[Fencing, choice(Fencing)] | None = None
    node_selector: LabelMap | None = None
    node_selector_soft: Flag | None = None
    starvation_after_ms: Duration | None = Field(None, alias="starvation_after")
    start_timeout_ms: PositiveTimeout | None = Field(None, alias="start_timeout")
    never_preempts: Flag | None = None
    cluster: Any = None  # became the placement_config
    placement_config: Annotated[str, PlainValidator(placement_text)] | None = None
    placement_source: Text | None = None

    @model_validator(mode="after")
    def _consistent(self) -> JobInput:
        components = [component.spec() for component in self.components]
        misfits = [*_repeated(components), *_uneven_groups(components)]
        workers = sum(component.max_workers for component in components)
        if workers > MAX_WORKERS:
            misfits.append(Misfit(("components",), f"{workers} workers are too many; {MAX_WORKERS} are allowed"))
        if misfits:
            raise Misfits(misfits)
        return self

    def spec(self) -> JobSpec:
        """The frozen form."""
        stated = self.stated("components", "owner", "restart", "wait_for_nodes", "cluster")
        stated["components"] = tuple(component.spec() for component in self.components)
        if self.owner is not None:
            stated["session_lease_ms"] = self.owner.session.lease
        if self.restart is not None:
            stated["restart"] = self.restart.spec()
        if self.wait_for_nodes is not None:
            stated["wait_for_nodes_ms"] = self.wait_for_nodes.timeout
        return JobSpec(**stated)


def _repeated(components: list[ComponentSpec]) -> list[Misfit]:
    counts = Counter(component.name for component in components)
    first = {component.name: index for index, component in reversed(list(enumerate(components)))}
    return [
        Misfit(
            ("components", index, "name"), f"{component.name} is the name of components[{first[component.name]}] too"
        )
        for index, component in enumerate(components)
        if counts[component.name] > 1 and index != first[component.name]
    ]


def _uneven_groups(components: list[ComponentSpec]) -> list[Misfit]:
    """Members of one group share a process per rank, so they need equal counts (design 06)."""
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for component in components:
        if component.colocation_group:
            members = groups.setdefault(component.colocation_group, {})
            members[component.name] = (component.min_workers, component.max_workers)
    return [
        Misfit(
            ("components",),
            f"All roles in colocation group '{group}' must have the same count. Got: "
            f"{ {member: high for member, (_, high) in counts.items()} }",
        )
        for group, counts in groups.items()
        if len(set(counts.values())) > 1
    ]


def job_spec(mapping: object) -> JobSpec:
    """A job from a mapping such as ``{"name": "train-00", "pool": "rlhf", "priority": 9, "components": […]}``.

    A ``cluster`` (as in an RLinf config) and the components' ``placement`` become its ``placement_config``.

    Raises:
        InvalidInput: every fault. Faults between fields (a name twice) are looked for once each field is right.
    """
    try:
        source = with_placement_config(as_mapping(mapping))
    except Misfits as error:
        raise InvalidInput(faults_of(error, mapping)) from None
    return read(JobInput, source).spec()
