"""What may a careless editor make of a placement config? Valid files, and small random changes of them.

``python -m benchmarks.placement --fuzz 100000`` and ``test_fuzz.py`` feed the results to the language, which must end
in a plan or in located faults, whatever it is given.
"""

from __future__ import annotations

import random

from callboard.model.faults import InvalidInput
from callboard.placement import Accelerator, Cluster, HardwareUnit, Node, plan_placement

HETERO = """\
cluster:
  num_nodes: 6
  component_placement:
    actor:   {node_group: a800, placement: 0-15}
    rollout: {node_group: "4090", placement: 0-15:0-7}
    env:     {node_group: franka, placement: 0-1}
    agent:   {node_group: node, placement: "0-1:0-19,2-3:20-39"}
    critic,reward: all
  node_groups:
    - label: a800
      node_ranks: 0-1
      env_configs:
        - node_ranks: 0-1
          python_interpreter_path: /opt/venv/bin/python3
          env_vars: [{GLOO_SOCKET_IFNAME: eth0}, {HF_TOKEN: "abc"}]
    - {label: 4090, node_ranks: "2,3"}
    - label: franka
      node_ranks: 4-5
      hardware: {type: Franka, configs: [{node_rank: 4, robot_ip: 10.10.10.1}, {node_rank: 5, ports: [1, 2]}]}
"""

REASONING = """\
runner:
  task_type: reasoning
algorithm: {recompute_logprobs: true}
actor: {model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}
rollout: {tensor_parallel_size: 2}
cluster:
  auto_scheduler: false
  num_nodes: 6
  component_placement:
    actor: 0-15
    rollout: 16-27
    inference: 28-31
    reward: 16-27
"""

JOB = """\
name: train
pool: rlhf
components:
  - name: actor
    actor: pkg.module:Actor
    resources: {gpu: 1}
    component_placement: 0-3
  - name: env
    actor: pkg.module:Env
    component_placement: {placement: "0-1:0-3,2:4", share: 200m, visible: all}
"""

SECTION = """\
# the cluster section alone, with the nodes it means
nodes:
  - {node_id: n0, accelerators: [GPU-a, GPU-b], accelerator_type: h100, labels: {zone: a}, cpu: 32, memory: 64GiB}
  - {node_id: n1, accelerators: 2, node_group: spare, hardware: [{type: Franka, arm: left}]}
component_placement: &all
  actor: 0,2-3
  rollout: {<<: {placement: 0-1}, node_group: [spare]}
  'env, sim': 0:0-3,1-3
node_groups:
  - {label: x, node_ranks: all, ignore_hardware: true}
"""

COLLOCATED = """\
runner: {task_type: reasoning}
rollout: {tensor_parallel_size: 1}
actor: {model: {tensor_model_parallel_size: 4}}
cluster: {num_nodes: 4, num_gpus_per_node: 8, component_placement: {"actor,rollout,reward": all}}
"""

VALID = (HETERO, REASONING, JOB, SECTION, COLLOCATED)
"""Valid files. All fit :func:`cluster`, or describe their own nodes."""

_WORDS = (
    *(
        "0",
        "1",
        "00",
        "010",
        "-1",
        "1:0",
        "0-0",
        "0-",
        "-",
        ":",
        "::",
        ",",
        ",,",
        "all",
        "ALL",
        "0-99999999999999999999",
    ),
    *(
        "60",
        "1e3",
        "0x4090",
        "1_0",
        "on",
        "no",
        "~",
        "null",
        "''",
        '""',
        "NaN",
        ".inf",
        "true",
        "2024-01-01",
        "*a",
        "&a",
    ),
    *("<<: *a", "{", "}", "[", "]", "[]", "{}", "- ", "#", "|", ">", "? ", "!!int", "!x", "%", "@", "`", "\t", "\n"),
    *(
        "\n\n",
        "  ",
        "---",
        "...",
        "\x00",
        "\x07",
        "\u2028",
        "\ufeff",
        "\ud800",
        "é",
        "\uff19",
        "node",
        "cluster",
        "a800",
    ),
    *(
        "franka",
        "placement",
        "node_group",
        "share: 0.3",
        "visible: all",
        "label:",
        "node_ranks: 0",
        "${x}",
        "\\",
        "'",
        '"',
    ),
    *("0-3:0-7", "0:0-999999", "0-99999:0", "0-31:0-30", "component_placement:", "node_groups:", "num_nodes: 0"),
)


def cluster() -> Cluster:
    """Six nodes: four with eight GPUs, two with none, of which one declares a robot."""
    devices = tuple(Accelerator(str(index)) for index in range(8))
    robots = (HardwareUnit("Franka"),)
    with_gpus = [Node(node_id=f"n{rank}", rank=rank, accelerators=devices) for rank in range(4)]
    return Cluster((*with_gpus, Node(node_id="n4", rank=4, hardware=robots), Node(node_id="n5", rank=5)))


def mutated(chance: random.Random) -> str:
    """One of the valid files after one to six random changes."""
    text = chance.choice(VALID)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 6))):
        text = _changed(text, chance)
    return text


def _changed(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    end = min(len(text), at + chance.choice((1, 1, 1, 2, 3, 8, 40)))
    kind = chance.randrange(8)
    if kind == 0:
        return text[:at] + text[end:]
    if kind == 1:
        return text[:at] + chance.choice(_WORDS) + text[at:]
    if kind == 2:
        return text[:at] + chance.choice(_WORDS) + text[end:]
    if kind == 3:
        return text[:at] + chr(chance.choice((chance.randrange(128), chance.randrange(0x3000)))) + text[end:]
    if kind == 4:
        return _number(text, at, chance)
    lines = text.split("\n")
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    if kind == 5:
        lines.insert(other, lines[one])
    elif kind == 6:
        lines[one], lines[other] = lines[other], lines[one]
    else:
        lines[one] = "  " * chance.randrange(3) + chance.choice(chance.choice(VALID).split("\n")).strip()
    return "\n".join(lines)


def _number(text: str, at: int, chance: random.Random) -> str:
    """Another number in the place of the next one."""
    start = next((index for index in range(at, len(text)) if text[index].isdigit()), None)
    if start is None:
        return text + str(chance.randrange(100))
    end = start
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:start] + str(chance.choice((0, 1, 2, 3, 5, 7, 8, 31, 32, 60, 10**9, 10**30))) + text[end:]


def outcome(text: str, known: Cluster) -> str:
    """``plan`` or ``faults``, each of these in a line that the text has."""
    lines = sum(text.count(end) for end in "\n\r\x85\u2028\u2029") + 2
    return outcome_of(text, known, lines)


def outcome_of(config: object, known: Cluster, lines: int = 0) -> str:
    """``plan`` or ``faults``. Anything else is an exception that must not be."""
    try:
        plan_placement(config, known)
    except InvalidInput as error:
        found = error.faults
    else:
        return "plan"
    assert found
    assert all(fault.message for fault in found)
    assert all(0 <= fault.line <= lines for fault in found)
    return "faults"
