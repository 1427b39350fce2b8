"""TLS: what a controller listens with, who a certificate is, and what a client connects with."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from callboard.model.frozen import dataclass
from callboard.security.caller_roles import Identity, Role
from callboard.security.places import TLS_VARIABLES, UnsafeFile, read_private

if TYPE_CHECKING:
    import grpc

_MAX_KNOWN = 10_000


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost is not trusted to be one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TlsFiles(NamedTuple):
    """Where the parts of one end lie.

    Attributes:
        ca: the authorities that the other end's certificate must be from.
        cert: own certificate, with those between it and the authority.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def stated(cls, environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
        """Those that the environment names; None: it names none."""
        found = {part: Path(environ[name]) for part, name in TLS_VARIABLES.items() if environ.get(name)}
        return cls(**found) if found else None

    def read(self) -> TlsParts:
        """What the files hold.

        Raises:
            UnsafeFile: one can't be read, the key is not private, or the certificate isn't the key's.
        """
        if (self.cert is None) != (self.key is None):
            one = self.cert or self.key
            assert one is not None
            raise UnsafeFile(one, "is of no use alone. Name the certificate and its key.")
        parts = TlsParts(
            ca=_public(self.ca) if self.ca else b"",
            cert=_public(self.cert) if self.cert else b"",
            key=read_private(self.key).encode() + b"\n" if self.key else b"",
        )
        if self.cert is not None and not _belong(parts.cert, parts.key, self.cert):
            raise UnsafeFile(self.cert, f"is not the certificate of the key in {self.key}. Name a pair.")
        return parts

    def versions(self) -> tuple[object, ...]:
        """Changes when a file does."""
        return tuple(version(path) for path in self if path is not None)


@dataclass(frozen=True, slots=True)
class TlsParts:
    """The content of :class:`TlsFiles`."""

    ca: bytes
    cert: bytes
    key: bytes

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client. Without an authority: those that the machine trusts."""
        import grpc  # noqa: PLC0415 - the options of programs name these files, and their help comes without gRPC

        return grpc.ssl_channel_credentials(self.ca or None, self.key or None, self.cert or None)


class ServerTls:
    """What a controller listens with. Its files are read again when they change, at the next connection."""

    def __init__(self, files: TlsFiles) -> None:
        """
        Raises:
            UnsafeFile: they can't be used.
        """
        self.files = files
        self._parts = files.read()
        self._versions = files.versions()

    def credentials(self, *, ask: bool) -> grpc.ServerCredentials:
        """For a port.

        Args:
            ask: whether a caller must show a certificate of the authority.
        """
        import grpc  # noqa: PLC0415 - as above

        given = self._versions

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if self.look() and given != self._versions:
                given = self._versions
                return configuration()
            return None

        def configuration() -> grpc.ServerCertificateConfiguration:
            parts = self._parts
            return grpc.ssl_server_certificate_configuration(
                [(parts.key, parts.cert)], root_certificates=parts.ca if ask else None
            )

        fetcher: Any = fetch  # None is allowed, whatever the stubs say
        return grpc.dynamic_ssl_server_credentials(configuration(), fetcher, require_client_authentication=ask)

    def keep_renewed(self, context: ssl.SSLContext) -> None:
        """Each connection that begins with `context` from now on shows the newest certificate.

        The context is left as it is: while another certificate is loaded into one, a connection that begins just then
        finds a certificate without its key.
        """
        newest, shown = context, self._versions

        def begin(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal newest, shown
            if self.look() and shown != self._versions:
                fresh, versions = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._versions
                # Replaced again since the look: the next connection reads what is there then.
                with contextlib.suppress(OSError):
                    fresh.load_cert_chain(str(self.files.cert), str(self.files.key))
                    newest, shown = fresh, versions
            connection.context = newest

        context.sni_callback = begin

    def look(self) -> bool:
        """Reads the files again if they changed; False: they can't be used, and what was read before still is."""
        if (now := self.files.versions()) == self._versions:
            return True
        import structlog  # noqa: PLC0415 - the controller has it; a client, which reads this module too, need not

        log = structlog.get_logger(__name__)
        try:
            self._parts = self.files.read()
        except UnsafeFile as error:
            told = "mend the file; until then the old one is used"
            log.error("certificate_not_read", why=str(error), remedy=told)  # noqa: TRY400 - the reason says all of it
            return False
        self._versions = now
        log.info("certificate_read_again", path=str(self.files.cert))
        return True


class Certified(NamedTuple):
    """Who a certificate is.

    Attributes:
        serial: number of the certificate, hexadecimal.
        expires_s: when it ends, in seconds since 1970.
    """

    identity: Identity
    serial: str
    expires_s: float


@lru_cache(maxsize=_MAX_KNOWN)
def certified(pem: bytes) -> Certified | None:
    """Who a certificate that gRPC has verified is, each read once; None: it states no role."""
    from cryptography import x509  # noqa: PLC0415 - an extra, and slow to import

    try:
        found = x509.load_pem_x509_certificate(pem)
        names = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        units = found.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATIONAL_UNIT_NAME)
        name, role = str(names[0].value), Role(str(units[0].value))
    except (ValueError, IndexError):
        return None
    identity = Identity(name, role, node=name if role is Role.AGENT else "")
    return Certified(identity, f"{found.serial_number:x}", found.not_valid_after_utc.timestamp())


def version(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced or written; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns)


def _public(path: Path) -> bytes:
    """A file that is no secret."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnsafeFile(path, f"can't be read ({error.strerror}).") from error
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise UnsafeFile(path, "holds no certificate in PEM.")
    return data


def _belong(cert: bytes, key: bytes, path: Path) -> bool:
    try:
        from cryptography import x509  # noqa: PLC0415 - an extra, and slow to import
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    except ImportError:
        return True  # a client without the extra: gRPC finds it out, only less clearly
    try:
        public = load_pem_private_key(key, password=None).public_key()
        return bool(x509.load_pem_x509_certificate(cert).public_key() == public)
    except (ValueError, TypeError) as error:
        raise UnsafeFile(path, f"or its key can't be used ({error}).") from error
