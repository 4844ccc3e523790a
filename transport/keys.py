"""This host's key, the peers it trusts, and the TLS contexts made of both.

A peer *is* its exact certificate: trust is a table from local names to certificates, compared by SHA-256 of the DER
form, in both directions. No authority, no host names, no expiry: what is in the table may connect, nothing else may.
The table is read again whenever it changed on disk, so `trust` and `forget` need no restart; links already open stay.

Owns one directory (0700): `identity.pem` (private key and certificate, 0600) and `trusted/NAME.pem`. Owns no socket.
Bound: `MAX_TRUSTED` peers, `MAX_PEM` bytes a file.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import secrets
import ssl
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from transport.link import LinkError

MAX_TRUSTED: Final = 256
MAX_PEM: Final = 16 << 10
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_OWNER_LINE: Final = "zc-handoff host "
# Pinned keys gain nothing from dates, and a host whose clock is wrong must still connect. 9999-12-31 is RFC 5280's
# "no well-defined expiration date".
_NOT_BEFORE: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


@dataclass
class _Table:
    """The trusted peers as they were on disk at one moment. Replaced as a whole: threads look into it."""

    seen: tuple[tuple[str, int, int], ...]  # name, time and size of each file
    by_print: dict[str, str]  # fingerprint -> name
    pems: dict[str, str]  # name -> certificate
    server: ssl.SSLContext | None = None


class KeyStore:
    """All methods raise LinkError with the path or name at fault; none overwrites anything. For any thread."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._identity = self.directory / "identity.pem"
        self._trusted = self.directory / "trusted"
        self._table = _Table((), {}, {})

    # -- this host's own key

    def new(self, name: str) -> str:
        """Make this host's key and certificate; returns the certificate's fingerprint."""
        check_name(name)
        key = ec.generate_private_key(ec.SECP256R1())  # every TLS 1.3 stack has P-256, the QUIC ones included
        certificate = _self_signed(key)
        text = (
            f"{_OWNER_LINE}{name}\n".encode()
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        _make_folder(self.directory)
        if not _write_new(self._identity, text):
            raise LinkError(
                "key-exists", f"{self._identity} already exists: this host has a key; remove it to start over"
            )
        return fingerprint(certificate.public_bytes(serialization.Encoding.DER))

    def exists(self) -> bool:
        return self._identity.exists()

    def name(self) -> str:
        """The name this host gave itself; a suggestion for peers, never sent and never believed."""
        first = self._read_identity().partition("\n")[0]
        return first.removeprefix(_OWNER_LINE)

    def show(self) -> tuple[str, str]:
        """(PEM of the public certificate, fingerprint): what to hand to a peer's `trust`."""
        certificate = _one_certificate(self._read_identity(), str(self._identity))
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return pem, fingerprint(certificate.public_bytes(serialization.Encoding.DER))

    # -- the peers

    def trust(self, name: str, pem: str) -> str:
        """Let the holder of this certificate's key connect as `name`; returns its fingerprint."""
        check_name(name)
        if "PRIVATE KEY" in pem:
            raise LinkError("private-key", "that is a private key: give the output of `zc-handoff keys show`")
        certificate = _one_certificate(pem, "the certificate to trust")
        der_print = fingerprint(certificate.public_bytes(serialization.Encoding.DER))
        if self.exists() and self.show()[1] == der_print:
            raise LinkError("own-key", "that is this host's own certificate: trust the other host's")
        known = self.trusted()
        holder = next((n for n, p in known.items() if p == der_print), name)
        if holder != name:
            raise LinkError(
                "already-trusted", f"that certificate is trusted as {holder} already: forget {holder} first"
            )
        if len(known) >= MAX_TRUSTED and name not in known:
            raise LinkError("too-many-peers", f"{len(known)} peers are trusted, the limit: forget one first")
        _make_folder(self._trusted)
        text = certificate.public_bytes(serialization.Encoding.PEM)
        if not _write_new(self._trusted / f"{name}.pem", text) and known.get(name) != der_print:
            raise LinkError("name-taken", f"{name} is trusted with another certificate: `keys forget {name}` first")
        return der_print

    def trusted(self) -> dict[str, str]:
        """Local name to fingerprint."""
        return {name: der_print for der_print, name in sorted(self._fresh().by_print.items(), key=lambda kv: kv[1])}

    def forget(self, name: str) -> None:
        """New links with this peer are refused from now on; open ones stay until closed."""
        check_name(name)
        try:
            (self._trusted / f"{name}.pem").unlink()
        except FileNotFoundError:
            raise LinkError("unknown-peer", f"no peer is trusted as {name}: see `zc-handoff keys list`") from None
        except OSError as error:
            raise _cannot_write(self._trusted, error) from error

    def peer_of(self, der: bytes | None) -> str | None:
        """Whose certificate this is; None for a stranger's."""
        return self._fresh().by_print.get(fingerprint(der)) if der else None

    # -- TLS

    def server_context(self) -> ssl.SSLContext:
        """For accepted control connections: any trusted peer, no one else."""
        table = self._fresh()
        if table.server is None:
            table.server = self._context(ssl.PROTOCOL_TLS_SERVER, "".join(table.pems.values()))
        return table.server

    def client_context(self, peer: str) -> ssl.SSLContext:
        """For connecting to `peer`: its certificate and no other is accepted."""
        pem = self._fresh().pems.get(peer)
        if pem is None:
            raise LinkError("unknown-peer", f"no key is trusted for {peer}: `zc-handoff keys trust {peer} FILE` first")
        return self._context(ssl.PROTOCOL_TLS_CLIENT, pem)

    def _context(self, protocol: ssl._SSLMethod, authorities: str) -> ssl.SSLContext:
        self._read_identity()  # refuses loose permissions before the key is used
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._identity)
        if authorities:
            context.load_verify_locations(cadata=authorities)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # every link is a full handshake, so every link proves both keys
        return context

    # -- disk

    def _read_identity(self) -> str:
        try:
            mode = self._identity.stat()
        except FileNotFoundError:
            raise LinkError("no-key", f"{self._identity} does not exist: `zc-handoff keys new NAME` first") from None
        if mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or mode.st_uid != os.geteuid():
            raise LinkError("key-exposed", f"{self._identity} must belong to you with mode 0600: `chmod 600` it")
        return _read(self._identity)

    def _fresh(self) -> _Table:
        """The table, read again if any file of it changed."""
        try:
            files = self._entries()
            seen = tuple((f.name, (s := f.stat()).st_mtime_ns, s.st_size) for f in files)
        except OSError as error:
            raise _cannot_read(error) from error
        if seen == self._table.seen:
            return self._table
        by_print: dict[str, str] = {}
        pems: dict[str, str] = {}
        for file in files:
            certificate = _one_certificate(_read(file), str(file))
            pems[file.stem] = certificate.public_bytes(serialization.Encoding.PEM).decode()
            by_print[fingerprint(certificate.public_bytes(serialization.Encoding.DER))] = file.stem
        self._table = table = _Table(seen, by_print, pems)
        return table

    def _entries(self) -> list[Path]:
        if not self._trusted.is_dir():
            return []
        for folder in (self.directory, self._trusted):
            _check_ours(folder)
        files = sorted(self._trusted.glob("*.pem"))
        if len(files) > MAX_TRUSTED:
            raise LinkError("too-many-peers", f"{self._trusted} holds {len(files)} files, more than {MAX_TRUSTED}")
        return files


