"""Which TLS library QUIC is built with, and what protects its packets."""

from __future__ import annotations

from pathlib import Path

import pytest

from native import build_quic
from native.build_quic import BACKENDS, compiler_arguments, find_backend, with_aead


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, the only one that is searched."""
    monkeypatch.setattr(build_quic, "_PREFIXES", (tmp_path,))
    monkeypatch.delenv("QUIC_TLS", raising=False)
    monkeypatch.delenv("QUIC_AEAD", raising=False)
    return tmp_path


def install(prefix: Path, *names: str) -> None:
    folder = prefix / "include" / "ngtcp2"
    folder.mkdir(parents=True, exist_ok=True)
    for header in ("ngtcp2.h", *(BACKENDS[name].header for name in names)):
        (folder / header).touch()


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [((), None), (("openssl",), "openssl"), (("gnutls",), "gnutls"), (("openssl", "gnutls"), "gnutls")],
)
def test_gnutls_is_taken_where_it_is_installed_else_openssl_else_nothing(
    prefix: Path, installed: tuple[str, ...], chosen: str | None
) -> None:
    install(prefix, *installed)
    found = find_backend()
    assert found == (chosen and BACKENDS[chosen]._replace(prefix=prefix))


def test_the_one_that_is_insisted_on_is_taken_or_refused_by_name(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(prefix, "gnutls")
    monkeypatch.setenv("QUIC_TLS", "openssl")
    with pytest.raises(ValueError, match=r"'openssl', but no ngtcp2_crypto_ossl.h"):
        find_backend()
    install(prefix, "openssl")
    found = find_backend()
    assert found is not None and found.sources == ("quic_tls_ossl.c",)
    monkeypatch.setenv("QUIC_TLS", "schannel")
    with pytest.raises(ValueError, match=r"'schannel': one of gnutls, openssl"):
        find_backend()


def test_what_the_caller_insists_on_comes_before_the_environment(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(prefix, "gnutls", "openssl")
    monkeypatch.setenv("QUIC_TLS", "openssl")
    assert find_backend("gnutls") == BACKENDS["gnutls"]._replace(prefix=prefix)


def test_it_is_found_under_any_prefix_and_only_together_with_ngtcp2_itself(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_quic, "_PREFIXES", (tmp_path / "usr", tmp_path / "brew"))
    install(tmp_path / "brew", "gnutls")
    found = find_backend()
    assert found == BACKENDS["gnutls"]._replace(prefix=tmp_path / "brew")
    assert found is not None and found.folders("lib") == [f"{tmp_path}/brew/lib"]
    (tmp_path / "brew/include/ngtcp2/ngtcp2.h").unlink()
    assert find_backend() is None


def test_an_openssl_that_homebrew_keeps_apart_is_found(prefix: Path) -> None:
    install(prefix, "openssl")
    keg = prefix / "opt" / "openssl@3"
    (keg / "include").mkdir(parents=True)
    (keg / "lib").mkdir()
    found = find_backend()
    assert found is not None
    arguments = compiler_arguments(found)
    assert f"-I{keg}/include" in arguments and f"-L{keg}/lib" in arguments and "-DQUIC_TLS_OSSL" in arguments


def test_packets_are_protected_by_ipsec_mb_where_it_is_installed_unless_tls_is_insisted_on(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(prefix, "gnutls")
    found = find_backend()
    assert found is not None and with_aead(found) == found
    monkeypatch.setenv("QUIC_AEAD", "ipsec-mb")
    with pytest.raises(ValueError, match=r"'ipsec-mb', but no intel-ipsec-mb.h"):
        with_aead(found)
    (prefix / "include" / "intel-ipsec-mb.h").touch()
    assert "-DQUIC_AEAD_IPSEC_MB" in compiler_arguments(with_aead(found))
    monkeypatch.setenv("QUIC_AEAD", "tls")
    assert with_aead(found) == found
    monkeypatch.setenv("QUIC_AEAD", "openssl")
    with pytest.raises(ValueError, match=r"'openssl': one of ipsec-mb, tls"):
        with_aead(found)
