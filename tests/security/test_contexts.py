"""Contexts: who logged in once names neither address nor credentials again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from callboard.client.clusters import find_controller
from callboard.client.errors import NoController
from callboard.security import certificates
from callboard.security.caller_roles import Role
from callboard.security.contexts import (
    BadContext,
    config_directory,
    context_for,
    current_context,
    log_in,
    read_contexts,
    remove,
    use,
)
from callboard.security.grants import grant
from callboard.security.tls import TlsParts
from callboard.security.tokens import find_tls, find_token
from tests.controller.support import options_for, running

TOKEN = "cb_" + "t" * 43


@pytest.fixture
def account(tmp_path: Path) -> dict[str, str]:
    """The environment of an account without anything."""
    return {"HOME": str(tmp_path / "home"), "CALLBOARD_RUN_DIR": str(tmp_path / "run")}


async def cli(account: dict[str, str], *arguments: str, said: str = "") -> tuple[int, str]:
    """Runs the command line as that account; its exit code and all it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "callboard.cli", *arguments),
        env={"PATH": os.environ["PATH"], **account},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate(said.encode())
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_after_a_login_every_command_finds_controller_and_credentials(
    tmp_path: Path, account: dict[str, str]
) -> None:
    certificates.make_authority(tmp_path / "state" / "certs", [])
    async with running(options_for(tmp_path)) as controller:
        (tmp_path / "home").mkdir()
        token = grant(controller.options.state_dir, "olga", Role.OPERATOR)
        ca = str(controller.options.certs / "ca.pem")
        stated = ("login", controller.tokens_at, "--name", "lab", "--token-file", "-", "--tls-ca", ca)
        code, output = await cli(account, *stated, said="cb_" + "w" * 43 + "\n")
        assert code != 0, output
        assert not read_contexts(account).known, "what is not taken is not kept"
        code, output = await cli(account, *stated, said=f"{token}\n")
        assert code == 0, output
        code, output = await cli(account, "pool", "create", "a", "-o", "json")
        assert code == 0, output
        assert controller.audit.newest(1)[0].who == "olga"
        code, output = await cli(account, "context", "show", "-o", "json")
        assert (code, json.loads(output)["address"]) == (0, controller.tokens_at), output
        assert token not in output
        certificates.issue(controller.options.certs, "vera", Role.VIEWER, tmp_path / "vera")
        pems = [
            f"--tls-{part}={tmp_path / 'vera' / name}"
            for part, name in (("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "cert.key"))
        ]
        code, output = await cli(account, "login", controller.address, "--name", "see", *pems)
        assert code == 0, output
        code, output = await cli(account, "pool", "create", "b")
        assert (code, "viewer" in output) == (1, True), output
        code, output = await cli(account, "--context", "lab", "pool", "create", "b")
        assert code == 0, output
        base = config_directory(account)
        assert base is not None
        assert all(path.stat().st_mode & 0o077 == 0 for path in [base, *base.rglob("*")])


def test_what_is_stated_comes_before_the_environment_the_context_and_the_run_directory(account: dict[str, str]) -> None:
    with pytest.raises(NoController):
        find_controller(None, account)
    log_in("lab", "lab:7700", TOKEN, None, account)
    assert find_controller(None, account).address == "lab:7700"
    named = account | {"CALLBOARD_CONTROLLER": "other:7700"}
    assert find_controller(None, named).address == "other:7700"
    assert find_controller("third:7700", named).address == "third:7700"
    with pytest.raises(NoController):
        find_controller(None, account | {"CALLBOARD_CONTEXT": "none"})
    with pytest.raises(BadContext, match="context list"):
        find_controller(None, account | {"CALLBOARD_CONTEXT": "lost"})


def test_credentials_of_a_context_go_to_its_own_controller_only(account: dict[str, str]) -> None:
    log_in("lab", "lab:7700", TOKEN, None, account)
    assert find_token("lab:7700", environ=account) == TOKEN
    assert find_token("elsewhere:7700", environ=account) == ""
    assert find_token("lab:7700", environ=account | {"CALLBOARD_TOKEN": "x" * 20}) == "x" * 20
    assert find_tls("lab:7700", account) is None
    use("none", account)
    assert find_token("lab:7700", environ=account) == ""


def test_contexts_are_kept_replaced_and_forgotten(account: dict[str, str], tmp_path: Path) -> None:
    certificates.make_authority(tmp_path / "certs", [])
    authority = (tmp_path / "certs" / "ca.pem").read_bytes()
    log_in("a", "a:1", "", TlsParts(authority, b"", b""), account)
    log_in("b", "b:1", TOKEN, None, account)
    assert (context_for("b:1", account), context_for("a:1", account)) == (current_context(account), None)
    use("a", account)
    assert find_tls("a:1", account) == TlsParts(authority.strip() + b"\n", b"", b"")
    log_in("a", "a:2", TOKEN, None, account)
    assert find_tls("a:2", account) is None, "an old certificate is not left over"
    remove("a", account)
    assert (list(read_contexts(account).known), read_contexts(account).current) == (["b"], "")
    for name in ("none", "../x", ""):
        with pytest.raises(BadContext, match="can't be the name"):
            log_in(name, "a:1", TOKEN, None, account)
    for act in (use, remove):
        with pytest.raises(BadContext, match="no context z"):
            act("z", account)


def test_a_file_that_others_can_read_or_that_is_broken_is_refused(account: dict[str, str]) -> None:
    log_in("a", "a:1", TOKEN, None, account)
    base = config_directory(account)
    assert base is not None
    (base / "contexts.json").chmod(0o644)
    with pytest.raises(BadContext, match="chmod 600"):
        find_controller(None, account)
    (base / "contexts.json").chmod(0o600)
    (base / "contexts.json").write_text("{")
    with pytest.raises(BadContext, match="log in again"):
        find_controller(None, account)
