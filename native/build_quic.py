"""Builds `native._quic` with cffi, where ngtcp2 and a TLS library it knows are installed.

GnuTLS where there is, else OpenSSL; the environment variable QUIC_TLS, `gnutls` or `openssl`, insists on one.
Without either everything else works: `zc-handoff doctor` says what to install. Packets are protected by ipsec-mb where
that is installed, else by the TLS library; QUIC_AEAD, `ipsec-mb` or `tls`, insists likewise. The headers between their
cffi marks are the interface; the events of `quic_events` arrive in the functions declared here. Run as a program it
prints what a C compiler needs beside the sources that every backend shares, or nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import cffi

_HERE = Path(__file__).parent
_BEGIN, _END = "/* cffi reads from here */", "/* cffi reads to here */"
_SHARED: Final = ("quic.c", "quic_link.c", "quic_page.c", "quic_net.c")
_HEADERS: Final = ("quic.h", "quic_internal.h", "quic_shim.h")
# Homebrew links ngtcp2 into its prefix, but not OpenSSL, of which macOS had its own.
_PREFIXES: Final = tuple(Path(p) for p in ("/usr", "/usr/local", "/opt/homebrew"))
_KEG: Final = Path("opt", "openssl@3")
_FORCE: Final = "QUIC_TLS"  # not ZC_...: those are the daemon's settings, and it refuses others
_FORCE_AEAD: Final = "QUIC_AEAD"
_AEAD_HEADER: Final = "intel-ipsec-mb.h"
_AEAD_SOURCE: Final = "quic_aead_ipsec_mb.c"
_AEAD_LIBRARY: Final = "IPSec_MB"


class Backend(NamedTuple):
    """A TLS library: `header` is ngtcp2's glue for it, `sources` are ours. Sought in this order."""

    header: str
    sources: tuple[str, ...]
    libraries: tuple[str, ...]
    prefix: Path = Path("/usr")

    @property
    def installed(self) -> bool:
        return all((self.prefix / "include" / "ngtcp2" / name).exists() for name in (self.header, "ngtcp2.h"))

    def folders(self, kind: str) -> list[str]:
        """Where the compiler finds "include" or "lib" files of it."""
        keg = self.prefix / _KEG / kind
        return [str(self.prefix / kind), *([str(keg)] if keg.exists() else [])]

    @property
    def macros(self) -> list[str]:
        """What the other sources look at."""
        return [Path(source).stem.upper() for source in self.sources]


BACKENDS: Final = {
    "gnutls": Backend("ngtcp2_crypto_gnutls.h", ("quic_tls_gnutls.c",), ("ngtcp2", "ngtcp2_crypto_gnutls", "gnutls")),
    "openssl": Backend("ngtcp2_crypto_ossl.h", ("quic_tls_ossl.c",), ("ngtcp2", "ngtcp2_crypto_ossl", "ssl", "crypto")),
}
_EVENTS: Final = """
extern "Python" {
  int zc_quic_verify(void *, uint64_t, const uint8_t *, size_t);
  void zc_quic_opened(void *, uint64_t);
  void zc_quic_control(void *, uint64_t, const uint8_t *, size_t);
  void zc_quic_control_acked(void *, uint64_t, size_t);
  uint8_t *zc_quic_claim(void *, uint64_t, uint64_t, const uint8_t *, size_t, uint64_t);
  void zc_quic_landed(void *, uint64_t, uint64_t);
  void zc_quic_lost(void *, uint64_t, uint64_t, uint64_t);
  void zc_quic_sent(void *, uint64_t, uint64_t, int);
  void zc_quic_closed(void *, uint64_t, int, uint64_t, const char *);
}
"""


def find_backend(force: str | None = None) -> Backend | None:
    """The backend to build with, or None. Raises ValueError if the one insisted on is unknown or not installed."""
    force = force or os.environ.get(_FORCE)
    names = [force] if force else list(BACKENDS)
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ValueError(f"{_FORCE} is {unknown[0]!r}: one of {', '.join(BACKENDS)}")
    for prefix in _PREFIXES:
        for name in names:
            if (backend := BACKENDS[name]._replace(prefix=prefix)).installed:
                return backend
    if force:
        raise ValueError(f"{_FORCE} is {force!r}, but no {BACKENDS[force].header} is installed")
    return None


def with_aead(backend: Backend) -> Backend:
    """With ipsec-mb beside it, where that is installed. Raises ValueError as `find_backend`."""
    force = os.environ.get(_FORCE_AEAD, "")
    if force not in ("", "ipsec-mb", "tls"):
        raise ValueError(f"{_FORCE_AEAD} is {force!r}: one of ipsec-mb, tls")
    if force != "tls" and (backend.prefix / "include" / _AEAD_HEADER).exists():
        return backend._replace(sources=(*backend.sources, _AEAD_SOURCE), libraries=(*backend.libraries, _AEAD_LIBRARY))
    if force == "ipsec-mb":
        raise ValueError(f"{_FORCE_AEAD} is {force!r}, but no {_AEAD_HEADER} is installed")
    return backend


def builder(root: Path = Path()) -> cffi.FFI:
    """`root` is the checkout, relative for setuptools."""
    from cffi import FFI

    backend = find_backend()
    assert backend is not None
    backend = with_aead(backend)
    ffi = FFI()
    ffi.cdef((_HERE / "quic.h").read_text().split(_BEGIN)[1].split(_END)[0])
    ffi.cdef(_EVENTS)
    ffi.set_source(
        "native._quic",
        '#include "quic.h"',
        sources=[str(root / "native" / name) for name in (*_SHARED, *backend.sources)],
        define_macros=[(name, None) for name in backend.macros],
        include_dirs=[str(root / "native"), *backend.folders("include")],
        library_dirs=backend.folders("lib"),
        libraries=list(backend.libraries),
        depends=[str(root / "native" / name) for name in _HEADERS],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
    )
    return ffi


def compiler_arguments(backend: Backend) -> list[str]:
    """Sources, folders and libraries of the TLS part, for programs that are built without cffi."""
    return [
        *(f"-D{name}" for name in backend.macros),
        *(str(_HERE / source) for source in backend.sources),
        *(f"-I{folder}" for folder in (_HERE, *backend.folders("include"))),
        *(f"-L{folder}" for folder in backend.folders("lib")),
        *(f"-l{library}" for library in backend.libraries),
    ]


if __name__ == "__main__" and (found := find_backend()) is not None:
    print(" ".join(compiler_arguments(with_aead(found))))
