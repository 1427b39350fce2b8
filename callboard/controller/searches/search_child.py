"""One search for a placement, in a process of its own: it takes a core for seconds, and the controller must answer.

``python -m callboard.controller.searches.search_child`` reads a request as JSON from its input and writes steps as
lines of JSON: ``{"progress": [incumbent, bound]}`` any number of times, then one of ``{"found": …}``, ``{"faults":
[…]}`` and ``{"no_plan": "why"}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from callboard.autoplace.answer.report import Answer, answer_for_job, answer_for_problem, as_plain, section_of
from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.problem.problem import NoPlan, Problem
from callboard.autoplace.rlinf.job import rlinf_job
from callboard.autoplace.solve.search import search
from callboard.model.faults import InvalidInput
from callboard.model.inputs import read_yaml


def main() -> int:
    """Answers one request; returns the exit code."""
    request = json.load(sys.stdin)
    try:
        answer = _answer(request)
    except InvalidInput as error:
        _say({"faults": [[fault.field, fault.message, fault.line, fault.column] for fault in error.faults]})
    except NoPlan as error:
        _say({"no_plan": str(error)})
    else:
        _say({"found": as_plain(answer) | {"cluster_yaml": section_of(answer)}})
    return 0


def _answer(request: dict[str, Any]) -> Answer:
    config = read_yaml(request["config"], ours=False)
    nodes = request["nodes"]

    def searched(problem: Problem) -> Plan:
        return search(problem, time_limit=request["time_limit_s"], on_progress=_progress)

    if "workflow" not in config and "components" not in config:
        return answer_for_job(
            rlinf_job(config, nodes=[node["gpus"] for node in nodes], mixed=request["mixed"]), searched
        )
    general: dict[str, Any] = dict(config)
    if "workflow" in config:
        general["cluster"] = {"nodes": nodes}
    else:
        general["gpus"] = sum(node["gpus"] for node in nodes)
    return answer_for_problem(Problem.from_mapping(general), searched)


def _progress(incumbent_seconds: float, bound_seconds: float) -> None:
    _say({"progress": [incumbent_seconds, bound_seconds]})


def _say(step: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
