"""Components as input: workers that can be counted, no variable of the scheduler's, rules that can act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from callboard.model.inputs.arguments import MAX_ARGUMENTS_BYTES, ArgsJson, KwargsJson
from callboard.model.inputs.compounds import Env, LabelMap, PassEnv, StatedAmounts, Total, list_of, resources
from callboard.model.inputs.located import Misfit, Misfits, Refused, shown_text
from callboard.model.inputs.places import places_of
from callboard.model.inputs.reading import Input, check
from callboard.model.inputs.scalars import (
    Actor,
    Duration,
    Flag,
    Interpreter,
    Method,
    Name,
    Package,
    StopSignal,
    choice,
    text,
    whole,
)
from callboard.model.inputs.scaling import Scaling
from callboard.model.quantities import NOTHING, Resources
from callboard.model.specs import (
    COLOCATED_CONCURRENCY,
    PROGRAM,
    PROGRAM_SIGNAL,
    RAY_PROGRAM,
    ComponentSpec,
    Strategy,
    WorkerPlace,
)

MAX_WORKERS = 100_000
"""Most workers of a component, and of a job."""

MAX_PORTS = 64
"""Most ports of one worker."""

MAX_COMMAND = 4096
"""Most arguments of a command."""

MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Longest argument of a command."""

_OF_ACTORS = {
    "args": "args_json",
    "kwargs": "kwargs_json",
    "entry": "entry",
    "max_concurrency": "max_concurrency",
    "colocation_group": "colocation_group",
    "progress_timeout": "progress_timeout_ms",
}
"""Keys that say nothing of a command, and their fields."""


def _script(value: object) -> str:
    read = _argument(value)
    if not read.strip():
        raise Refused("an empty script does nothing; write the commands of a shell")
    if read.startswith("#!") and read.split("\n", 1)[0].split("/")[-1].split(" ")[-1] not in ("sh", "bash"):
        raise Refused("a script is run by a shell; write command: [INTERPRETER, -c, TEXT] for another interpreter")
    return read


def _argument(value: object) -> str:
    read = text(value)
    if (size := len(read.encode())) > MAX_ARGUMENT_BYTES:
        raise Refused(f"{size} bytes are too many for one argument; Linux takes {MAX_ARGUMENT_BYTES}. Put it in a file")
    return read


