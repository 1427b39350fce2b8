"""Components as input: workers that can be counted, no variable of the scheduler's, rules that can act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from callboard.model.frozen import dataclass
from callboard.model.inputs.compounds import MAX_ARGUMENTS_BYTES, Amounts, list_of
from callboard.model.inputs.located import Misfit, Misfits, Refused, shown_text
from callboard.model.inputs.reading import Input, check
from callboard.model.inputs.scalars import ENVIRONMENTS, Actor, Concurrency, Flag, Name, Workers, environment, text
from callboard.model.quantities import NOTHING, Resources
from callboard.model.schema import ANY, Kind, Written, part
from callboard.model.specs import (
    COLOCATED_CONCURRENCY,
    PROGRAM,
    PROGRAM_SIGNAL,
    RAY_PROGRAM,
    ComponentSpec,
    JobSpec,
    ScalingRule,
    WorkerPlace,
)

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
Script = Annotated[str, Kind(_script)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of Ray that the scheduler doesn't own."""

    alias: Annotated[Name, Written("name", "name")] | None = None
    memory: Annotated[Any, ANY] = None
    max_concurrency: Concurrency | None = None


def _own_options(value: object) -> object:
    """Any other option is refused by its name, because the scheduler decides about it."""
    if isinstance(value, Mapping):
        foreign = [key for key in value if key not in ("name", "memory", "max_concurrency")]
        if foreign:
            why = "is refused: the scheduler decides about it; name, memory and max_concurrency are allowed"
            raise Misfits([Misfit((str(key),), f"{shown_text(str(key))} {why}") for key in foreign])
    return value


class PlaceInput(Input, of=WorkerPlace):
    """Explicit places, one per worker: a node, devices of it, and what the node's settings add."""

    def consistent(self) -> list[Misfit]:
        """Each device once, and none of an observer."""
        indexes = [index for index, _ in self.devices or ()]
        if len(set(indexes)) != len(indexes):
            return [Misfit(("devices",), "names a device twice")]
        if indexes and self.observes:
            return [Misfit(("observes",), "an observer holds no devices; leave out one of the two")]
        return []


class RuleInput(Input, of=ScalingRule):
    """Scaling rules: one signal each, one side of one threshold, and what to do about it."""

    example = "a rule; write e.g. {signal: queue_depth, above: 100, action: down}"

    def consistent(self) -> list[Misfit]:
        """One side of one threshold."""
        if (self.above_milli is None) == (self.below_milli is None):
            return [Misfit((), "state either above or below, the value from which the rule acts")]
        return []


