"""`callboard controller`, and `callboard store`: the program that decides, and where it keeps its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import Stated, TlsCaOption, TlsCertOption, TlsKeyOption, option, stating
from callboard.controller.options import ControllerOptions

app = typer.Typer()

ExitWithParentOption = Annotated[
    int | None, option("--exit-with-parent", "PID", "End when this program, which started it, ends.", hidden=True)
]


@app.command(
    "controller",
    epilog="Example: callboard controller --listen 127.0.0.1:7700",
    short_help="Run the controller: one per cluster.",
)
@stating(ControllerOptions)
def controller(
    *,
    stated: Stated,
    roles: Annotated[
        Path | None, option("--roles", "FILE", "YAML file with presets of further roles, e.g. roles: {sim: ...}.")
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    jwt_key: Annotated[
        Path | None,
        option(
            "--jwt-key",
            "FILE",
            "Public keys (PEM or JWKS) of a login whose signed tokens are valid; needs --jwt-issuer, --jwt-audience.",
        ),
    ] = None,
    jwt_issuer: Annotated[str, option("--jwt-issuer", "URL", "Issuer of signed tokens.")] = "",
    jwt_audience: Annotated[str, option("--jwt-audience", "NAME", "Audience that signed tokens must be for.")] = "",
    jwt_name_claim: Annotated[str, option("--jwt-name-claim", "CLAIM", "Claim with the client's name.")] = "sub",
    jwt_role_claim: Annotated[
        str, option("--jwt-role-claim", "CLAIM", "Claim with its role or groups, e.g. realm.roles.")
    ] = "role",
    jwt_role: Annotated[
        list[str] | None,
        option(
            "--jwt-role", "GROUP=ROLE", "Role of a group; may be repeated. Default: groups that are named like roles."
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        option(
            "--limit",
            "NAME=N",
            "Limit of a queue or a history, e.g. ended_jobs=5000; may be repeated. An unknown name lists them all.",
        ),
    ] = None,
    exit_with_parent: ExitWithParentOption = None,
) -> None:
    """Run the controller: one per cluster. Ctrl-C ends it; what runs goes on and is found again."""
    actions.controller.run(
        stated,
        roles=roles,
        tls=(tls_ca, tls_cert, tls_key),
        jwt=(jwt_key, jwt_issuer, jwt_audience, jwt_name_claim, jwt_role_claim, jwt_role or []),
        limits=limit or [],
        exit_with_parent=exit_with_parent is not None,
    )
