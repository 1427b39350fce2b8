"""Do the files for Slurm and Kubernetes say what the program understands, and do the documented commands exist?"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from callboard.cli.main import app
from callboard.model.quantities import parse_memory
from callboard.v1.node_pb2 import NodeState
from tests.cli.cluster import ROOT, RealCluster

DEPLOY = ROOT / "scripts" / "deploy"
DOCUMENT = ROOT / "docs" / "growing.md"


def parsed(arguments: list[str]) -> Any:
    """The verb and its options, as the program reads them."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    return command.make_context(command.name, arguments)


def manifests() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


class TestKubernetes:
    def test_every_command_is_one_of_ours(self) -> None:
        seen = []
        for manifest in manifests():
            template = manifest.get("spec", {}).get("template", {}) if manifest["kind"] == "StatefulSet" else {}
            for container in template.get("spec", {}).get("containers", []):
                line = [part.replace("$(POD)", "pod-0").replace("$(IP)", "10.0.0.7") for part in container["command"]]
                assert line[0] == "callboard"
                parsed(line[1:])
                seen.append(line[1])
        assert seen == ["controller", "agent", "agent"]

    def test_ray_has_room_for_its_objects_and_no_variable_is_taken_for_ours(self) -> None:
        """Ray takes 30 % of the memory for objects, and a pod's own /dev/shm is 64 MiB."""
        rooms = []
        for manifest in manifests():
            if manifest["kind"] != "StatefulSet":
                continue
            pod = manifest["spec"]["template"]["spec"]
            assert pod["enableServiceLinks"] is False, "CALLBOARD_PORT and others, after the service's name"
            (container,) = pod["containers"]
            sizes = {volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in pod.get("volumes", ())}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            if "agent" in container["command"]:
                room = parse_memory(f"{sizes[mounts['/dev/shm']]}B")
                rooms.append(room / parse_memory(f"{container['resources']['limits']['memory']}B"))
        assert len(rooms) == 2
        assert all(0.3 < room < 0.5 for room in rooms)

    def test_what_is_scaled_exists_and_the_metrics_are_ours(self) -> None:
        names = {m["metadata"]["name"] for m in manifests() if m["kind"] == "StatefulSet"}
        scaled = [m["spec"]["scaleTargetRef"]["name"] for m in manifests() if "scaleTargetRef" in m["spec"]]
        assert len(scaled) == 2
        assert set(scaled) <= names - {"callboard-head"}
        source = (ROOT / "callboard" / "controller" / "metrics" / "gauges.py").read_text()
        for file in (DEPLOY / "kubernetes").glob("*.yaml"):
            for name in set(re.findall(r"callboard_(?!wanted_pods)\w+", file.read_text())):
                assert f'"{name}"' in source, name

    def test_a_pod_has_the_time_for_its_notice(self) -> None:
        for manifest in manifests():
            if manifest["metadata"]["name"] == "callboard-agent" and manifest["kind"] == "StatefulSet":
                pod = manifest["spec"]["template"]["spec"]
                (agent,) = pod["containers"]
                options = parsed(
                    [p.replace("$(POD)", "p").replace("$(IP)", "1.1.1.1") for p in agent["command"]][1:]
                ).params
                pause = int(re.findall(r"sleep (\d+)", " ".join(agent["lifecycle"]["preStop"]["exec"]["command"]))[0])
                assert int(options["notice_deadline"].removesuffix("s")) < pause < pod["terminationGracePeriodSeconds"]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose `sbatch` runs the job here, and whose `scancel` signals it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "sbatch": """for each; do script=$each; done
export SLURM_JOB_ID=7
nohup bash "$script" >"$SLURM_HERE/log" 2>&1 &
echo $! >"$SLURM_HERE/pid"
echo 7""",
        "scancel": """echo "$@" >>"$SLURM_HERE/scancel"
case "$*" in *RUNNING*) kill -TERM "$(cat "$SLURM_HERE/pid")" ;; esac""",
        "callboard": f'exec {shlex.quote(sys.executable)} -m callboard.cli "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_HERE": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "CALLBOARD_LOOPBACK": "yes",
        "CALLBOARD_AGENT_OPTIONS": "--runtime process --simulate-gpus 1 --cpus 1 --memory 1GiB",
    }


class TestSlurm:
    async def test_a_node_joins_is_drained_when_slurm_takes_it_back_and_goes(
        self, bare: RealCluster, slurm: dict[str, str], tmp_path: Path
    ) -> None:
        slurm |= {"CALLBOARD_NODE": "auto-1", "CALLBOARD_CONTROLLER": bare.address}

        async def script(name: str) -> None:
            process = await asyncio.create_subprocess_exec(
                str(DEPLOY / "slurm" / name), "--partition=gpu", env=slurm, stdout=asyncio.subprocess.DEVNULL
            )
            assert await process.wait() == 0

        await script("up.sh")
        job = int((tmp_path / "pid").read_text())
        states: list[str] = []
        async with asyncio.timeout(90):
            async for event in bare.client.watch(start_revision=1, subject="nodes/auto-1"):
                states.append(event.state)
                if event.state == "READY":
                    assert dict((await bare.client.get_node("auto-1")).labels) == {"slurm-job": "7"}
                    os.kill(job, signal.SIGUSR1)
                elif event.state == "DRAINING":
                    assert (await bare.client.get_node("auto-1")).state_reason == "Slurm takes the node back"
                    await script("down.sh")
                elif event.state == "LEFT":
                    break
        assert "DRAINING" in states
        assert (await bare.client.get_node("auto-1")).state == NodeState.NODE_STATE_LEFT
        assert "--state=PENDING" in (tmp_path / "scancel").read_text()

    @pytest.mark.parametrize("address", ["127.0.0.1:7700", "localhost:7700", "[::1]:7700"])
    def test_an_address_that_no_other_node_reaches_is_refused(self, slurm: dict[str, str], address: str) -> None:
        slurm |= {"CALLBOARD_NODE": "auto-1", "CALLBOARD_CONTROLLER": address, "CALLBOARD_LOOPBACK": "no"}
        shown = subprocess.run([DEPLOY / "slurm" / "up.sh"], env=slurm, capture_output=True, text=True, check=False)
        assert shown.returncode == 2
        assert f"other nodes can't reach the controller at {address}" in shown.stderr

    def test_the_scripts_need_what_the_loop_gives(self) -> None:
        for name in ("up.sh", "down.sh"):
            assert "CALLBOARD_NODE:?" in (DEPLOY / "slurm" / name).read_text()


def commands() -> list[str]:
    """Every command line of ours in the document, without what stands for something else."""
    text = DOCUMENT.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(callboard [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.strip().replace(" …", "") for line in lines if line.startswith("callboard ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_document_is_understood(line: str) -> None:
    words = shlex.split(line)
    parsed(words[1:])


def test_the_document_shows_something() -> None:
    assert len(commands()) >= 8
    for name in re.findall(r"scripts/[\w/]+\.\w+|examples/\w+\.py|callboard/[\w/]+\.py", DOCUMENT.read_text()):
        assert (ROOT / name).exists(), name
