"""Can everything that the programs can be told be said on the command line?"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
import typer.main
from typer.testing import CliRunner, Result

from callboard.agents.options import AgentOptions
from callboard.cli.cluster import agent as agent_action
from callboard.cli.cluster import controller as controller_action
from callboard.cli.main import app
from callboard.cli.options import Stated, read_stated, stating
from callboard.controller.options import ControllerOptions, Limits
from callboard.model.options import OptionError, option, option_of
from callboard.model.roles import PRESETS
from callboard.security.caller_roles import Role
from callboard.security.signed_tokens import SignedTokenRules
from callboard.security.tls import TlsFiles
from tests.cli.machine import Machine

AGENT: dict[str, tuple[list[str], Any]] = {
    "node_id": (["n7"], "n7"),
    "controller": (["10.0.0.1:7700"], "10.0.0.1:7700"),
    "cluster": (["blue"], "blue"),
    "token_file": (["{token}"], None),
    "rank": (["3"], 3),
    "labels": (["zone=a"], {"zone": "a"}),
    "node_group": (["gpu"], "gpu"),
    "runtime": (["process"], "process"),
    "gpus": (["2"], 2),
    "simulate_gpus": (["2"], 2),
    "cpu_milli": (["4"], 4000),
    "memory_bytes": (["2GiB"], 2 << 30),
    "custom_milli": (["arm=1"], {"arm": 1000}),
    "hardware": (["Franka=1"], (("Franka", ""),)),
    "interpreters": (["/opt/py/bin/python"], ("/opt/py/bin/python",)),
    "ray_head": ([], True),
    "ray_address": (["10.0.0.1:6379"], "10.0.0.1:6379"),
    "ray_token_path": (["/etc/ray-token"], "/etc/ray-token"),
    "ray_port": (["7000"], 7000),
    "dashboard_port": (["8265"], 8265),
    "node_ip": (["127.0.0.2"], "127.0.0.2"),
    "port_base": (["30000"], 30000),
    "object_store_bytes": (["1GiB"], 1 << 30),
    "output_worker_bytes": (["1MiB"], 1 << 20),
    "output_bytes": (["1GiB"], 1 << 30),
    "warm_spares": (["5"], 5),
    "foreign_gpu_use": (["warn"], "warn"),
    "foreign_gpu_bytes": (["2GiB"], 2 << 30),
    "preload_bytes": (["2GiB"], 2 << 30),
    "run_dir": (["/tmp/x"], "/tmp/x"),
    "exit_with_parent": (["77"], 77),
    "exit_with": (["77:1"], (77, 1)),
    "successor_s": (["90s"], 90.0),
    "notice_command": (["true"], "true"),
    "notice_every_s": (["7s"], 7.0),
    "notice_timeout_s": (["3s"], 3.0),
    "notice_within_ms": (["1m"], 60_000),
    "leave_hooks_s": (["4s"], 4.0),
    "leave_s": (["30s"], 30.0),
    "http_proxy": ([], True),
    "log_format": (["console"], "console"),
    "log_level": (["debug"], "DEBUG"),
}

CONTROLLER: dict[str, tuple[list[str], Any]] = {
    "listen": (["127.0.0.1:7999"], "127.0.0.1:7999"),
    "state_dir": (["/tmp/state"], Path("/tmp/state")),
    "run_dir": (["/tmp/run"], Path("/tmp/run")),
    "store": (["postgresql://db/callboard"], "postgresql://db/callboard"),
    "advertise": (["head.lab:7700"], "head.lab:7700"),
    "store_lease_ms": (["9s"], 9_000),
    "metrics": (["127.0.0.1:9999"], "127.0.0.1:9999"),
    "metrics_required": (["127.0.0.1:9999"], True),
    "metrics_open": ([], True),
    "otlp": (["http://127.0.0.1:4317"], "http://127.0.0.1:4317"),
    "page": (["9998"], "127.0.0.1:9998"),
    "page_required": (["127.0.0.1:9998"], True),
    "page_open": ([], True),
    "page_names": (["board.example"], ("board.example",)),
    "insecure": ([], True),
    "tls": (["/tmp/a.pem", "--tls-key", "/tmp/a.key"], TlsFiles(None, Path("/tmp/a.pem"), Path("/tmp/a.key"))),
    "jwt": (
        ["/tmp/key.pem", "--jwt-issuer", "i", "--jwt-audience", "a", "--jwt-role", "ml=trainer"],
        SignedTokenRules(key_file=Path("/tmp/key.pem"), issuer="i", audience="a", roles={"ml": Role.TRAINER}),
    ),
    "token_listen": (["127.0.0.1:7702"], "127.0.0.1:7702"),
    "lease_ms": (["40s"], 40_000),
    "heartbeat_ms": (["2s"], 2_000),
    "orphan_grace_ms": (["2h"], 7_200_000),
    "reconcile_grace_ms": (["0s"], 0),
    "stop_grace_ms": (["9s"], 9_000),
    "call_timeout_ms": (["9s"], 9_000),
    "progress_ms": (["9s"], 9_000),
    "loop": (["asyncio"], "asyncio"),
    "exit_with_parent": (["77"], True),
    "log_format": (["json"], "json"),
    "log_level": (["error"], "error"),
    "limits": (["ended_jobs=5"], Limits(ended_jobs=5)),
    "roles": (["{roles}"], None),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that programs were started with; none is."""
    found: list[Any] = []

    async def run_agent(options: AgentOptions) -> int:
        found.append(options)
        return 0

    def run_controller(options: ControllerOptions, *_: Any) -> int:
        found.append(options)
        return 0

    # Whether Ray's dashboard is installed here is another question.
    monkeypatch.setattr(agent_action, "usable_port", lambda port, **_: port)
    monkeypatch.setattr(agent_action, "run_agent", run_agent)
    monkeypatch.setattr(controller_action, "run_controller", run_controller)
    return found


