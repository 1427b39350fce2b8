"""Does every verb say what it does, with an example?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from callboard.cli.main import app, main
from callboard.cli.verbs import MODULE_OF


def verbs(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    command = command or get_command(app)
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        yield from verbs(below, (*path, name))


VERBS = list(verbs())


def test_the_verbs_of_the_design_are_there() -> None:
    assert {" ".join(path) for path, _ in VERBS} == {
        *(
            "add-worker",
            "remove-worker",
            "ray-env",
            "version",
            "job result",
            "demand",
            "autoscale",
            "demo elastic",
            "node remove",
        ),
        *("up", "down", "controller", "agent", "status", "events", "simulate", "replay", "demo rlhf"),
        *("autoplace", "profile", "plan", "run", "exec", "attach", "top", "doctor", "job env", "page"),
        *("job submit", "job list", "job get", "job cancel", "job complete", "job explain", "job preempt"),
        *("store copy", "store backup", "store restore"),
        *("audit", "token create", "token list", "token revoke", "login"),
        *("certs init", "certs agent", "certs client", "certs renew", "certs retire", "certs revoke", "certs list"),
        *("context list", "context show", "context use", "context remove"),
        *("job watch", "job logs", "job scale", "worker list"),
        *("pool create", "pool list", "pool get", "pool set", "pool delete"),
        *("pg list", "pg get", "pg delete", "policy get", "policy set", "placement show"),
        *("node list", "node get", "node cordon", "node uncordon", "node drain", "node token create"),
    }


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[" ".join(path) for path, _ in VERBS])
def test_a_verb_says_what_it_does_and_gives_an_example(path: tuple[str, ...], command: Any) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0
    assert command.help
    assert f"Example: callboard {' '.join(path)}" in shown.output
    unexplained = [option.name for option in command.params if not getattr(option, "help", None)]
    assert not unexplained


@pytest.mark.parametrize("options", [["--controller", "h:1"], ["-c", "h:1"], ["--output", "json"], ["-o", "json"]])
def test_an_option_before_the_verb_is_told_where_it_belongs(options: list[str]) -> None:
    shown = CliRunner().invoke(app, [*options, "status"])
    assert shown.exit_code == 2
    place = f"it belongs behind the verb: callboard VERB {'--output' if 'json' in options else '--controller'}"
    assert f"{place} {options[1]}" in " ".join(shown.output.split())


GROUPS = [(), *sorted({path[:-1] for path, _ in VERBS if len(path) > 1})]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: " ".join(group) or "callboard")
def test_a_list_of_verbs_is_whole_in_a_narrow_terminal(group: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"})
    cut = [line for line in shown.output.split("Commands:")[1].splitlines() if line.endswith("...")]
    assert not cut, "\n".join(cut)


READS = [path for path, _ in VERBS if path[-1] in {"list", "get", "status", "events", "explain", "watch", "demand"}]


@pytest.mark.parametrize("path", READS, ids=" ".join)
def test_every_read_can_be_shown_in_four_ways(path: tuple[str, ...]) -> None:
    assert "--output <table|wide|json|yaml>" in " ".join(CliRunner().invoke(app, [*path, "--help"]).output.split())


WITHOUT_OUTPUT = {"agent", "autoscale", "controller", "demo elastic", "demo rlhf", "job logs", "run", "exec", "attach"}
"""Verbs that run until they are ended, or whose result is a text of its own."""


def options_of(command: Any) -> set[str]:
    return {option for each in command.params for option in each.opts}


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[" ".join(path) for path, _ in VERBS])
def test_every_verb_answers_programs_in_json(path: tuple[str, ...], command: Any) -> None:
    assert ("--output" in options_of(command)) == (" ".join(path) not in WITHOUT_OUTPUT)


@pytest.mark.parametrize(
    "path",
    [path for path in READS if path[-1] != "watch" and path[0] not in {"token", "certs", "context"}],
    ids=" ".join,
)
def test_every_read_can_be_watched(path: tuple[str, ...]) -> None:
    (command,) = (command for each, command in VERBS if each == path)
    assert "--watch" in options_of(command)


def test_the_version_is_said() -> None:
    from callboard import __version__

    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"callboard {__version__}"


def test_a_wrong_verb_is_bad_input() -> None:
    assert CliRunner().invoke(app, ["jbo"]).exit_code == 2
    assert CliRunner().invoke(app, ["job", "list", "-o", "xml"]).exit_code == 2


def test_bytes_that_are_no_text_are_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["callboard", "node", "drain", "n1", "--reason", "ü \udc9b31m"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: Argument 5 is not UTF-8: ü \\udc9b31m\n"


def test_the_list_of_verbs_says_of_each_what_its_own_help_begins_with() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    commands: Any = get_command(app)
    commands = commands.commands
    for name in MODULE_OF:
        short = " ".join(commands[name].get_short_help_str(1_000).split())
        (line,) = [line for line in listed.splitlines() if line.split()[:1] == [name]]
        shown = line.split(None, 1)[1]
        assert short.startswith(shown.removesuffix("...")), name
