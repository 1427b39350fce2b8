"""Specs as a person would write them: mappings in human units, the inverse of :mod:`callboard.model.inputs`.

What equals its default is left out. Values of secret variables are masked unless asked for (SE-04):
what is shown must not be submitted again as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from callboard.model.names import is_secret
from callboard.model.roles import unfused
from callboard.model.schema import Declared, Secrecy, declared_in
from callboard.model.specs import COLOCATED_CONCURRENCY, PROGRAM_SIGNAL, ComponentSpec, JobSpec, Labels

MASK = "********"
"""What stands for the value of a secret variable."""


def job_to_mapping(spec: JobSpec, *, secrets: bool = False) -> dict[str, Any]:
    """A job as ``job_spec`` reads it; ``secrets``: show the values of secret variables."""
    stated = described(spec)
    del stated["components"]  # they come last, as each was asked for
    components = [_component(item, secrets=secrets) for item in unfused(spec).components]
    return stated | {"components": components}


def described(spec: Any, *, defaults: bool = False, secrets: bool = False, base: Any = None) -> dict[str, Any]:
    """What the fields of a spec declare, by the keys that people write.

    Args:
        defaults: state defaults too.
        secrets: show the values of secret variables.
        base: spec whose values are the defaults, in place of those declared.
    """
    stated: dict[str, Any] = {}
    for field in declared_in(type(spec)):
        value = getattr(spec, field.name)
        default = field.default if base is None else getattr(base, field.name)
        if value is None or value == field.kind.unsaid:
            continue
        if defaults or value != default or field.written.always:
            place = stated
            for part in field.keys[:-1]:
                place = place.setdefault(part, {})
            place[field.keys[-1]] = _shown(field, value, secrets=secrets)
    return stated


def masked(env: Labels, *, secrets: bool = False, declared: bool = False) -> dict[str, str]:
    """Variables with the values of secret ones masked; ``declared``: all of them are secret, whatever their names."""
    return {name: MASK if (declared or is_secret(name)) and not secrets else value for name, value in env}


def _shown(field: Declared, value: Any, *, secrets: bool) -> Any:
    kind = field.kind
    if kind.part is not None:
        if kind.most:
            return [described(each, secrets=secrets) for each in value]
        return described(value, defaults=kind.whole, secrets=secrets)
    if kind.secrecy is not Secrecy.NONE:
        return masked(value, secrets=secrets, declared=kind.secrecy is Secrecy.ALL)
    return kind.show(value)


_OF_ACTORS = ("args", "kwargs", "entry", "max_concurrency")


def _component(spec: ComponentSpec, *, secrets: bool) -> dict[str, Any]:
    """What its fields declare, and what several of them say together: its work, its workers and Ray's options."""
    # Without a role a component of a group has a default of its own; with one, whatever is stated is no default.
    base = ComponentSpec(name="", actor="", max_concurrency=_default_concurrency(spec))
    base = replace(base, stop_signal=PROGRAM_SIGNAL) if spec.command and not spec.ray else base
    stated = described(spec, secrets=secrets, base=base)
    for key in ("name", "actor", "min_workers", "max_workers", *(_OF_ACTORS if spec.command else ())):
        stated.pop(key, None)
    if spec.zero_resources:
        stated["resources"] = stated.get("resources", {}) | dict.fromkeys(spec.zero_resources, 0)
    if spec.alias:
        stated["ray_options"] = {"name": spec.alias}
    head: dict[str, Any] = {"name": spec.name}
    head |= {"command": list(spec.command)} if spec.command else {"actor": spec.actor}
    head |= {"ray": True} if spec.ray else {}
    head |= {"tty": True} if spec.tty else {}
    bounds = {"min_workers": spec.min_workers, "max_workers": spec.max_workers}
    return head | (bounds if spec.elastic else {"workers": spec.min_workers}) | stated


def _default_concurrency(spec: ComponentSpec) -> int:
    if spec.role:
        return 0
    return COLOCATED_CONCURRENCY if spec.colocation_group else ComponentSpec(name="", actor="").max_concurrency