def say(tmp_path: Path, verb: str, option: str, values: list[str]) -> Result:
    """Runs a program with one option, and what is always needed."""
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("a-token-of-the-lab\n")
    (tmp_path / "roles.yaml").write_text("roles: {sim: {cpu: 1}}\n")
    told = [value.format(token=tmp_path / "token", roles=tmp_path / "roles.yaml") for value in values]
    needed = ["--node-id", "n0", "--controller", "127.0.0.1:1", "--log-format", "json"] if verb == "agent" else []
    return CliRunner().invoke(app, [verb, *needed, option, *told], catch_exceptions=False)


@pytest.mark.parametrize("name", [field.name for field in fields(AgentOptions)])
def test_ft_e1_every_field_of_the_agent_can_be_stated(name: str, started: list[Any], tmp_path: Path) -> None:
    values, wanted = AGENT[name]
    wanted = str(tmp_path / "token") if name == "token_file" else wanted
    result = say(tmp_path, "agent", option_of(AgentOptions, name), values)
    assert result.exit_code == 0, result.output
    assert getattr(started[0], name) == wanted
    others = {"node_id": "n0", "controller": "127.0.0.1:1", "log_format": "json"} | {name: wanted}
    for field in fields(AgentOptions):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        assert getattr(started[0], field.name) == others.get(field.name, default)


@pytest.mark.parametrize("name", [field.name for field in fields(ControllerOptions)])
def test_ft_e1_every_field_of_the_controller_can_be_stated(name: str, started: list[Any], tmp_path: Path) -> None:
    values, wanted = CONTROLLER[name]
    result = say(tmp_path, "controller", option_of(ControllerOptions, name), values)
    assert result.exit_code == 0, result.output
    if name == "roles":
        assert set(started[0].roles) - set(PRESETS) == {"sim"}
    else:
        assert getattr(started[0], name) == wanted


