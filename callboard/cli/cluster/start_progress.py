"""The start of a cluster on the screen: a live list of nodes on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.status import Status

from callboard.cli.options import wishes
from callboard.cli.show import consoles, words
from callboard.v1.node_pb2 import Node


class StartProgress:
    """Shows how far a cluster is. An observer of :class:`callboard.cli.local.cluster.LocalCluster`."""

    def __init__(self, agents: int) -> None:
        self._agents = agents
        self._console = consoles.stderr()
        self._status: Status | None = None
        self._shown = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal and not wishes.quiet:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step(self, text: str) -> None:
        self._show(f"{text} …")

    def nodes(self, nodes: Sequence[Node]) -> None:
        ready = sum(1 for node in nodes if words.node_state(node) == "READY")
        seen = ", ".join(_seen(node) for node in nodes)
        self._show(f"{ready} of {self._agents} nodes ready" + (f" ({seen})" if seen else "") + " …")

    def finish(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self, text: str) -> None:
        if wishes.quiet or text == self._shown:
            return
        self._shown = text
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text)


def _seen(node: Node) -> str:
    fault = f": {node.ray_fault.message}" if node.HasField("ray_fault") else ""
    return f"{words.node_id(node)} {words.node_state(node).lower()}{fault}"
