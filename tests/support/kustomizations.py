"""What would kustomize refuse, or silently leave undone, of a kustomization? No package index has a schema of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FIELDS = frozenset(
    [
        "apiVersion", "kind", "metadata", "openapi", "namePrefix", "nameSuffix", "namespace", "labels",
        "commonAnnotations", "patches", "images", "replacements", "replicas", "sortOptions", "resources",
        "components", "crds", "configMapGenerator", "secretGenerator", "helmGlobals", "helmCharts",
        "generatorOptions", "configurations", "generators", "transformers", "validators", "buildMetadata",
    ]
)  # fmt: skip
"""Of kustomize.config.k8s.io/v1beta1, as https://kubectl.docs.kubernetes.io/references/kustomize/kustomization has
them. kustomize refuses any other."""

DEPRECATED = frozenset(
    [
        "bases", "commonLabels", "imageTags", "inventory", "patchesJson6902", "patchesStrategicMerge", "vars",
        "helmChartInflationGenerator",
    ]
)  # fmt: skip
"""Still read by kustomize, and replaced by others."""

OF_IMAGE = frozenset(["name", "newName", "newTag", "tagSuffix", "digest"])
OF_PATCH = frozenset(["path", "patch", "target", "options"])
OF_TARGET = frozenset(["group", "version", "kind", "name", "namespace", "labelSelector", "annotationSelector"])
SCALED = ("Deployment", "ReplicaSet", "ReplicationController", "StatefulSet")

Manifest = Mapping[str, Any]


def faults(folder: Path) -> list[str]:
    """What is wrong with the kustomization of a folder, a line each."""
    return list(_faults(folder))


def _faults(folder: Path) -> Iterator[str]:
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if (text.get("apiVersion"), text.get("kind")) != ("kustomize.config.k8s.io/v1beta1", "Kustomization"):
        yield f"{text.get('apiVersion')} {text.get('kind')} is not what kustomize reads"
    yield from (f"{key}: deprecated" for key in set(text) & DEPRECATED)
    yield from (f"{key}: unknown" for key in set(text) - FIELDS - DEPRECATED)
    held: list[Manifest] = []
    for name in text.get("resources", []):
        path = folder / name
        if not path.exists():
            yield f"resources: {name} does not exist"
        elif path.is_dir():
            yield from (f"{name}: {each}" for each in faults(path))
            held += manifests(path)
        elif not path.resolve().is_relative_to(folder.resolve()):
            yield f"resources: {name} is a file outside of the folder, which kustomize does not read"
        else:
            held += _documents(path)
    named = [(each.get("kind"), each.get("metadata", {}).get("name")) for each in held]
    yield from (f"{kind} {name}: has no kind or no name" for kind, name in named if not (kind and name))
    yield from (f"{kind} {name}: is there twice" for kind, name in set(named) if named.count((kind, name)) > 1)
    yield from _images(text.get("images", []), held)
    for each in text.get("replicas", []):
        yield from (f"replicas: {key}: unknown" for key in set(each) - {"name", "count"})
        if not any((kind, each.get("name")) in named for kind in SCALED):
            yield f"replicas: nothing that is scaled is called {each.get('name')}"
    for each in text.get("patches", []):
        yield from _patch(each, folder, held)


def manifests(folder: Path) -> list[Manifest]:
    """What the kustomization of a folder takes, before it changes anything."""
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    paths = [folder / name for name in text.get("resources", [])]
    return [each for path in paths for each in (manifests(path) if path.is_dir() else _documents(path))]


def _documents(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def _images(images: list[Mapping[str, str]], held: list[Manifest]) -> Iterator[str]:
    used = {_without_tag(image) for each in held for image in _values(each, "image")}
    for each in images:
        yield from (f"images: {key}: unknown" for key in set(each) - OF_IMAGE)
        if each.get("name") not in used:
            yield f"images: nothing uses {each.get('name')}"
        if "digest" in each and "newTag" in each:
            yield f"images: {each['name']} has a tag and a digest"


def _without_tag(image: str) -> str:
    head, colon, tag = image.partition("@")[0].rpartition(":")
    return head if colon and "/" not in tag else image.partition("@")[0]


def _patch(said: Mapping[str, Any], folder: Path, held: list[Manifest]) -> Iterator[str]:
    yield from (f"patches: {key}: unknown" for key in set(said) - OF_PATCH)
    yield from (f"patches: target: {key}: unknown" for key in set(said.get("target", {})) - OF_TARGET)
    if ("path" in said) == ("patch" in said):
        yield "patches: one of path and patch is needed"
        return
    if "path" in said and not (folder / said["path"]).is_file():
        yield f"patches: {said['path']} does not exist"
        return
    patch = yaml.safe_load(said["patch"] if "patch" in said else (folder / said["path"]).read_text())
    own = patch if isinstance(patch, Mapping) else {}
    target = said.get("target") or {"kind": own.get("kind"), "name": own.get("metadata", {}).get("name")}
    hit = [
        each
        for each in held
        if target.get("kind") in (None, each["kind"]) and target.get("name") in (None, each["metadata"]["name"])
    ]
    if not hit:
        yield f"patches: there is no {target.get('kind')} {target.get('name')}"
    for each in hit:
        if isinstance(patch, list):
            yield from (f"patches: {step['path']} is not there" for step in patch if not _may(step, each))
        else:
            yield from (f"patches: {path} is not there" for path in _missing(patch, each))


def _may(step: Mapping[str, Any], of: Any) -> bool:
    """Whether a step of a JSON patch finds its place; `add` needs only the place's parent."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    for part in way:
        try:
            of = of[int(part)] if isinstance(of, list) else of[part]
        except (KeyError, IndexError, ValueError):
            return False
    if step["op"] == "add":
        return True
    return int(last) < len(of) if isinstance(of, list) else last in of


def _missing(patch: Any, of: Any, path: str = "") -> Iterator[str]:
    """List entries with a name, such as containers, that a merge would add instead of change."""
    if isinstance(patch, Mapping) and isinstance(of, Mapping):
        for key in set(patch) & set(of):
            yield from _missing(patch[key], of[key], f"{path}/{key}")
    elif isinstance(patch, list) and isinstance(of, list):
        there = {each["name"]: each for each in of if isinstance(each, Mapping) and "name" in each}
        for each in patch:
            if isinstance(each, Mapping) and "name" in each and path.endswith("/containers"):
                if each["name"] in there:
                    yield from _missing(each, there[each["name"]], f"{path}/{each['name']}")
                else:
                    yield f"{path}/{each['name']}"


def _values(of: Any, key: str) -> Iterator[str]:
    if isinstance(of, Mapping):
        for name, value in of.items():
            yield from [value] if name == key and isinstance(value, str) else _values(value, key)
    elif isinstance(of, list):
        for each in of:
            yield from _values(each, key)
