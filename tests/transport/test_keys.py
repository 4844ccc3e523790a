"""Keys on disk: nothing overwritten, nothing exposed, a peer is its exact certificate (X1)."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from transport.keys import MAX_TRUSTED, KeyStore, fingerprint
from transport.link import LinkError


def store(path: Path, name: str = "alpha") -> KeyStore:
    keys = KeyStore(path / name)
    keys.new(name)
    return keys


def reason(caught: pytest.ExceptionInfo[LinkError]) -> str:
    return caught.value.reason


def test_a_new_key_is_private_and_its_certificate_long_lived_and_nameless(tmp_path: Path) -> None:
    keys = store(tmp_path)
    assert stat.S_IMODE((tmp_path / "alpha").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "alpha/identity.pem").stat().st_mode) == 0o600
    pem, printed = keys.show()
    certificate = x509.load_pem_x509_certificate(pem.encode())
    assert "PRIVATE" not in pem and pem.count("BEGIN") == 1
    assert printed == fingerprint(certificate.public_bytes(serialization.Encoding.DER))
    assert certificate.not_valid_after_utc.year == 9999
    assert certificate.not_valid_before_utc < datetime.datetime(
        2001, 1, 1, tzinfo=datetime.UTC
    )  # a wrong clock is no matter
    assert b"alpha" not in certificate.public_bytes(serialization.Encoding.DER)
    assert keys.name() == "alpha"


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keys = store(tmp_path)
    before = keys.show()
    with pytest.raises(LinkError, match=r"identity\.pem already exists") as caught:
        keys.new("alpha")
    assert reason(caught) == "key-exists" and keys.show() == before
    assert os.listdir(tmp_path / "alpha") == ["identity.pem"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    keys = store(tmp_path)
    os.chmod(tmp_path / "alpha/identity.pem", mode)
    with pytest.raises(LinkError, match="chmod 600") as caught:
        keys.server_context()
    assert reason(caught) == "key-exposed"


def test_without_a_key_the_next_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="zc-handoff keys new") as caught:
        KeyStore(tmp_path / "none").show()
    assert reason(caught) == "no-key"
    assert KeyStore(tmp_path / "none").trusted() == {}


def test_trust_is_a_table_of_names_and_certificates(tmp_path: Path) -> None:
    a, b, c = store(tmp_path, "a"), store(tmp_path, "b"), store(tmp_path, "c")
    assert a.trust("b", b.show()[0]) == b.show()[1]
    a.trust("c", c.show()[0])
    assert a.trusted() == {"b": b.show()[1], "c": c.show()[1]}
    der = ssl.PEM_cert_to_DER_cert(b.show()[0])
    assert a.peer_of(der) == "b" and c.peer_of(der) is None and a.peer_of(None) is None
    a.forget("b")
    assert a.peer_of(der) is None and a.trusted() == {"c": c.show()[1]}
    with pytest.raises(LinkError) as caught:
        a.forget("b")
    assert reason(caught) == "unknown-peer"


def test_trusting_the_same_again_is_fine_and_a_name_is_never_moved_to_another_key(tmp_path: Path) -> None:
    a, b, c = store(tmp_path, "a"), store(tmp_path, "b"), store(tmp_path, "c")
    a.trust("peer", b.show()[0])
    a.trust("peer", b.show()[0])
    with pytest.raises(LinkError, match="keys forget peer") as caught:
        a.trust("peer", c.show()[0])
    assert reason(caught) == "name-taken"
    with pytest.raises(LinkError, match="trusted as peer") as caught:
        a.trust("other", b.show()[0])
    assert reason(caught) == "already-trusted"
    assert a.trusted() == {"peer": b.show()[1]}


def test_a_change_by_another_process_is_seen(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    assert a.trusted() == {}
    KeyStore(tmp_path / "a").trust("b", b.show()[0])
    assert list(a.trusted()) == ["b"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "x" * 64, "a\n", "ü", "-x"])
def test_names_that_are_no_plain_file_names_are_refused(tmp_path: Path, name: str) -> None:
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    for attempt in (
        lambda: a.trust(name, b.show()[0]),
        lambda: a.forget(name),
        lambda: KeyStore(tmp_path / "n").new(name),
    ):
        with pytest.raises(LinkError) as caught:
            attempt()
        assert reason(caught) == "bad-name"


def test_what_is_no_certificate_of_ours_is_refused(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    pem = b.show()[0]
    private = (tmp_path / "b/identity.pem").read_text()
    cases = {
        "": "bad-certificate",
        "hello": "bad-certificate",
        pem + pem: "bad-certificate",
        pem[: len(pem) // 2]: "bad-certificate",
        pem.replace(pem[100], "A" if pem[100] != "A" else "B", 1): "bad-certificate",
        pem + "x" * 20_000: "bad-certificate",
        private: "private-key",
        a.show()[0]: "own-key",
        foreign(authority=True): "bad-certificate",
        foreign(signed_by_other=True): "bad-certificate",
        foreign(curve=ec.SECP384R1()): "bad-certificate",
    }
    for text, expected in cases.items():
        with pytest.raises(LinkError) as caught:
            a.trust("b", text)
        assert reason(caught) == expected, text
    assert a.trusted() == {}


def foreign(*, authority: bool = False, signed_by_other: bool = False, curve: ec.EllipticCurve | None = None) -> str:
    """A certificate that looks like ours but for one thing."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    signer = ec.generate_private_key(ec.SECP256R1()) if signed_by_other else key
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def test_the_table_is_bounded(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    (tmp_path / "a/trusted").mkdir(0o700)
    for i in range(MAX_TRUSTED + 1):
        (tmp_path / f"a/trusted/{i}.pem").write_text(b.show()[0])
    with pytest.raises(LinkError) as caught:
        a.trusted()
    assert reason(caught) == "too-many-peers"


def test_a_damaged_entry_is_named_and_not_skipped(tmp_path: Path) -> None:
    """Skipping it silently would make a peer a stranger without a word."""
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    a.trust("b", b.show()[0])
    (tmp_path / "a/trusted/b.pem").write_text("")
    with pytest.raises(LinkError, match=r"trusted/b\.pem"):
        a.trusted()


def test_an_entry_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """All methods raise LinkError: whoever greets a peer expects nothing else."""
    a = store(tmp_path, "a")
    (tmp_path / "a/trusted/b.pem").mkdir(parents=True)
    (tmp_path / "a/trusted").chmod(0o700)
    with pytest.raises(LinkError, match=r"trusted/b\.pem: Is a directory"):
        a.trusted()
    with pytest.raises(LinkError) as caught:
        a.forget("b")
    assert reason(caught) == "cannot-write"
    (tmp_path / "a/trusted/b.pem").rmdir()
    (tmp_path / "a/trusted/b.pem").symlink_to("absent")
    with pytest.raises(LinkError, match=r"trusted/b\.pem: No such file"):
        a.server_context()


@pytest.mark.parametrize("folder", ["a", "a/trusted"])
@pytest.mark.parametrize("mode", [0o770, 0o702, None], ids=["group", "others", "another's"])
def test_a_folder_in_which_others_could_trust_themselves_is_refused(
    tmp_path: Path, folder: str, mode: int | None
) -> None:
    """Who can write to the outer one can put another inner one there."""
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    a.trust("b", b.show()[0])
    if mode is not None:
        (tmp_path / folder).chmod(mode)
    elif os.geteuid() == 0:
        os.chown(tmp_path / folder, 12345, -1)
    else:
        pytest.skip("only root can give a folder away")
    with pytest.raises(LinkError, match="chmod go-w") as caught:
        a.server_context()
    assert reason(caught) == "trust-exposed"


def test_contexts_speak_tls_1_3_only_and_verify(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a"), store(tmp_path, "b")
    a.trust("b", b.show()[0])
    for context in (a.server_context(), a.client_context("b")):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(LinkError) as caught:
        a.client_context("c")
    assert reason(caught) == "unknown-peer"


def test_a_peer_trusted_while_a_context_is_made_is_in_the_next_one(tmp_path: Path) -> None:
    """The engine of QUIC looks up peers on a thread of its own."""
    other = store(tmp_path, "beta")

    class Interrupted(KeyStore):
        def _context(self, protocol: ssl._SSLMethod, authorities: str) -> ssl.SSLContext:
            context = super()._context(protocol, authorities)
            if not authorities:
                self.trust("beta", other.show()[0])
                assert self.peer_of(ssl.PEM_cert_to_DER_cert(other.show()[0])) == "beta"
            return context

    store(tmp_path)
    keys = Interrupted(tmp_path / "alpha")
    assert [keys.server_context().cert_store_stats()["x509"] for _ in range(2)] == [0, 1]
