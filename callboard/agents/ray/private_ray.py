"""A Ray cluster of a job's own, inside the process trees of its workers (docs/programs.md).

Each worker starts a Ray node with exactly its devices; rank 0 is the head, and runs the command once all nodes are
there. As a program, so that the host never imports Ray, this module waits for the nodes and becomes the command
(`… ADDRESS NODES EXECUTABLE COMMAND…`), or has Ray move its work off a node (`… ADDRESS LABEL UNTIL_MS`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from callboard.agents.host.worker_process import ProgramFailed, StopNotice
from callboard.agents.host.worker_program import Program, first_end
from callboard.agents.ray.ray_command import SETTINGS, RayNodeSpec, ray_start
from callboard.agents.ray.ray_faults import start_error

if TYPE_CHECKING:
    from callboard.agents.host.worker_host import WorkerContext

TOKEN_VARIABLE = "PRIVATE_RAY_TOKEN"  # noqa: S105 - the name of a variable
"""Secret variable of a component: the token of its Ray cluster. Empty: the cluster asks for none."""

_POLL_S = 0.1
_LOOK_S = 0.3
_SILENT_S = 20.0
"""How long nodes may take before the wait for them says why: about twice what they take on a busy machine."""

_GONE_AFTER = 3
"""Refused connections in a row after which a head is taken for gone: its command has ended."""

_STORE_PART = 0.3
"""Of the memory that a worker asks for, for Ray's object store: Ray's own part of a machine's."""

_STORE_BYTES = 1 << 30
"""Of a worker that asks for no memory."""

_AS_PROGRAM = (sys.executable, "-P", "-m", "callboard.agents.ray.private_ray")

_LEAVE_WORDS = 4
"""Of a command line that has a node leave: one that starts a command has an executable and its name besides."""

_PREEMPTION, _ALIVE = 2, 0
"""Ray's reason for a drain that waits for nothing else, and its state of a node that lives."""


class RayProgram(Program):
    """Runs one command on a Ray cluster of its own; see `Program`."""

    forwards = True

    def __init__(self, command: list[str], *, tty: bool = False, elastic: bool = False) -> None:
        super().__init__(command, tty=tty)
        self._elastic = elastic
        if importlib.util.find_spec("ray") is None:
            raise ProgramFailed(
                f"the job asks for a Ray cluster of its own, and {sys.executable} has no Ray; install it there, or "
                "name an interpreter that has it",
                127,
            )
        self._head = ""
        self._nodes = 1
        self._is_head = False
        self._rank = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()

    def setup(self, context: WorkerContext) -> None:
        """Start the node; the other nodes' workers do the same at the same time."""
        super().setup(context)
        self._rank, self._nodes = context.rank, context.world_size
        self._is_head = self._rank == 0
        address, own = _addresses(context, self._environment["MASTER_ADDR"])
        self._head = f"{address}:{self._environment['MASTER_PORT']}"
        variables = {**self._environment, **SETTINGS, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(self._scratch)}
        if token := variables.pop(TOKEN_VARIABLE, ""):
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self._environment = {**variables, "RAY_ADDRESS": self._head}
        memory = int(variables.get("CALLBOARD_MEMORY", "0"))
        spec = RayNodeSpec(
            node_id=_label(self._rank),
            gcs_address=self._head,
            head=self._is_head,
            node_ip=own,
            cpu_milli=1000 * int(variables.get("CALLBOARD_CPUS", "1")),
            gpus=len(context.devices),
            memory_bytes=int(memory * (1 - _STORE_PART)) or _STORE_BYTES,
            custom_milli={},
            object_store_bytes=int(memory * _STORE_PART) or _STORE_BYTES,
            port_base=None,
            dashboard_port=None,
            temp_dir=self._scratch,
            log=self._scratch / "start.log",
            environment=variables,
        )
        self._start = (ray_start(spec), variables, spec.log)

    def cancel(self, notice: StopNotice) -> None:
        """Ask the command to end; its Ray nodes stay until it has. Those of an elastic cluster may go before it: they
        take nothing new, and end when nothing runs there any more."""
        self._ended.set()
        for relay in self._beside:
            relay.terminate()
        if self._child is not None:
            # Its whole session, as a terminal's Ctrl-C would reach; Ray's processes are in others.
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGTERM)
        elif self._elastic and not self._is_head:
            until_ms = str(int(notice.deadline * 1000))
            threading.Thread(target=self._leave_cluster, args=(until_ms,), daemon=True).start()

    def run(self) -> None:
        """Run the command on rank 0, and a node of Ray as long as it runs."""
        while not self._is_head and not self._answers():
            if self._ended.wait(_POLL_S):
                return
        command, variables, log = self._start
        with log.open("wb") as output:
            node = self._node = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        if self._is_head:
            line = [*_AS_PROGRAM, self._head, str(self._nodes), self._executable, *self._command]
            self._child = self._started(line, sys.executable, tty=self._tty)
        else:
            threading.Thread(target=self._end_with_head, daemon=True).start()
        ended, code = first_end({node.pid, *([self._child.pid] if self._child is not None else [])})
        if ended == node.pid and not self._ended.is_set():
            said = log.read_text(errors="replace").splitlines()
            raise ProgramFailed(str(start_error(f"the job's own Ray ended with exit code {code}", said)), 1)
        if ended != node.pid:
            self._ended.set()
            node.terminate()
            first_end({node.pid})
            self._check(code)

    def _leave_cluster(self, until_ms: str) -> None:
        """End this node when nothing runs there any more: `ray start --block` outlives one that ended well."""
        line = [*_AS_PROGRAM, self._head, _label(self._rank), until_ms]
        subprocess.run(line, env=self._environment, stdin=subprocess.DEVNULL, check=False)
        self._end_node()

    def _end_node(self) -> None:
        if self._node is not None:
            with suppress(ProcessLookupError):
                os.kill(self._node.pid, signal.SIGTERM)

    def _end_with_head(self) -> None:
        """End this node when the head is gone: Ray itself would wait a minute for another."""
        refused = 0
        while refused < _GONE_AFTER:
            time.sleep(_LOOK_S)
            refused = 0 if self._answers() else refused + 1
        self._ended.set()
        self._end_node()

    def _answers(self) -> bool:
        """Whether the head listens."""
        return _listens(self._head)


