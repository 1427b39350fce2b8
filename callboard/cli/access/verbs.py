"""`callboard certs`, `token`, `login` and `context`: who may call a controller, and those that one logged in to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import StateDirOption, TlsCaOption, TlsCertOption, TlsKeyOption, argument, option, takes
from callboard.security.caller_roles import Role
from callboard.security.places import NO_CONTEXT

app = typer.Typer()
cert_verbs = typer.Typer(
    help="Make, list, renew and revoke certificates. On the controller's machine.",
    no_args_is_help=True,
)
app.add_typer(cert_verbs, name="certs")

DirOption = Annotated[
    Path | None,
    option(
        "--dir",
        "DIR",
        "Directory of the authority. Default: certs in the controller's state directory, where it finds them.",
    ),
]
OutOption = Annotated[
    Path | None, option("--out", "DIR", "Where the files go. Default: a directory with the name, here.")
]
LastsOption = Annotated[str, option("--lasts", "TIME", "How long the certificate is valid, e.g. 90d. Default: 365d.")]
token_verbs = typer.Typer(help="Make, list and revoke tokens, on the controller's machine.", no_args_is_help=True)
app.add_typer(token_verbs, name="token")
context_verbs = typer.Typer(help="Show, choose and forget controllers that you logged in to.", no_args_is_help=True)
app.add_typer(context_verbs, name="context")


@cert_verbs.command("init", epilog="Example: callboard certs init --host ray-head.lab.example")
@takes("output")
def init(
    host: Annotated[
        list[str] | None,
        option(
            "--host",
            "HOST",
            "Name or address by which others call the controller; may be repeated. This machine's "
            "name and loopback are always included.",
        ),
    ] = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make a certificate authority and the controller's certificate. A controller started afterwards uses TLS."""
    actions.certs.init(host or [], lasts=lasts, directory=directory)


@cert_verbs.command("agent", epilog="Example: callboard certs agent node-7 --out node-7")
@takes("output")
def agent_certificate(
    node: Annotated[str, argument("NODE", "Id of the node; the agent can join as no other.")],
    out: OutOption = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make a certificate for the agent of one node."""
    actions.certs.issue(node, Role.AGENT, out=out, lasts=lasts, directory=directory)


@cert_verbs.command("client", epilog="Example: callboard certs client alice --role trainer --out alice")
@takes("output")
def client_certificate(
    name: Annotated[str, argument("NAME", "Name of the client; pools name their members by it.")],
    role: Annotated[Role, option("--role", "What it may do.")],
    out: OutOption = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make a certificate for a person or a program."""
    actions.certs.issue(name, role, out=out, lasts=lasts, directory=directory)


@cert_verbs.command("renew", epilog="Example: callboard certs renew server")
@takes("output")
def renew(
    name: Annotated[
        str,
        argument("NAME", "Name of the client or node; `server`: of the controller; `authority`: the authority itself."),
    ],
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Replace a certificate by one with a new key. The controller notices by itself when its own was replaced."""
    actions.certs.renew(name, lasts=lasts, directory=directory)


@cert_verbs.command("revoke", epilog="Example: callboard certs revoke alice")
@takes("output")
def revoke(
    name: Annotated[str, argument("NAME", "Name of the client or node.")],
    directory: DirOption = None,
) -> None:
    """Revoke the certificates of a client. Within two seconds they are refused, and its open streams end."""
    actions.certs.revoke(name, directory=directory)


@cert_verbs.command("retire", epilog="Example: callboard certs retire")
@takes("output")
def retire(directory: DirOption = None) -> None:
    """Stop trusting the old authority after `certs renew authority`. Refused while somebody needs it."""
    actions.certs.retire(directory=directory)


@cert_verbs.command("list", epilog="Example: callboard certs list")
@takes("output")
def list_certificates(directory: DirOption = None) -> None:
    """List what was issued."""
    actions.certs.show_list(directory=directory)


@app.command(
    "login",
    epilog="Example: callboard login ray-head.lab.example:7701 --name lab --tls-ca ca.pem --token-file alice.token",
    short_help="Keep the address and credentials of a controller.",
)
@takes("output")
def login(
    address: Annotated[str, argument("HOST:PORT", "Address of the controller.")],
    name: Annotated[str, option("--name", "NAME", "Name of the context. Default: the host.")] = "",
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            "FILE",
            "Private file with a token; - reads the input. Default: $CALLBOARD_TOKEN_FILE, $CALLBOARD_TOKEN.",
            allow_dash=True,
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Check credentials at a controller and keep copies of them (mode 0600). Commands use them from then on."""
    actions.contexts.login(address, name=name, token_file=token_file, tls=(tls_ca, tls_cert, tls_key))


@context_verbs.command("list", epilog="Example: callboard context list")
@takes("output")
def list_contexts() -> None:
    """List the contexts; the star marks the one in use."""
    actions.contexts.show_list()


@context_verbs.command("show", epilog="Example: callboard context show")
@takes("output")
def show_context(name: Annotated[str, argument("NAME", "Default: the one in use.")] = "") -> None:
    """Show one context, without its secrets."""
    actions.contexts.show(name)


@context_verbs.command("use", epilog="Example: callboard context use lab")
@takes("output")
def use_context(
    name: Annotated[str, argument("NAME", f"Name of the context; {NO_CONTEXT}: use no context.")],
) -> None:
    """Use a context from now on."""
    actions.contexts.use(name)


@context_verbs.command("remove", epilog="Example: callboard context remove lab")
@takes("output")
def remove_context(name: Annotated[str, argument("NAME", "Name of the context.")]) -> None:
    """Forget a context and its credentials.

    Only on this machine: the controller still accepts the credentials.
    """
    actions.contexts.remove(name)


@token_verbs.command("create", epilog="Example: callboard token create alice --role trainer --file alice.token")
@takes("output")
def create_token(
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
def revoke_token(
    name: Annotated[str, argument("NAME", "Name of the client.")], state_dir: StateDirOption = None
) -> None:
    """Take a client's token back. Within two seconds it is no longer valid, and the client's open streams end."""
    actions.tokens.revoke(name, state_dir=state_dir)
