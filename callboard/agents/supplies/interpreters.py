"""Python interpreters: whether a job's worker may run on one, and whether Ray would survive it.

Ray hangs without an error on a path that isn't there, and a worker of another Ray or Python minor can't talk to its
raylet (docs/agents.md): so an interpreter is looked at before anything is started with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType

from callboard.agents.runtime import HostError
from callboard.agents.system.tasks import ask

_ASK = (
    "import sys, importlib.metadata as m\n"
    "print(*sys.version_info[:2], m.version('ray') if sys.argv[1] == 'ray' else '-')"
)
_TIMEOUT_S = 20.0
"""A cold interpreter on a network file system; a start's own deadline is above."""


class InterpreterRefused(HostError):
    """The interpreter isn't allowed here or doesn't fit."""


class Interpreters:
    """Interpreters of this node; each one is asked once."""

    def __init__(self, listed: Collection[str], *, with_ray: bool) -> None:
        self._listed = frozenset(listed)
        self._with_ray = with_ray
        self._fitting: set[str] = {sys.executable}

    def allowed(self, path: str) -> str:
        """The interpreter that is meant ("" is the agent's own).

        Raises:
            InterpreterRefused: it isn't in the node's allow-list (SE-06).
        """
        if path not in {"", sys.executable} and path not in self._listed:
            raise InterpreterRefused(
                f"interpreter: {path} is not in this node's allow-list; start its agent with --interpreter {path}"
            )
        return path or sys.executable

    async def check(self, path: str, early: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise `InterpreterRefused` unless it is there and, started with these variables, of the node's own Python
        and Ray version."""
        if path in self._fitting:
            return
        if not os.access(path, os.X_OK):
            raise InterpreterRefused(
                f"interpreter {path} is not there or can't be run; install it on this node, or name another"
            )
        there, here = await self._ask(path, early), await self._ask(sys.executable, {})
        if there != here:
            raise InterpreterRefused(
                f"interpreter {path} is {there}, this node runs {here}; name one with the same versions, or install "
                "them there"
            )
        self._fitting.add(path)

    async def _ask(self, path: str, early: Mapping[str, str]) -> str:
        kind = "ray" if self._with_ray else "process"
        try:
            said = await ask([path, "-I", "-c", _ASK, kind], {**os.environ, **early}, within_s=_TIMEOUT_S)
        except TimeoutError as error:
            raise InterpreterRefused(
                f"interpreter {path} did not answer in {_TIMEOUT_S:g} s; try `{path} -c 0` on this node"
            ) from error
        if said.code != 0:
            last = said.errors.decode(errors="replace").strip().splitlines()[-1:]
            raise InterpreterRefused(f"interpreter {path} failed: {''.join(last)}; try `{path} -c 0` on this node")
        major, minor, ray = said.output.decode().split()
        return f"Python {major}.{minor} with Ray {ray}" if self._with_ray else f"Python {major}.{minor}"