Command = Annotated[tuple[str, ...], list_of(_argument, "e.g. [python, -m, pkg, --lr, '0.1']", MAX_COMMAND)]
Script = Annotated[str, PlainValidator(_script)]
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

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("num_gpus", "gpu", "gpus"), "resources: {gpu: …}"),
            **dict.fromkeys(("num_cpus", "cpu", "cpus"), "resources: {cpu: …}"),
            **dict.fromkeys(("memory", "mem"), "resources: {memory: …}"),
            **dict.fromkeys(("replicas", "num_workers", "num_replicas", "world_size", "parallelism"), "workers"),
            **dict.fromkeys(("min_replicas", "minReplicas"), "min_workers"),
            **dict.fromkeys(("max_replicas", "maxReplicas"), "max_workers"),
            **dict.fromkeys(("class", "cls", "actor_class", "class_name", "image"), "actor"),
            **dict.fromkeys(("entrypoint", "main", "run"), "entry"),
            **dict.fromkeys(("env_vars", "environment"), "env"),
            **dict.fromkeys(("arguments", "init_kwargs"), "kwargs"),
            **dict.fromkeys(("nodeSelector", "node_affinity", "affinity"), "node_selector"),
            **dict.fromkeys(("scheduling_strategy", "strategy"), "placement"),
            "runtime_env": "env (variables) and interpreter",
        }
    )

    later = frozenset({"py_modules"})
    internal = frozenset({"places"})

    name: Name
    actor: Actor | None = None
    command: Command | None = None
    script: Script | None = None
    ray: Flag | None = None
    working_dir: Package | None = None
    role: Name | None = None
    args_json: ArgsJson | None = Field(None, alias="args")
    kwargs_json: KwargsJson | None = Field(None, alias="kwargs")
    entry: Method | None = None
    workers: Workers | None = None
    min_workers: Workers | None = None
    max_workers: Workers | None = None
    resources: StatedAmounts | None = None
    max_concurrency: Concurrency | None = None
    env: Env | None = None
    secret_env: Env | None = None
    pass_env: PassEnv | None = None
    pool: Name | None = None
    node_selector: LabelMap | None = None
    node_selector_soft: Flag | None = None
    colocation_group: Name | None = None
    colocation_total: Total | None = None
    scaling: Scaling | None = None
    in_bundle: Flag | None = None
    interpreter: Interpreter | None = None
    ray_options: Annotated[RayOptionsInput, PlainValidator(read_ray_options)] | None = None
    progress_timeout_ms: Duration | None = Field(None, alias="progress_timeout")
    placement: Annotated[Strategy, choice(Strategy)] | None = None
    ports: Annotated[int, whole(0, MAX_PORTS)] | None = None
    stop_signal: StopSignal | None = None
    component_placement: Any = None  # became a part of placement_config before a model sees it
    places: Annotated[tuple[WorkerPlace, ...], places_of(MAX_WORKERS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ComponentInput:
        misfits = [
            *self._wrong_work(),
            *self._wrong_counts(),
            *self._wrong_options(),
            *self._wrong_places(),
            *self._wrong_variables(),
            *self._wrong_rules(),
        ]
        if misfits:
            raise Misfits(misfits)
        return self

    def _wrong_work(self) -> list[Misfit]:
        stated = [key for key in ("actor", "command", "script") if getattr(self, key) is not None]
        if not stated:
            return [Misfit(("actor",), "is required; or state command or script, for a program")]
        size = sum(len(each) for each in self.command or ())
        misfits = [Misfit((key,), f"is stated beside {stated[0]}; state one of them") for key in stated[1:]]
        if self.ray and self.actor is not None:
            misfits.append(Misfit(("ray",), "is for a command or script: a Ray cluster of its own"))
        if self.ray and self.stop_signal is not None:
            misfits.append(Misfit(("stop_signal",), "is SIGTERM for a command with ray: true, and sent to it alone"))
        if self.ray and self.min_workers != self.max_workers:
            misfits.append(Misfit(("ray",), "needs a fixed number of workers"))
        if self.actor in (PROGRAM, RAY_PROGRAM):
            misfits.append(Misfit(("actor",), "runs a command; state command: [PROGRAM, ARGUMENT, …] instead"))
        if self.command is not None and not (self.command and self.command[0]):
            misfits.append(Misfit(("command",), "names no program; write e.g. [python, train.py]"))
        if size > MAX_ARGUMENTS_BYTES // 4:
            misfits.append(Misfit(("command",), f"is {size} characters long; {MAX_ARGUMENTS_BYTES // 4} are allowed"))
        if self.actor is None:
            why = f"is for actors; a {stated[0]} has its own arguments and runs until it ends"
            misfits += [Misfit((key,), why) for key, field in _OF_ACTORS.items() if getattr(self, field)]
        return misfits

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
        if self.placement is not None:
            misfits.append(Misfit(("placement",), "says nothing beside places, which decide where each worker runs"))
        if self._amounts.gpu_milli:
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
            own = self._amounts.memory_bytes
            if own and own != asked.memory_bytes:
                misfits.append(Misfit(("ray_options", "memory"), "differs from resources.memory; state one of them"))
        asked_at_once = options.max_concurrency
        if asked_at_once is not None and self.max_concurrency not in (None, asked_at_once):
            message = "differs from max_concurrency; state one of them"
            misfits.append(Misfit(("ray_options", "max_concurrency"), message))
        return misfits

    def _wrong_variables(self) -> list[Misfit]:
        plain = dict(self.env or ())
        message = "is in env too; state it in one of them"
        return [Misfit(("secret_env", name), message) for name, _ in self.secret_env or () if name in plain]

    def _wrong_rules(self) -> list[Misfit]:
        misfits = []
        if self.scaling and (self.min_workers is None or self.min_workers == self.max_workers):
            misfits.append(Misfit(("scaling",), "needs min_workers and max_workers, between which the rules scale"))
        if self.colocation_total is not None and self.colocation_group is None:
            misfits.append(Misfit(("colocation_total",), "is for members of a colocation_group; state resources"))
        return misfits

    @property
    def _amounts(self) -> Resources:
        return NOTHING if self.resources is None else self.resources.amounts

    def spec(self) -> ComponentSpec:
        """The frozen form. What is not stated and has a preset is left open, for the controller to fill in."""
        stated = self.stated("workers", "ray_options", "component_placement", "command", "script", "ray")
        if self.actor is None:
            command = self.command or ("/bin/sh", "-ec", self.script or "")
            actor = RAY_PROGRAM if self.ray else PROGRAM
            work = {"actor": actor, "args_json": json.dumps([command], separators=(",", ":")), "entry": "run"}
            # One call at a time: that of the command, on the main thread of its host.
            stated |= work | {"max_concurrency": 1}
            if not self.ray:
                stated.setdefault("stop_signal", PROGRAM_SIGNAL)
        if self.resources is not None:
            stated["resources"] = self.resources.amounts
            # Which zeros were written matters to presets alone.
            stated["zero_resources"] = self.resources.zeros if self.role is not None else ()
        if self.role is not None:
            stated.setdefault("max_concurrency", 0)
        elif self.colocation_group is not None:
            stated.setdefault("max_concurrency", COLOCATED_CONCURRENCY)
        workers = len(self.places) if self.places else self.workers
        if workers is not None:
            stated |= {"min_workers": workers, "max_workers": workers}
        if self.ray_options is not None:
            stated |= self.ray_options.stated("memory")
            if self.ray_options.memory is not None:
                memory = check(_MemoryInput, {"memory": {"memory": self.ray_options.memory}}).memory
                stated["resources"] = replace(self._amounts, memory_bytes=memory.memory_bytes)
        return ComponentSpec(**stated)


class _MemoryInput(Input):
    """An amount of memory alone."""

    memory: Annotated[Resources, PlainValidator(resources)]
