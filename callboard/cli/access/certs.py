"""`callboard certs`: the certificates of a cluster, on the machine of its authority."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from callboard.cli.cluster.tokens import day, printed, state_directory
from callboard.cli.options import takes
from callboard.cli.show import screen
from callboard.cli.show.failing import BAD_INPUT, CommandFailed, Failure
from callboard.cli.show.session import failing_in_words
from callboard.model.durations import parse_duration_ms
from callboard.model.quantities import QuantityError
from callboard.security import certificates
from callboard.security.certificates import CERTS_NAME, LASTS_MS, SERVER, BadCertificate, Issued, read_issued
from callboard.security.places import UnsafeFile, UnsafeRunDirectory
from callboard.security.roles import Role

app = typer.Typer()
cert_verbs = typer.Typer(
    help="Make, list, renew and revoke the certificates of a cluster, on the controller's machine.",
    no_args_is_help=True,
)
app.add_typer(cert_verbs, name="certs")

DirOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="Directory of the authority. Default: certs in the controller's state directory, where it finds them.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where the files go. Default: a directory with the name, here."),
]
LastsOption = Annotated[
    str, typer.Option("--lasts", metavar="TIME", help="How long the certificate counts, e.g. 90d. Default: 365d.")
]


@cert_verbs.command("init", epilog="Example: callboard certs init --host ray-head.lab.example")
@takes("output")
def init(
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Name or address by which others call the controller; may be repeated. This machine's name and "
            "loopback are always included.",
        ),
    ] = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make an authority and the controller's certificate. A controller that starts then listens with TLS."""
    with _of_authority(directory) as place:
        certificates.make_authority(place, host or [], lasts_ms=_lasts_ms(lasts))
    if not printed({"directory": str(place)}):
        screen.stdout().print(f"The authority is in {place}. Keep ca.key there: who has it can be anybody.")


@cert_verbs.command("agent", epilog="Example: callboard certs agent node-7 --out node-7")
@takes("output")
def agent(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Id of the node; the agent can join as no other.")],
    out: OutOption = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make a certificate for the agent of one node."""
    _issue(node, Role.AGENT, out, lasts, directory)


@cert_verbs.command("client", epilog="Example: callboard certs client alice --role trainer --out alice")
@takes("output")
def client(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client; pools name their members by it.")],
    role: Annotated[Role, typer.Option("--role", help="What it may do.")],
    out: OutOption = None,
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Make a certificate for a person or a program."""
    _issue(name, role, out, lasts, directory)


@cert_verbs.command("renew", epilog="Example: callboard certs renew server")
@takes("output")
def renew(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client or node; server: the controller's.")],
    lasts: LastsOption = "",
    directory: DirOption = None,
) -> None:
    """Put a new certificate with a new key in the place of one. The controller reads its own again by itself."""
    with _of_authority(directory) as place:
        made = certificates.renew(place, name, lasts_ms=_lasts_ms(lasts))
    if not printed(_plain(made)):
        screen.stdout().print(
            f"The certificate of {name} in {made.folder} is new; it counts until {day(made.expires_ms)}."
        )


@cert_verbs.command("revoke", epilog="Example: callboard certs revoke alice")
@takes("output")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client or node.")],
    directory: DirOption = None,
) -> None:
    """Take the certificates of a client back. They count no longer within two seconds, and its streams end."""
    with _of_authority(directory) as place:
        count = certificates.revoke(place, name)
    if not printed({"name": name, "revoked": count}):
        screen.stdout().print(f"The certificates of {name} count no longer ({count}).")


@cert_verbs.command("list", epilog="Example: callboard certs list")
@takes("output")
def list_certificates(directory: DirOption = None) -> None:
    """List what was issued."""
    with _of_authority(directory) as place:
        issued = read_issued(place)
    if not printed([_plain(each) for each in issued]):
        rows = [[each.name, each.role or SERVER, day(each.expires_ms), day(each.revoked_ms)] for each in issued]
        screen.stdout().print(screen.table(["NAME", "ROLE", "EXPIRES", "REVOKED"], rows))


def _issue(name: str, role: Role, out: Path | None, lasts: str, directory: Path | None) -> None:
    folder = (out or Path(name)).absolute()
    with _of_authority(directory) as place:
        made = certificates.issue(place, name, role, folder, lasts_ms=_lasts_ms(lasts))
    if not printed(_plain(made)):
        screen.stdout().print(
            f"The certificate of {name}, role {role}, is in {folder}: ca.pem, cert.pem and cert.key. Take them to its "
            f"machine by a way that nobody reads; it counts until {day(made.expires_ms)}."
        )


def _plain(made: Issued) -> dict[str, Any]:
    return asdict(made)


def _lasts_ms(text: str) -> int:
    try:
        return parse_duration_ms(text) if text else LASTS_MS
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint="--lasts") from error


@contextmanager
def _of_authority(directory: Path | None) -> Iterator[Path]:
    """The directory that is meant; what can be wrong with it is told in words."""
    with failing_in_words():
        try:
            yield directory or state_directory(None) / CERTS_NAME
        except (BadCertificate, UnsafeFile, UnsafeRunDirectory, OSError) as error:
            raise CommandFailed(
                Failure("The certificates were left as they are.", f"{error}.", "Correct it and try again.", BAD_INPUT)
            ) from error
