"""Builds `native._quic` with cffi, where ngtcp2 and a TLS library it knows are installed; `BACKEND` says which.

Without them everything else works: `zc-handoff doctor` says what to install. The headers between their cffi marks are
the interface; the events of `quic_events` arrive in the functions declared here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import cffi

_HERE = Path(__file__).parent
_BEGIN, _END = "/* cffi reads from here */", "/* cffi reads to here */"
_HEADERS: Final = ("quic.h", "quic_internal.h", "quic_shim.h")
_PREFIXES: Final = tuple(Path(p) for p in ("/usr", "/usr/local", "/opt/homebrew"))
# Header of ngtcp2's glue -> (source here, libraries). The first that is installed is used.
_BACKENDS: Final = {
    "ngtcp2_crypto_gnutls.h": ("quic_tls_gnutls.c", ("ngtcp2_crypto_gnutls", "gnutls")),
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


def find_backend() -> tuple[Path, str] | None:
    """(prefix, header) of the first TLS glue that is installed with its library, or None."""
    for prefix in _PREFIXES:
        include = prefix / "include"
        for header in _BACKENDS:
            if (include / "ngtcp2" / header).exists() and (include / "ngtcp2" / "ngtcp2.h").exists():
                return prefix, header
    return None


BACKEND: Final = find_backend()


def builder(root: Path = Path()) -> cffi.FFI:
    """`root` is the checkout, relative for setuptools."""
    assert BACKEND is not None
    prefix, header = BACKEND
    source, libraries = _BACKENDS[header]
    ffi = cffi.FFI()
    ffi.cdef((_HERE / "quic.h").read_text().split(_BEGIN)[1].split(_END)[0])
    ffi.cdef(_EVENTS)
    sources = ("quic.c", "quic_link.c", "quic_page.c", "quic_net.c", source)
    ffi.set_source(
        "native._quic",
        '#include "quic.h"',
        sources=[str(root / "native" / name) for name in sources],
        include_dirs=[str(root / "native"), str(prefix / "include")],
        library_dirs=[str(prefix / "lib")],
        libraries=["ngtcp2", *libraries],
        depends=[str(root / "native" / name) for name in _HEADERS],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
    )
    return ffi


if BACKEND is not None:
    ffibuilder = builder()
