"""Do the programs in examples/programs run as their first lines say, and are the commands of docs/programs.md right?"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer._click.exceptions import UsageError
from typer.main import get_command

from callboard.cli.main import app
from tests.cli.cluster import ROOT, RealCluster
from tests.cli.test_running import ran

PAGE = ROOT / "docs" / "programs.md"
EXAMPLES = ROOT / "examples" / "programs"

FRAMEWORKS = ("Python scripts", "torchrun", "verl", "OpenRLHF", "RLinf", "NeMo RL", "vLLM server", "Ray scripts")


def shown_commands(text: str) -> Iterator[tuple[str, bool]]:
    """Every command line of callboard in a text, and whether it is whole: in a block, and not a part in a sentence."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        lines = block.replace("\\\n", " ").splitlines()
        yield from ((line, True) for line in lines if line.startswith("callboard "))
    for span in re.findall(r"`(callboard [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield span, False


def parsed(line: str) -> tuple[list[str], dict[str, Any]]:
    """The verb of a command line and what it was given, as the program itself reads it."""
    words = [word for word in shlex.split(line, comments=True) if word != "…"][1:]
    command: Any = get_command(app)
    path: list[str] = []
    while hasattr(command, "get_command"):
        path.append(words.pop(0))
        command = command.get_command(None, path[-1])
        assert command is not None, line
    return path, command.make_context(path[-1], words).params


def test_every_command_on_the_page_is_one() -> None:
    lines = list(shown_commands(PAGE.read_text()))
    assert len(lines) > 20
    for line, whole in lines:
        try:
            path, given = parsed(line)
        except UsageError as error:
            if whole or "Missing" not in str(error.format_message()):
                raise AssertionError(f"{line}: {error.format_message()}") from error
        else:
            assert not whole or path != ["run"] or given["command"] or given["file"], line


def test_every_framework_has_its_section_with_both_commands() -> None:
    text = PAGE.read_text()
    for name in FRAMEWORKS:
        section = re.search(rf"^### {re.escape(name)}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
        assert section is not None, name
        blocks = re.findall(r"```bash\n(.*?)```", section[1], re.DOTALL)
        assert len(blocks) == 2, f"{name}: the command of today, and the one with callboard"
        assert not any(line.startswith("callboard ") for line in blocks[0].splitlines()), name
        assert any(line.startswith("callboard run ") for line in blocks[1].splitlines()), name


def told(example: Path) -> list[str]:
    """What a program's first lines say to type, behind `callboard run --pool research`."""
    (line,) = re.findall(r"^ {4}callboard run (.*(?:\n {8}.*)?)$", example.read_text(), re.MULTILINE)
    words = shlex.split(line.replace("\\\\\n", " ").replace("\\\n", " "))
    assert words[:2] == ["--pool", "research"]
    return words[2:]


@pytest.mark.timeout(300)
async def test_an_array_of_hyper_parameters_ends_with_a_value_or_a_reason_each(cluster: RealCluster) -> None:
    done = await ran(cluster, "--name", "sweep", *told(EXAMPLES / "sweep.py"))
    assert done.exit_code == 1, done.stdout + done.stderr
    results = [json.loads(line.partition(" | ")[2]) for line in done.stdout.splitlines()]
    assert {each["rate"] for each in results} == {0.0002, 0.001, 0.002}
    assert min(results, key=lambda each: each["value"])["rate"] == 0.002
    assert "rate 0.02 diverges" in done.stderr


@pytest.mark.timeout(300)
async def test_torchrun_trains_on_two_nodes_to_the_same_weights(cluster: RealCluster) -> None:
    pytest.importorskip("torch", reason="torch is installed by scripts/test")
    await cluster.add_node("n1")
    await cluster.client.update_pool({"name": "rlhf", "nominal": {"cpu": 8}})
    done = await ran(cluster, "--name", "ddp", *told(EXAMPLES / "ddp.py"))
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = [line.partition(" | ")[2] for line in done.stdout.splitlines()]
    weights = {line.rpartition(" ")[2] for line in lines}
    assert sorted(line.split(":")[0] for line in lines) == [f"rank {rank} of 4" for rank in range(4)]
    assert len(weights) == 1, "the same everywhere"
