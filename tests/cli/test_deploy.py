"""Do the files for Slurm and Kubernetes say what the program understands, and do the documented commands exist?"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from callboard.cli.main import app
from callboard.controller.metrics.gauges import gauges
from callboard.model.durations import parse_duration_ms
from callboard.model.quantities import parse_memory
from callboard.scheduler import State
from callboard.security.places import TLS_VARIABLES
from callboard.security.tokens import TOKEN_FILE_VARIABLE
from callboard.v1.node_pb2 import NodeState
from tests.cli.cluster import ROOT, RealCluster
from tests.support.kustomizations import faults

DEPLOY = ROOT / "scripts" / "deploy"
DOCUMENT = ROOT / "docs" / "growing.md"


def parsed(arguments: list[str]) -> Any:
    """The verb and its options, as the program reads them."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        while arguments[0].startswith("--"):  # What holds for every verb: `--context NAME`.
            assert any(arguments[0] in parameter.opts for parameter in command.params), arguments[0]
            arguments = arguments[2:]
        name, *arguments = arguments
        command = command.commands[name]
    return command.make_context(command.name, arguments)


def manifests() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        if file.name != "kustomization.yaml":
            yield from yaml.safe_load_all(file.read_text())


class TestKubernetes:
    @pytest.mark.parametrize("name", ["callboard.yaml", "hpa.yaml"])
    def test_kubernetes_knows_every_field(self, name: str) -> None:
        """`keda.yaml` is of a kind that KEDA brings."""
        judge = [str(Path(sys.executable).with_name("kubernetes-validate")), "--strict", "--no-warn"]
        file = DEPLOY / "kubernetes" / name
        shown = subprocess.run([*judge, file], capture_output=True, text=True, check=False, timeout=60)
        assert shown.returncode == 0, shown.stdout + shown.stderr

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
            sizes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in pod.get("volumes", ()) if "emptyDir" in v}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            if "agent" in container["command"]:
                room = parse_memory(f"{sizes[mounts['/dev/shm']]}B")
                rooms.append(room / parse_memory(f"{container['resources']['limits']['memory']}B"))
        assert len(rooms) == 2
        assert all(0.3 < room < 0.5 for room in rooms)

    def test_nothing_is_open_and_agents_show_a_token_by_tls(self) -> None:
        for manifest in manifests():
            if manifest["kind"] != "StatefulSet":
                continue
            pod = manifest["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            assert not [part for part in container["command"] if "insecure" in part or "open" in part]
            if "agent" not in container["command"]:
                (before,) = pod["initContainers"]
                made = before["command"][-1].rpartition("|| ")[2]
                assert parsed(shlex.split(made)[1:]).params["host"] == ["callboard"], "as agents call it"
                continue
            options = parsed([p.replace("$(POD)", "p").replace("$(IP)", "1.1.1.1") for p in container["command"]][1:])
            assert options.params["controller"] == "callboard:7701", "where callers without a certificate connect"
            stated = {each["name"]: each.get("value", "") for each in container["env"]}
            for variable in (TLS_VARIABLES["ca"], TOKEN_FILE_VARIABLE):
                folder, _, _ = stated[variable].rpartition("/")
                (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == folder]
                (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
                assert volume["secret"]["defaultMode"] == 0o400

    def test_what_is_scaled_exists_and_the_metrics_are_ours(self) -> None:
        names = {m["metadata"]["name"] for m in manifests() if m["kind"] == "StatefulSet"}
        scaled = [m["spec"]["scaleTargetRef"]["name"] for m in manifests() if "scaleTargetRef" in m["spec"]]
        assert len(scaled) == 2
        assert set(scaled) <= names - {"callboard-head"}
        ours = {family.name for family in gauges(State(), now_ms=0)}
        for file in (DEPLOY / "kubernetes").glob("*.yaml"):
            assert set(re.findall(r"callboard_(?!wanted_pods)\w+", file.read_text())) <= ours, file

    def test_a_pod_has_the_time_for_its_notice(self) -> None:
        for manifest in manifests():
            if manifest["metadata"]["name"] == "callboard-agent" and manifest["kind"] == "StatefulSet":
                pod = manifest["spec"]["template"]["spec"]
                (agent,) = pod["containers"]
                options = parsed(
                    [p.replace("$(POD)", "p").replace("$(IP)", "1.1.1.1") for p in agent["command"]][1:]
                ).params
                pause = int(re.findall(r"sleep (\d+)", " ".join(agent["lifecycle"]["preStop"]["exec"]["command"]))[0])
                assert int(options["notice_within_ms"].removesuffix("s")) < pause < pod["terminationGracePeriodSeconds"]


def overlay(folder: Path) -> Path:
    """The kustomization of one's own that operating.md shows, beside a checkout."""
    (shown,) = re.findall(
        r"```yaml\n(apiVersion: kustomize.*?)```", (ROOT / "docs" / "operating.md").read_text(), re.DOTALL
    )
    (folder / "callboard" / "scripts").mkdir(parents=True)
    shutil.copytree(DEPLOY, folder / "callboard" / "scripts" / "deploy")
    shutil.copy(DEPLOY / "kubernetes" / "hpa.yaml", folder)
    (folder / "kustomization.yaml").write_text(shown)
    return folder


FAULTY = {
    "an unknown key": ("namespace: ", "nameSpace: ", "nameSpace: unknown"),
    "a deprecated key": ("namespace: ", "commonLabels: {a: b}\nnamespace: ", "commonLabels: deprecated"),
    "a resource that isn't there": ("- hpa.yaml", "- hpa.yml", "resources: hpa.yml does not exist"),
    "a file of another folder": (
        "- hpa.yaml",
        "- callboard/../../elsewhere.yaml",
        "resources: callboard/../../elsewhere.yaml is a file outside of the folder, which kustomize does not read",
    ),
    "one thing twice": (
        "- hpa.yaml",
        "- hpa.yaml\n  - again.yaml",
        "HorizontalPodAutoscaler callboard-agent: is there twice",
    ),
    "an image that nothing uses": ("name: callboard\n", "name: callbord\n", "images: nothing uses callbord"),
    "replicas of nothing": (
        "name: callboard-agent\n    count",
        "name: agents\n    count",
        "replicas: nothing that is scaled is called agents",
    ),
    "a patch of nothing": (
        "name: callboard-agent\n      spec",
        "name: agent\n      spec",
        "patches: there is no StatefulSet agent",
    ),
    "a patch of no container": (
        "- name: agent\n",
        "- name: agnt\n",
        "patches: /spec/template/spec/containers/agnt is not there",
    ),
}


class TestKustomization:
    def test_it_has_no_fault_and_tells_of_every_file_beside_it(self) -> None:
        folder = DEPLOY / "kubernetes"
        assert faults(folder) == []
        text = (folder / "kustomization.yaml").read_text()
        assert not [file.name for file in folder.iterdir() if file.name not in text and file.stem != "kustomization"]

    def test_one_of_ones_own_that_is_shown_has_no_fault(self, tmp_path: Path) -> None:
        assert faults(overlay(tmp_path)) == []

    @pytest.mark.parametrize(("old", "new", "told"), FAULTY.values(), ids=FAULTY)
    def test_a_fault_is_found(self, tmp_path: Path, old: str, new: str, told: str) -> None:
        (folder := tmp_path / "own").mkdir()
        file = overlay(folder) / "kustomization.yaml"
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
        for copy in (folder / "again.yaml", tmp_path / "elsewhere.yaml"):
            shutil.copy(DEPLOY / "kubernetes" / "hpa.yaml", copy)
        assert faults(folder) == [told]

    def test_kubectl_builds_both(self, tmp_path: Path) -> None:
        """Where the machine has it."""
        if (kubectl := shutil.which("kubectl")) is None:
            pytest.skip("this machine has no kubectl")
        built = []
        for folder in (DEPLOY / "kubernetes", overlay(tmp_path)):
            shown = subprocess.run(
                [kubectl, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60
            )
            assert shown.returncode == 0, shown.stderr
            built.append({(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(shown.stdout)})
        base, own = built
        assert set(own) - set(base) == {("HorizontalPodAutoscaler", "callboard-agent")}
        agent = own["StatefulSet", "callboard-agent"]["spec"]
        (container,) = agent["template"]["spec"]["containers"]
        assert (agent["replicas"], container["image"]) == (4, "registry.example/callboard:0.1.0")
        assert container["resources"]["limits"] == {"cpu": "16", "memory": "512Gi", "nvidia.com/gpu": "4"}


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


def blocks_and_mentions(page: Path) -> tuple[list[str], list[str]]:
    """The command lines of ours in a page: those in blocks, and those in sentences."""
    text = page.read_text().replace("\\\n", " ")
    shown = re.compile(r"^ *```(?:console|bash|sh|)\n(.*?)^ *```|((?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE)
    lines = [line for fenced, indented in shown.findall(text) for line in (fenced or indented).splitlines()]
    start = re.compile(r"^\s*(?:[$#] )?(?:\w+=\S* )*(?:\.venv/bin/)?callboard (?=[a-z-])")
    typed = [re.split(r"   #| [|>] ", start.sub("callboard ", line))[0].strip() for line in lines if start.match(line)]
    return typed, re.findall(r"`(callboard [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *sorted((DEPLOY / "monitoring").glob("*.yaml"))]
SHOWN = [(page.name, line) for page in PAGES for line in blocks_and_mentions(page)[0]]
MENTIONED = [(page.name, line) for page in PAGES for line in blocks_and_mentions(page)[1]]


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_every_command_that_a_page_shows_is_understood(page: str, line: str) -> None:
    parsed([word for word in shlex.split(line, comments=True)[1:] if word != "…"])


@pytest.mark.parametrize(("page", "line"), sorted(set(MENTIONED)))
def test_every_command_that_a_sentence_mentions_exists_with_its_options(page: str, line: str) -> None:
    words = [word for word in re.split(r"[\s=|]+", line.partition(" -- ")[0]) if word not in {"…", "callboard"}]
    command: Any = get_command(app)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            known |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        elif word.startswith("--"):
            assert word in known | {"--help", "--install-completion"}, f"{word} in {line!r}"
        elif hasattr(command, "commands") and re.fullmatch(r"[a-z][a-z-]+", word):
            assert word in command.commands or word in line.partition("--")[2], f"{word} in {line!r}"


def test_the_pages_show_something() -> None:
    assert len(SHOWN) >= 30
    assert len(MENTIONED) >= 80
    for page in (DOCUMENT, ROOT / "docs" / "operating.md"):
        for name in re.findall(r"scripts/[\w/]+\.\w+|examples/\w+\.py|callboard/[\w/]+\.py", page.read_text()):
            assert (ROOT / name).exists(), name


class TestSystemd:
    @pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.stem)
    def test_a_unit_starts_one_of_our_programs(self, unit: Path) -> None:
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        program, *arguments = shlex.split(line.replace("$OPTIONS", "--ray-head"))
        assert Path(program).name == "callboard"
        options = parsed(arguments).params
        assert options["log_format"] == "json"
        if "leave_hooks_s" in options:
            # The agent's own time to leave comes before systemd's patience ends.
            (patience,) = re.findall(r"^TimeoutStopSec=(\d+)s$", unit.read_text(), re.MULTILINE)
            assert parse_duration_ms(options["leave_hooks_s"]) < int(patience) * 1000

    @pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.stem)
    def test_systemd_understands_a_unit(self, unit: Path, tmp_path: Path) -> None:
        """Checked by systemd itself where the machine has it; every other machine checks its keys."""
        keys = set(re.findall(r"^(\w+)=", unit.read_text(), re.MULTILINE))
        assert keys <= UNIT_KEYS
        if (verify := shutil.which("systemd-analyze")) is None:
            return
        copy = tmp_path / unit.name
        copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
        shown = subprocess.run(
            [verify, "verify", "--man=no", copy], capture_output=True, text=True, check=False, timeout=60
        )
        assert unit.name not in shown.stderr, shown.stderr


UNIT_KEYS = frozenset(
    [
        "Description", "Wants", "After", "User", "StateDirectory", "StateDirectoryMode", "RuntimeDirectory",
        "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "Environment", "EnvironmentFile", "ExecStart",
        "Restart", "RestartSec", "TimeoutStopSec", "KillMode", "LimitNOFILE", "LimitMEMLOCK", "LimitCORE",
        "NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "OOMPolicy", "Delegate", "WantedBy",
    ]
)  # fmt: skip


class TestContainer:
    def test_its_linter_finds_nothing(self) -> None:
        linter = Path(sys.executable).with_name("hadolint")
        file = DEPLOY / "container" / "Containerfile"
        shown = subprocess.run([linter, file], capture_output=True, text=True, check=False, timeout=60)
        assert shown.returncode == 0, shown.stdout

    def test_what_it_copies_is_there_and_its_extras_are_ours(self) -> None:
        text = (DEPLOY / "container" / "Containerfile").read_text()
        for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
            for name in line.split():
                assert (ROOT / name).exists(), name
        (extras,) = re.findall(r'^ARG EXTRAS="(.*)"$', text, re.MULTILINE)
        check = [sys.executable, "scripts/lockfile.py", "check-extras", "requirements.lock", *extras.split()]
        subprocess.run(check, cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
def test_a_wheel_of_this_checkout_installs_offline_and_is_whole(tmp_path: Path) -> None:
    """Into an environment that sees the requirements of this one and no package index."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        str(tmp_path),
    ]
    # A checkout by itself: what lies about in this one must not get into the wheel.
    source = tmp_path / "checkout"
    source.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, files.decode().split("\0")):
        if name.startswith(("callboard/", "pyproject", "README", "LICENSE")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    subprocess.run([*build, str(source)], check=True, timeout=170)
    (wheel,) = tmp_path.glob("callboard-*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    (folder,) = home.glob("lib/python*/site-packages")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=170)
    (folder / "requirements.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    check = "import callboard, sys; print(callboard.__file__); [getattr(callboard, name) for name in callboard.__all__]"
    shown = subprocess.run(
        [home / "bin" / "python", "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(shown.stdout.strip()).is_relative_to(folder), "the wheel's own, not the checkout's"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    tracked = {name for name in files.decode().split("\0") if name.startswith("callboard/")}
    assert not {name for name in tracked if (ROOT / name).exists()} - held
    assert "callboard/py.typed" in held
