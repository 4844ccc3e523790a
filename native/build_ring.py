"""Builds `native._ring` with cffi from the C headers: what stands between their cffi marks is the interface."""

from __future__ import annotations

from pathlib import Path

import cffi

_HERE = Path(__file__).parent
_HEADERS = ("ring.h", "slab.h")
_SOURCES = ("ring.c", "slab.c")
_BEGIN, _END = "/* cffi reads from here */", "/* cffi reads to here */"


def declarations(header: Path) -> str:
    """The marked part of a header."""
    return header.read_text().split(_BEGIN)[1].split(_END)[0]


def builder(root: Path = Path(), *, kill_steps: bool = False) -> cffi.FFI:
    """`root` is the checkout, relative for setuptools; `kill_steps` makes the test build that dies on request."""
    ffi = cffi.FFI()
    ffi.cdef("struct ring_descriptor;")
    for header in _HEADERS:
        ffi.cdef(declarations(_HERE / header))
    if kill_steps:
        ffi.cdef("extern char ring_test_stop_at[64];")
    ffi.set_source(
        "native._ring",
        "\n".join(f'#include "{header}"' for header in _HEADERS),
        sources=[str(root / "native" / source) for source in _SOURCES],
        include_dirs=[str(root / "native")],
        depends=[str(root / "native" / name) for name in (*_HEADERS, "step.h")],
        define_macros=[("RING_TEST_STOP", "1")] if kill_steps else [],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
    )
    return ffi


ffibuilder = builder()