class ComponentInput(Input, of=ComponentSpec):
    """The keys of a component besides those that its spec declares, and what they say together."""

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("num_gpus", "gpu", "gpus"), "resources: {gpu: …}"),
            **dict.fromkeys(("num_cpus", "cpu", "cpus"), "resources: {cpu: …}"),
            **dict.fromkeys(("memory", "mem"), "resources: {memory: …}"),
            **dict.fromkeys(("replicas", "num_workers", "num_replicas", "world_size", "parallelism"), "workers"),
            **dict.fromkeys(("min_replicas", "minReplicas"), "min_workers"),
            **dict.fromkeys(("max_replicas", "maxReplicas"), "max_workers"),
            **dict.fromkeys(("class", "cls", "actor_class", "class_name"), "actor"),
            **dict.fromkeys(("image", "image_uri", "docker_image"), "container"),
            **dict.fromkeys(("entrypoint", "main", "run"), "entry"),
            "env_vars": "env",
            **dict.fromkeys(("pip", "conda", "uv", "requirements"), "env: {requirements: …}"),
            **dict.fromkeys(("arguments", "init_kwargs"), "kwargs"),
            **dict.fromkeys(("nodeSelector", "node_affinity", "affinity"), "node_selector"),
            **dict.fromkeys(("scheduling_strategy", "strategy"), "placement"),
            "runtime_env": "working_dir, py_modules, env and container",
        }
    )

    neighbours = MappingProxyType({JobSpec: "the job, beside components"})

    example = "a component; write e.g. {name: trainer, actor: pkg.module:Class}"

    internal = frozenset({"places"})

    before = MappingProxyType({"ray_options": _own_options})

    actor: Actor | None = None  # or a command or script
    command: Command | None = None
    script: Script | None = None
    ray: Flag | None = None
    tty: Flag | None = None
    workers: Workers | None = None
    ray_options: Annotated[RayOptions, part(RayOptions)] | None = None
    component_placement: Annotated[Any, ANY] = None  # became a part of placement_config before a model sees it

    def consistent(self) -> list[Misfit]:
        """Work, workers and options that fit each other."""
        return [
            *self._wrong_work(),
            *self._wrong_counts(),
            *self._wrong_options(),
            *self._wrong_places(),
            *self._wrong_variables(),
            *self._wrong_environment(),
            *self._wrong_rules(),
        ]

    def _wrong_work(self) -> list[Misfit]:
        stated = [key for key in ("actor", "command", "script") if getattr(self, key) is not None]
        if not stated:
            return [Misfit(("actor",), "is required; or state command or script, for a program")]
        size = sum(len(each) for each in self.command or ())
        misfits = [Misfit((key,), f"is stated beside {stated[0]}; state one of them") for key in stated[1:]]
        if self.ray and self.actor is not None:
            misfits.append(Misfit(("ray",), "is for a command or script: a Ray cluster of its own"))
        if self.tty and self.actor is not None:
            misfits.append(Misfit(("tty",), "is for a command or script: a terminal of its own"))
        if self.ray and self.stop_signal is not None:
            misfits.append(Misfit(("stop_signal",), "is SIGTERM for a command with ray: true, and sent to it alone"))
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
                asked = _memory(options.memory)
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

    def _wrong_environment(self) -> list[Misfit]:
        """One thing decides which Python runs."""
        misfits = []
        stated = [("env", kind) for kind, _ in self.env or () if kind in ENVIRONMENTS]
        for place in stated:
            try:
                environment({place[1]: dict(self.env)[place[1]]})
            except Refused as error:
                misfits.append(Misfit(place, str(error)))
        places: list[tuple[str, ...]] = [*stated]
        places += [(key,) for key in ("environment", "interpreter", "container") if getattr(self, key) is not None]
        misfits += [Misfit(place, f"is stated beside {'.'.join(places[0])}; state one of them") for place in places[1:]]
        if self.container is not None and self.ray:
            why = (
                "is stated beside ray, whose nodes run on the node's own Python and Ray. "
                "Leave container out, and say with env or interpreter which Python packages there are"
            )
            misfits.append(Misfit(("container",), why))
        return misfits

    def _wrong_rules(self) -> list[Misfit]:
        misfits = []
        if self.scaling and (self.min_workers is None or self.min_workers == self.max_workers):
            misfits.append(Misfit(("scaling",), "needs min_workers and max_workers, between which the rules scale"))
        if self.colocation_total is not None and self.colocation_group is None:
            misfits.append(Misfit(("colocation_total",), "is for members of a colocation_group; state resources"))
        if self.limit_gpu_memory and not self._amounts.gpu_memory_bytes:
            why = "needs an amount that PyTorch then keeps to: resources: {gpu_memory: …}"
            misfits.append(Misfit(("limit_gpu_memory",), why))
        if self.limit_gpu_memory and self.actor is None:
            why = "is for an actor; a command reads CALLBOARD_GPU_MEMORY_BYTES and limits itself"
            misfits.append(Misfit(("limit_gpu_memory",), why))
        return misfits

    @property
    def _amounts(self) -> Resources:
        return NOTHING if self.resources is None else self.resources.amounts

    def spec(self) -> ComponentSpec:
        """The frozen form. What is not stated and has a preset is left open, for the controller to fill in."""
        stated = self.stated("workers", "ray_options", "component_placement", "command", "script", "ray", "tty")
        if self.actor is None:
            command = self.command or ("/bin/sh", "-ec", self.script or "")
            actor = RAY_PROGRAM if self.ray else PROGRAM
            work = {"actor": actor, "args_json": json.dumps([command], separators=(",", ":")), "entry": "run"}
            # One call at a time: that of the command, on the main thread of its host.
            stated |= work | {"max_concurrency": 1}
            more = {"tty": bool(self.tty), "elastic": bool(self.ray and self.min_workers != self.max_workers)}
            if said := {name: True for name, is_so in more.items() if is_so}:
                stated["kwargs_json"] = json.dumps(said, separators=(",", ":"))
            if not self.ray:
                stated.setdefault("stop_signal", PROGRAM_SIGNAL)
        named = [(kind, what) for kind, what in self.env or () if kind in ENVIRONMENTS]
        if named:
            stated |= {"environment": environment(dict(named)), "env": tuple(e for e in self.env if e not in named)}
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
        options = self.ray_options or RayOptions()
        if options.alias is not None:
            stated["alias"] = options.alias
        if options.max_concurrency is not None:
            stated["max_concurrency"] = options.max_concurrency
        if options.memory is not None:
            stated["resources"] = replace(self._amounts, memory_bytes=_memory(options.memory).memory_bytes)
        found: ComponentSpec = (self.of or ComponentSpec)(**stated)
        return found


class _MemoryInput(Input):
    """An amount of memory alone."""

    memory: Amounts


def _memory(value: object) -> Resources:
    found: Resources = check(_MemoryInput, {"memory": {"memory": value}}).memory
    return found
