"""What `callboard certs …` does, on the machine of the authority."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from callboard.cli.cluster.tokens import day, printed, state_directory
from callboard.cli.options import reading
from callboard.cli.show import consoles, tables
from callboard.cli.show.verb_guard import unless_wrong
from callboard.model.durations import parse_duration_ms
from callboard.security import certificates
from callboard.security.caller_roles import Role
from callboard.security.certificates import LASTS_MS
from callboard.security.issued import AUTHORITY, SERVER, BadCertificate, read_issued
from callboard.security.places import CERTS_NAME, UnsafeFile, UnsafeRunDirectory


def init(hosts: Sequence[str], *, lasts: str, directory: Path | None) -> None:
    with _of_authority(directory) as place:
        certificates.make_authority(place, hosts, lasts_ms=_lasts_ms(lasts))
    if not printed({"directory": str(place)}):
        consoles.stdout().print(f"The authority is in {place}. Keep ca.key there: who has it can be anybody.")


def renew(name: str, *, lasts: str, directory: Path | None) -> None:
    with _of_authority(directory) as place:
        if name == AUTHORITY:
            certificates.renew_authority(place)
            if not printed({"name": name, "directory": str(place)}):
                consoles.stdout().print(
                    "The authority has a new key. Certificates of the old one stay valid. Renew each client's, take it "
                    "to its machine with ca.pem, then run `callboard certs renew server` and `callboard certs retire`."
                )
            return
        made = certificates.renew(place, name, lasts_ms=_lasts_ms(lasts))
    if not printed(asdict(made)):
        consoles.stdout().print(
            f"The certificate of {name} in {made.folder} is new; it counts until {day(made.expires_ms)}."
        )


def revoke(name: str, *, directory: Path | None) -> None:
    with _of_authority(directory) as place:
        count = certificates.revoke(place, name)
    if not printed({"name": name, "revoked": count}):
        consoles.stdout().print(f"The certificates of {name} count no longer ({count}).")


def retire(*, directory: Path | None) -> None:
    with _of_authority(directory) as place:
        count = certificates.retire_authority(place)
    if not printed({"retired": count}):
        consoles.stdout().print(f"Only certificates of the newest authority are valid now ({count} retired).")


def show_list(*, directory: Path | None) -> None:
    with _of_authority(directory) as place:
        issued = read_issued(place)
    if not printed([asdict(each) for each in issued]):
        rows = [[each.name, each.role or SERVER, day(each.expires_ms), day(each.revoked_ms)] for each in issued]
        consoles.stdout().print(tables.table(["NAME", "ROLE", "EXPIRES", "REVOKED"], rows))


def issue(name: str, role: Role, *, out: Path | None, lasts: str, directory: Path | None) -> None:
    folder = (out or Path(name)).absolute()
    with _of_authority(directory) as place:
        made = certificates.issue(place, name, role, folder, lasts_ms=_lasts_ms(lasts))
    if not printed(asdict(made)):
        consoles.stdout().print(
            f"The certificate of {name}, role {role}, is in {folder}: ca.pem, cert.pem and cert.key. Take them to its "
            f"machine by a way that nobody reads; it counts until {day(made.expires_ms)}."
        )


def _lasts_ms(text: str) -> int:
    with reading("--lasts"):
        return parse_duration_ms(text) if text else LASTS_MS


@contextmanager
def _of_authority(directory: Path | None) -> Iterator[Path]:
    """The directory that is meant; what can be wrong with it is told in words."""
    with unless_wrong("certificates", BadCertificate, UnsafeFile, UnsafeRunDirectory, OSError):
        yield directory or state_directory(None) / CERTS_NAME
