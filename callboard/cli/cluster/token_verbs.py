"""`callboard token`: who else may call a controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import StateDirOption, argument, option, takes
from callboard.security.caller_roles import Role

app = typer.Typer()
token_verbs = typer.Typer(help="Make, list and revoke tokens, on the controller's machine.", no_args_is_help=True)
app.add_typer(token_verbs, name="token")


@token_verbs.command("create", epilog="Example: callboard token create alice --role trainer --file alice.token")
@takes("output")
def create(
    name: Annotated[str, argument("NAME", "Name of the client; pools name their members by it.")],
    role: Annotated[Role, option("--role", "What it may do.")],
    file: Annotated[
        Path | None, option("--file", "FILE", "Write the token there (mode 0600) instead of printing it.")
    ] = None,
    lasts: Annotated[
        str, option("--lasts", "TIME", "How long the token is valid, e.g. 30d. Default: until it is revoked.")
    ] = "",
    replace: Annotated[
        bool, option("--replace", "Give a client that exists a new token; its old one is no longer valid.")
    ] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Make a client and print its token, which is kept nowhere else. It is valid within a second."""
    actions.tokens.create(name, role=role, file=file, lasts=lasts, replace=replace, state_dir=state_dir)


@token_verbs.command("list", epilog="Example: callboard token list")
@takes("output")
def list_tokens(state_dir: StateDirOption = None) -> None:
    """List the clients with their roles."""
    actions.tokens.show_list(state_dir=state_dir)


@token_verbs.command("revoke", epilog="Example: callboard token revoke alice")
@takes("output")
def revoke(name: Annotated[str, argument("NAME", "Name of the client.")], state_dir: StateDirOption = None) -> None:
    """Take a client's token back. Within two seconds it is no longer valid, and the client's open streams end."""
    actions.tokens.revoke(name, state_dir=state_dir)