def trusting_pair(folder: Path, one: str, other: str) -> tuple[KeyStore, KeyStore]:
    """New keys of two hosts that trust each other, each in the folder of its name: for both ends on one machine."""
    stores = KeyStore(folder / one), KeyStore(folder / other)
    for store, name in zip(stores, (one, other), strict=True):
        store.new(name)
    stores[0].trust(other, stores[1].show()[0])
    stores[1].trust(one, stores[0].show()[0])
    return stores


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """The subject is random: strangers see the server's certificate, and it must tell them nothing."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, secrets.token_hex(16))])
    usage = x509.KeyUsage(True, *[False] * 8)  # digital signature: signs handshakes, never certificates
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _one_certificate(pem: str, where: str) -> x509.Certificate:
    """Exactly one self-signed P-256 certificate that cannot sign others."""
    blocks = pem.count("-----BEGIN CERTIFICATE-----")
    if blocks != 1 or len(pem) > MAX_PEM:
        raise LinkError("bad-certificate", f"{where} holds {blocks} certificates, not one: use `zc-handoff keys show`")
    try:
        certificate = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERTIFICATE-----") :].encode())
        certificate.verify_directly_issued_by(certificate)
        authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        key = certificate.public_key()
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise LinkError("bad-certificate", f"{where} is not a certificate made by `zc-handoff keys new`") from error
    if authority or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise LinkError("bad-certificate", f"{where} is not a P-256 certificate made by `zc-handoff keys new`")
    return certificate


def check_name(name: str) -> None:
    """Raises LinkError for what cannot name a peer."""
    if not _NAME.match(name):
        raise LinkError("bad-name", f"{name!r} is no peer name: 1 to 63 letters, digits, dots, dashes, underscores")


def _check_ours(folder: Path) -> None:
    """Who can write there can trust itself."""
    found = folder.stat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in (0, os.geteuid()):
        raise LinkError("trust-exposed", f"{folder} must be yours, and others may not write to it: `chmod go-w` it")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM + 1)
    except OSError as error:
        raise _cannot_read(error) from error
    if len(data) > MAX_PEM:
        raise LinkError("bad-certificate", f"{path} is larger than {MAX_PEM} bytes: not written by `zc-handoff keys`")
    return data.decode("ascii", "replace")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_read(error: OSError) -> LinkError:
    return LinkError("cannot-read", f"cannot read {error.filename}: {error.strerror}: mend or remove it")


def _cannot_write(path: Path, error: OSError) -> LinkError:
    return LinkError("cannot-write", f"cannot write {path}: {error.strerror}: mend that or give another --keys folder")


def _write_new(path: Path, data: bytes) -> bool:
    """Complete file, mode 0600, or nothing; False if `path` exists. Survives a crash at any step."""
    temporary: str | None = None
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return True
