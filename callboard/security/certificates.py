"""Certificates: the authority of one cluster, what it issued, and what it took back.

All lies in one directory: the authority (``ca.pem``, ``ca.key``), the controller's own certificate (``server.pem``,
``server.key``), one that programs of the controller's account connect with (``local.pem``, ``local.key``), and the list
of all that was issued (``issued.json``), which the controller reads again when it changes. The name of a certificate's
subject is the client's, its organizational unit the client's role.

Slow to import: who only reads the list needs :mod:`callboard.security.issued`.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from callboard.model.frozen import dataclass
from callboard.model.names import is_name
from callboard.security.caller_roles import OWNER, Role
from callboard.security.issued import (
    AUTHORITY,
    ISSUED_NAME,
    LOCAL,
    SERVER,
    BadCertificate,
    Issued,
    maker_of,
    read_issued,
)
from callboard.security.places import locked, make_private, read_private, write_private

AUTHORITY_LASTS_MS = 10 * 365 * 86_400_000
LASTS_MS = 365 * 86_400_000

_SKEW = timedelta(minutes=5)
"""Clocks of machines differ."""


_HOST_NAME = re.compile(r"(?:\*\.)?(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(?:\.|$))+")


def make_authority(directory: Path, hosts: Sequence[str], *, lasts_ms: int = LASTS_MS) -> None:
    """Makes an authority and the controller's certificate.

    Args:
        directory: where; made if there is none.
        hosts: names and addresses by which the controller is called, besides this machine's own.
        lasts_ms: how long the controller's certificate counts.

    Raises:
        BadCertificate: there is an authority already, or a host is neither a name nor an address.
        UnsafeRunDirectory: others can write there.
        OSError: the files can't be written.
    """
    if (directory / "ca.pem").exists():
        raise BadCertificate(
            f"there is an authority in {directory} already, and its certificates would count no longer; "
            "to replace it, move the directory away first"
        )
    for host in hosts:
        _check_host(host)
    for folder in (directory.parent, directory):
        make_private(folder)
    signed, key = _new_authority()
    _write_pair(directory / "ca.pem", directory / "ca.key", signed, key)
    own = {"localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts}
    with _changing(directory) as issued:
        hosts = sorted(own - {""})
        _issue(directory, issued, _Wanted(name=SERVER, hosts=hosts, folder=directory, stem=SERVER, lasts_ms=lasts_ms))
        _issue_local(directory, issued)


def _issue_local(directory: Path, issued: list[Issued]) -> None:
    """For programs of this account, which are known by their token; it only opens the connection."""
    _issue(directory, issued, _Wanted(name=LOCAL, role=Role.VIEWER, folder=directory, stem=LOCAL, lasts_ms=LASTS_MS))


def renew_authority(directory: Path) -> None:
    """Gives the authority a new key, which signs from now on. Certificates of the old one stay valid, and the
    controller shows its old one, until :func:`retire_authority`: meanwhile every certificate can be renewed.

    Raises:
        BadCertificate: there is no authority.
        UnsafeFile, OSError: files can't be used.
    """
    with _changing(directory) as issued:
        signed, key = _new_authority()
        # The certificates first: until the new key is there, the old one signs, and finds its own among them.
        write_private(directory / "ca.pem", _pem(signed) + (directory / "ca.pem").read_text(encoding="ascii"))
        write_private(directory / "ca.key", _key_pem(key))
        _issue_local(directory, issued)


def retire_authority(directory: Path) -> int:
    """Takes all authorities back but the newest, and with them all that they signed; returns how many.

    Raises:
        BadCertificate: somebody's last certificate is of an old one.
        UnsafeFile, OSError: files can't be used.
    """
    now_ms = time.time_ns() // 1_000_000
    with _changing(directory) as issued:
        newest, others = _authorities(directory)
        last = {each.name: each for each in issued if not each.revoked_ms and each.expires_ms > now_ms}
        if old := sorted(
            name for name, each in last.items() if others and each.authority != f"{newest.serial_number:x}"
        ):
            raise BadCertificate(
                f"these still have a certificate of the old authority: {', '.join(old)}; renew each with `callboard "
                "certs renew NAME` and take it to its machine, let agents join again, or revoke what is not used"
            )
        write_private(directory / "ca.pem", _pem(newest))
    return len(others)


def _new_authority() -> tuple[x509.Certificate, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("callboard authority", "")
    certificate = (
        _built(name, name, key.public_key(), AUTHORITY_LASTS_MS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return certificate.sign(key, hashes.SHA256()), key


def _authorities(directory: Path) -> tuple[x509.Certificate, list[x509.Certificate]]:
    """The authority that signs, and the others that are still believed."""
    signs = _signer(directory).public_key()
    known = x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    own = [each for each in known if each.public_key() == signs]
    if not own:
        raise BadCertificate(f"{directory / 'ca.pem'} is not of the key in ca.key; put a backup of both in their place")
    return own[0], [each for each in known if each is not own[0]]


def _signer(directory: Path) -> Any:
    return load_pem_private_key(read_private(directory / "ca.key").encode(), password=None)


def issue(directory: Path, name: str, role: Role, folder: Path, *, lasts_ms: int = LASTS_MS) -> Issued:
    """Issues a certificate with a new key: ``cert.pem``, ``cert.key`` and the authority's ``ca.pem``.

    Args:
        name: of the client; an agent's is the id of its node.
        folder: where the files go; made if there is none.
        lasts_ms: how long it counts.

    Raises:
        BadCertificate: there is no authority, or the name can't be one.
        UnsafeFile, OSError: files can't be used.
    """
    _check_name(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _changing(directory) as issued:
        wanted = _Wanted(name=name, role=role, folder=folder.absolute(), lasts_ms=lasts_ms)
        made = _issue(directory, issued, wanted)
    write_private(folder / "ca.pem", (directory / "ca.pem").read_text())
    return made


def sign_request(directory: Path, request: bytes, name: str, role: Role) -> str:
    """A certificate for a key that its holder made and keeps (a signing request in PEM); returns it in PEM.

    Raises:
        BadCertificate: it is no such request, or there is no authority.
        UnsafeFile, OSError: files can't be used.
    """
    _check_name(name)
    try:
        asked = x509.load_pem_x509_csr(request)
        valid = asked.is_signature_valid
        public = asked.public_key()
    except ValueError as error:
        raise BadCertificate(f"the request for a certificate can't be read ({error})") from error
    if not valid:
        raise BadCertificate("the request for a certificate is not signed by its own key")
    with _changing(directory) as issued:
        signed, known = _certified(directory, public, _Wanted(name=name, role=role, lasts_ms=LASTS_MS))
        issued.append(known)
    return _pem(signed)


def new_request(name: str) -> tuple[str, str]:
    """A new key and a request to certify it, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(name, "")).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(Encoding.PEM).decode()