@pytest.mark.parametrize("limit", [field.name for field in fields(Limits)])
def test_ft_e1_every_limit_can_be_stated(limit: str, started: list[Any], tmp_path: Path) -> None:
    assert say(tmp_path, "controller", "--limit", [f"{limit}=77"]).exit_code == 0
    assert started[0].limits == Limits(**{limit: 77})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("agent --interpreter python3", "not an absolute path"),
        ("agent --object-store-memory 1MiB", "75 MiB"),
        ("agent --object-store-memory much", "much"),
        ("agent --notice-timeout -1s", "-1s"),
        ("agent --leave-timeout soon", "soon"),
        ("agent --token-file /nowhere/token", "/nowhere/token"),
        ("agent --log-level loud", "LOUD"),
        ("controller --lease 1s", "two heartbeats"),
        ("controller --progress 0s", "longer than nothing"),
        ("controller --limit queue=3", "ended_jobs"),
        ("controller --limit inbox=many", "whole number"),
        ("controller --limit inbox=0", "inbox=0"),
        ("controller --limit inbox=5 --limit inbox=9", "inbox again"),
        ("controller --loop round", "uvloop"),
        ("controller --log-level loud", "warning"),
        ("up --interpreter /nowhere/python", "/nowhere/python"),
        ("up --object-store-memory 1MiB", "75 MiB"),
        ("up --foreign-gpu-use maybe", "'avoid', 'warn', 'ignore'"),
    ],
)
def test_ft_e1_a_refusal_names_the_option(line: str, said: str, started: list[Any], tmp_path: Path) -> None:
    verb, option, *values = line.split()
    result = say(tmp_path, verb, option, values)
    assert result.exit_code == 2
    assert option in result.output
    assert said in result.output
    assert started == []


def test_ft_e1_every_refusal_of_the_agent_names_an_option_that_there_is() -> None:
    commands: Any = typer.main.get_command(app)
    command = commands.commands["agent"]
    there = {option for parameter in command.params for option in parameter.opts}
    for bad in ({"rank": -1}, {"cpu_milli": -1}, {"labels": {"": "x"}}, {"leave_s": float("nan")}, {"gpus": -1}):
        with pytest.raises(OptionError) as refused:
            AgentOptions(node_id="n0", **bad)
        assert option_of(AgentOptions, refused.value.option) in there


def test_ft_e1_an_interpreter_is_allowed_from_the_command_line(machine: Machine, tmp_path: Path) -> None:
    # A second name of this Python: what is compared is the path, what must fit is the version.
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = (
        "name: {name}\npool: default\ncomponents:\n- {{name: actor, actor: 'callboard.demo.workers:RLHFWorker', "
        "kwargs: {{role: train}}, resources: {{cpu: 1}}, interpreter: {python}}}\n"
    )
    machine.up("--interpreter", str(python), "--foreign-gpu-use", "warn")
    (record,) = machine.clusters()
    lines = [Path(f"/proc/{program.process.pid}/cmdline").read_text().split("\0") for program in record.processes]
    told = [line[line.index("--foreign-gpu-use") + 1] for line in lines if "agent" in line]
    assert told == ["warn"] * 2, "what `up` is told reaches its agents"
    assert machine.run("pool", "create", "default", "--cpu", "4").returncode == 0
    (tmp_path / "fits.yaml").write_text(job.format(name="fits", python=python))
    shown = machine.run("job", "submit", str(tmp_path / "fits.yaml"), "--wait", "--timeout", "40")
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "not.yaml").write_text(job.format(name="not", python="/opt/other/bin/python"))
    refused = machine.run("job", "submit", str(tmp_path / "not.yaml"))
    assert refused.returncode != 0
    assert "/opt/other/bin/python" in refused.stderr
    assert "--interpreter /opt/other/bin/python" in refused.stderr
    assert [job["name"] for job in json.loads(machine.run("job", "list", "-o", "json").stdout)] == ["jobs/fits"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    pause_ms: int = option(1_500, "A pause.")
    room_bytes: int | None = option(None, "Room.", "--room-for-all")
    names: tuple[str, ...] = option((), "A name.", "--name", metavar="NAME")
    way: Literal["up", "down"] = option("up", "A way.")
    inside: int = 7


def test_a_field_with_an_option_is_all_that_a_new_option_needs() -> None:
    app = typer.Typer(rich_markup_mode=None)
    found: list[Sample] = []

    @app.command()
    @stating(Sample)
    def verb(*, stated: Stated) -> None:
        found.append(Sample(**read_stated(Sample, stated)))

    assert "--pause TIME" in CliRunner().invoke(app, ["--help"]).output
    for line in ([], ["--pause", "2s", "--room-for-all", "1KiB", "--name", "a", "--name", "b", "--way", "down"]):
        CliRunner().invoke(app, line, catch_exceptions=False)
    assert found == [Sample(), Sample(pause_ms=2_000, room_bytes=1024, names=("a", "b"), way="down")]
    for line in (["--pause", "soon"], ["--way", "left"], ["--inside", "8"]):
        refused = CliRunner().invoke(app, line)
        assert refused.exit_code == 2
        assert line[0] in refused.output