def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError:
        return False
    return True


def _addresses(context: WorkerContext, master: str) -> tuple[str, str]:
    """Addresses of the head and of this node. On loopback every node has one of its own, as Ray needs it."""
    first = socket.gethostbyname(master)
    if first.startswith("127."):
        head, own = (
            _loopback(f"{context.job_id}/{context.component}/{context.attempt}/{rank}") for rank in (0, context.rank)
        )
        return head, own
    if context.rank == 0:
        return first, first
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 1))
        return first, probe.getsockname()[0]


def _loopback(name: str) -> str:
    """An address that is this node's alone: clear of 127.0.0.0/16, where people and agents take theirs."""
    first, second, third = hashlib.sha256(name.encode()).digest()[:3]
    return f"127.{1 + first % 250}.{second}.{1 + third % 250}"


def _label(rank: int) -> str:
    """What the node of a rank is called in Ray."""
    return f"rank-{rank}"


def main() -> None:
    """Wait for the nodes and become the command, or have Ray move its work off a node."""
    if len(sys.argv) == _LEAVE_WORDS:
        _leave(*sys.argv[1:])
    else:
        _begin(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])


def _begin(address: str, nodes: int, executable: str, command: list[str]) -> None:
    """Wait for the nodes, then become the command. A long wait says on stderr what it is for, so that it is known when
    the worker is ended meanwhile. Should the head end, the host ends this process."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415 - only here Ray is needed
    from ray.exceptions import RpcError  # noqa: PLC0415

    client, said, patient_until = None, "", time.monotonic() + _SILENT_S
    while True:
        why = "its head does not listen yet"
        # Asked before Ray, whose client takes no signal until it has given up.
        if _listens(address):
            try:
                client = client or GcsClient(address=address)
                infos = client.get_all_node_info(timeout=5)
            except RpcError as error:  # it listens, and does not answer yet; anything else is a defect or a refusal
                client, why = None, f"its head does not answer: {error}"
            else:
                there = sum(info.state == _ALIVE for info in infos.values())
                if there >= nodes:
                    break
                client, why = client if infos else None, f"{there} are there"
        if why != said and time.monotonic() > patient_until:
            said = why
            sys.stderr.write(f"still waiting for the {nodes} nodes of the job's own Ray at {address}: {why}\n")
            sys.stderr.flush()
        time.sleep(_POLL_S / 2)
    os.execve(executable, command, os.environ)  # noqa: S606 - the user's command


def _leave(address: str, label: str, until_ms: str) -> None:
    """Have Ray start nothing more on a node, and return when nothing runs there any more, or the time is over."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415
    from ray.exceptions import RpcError  # noqa: PLC0415

    told = False
    while _listens(address) and time.time() * 1000 < int(until_ms):
        try:
            client = GcsClient(address=address)
            infos = client.get_all_node_info(timeout=5).values()
            living = [each for each in infos if each.state == _ALIVE and each.labels.get("callboard-node") == label]
            if told and not living:
                return
            for each in living if not told else ():
                client.drain_node(each.node_id.hex(), _PREEMPTION, "it leaves the job", int(until_ms))
                told = True
        except RpcError as error:  # the head is ending, too, or is busy
            sys.stderr.write(f"the job's own Ray doesn't answer while {label} leaves it: {error}\n")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