def lifetime(pem: bytes) -> tuple[float, float]:
    """When a certificate begins and ends, in seconds since 1970."""
    found = x509.load_pem_x509_certificate(pem)
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def renew(directory: Path, name: str, *, lasts_ms: int = LASTS_MS) -> Issued:
    """Puts a new certificate with a new key in the place of one; who reads the files next uses it. The old one counts
    until it expires or is revoked.

    Raises:
        BadCertificate: there is none of that name, or its key is not here.
        UnsafeFile, OSError: files can't be used.
    """
    with _changing(directory) as issued:
        named = [each for each in issued if each.name == name]
        living = [each for each in named if not each.revoked_ms]
        if not named:
            raise BadCertificate(f"there is no certificate of {name}; `callboard certs list` shows those there are")
        if not living:
            raise BadCertificate(f"{name} was revoked; {maker_of(named[-1].role)} makes a new certificate")
        last = living[-1]
        if not last.folder:
            raise BadCertificate(
                f"{name} made its key itself when it joined; let it join again, with `callboard node token create`"
            )
        if name == SERVER:
            hosts, stem = _hosts_of(directory / f"{SERVER}.pem"), SERVER
        else:
            hosts, stem = [], LOCAL if name == LOCAL else "cert"
        folder = Path(last.folder)
        if stem == "cert":  # The authority may be another one since.
            write_private(folder / "ca.pem", (directory / "ca.pem").read_text(encoding="ascii"))
        wanted = _Wanted(name=name, role=last.role, hosts=hosts, folder=folder, stem=stem, lasts_ms=lasts_ms)
        return _issue(directory, issued, wanted)


