"""Checkpoints that the controller has not acknowledged yet, kept on disk.

A worker that yielded is killed right after it left its checkpoint; what it left must not depend on this agent living on
until the controller has it. So it is written down before the kill, in a file that only this user reads, and removed
when the report that carries it is acknowledged. The next agent answers the stop, which is still owed, with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from callboard.agents.files.run_dir import RunDir, Started
from callboard.model.log import structlog
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

ROLE = "checkpoint"

MAX_KEPT = 1_000
"""Oldest forgotten first. What is left behind for good (its agent was killed between the acknowledgement and the
removal) must not grow for ever; a controller that is back asks for what it is owed at once."""


@dataclass(frozen=True)
class Yielded:
    """What came of asking a worker to yield."""

    cooperative: bool = False
    """The hooks returned in time and no call went on."""
    checkpoint: agent_pb2.Checkpoint | None = None
    detail: str = ""
    lost: str = ""
    """Why no checkpoint was left, though one was to be; empty: none was lost."""


NOTHING_LEFT = Yielded()


class Checkpoints:
    """What workers of this node left, by the name of the worker and its generation."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def keep(self, name: str, yielded: Yielded) -> None:
        """Write down what a worker left; called before it is killed. Without a checkpoint there is nothing to write."""
        if yielded.checkpoint is None:
            return
        try:
            self._run_dir.write_checkpoint(name, yielded.checkpoint.SerializeToString())
        except OSError as error:
            # A full disk must not keep a worker from ending (R10): this agent still has it in memory.
            _log.error("checkpoint_not_written", worker=name, why=str(error))
            return
        facts = {"cooperative": yielded.cooperative, "detail": yielded.detail}
        self._run_dir.put(Started(ROLE, None, name, facts))
        for oldest in self._recorded()[:-MAX_KEPT]:
            self.drop(oldest.name)

    def find(self, name: str) -> Yielded | None:
        """What this agent or an earlier one wrote down."""
        found = next((each for each in self._recorded() if each.name == name), None)
        if found is None:
            return None
        text = self._run_dir.read_checkpoint(name)
        if text is None:
            return None
        checkpoint = agent_pb2.Checkpoint.FromString(text)
        return Yielded(found.facts["cooperative"], checkpoint, found.facts["detail"])

    def drop(self, name: str) -> None:
        """The controller has it."""
        self._run_dir.remove_checkpoint(name)
        self._run_dir.drop(ROLE, name)

    def _recorded(self) -> list[Started]:
        return [each for each in self._run_dir.recorded() if each.role == ROLE]
