"""Builds that protect packets with different libraries understand each other (T1)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

import transport.quic
from native.build_quic import builder
from transport.quic_engine import engine_name

from .conftest import Run
from .hosts import Host, pattern

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`transport.quic`, once more, on an engine whose packets the TLS library protects."""
    if "ipsec-mb" not in engine_name():
        pytest.skip("ipsec-mb is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIC_AEAD", "tls")
        path = builder(ROOT).compile(tmpdir=str(tmp_path_factory.mktemp("plain")))
        spec = importlib.util.spec_from_file_location("native._quic", path)
        assert spec is not None and spec.loader is not None
        patch.setitem(sys.modules, "native._quic", importlib.util.module_from_spec(spec))
        for name in [name for name in sys.modules if name.startswith("transport.quic")]:
            patch.setattr(transport, name.removeprefix("transport."), sys.modules[name])  # put back afterwards
            patch.delitem(sys.modules, name)
        again = importlib.import_module("transport.quic")
        assert "ipsec-mb" not in importlib.import_module("transport.quic_engine").engine_name()
    assert "ipsec-mb" in importlib.import_module("transport.quic_engine").engine_name()
    return again


@pytest.mark.parametrize("dialer", ["ipsec-mb", "tls"])
def test_pages_cross_both_ways_between_ipsec_mb_and_the_tls_library(
    run: Run, tmp_path: Path, plain: Any, dialer: str
) -> None:
    async def work() -> None:
        a, b = Host(tmp_path, "a", "quic"), Host(tmp_path, "b", "quic")
        a.trust(b)
        b.trust(a)
        fast, slow = (a, b) if dialer == "ipsec-mb" else (b, a)
        fast.open()
        slow.endpoint = plain.QuicEndpoint(slow.keys, slow)
        try:
            there = await a.endpoint.connect("b", await b.endpoint.listen("127.0.0.1:0"))
            await b.until(lambda: bool(b.links))
            page = pattern(4 * MIB)
            for number in range(4):
                for link, sink in ((there, b), (b.links[0], a)):
                    await link.send_page(b"%d" % number, page)
                    assert sink.landings.payload(b"%d" % number) == page
        finally:
            await a.endpoint.close()
            await b.endpoint.close()

    run(work())
