"""Does the page say what happens? Each example is run as the command line would; ``UPDATE_DOCS=1`` writes them anew."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.model.inputs import job_spec, read_yaml
from callboard.placement import ComponentPlacement, PackedPlacementStrategy, parse, render
from callboard.placement.cluster.cluster import Cluster

PAGE = Path(__file__).parent.parent.parent / "docs" / "placement.md"
_EXAMPLE = re.compile(
    r"### (?P<title>[0-9]+\. [^\n]+)\n\n```yaml\n(?P<config>.*?)```\n\n```text\n"
    r"\$ callboard placement show example.yaml (?P<options>[^\n]*)\n(?P<output>.*?)```",
    re.DOTALL,
)
EXAMPLES = {match["title"]: match for match in _EXAMPLE.finditer(PAGE.read_text())}


def shown(config: str, options: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the program prints, without the table of ranks."""
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(directory)
    Path("example.yaml").write_text(config)
    result = CliRunner().invoke(app, ["placement", "show", "example.yaml", *shlex.split(options)])
    assert result.exit_code in {0, 2}, result.output
    picture = result.stdout.split("COMPONENT  RANK")[0].rstrip()
    text = f"{picture}\n{result.stderr}" if picture and result.stderr else picture or result.stderr
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def test_the_python_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {"config": EXAMPLES["3. Some shared, some not"]["config"]}
    exec(compile(code, str(PAGE), "exec"), names)
    assert isinstance(names["placement"], ComponentPlacement)


def test_the_job_of_the_page_is_a_job_that_is_placed() -> None:
    (text,) = re.findall(r"## In a job\n.*?```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    spec = job_spec(read_yaml(text))
    found = parse(spec.placement_config, Cluster.from_nodes("2+2"))
    assert [(part.name, part.world_size) for part in found.components] == [("actor", 4), ("env", 8)]


def test_the_strategy_of_the_page_is_what_it_says() -> None:
    (code,) = re.findall(r"`(PackedPlacementStrategy\([^`]*)`", PAGE.read_text())
    placed = eval(code, {"PackedPlacementStrategy": PackedPlacementStrategy, "Cluster": Cluster})
    assert [one.visible_accelerators for one in placed] == [("0", "2"), ("1", "3")]


def test_there_are_ten_examples() -> None:
    assert [title.split(".")[0] for title in EXAMPLES] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_what_happens(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[title]
    said = shown(example["config"], example["options"], tmp_path, monkeypatch)
    if os.environ.get("UPDATE_DOCS"):
        head = example[0][: -len(example["output"]) - 3]
        page = PAGE.read_text()
        PAGE.write_text(page.replace(example[0], f"{head}{said}```"))
    else:
        assert example["output"] == said, "run with UPDATE_DOCS=1"


@pytest.mark.parametrize("title", [title for title in EXAMPLES if not title.startswith("10")])
def test_an_example_is_read_again_as_it_was_written(title: str) -> None:
    example = EXAMPLES[title]
    found = parse(example["config"], Cluster.from_nodes(shlex.split(example["options"])[1]))
    assert parse(render(found)) == found
