"""Another Ray driver, to ask Ray itself: `python -m tests.support.ray_probe ADDRESS NODE_IP`.

One JSON line each way.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray._private.state import actors, available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tests.support.actors import Plain

FOREIGN: list[Any] = []
"""Tasks that wait for room in Ray."""

OBJECTS: list[Any] = []
"""References to what fills the object store of this driver's node."""


def process_id() -> int:
    """What the task of somebody else answers."""
    return os.getpid()


def shown(what: str) -> Any:
    """What Ray's own books say."""
    match what:
        case "groups":
            return {key: each for key, each in placement_group_table().items() if each["state"] != "REMOVED"}
        case "available":
            return available_resources_per_node()  # type: ignore[no-untyped-call]
        case "actor table":
            table: Any = actors()
            return [[each["Name"], each["State"], each["Pid"]] for each in table.values()]
        case "nodes":
            nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
            return {each["NodeID"]: each["NodeManagerAddress"] for each in nodes if each["Alive"]}
        case "actors":
            named: Any = ray.util.list_named_actors(all_namespaces=True)
            return [each["name"] for each in named]
        case other:
            raise ValueError(other)


OTHERS = ("foreign task", "foreign task runs", "foreign hold", "foreign release", "told in a bundle")


def others(request: dict[str, Any]) -> Any:
    """What somebody does in Ray who knows nothing of callboard."""
    match request["what"]:
        case "foreign task":
            # A Ray task of somebody who knows nothing of callboard, on one node.
            here: Any = NodeAffinitySchedulingStrategy(request["ray_node"], soft=False)
            task: Any = ray.remote(num_cpus=0, num_gpus=request["gpus"], scheduling_strategy=here)(process_id)
            FOREIGN.append(task.remote())
            done, _ = ray.wait(FOREIGN, timeout=request["limit_s"])
            return bool(done)
        case "foreign task runs":
            return ray.get(FOREIGN.pop(), timeout=request["limit_s"]) > 0
        case "foreign hold":
            here = NodeAffinitySchedulingStrategy(request["ray_node"], soft=False)
            holder: Any = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=here)(Plain).remote()
            FOREIGN.append(holder)
            return ray.get(holder.told_by_ray.remote(), timeout=30)
        case "foreign release":
            ray.kill(FOREIGN.pop())
            return None
        case "told in a bundle":
            # A plain actor of Ray, to which Ray gives what a bundle has.
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(request["group"])))
            inside: Any = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=request["bundle"])
            asker: Any = ray.remote(num_cpus=0, num_gpus=request["gpus"], scheduling_strategy=inside)(Plain).remote()
            told = ray.get(asker.told_by_ray.remote(), timeout=30)
            ray.kill(asker)
            return told
        case other:
            raise ValueError(other)


def answer(request: dict[str, Any]) -> Any:
    match request["what"]:
        case "call":
            actor: Any = ray.get_actor(request["actor"], namespace="callboard")
            return ray.get([actor.call.remote(request["method"], *request["args"]) for _ in range(request["times"])])
        case "stream":
            actor = ray.get_actor(request["actor"], namespace="callboard")
            items = actor.stream.options(num_returns="streaming").remote(request["method"], *request["args"])
            return [ray.get(item) for item in items]
        case "put":
            OBJECTS.append(ray.put(bytes(request["size"])))
            return None
        case "forget":
            OBJECTS.clear()
            return None
        case other:
            return others(request) if other in OTHERS else shown(other)


def main() -> None:
    # Ray prints what it likes on the standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    ray.init(
        address=sys.argv[1],
        _node_ip_address=sys.argv[2],
        namespace="elsewhere",
        log_to_driver=False,
        configure_logging=False,
    )
    say("ready")
    for line in sys.stdin:
        say(answer(json.loads(line)))


if __name__ == "__main__":
    main()