def revoke(directory: Path, name: str) -> int:
    """Takes every certificate of a client back; returns how many.

    Raises:
        BadCertificate: there is none that counts.
        UnsafeFile, OSError: files can't be used.
    """
    now_ms = time.time_ns() // 1_000_000
    with _changing(directory) as issued:
        found = [place for place, each in enumerate(issued) if each.name == name and not each.revoked_ms]
        if not found or name == SERVER:
            raise BadCertificate(
                f"there is no valid client's certificate of {name}; `callboard certs list` shows those there are"
            )
        for place in found:
            issued[place] = replace(issued[place], revoked_ms=now_ms)
    return len(found)


def _check_name(name: str) -> None:
    if not is_name(name) or name in (OWNER.name, SERVER, LOCAL, AUTHORITY):
        raise BadCertificate(
            f"{name!r} can't be the name of a client; take letters, digits, '.', '_' and '-', a letter first"
        )


@contextmanager
def _changing(directory: Path) -> Iterator[list[Issued]]:
    """What was issued, written back at the end; one program at a time."""
    if not (directory / "ca.pem").exists():
        raise BadCertificate(f"there is no authority in {directory}; make one with `callboard certs init`")
    with locked(directory / ISSUED_NAME):
        issued = read_issued(directory)
        yield issued
        plain = {"issued": [asdict(each) for each in issued]}
        write_private(directory / ISSUED_NAME, json.dumps(plain, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A certificate to be made: of a client with a role, or without one of a controller with hosts."""

    name: str
    role: str = ""
    hosts: Sequence[str] = ()
    folder: Path | None = None
    stem: str = "cert"
    lasts_ms: int


def _issue(directory: Path, issued: list[Issued], wanted: _Wanted) -> Issued:
    assert wanted.folder is not None
    key = ec.generate_private_key(ec.SECP256R1())
    signed, known = _certified(directory, key.public_key(), wanted)
    _write_pair(wanted.folder / f"{wanted.stem}.pem", wanted.folder / f"{wanted.stem}.key", signed, key)
    issued.append(known)
    return known


def _certified(directory: Path, public: CertificatePublicKeyTypes, wanted: _Wanted) -> tuple[x509.Certificate, Issued]:
    """A certificate that the authority signed; a controller's with ``hosts`` can't be a client's, nor the other way."""
    authority, _ = _authorities(directory)
    use = x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH if wanted.role else x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
    built = (
        _built(_subject(wanted.name, wanted.role), authority.subject, public, wanted.lasts_ms)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )
    if alternatives := [_alternative(host) for host in wanted.hosts]:
        built = built.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    signed = built.sign(_signer(directory), hashes.SHA256())
    return signed, Issued(
        serial=f"{signed.serial_number:x}",
        name=wanted.name,
        role=wanted.role,
        folder=str(wanted.folder or ""),
        made_ms=time.time_ns() // 1_000_000,
        expires_ms=int(signed.not_valid_after_utc.timestamp() * 1000),
        authority=f"{authority.serial_number:x}",
    )


def _subject(name: str, role: str) -> x509.Name:
    parts = [x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "callboard")]
    if role:
        parts.append(x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name([*parts, x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _built(
    subject: x509.Name, issuer: x509.Name, public: CertificatePublicKeyTypes, lasts_ms: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(milliseconds=lasts_ms))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _check_host(host: str) -> None:
    """Refuses what nobody could be called by: a certificate would carry it, and no client would take it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host) or host.replace(".", "").isdecimal():
            raise BadCertificate(
                f"{host!r} is neither the name nor the address of a machine; state each by itself and without a port"
            ) from None


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise BadCertificate(f"{host!r} is neither the name nor the address of a machine") from error


def _hosts_of(path: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in names]


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: Any) -> str:
    return str(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())


def _write_pair(certificate: Path, key: Path, signed: x509.Certificate, private: Any) -> None:
    """The key first: whoever sees the new certificate finds the key that belongs to it."""
    write_private(key, _key_pem(private))
    write_private(certificate, _pem(signed))
