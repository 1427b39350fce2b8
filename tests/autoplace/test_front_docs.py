"""Does what `docs/autoplace.md` shows come out? ``UPDATE_DOCS=1`` writes it anew."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from callboard.cli.main import app

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "autoplace.md"
PICTURE = ROOT / "docs" / "autoplace.svg"
BLOCK = re.compile(r"```console\n\$ callboard (?P<command>[^\n]*)\n(?P<output>.*?)```", re.DOTALL)
EXAMPLES = sorted((ROOT / "examples" / "autoplace" / "rlinf").glob("*.yaml"))


@pytest.fixture(autouse=True)
def same_screen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def output_of(command: str) -> str:
    shown = CliRunner().invoke(app, shlex.split(command))
    assert shown.exit_code == 0, shown.output
    return "".join(line.rstrip() + "\n" for line in shown.stdout.splitlines())


def test_every_command_of_the_document_prints_what_it_says() -> None:
    text = DOCUMENT.read_text()
    if os.environ.get("UPDATE_DOCS"):
        text = BLOCK.sub(
            lambda block: f"```console\n$ callboard {block['command']}\n{output_of(block['command'])}```", text
        )
        DOCUMENT.write_text(text)
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        assert output_of(block["command"]) == block["output"], "run with UPDATE_DOCS=1"


def test_the_picture_is_what_its_example_draws(tmp_path: Path) -> None:
    drawn = PICTURE if os.environ.get("UPDATE_DOCS") else tmp_path / "plan.svg"
    output_of(f"autoplace examples/autoplace/ppo_64_gpus.yaml --plot {shlex.quote(str(drawn))}")
    assert drawn.read_bytes() == PICTURE.read_bytes(), "run with UPDATE_DOCS=1"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_applied_is_accepted(example: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(example.read_text())
    output_of(f"autoplace {shlex.quote(str(file))} --apply")
    output_of(f"placement show {shlex.quote(str(file))} --nodes 8")
    comments = [line for line in example.read_text().splitlines() if line.lstrip().startswith("#")]
    assert [line for line in comments if line not in file.read_text()] == []


class TestScript:
    """`scripts/run_placement_autotune.sh`: the seed's own entry."""

    @staticmethod
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "scripts" / "run_placement_autotune.sh"
        return subprocess.run(
            [str(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )

    def test_without_an_argument_it_lists_the_configs(self) -> None:
        listed = self.run()
        assert listed.returncode == 0
        assert [line.strip() for line in listed.stdout.splitlines()[1:-1]] == [path.stem for path in EXAMPLES]

    def test_a_name_prints_the_best_placement(self) -> None:
        shown = self.run("reasoning")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("Best placement for this task is:\n\ncluster:\n  num_nodes: 1\n")

    def test_a_file_and_options_go_through(self) -> None:
        shown = self.run("examples/autoplace/rlinf/reasoning.yaml", "-o", "yaml", "--nodes", "8")
        assert shown.returncode == 0, shown.stderr
        assert "component_placement" in yaml.safe_load(shown.stdout)["cluster"]

    def test_another_folder_may_be_named(self, tmp_path: Path) -> None:
        (tmp_path / "math").mkdir()
        (tmp_path / "math" / "mine.yaml").write_text(EXAMPLES[1].read_text())
        assert "math/mine" in self.run(CONFIG_PATH=str(tmp_path)).stdout
        assert self.run("math/mine", CONFIG_PATH=str(tmp_path)).returncode == 0

    def test_an_unknown_name_is_bad_input(self) -> None:
        shown = self.run("resoning")
        assert shown.returncode == 2
        assert "reasoning" in shown.stderr
