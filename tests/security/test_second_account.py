"""Another account of the same machine can neither read nor do anything, without any setting."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from callboard.client.clusters import ClusterRecord
from callboard.client.sync import SyncClient
from callboard.security.places import account_directory
from callboard.security.tokens import REGISTRY, controller_token
from tests.cli.cluster import ACTOR
from tests.cli.machine import ROOT, Machine
from tests.security.test_tokens import METHODS

NOBODY = 65_534

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another account")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine whose directories everybody may enter: what keeps the intruder out are our own modes alone."""
    base = Path(tempfile.mkdtemp(prefix="cb-uid-", dir="/tmp"))
    base.chmod(0o755)
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(base / "run"))
    built = Machine(base / "run")
    before = os.umask(0)  # nor does a careful umask help
    yield built
    os.umask(before)
    built.clear()
    shutil.rmtree(base)


def intrude(**target: Any) -> dict[str, Any]:
    """What the other account could do."""
    shown = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "security" / "intruder.py")],
        input=json.dumps(target | {"uid": NOBODY}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        cwd="/",
    )
    assert shown.returncode == 0, shown.stderr
    answer: dict[str, Any] = json.loads(shown.stdout)
    assert (answer["uid"], answer["groups"]) == (NOBODY, [])
    return answer


def everything_below(root: Path) -> list[Path]:
    return [root, *sorted(root.rglob("*"))]


def with_children(record: ClusterRecord) -> list[int]:
    return [
        each.pid
        for entry in record.processes
        for each in (psutil.Process(entry.process.pid), *psutil.Process(entry.process.pid).children(recursive=True))
    ]


def test_a_second_account_can_neither_read_nor_do_anything(machine: Machine) -> None:
    machine.up("--agents", "1")
    (record,) = machine.clusters()
    with SyncClient(record.controller) as client:
        client.ensure_pool("rlhf", nominal={"cpu": 2})
        spec = {"name": "w", "actor": ACTOR, "resources": {"cpu": 1}, "env": {"MY_API_KEY": "hush"}}
        job = client.submit({"name": "train", "pool": "rlhf", "components": [spec]})
        job.running(timeout=60)
        revision, address = client.stats().revision, client.stats().metrics_address
    token = controller_token(record.directory / "controller")
    registry = account_directory() / REGISTRY
    # Of the registry what is the cluster's own: other controllers of this account come and go.
    found = [*everything_below(machine.run_dir), registry, registry / record.controller]
    kinds = {name: any(test(path.lstat().st_mode) for path in found) for name, test in KINDS.items()}
    assert all(kinds.values()), f"there is something of every kind to try: {kinds}"
    names = {path.name for path in found}
    assert {"token", "journal.sqlite", "secrets.key", "checkpoints", "output", "controller.log"} <= names, names
    answer = intrude(
        paths=[str(path) for path in found],
        controller=record.controller,
        methods=METHODS,
        figures=address and f"http://{address}/metrics",
        processes=with_children(record),
        token=token,
    )
    assert answer["done"] == []
    with SyncClient(record.controller) as client:
        assert client.stats().revision == revision, "nothing changed"
    assert all(os.path.lexists(path) for path in found if path.suffix not in {".sqlite-wal", ".sqlite-shm"})


KINDS = {"file": stat.S_ISREG, "directory": stat.S_ISDIR, "socket": stat.S_ISSOCK}


def test_the_intruder_would_be_noticed(machine: Machine) -> None:
    """Where somebody opened the door on purpose, the same program gets in."""
    machine.up("--agents", "1", "--insecure", "--metrics-open")
    (record,) = machine.clusters()
    with SyncClient(record.controller) as client:
        address = client.stats().metrics_address
    log = record.directory / "logs" / "controller.log"
    for path in (machine.run_dir, record.directory, log.parent):
        path.chmod(0o755)
    answer = intrude(
        paths=[str(log.parent)],
        controller=record.controller,
        methods=[["/callboard.v1.SchedulerService/GetStats", False, False]],
        figures=address and f"http://{address}/metrics",
        processes=[],
        token="",
    )
    assert answer["done"] == [
        f"listed {log.parent}",
        f"read {log.parent}",
        "called /callboard.v1.SchedulerService/GetStats",
        *([f"read http://{address}/metrics"] if address else []),  # none where another program has the usual port
    ]
