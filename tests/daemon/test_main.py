"""A daemon's life, in this process and with a worker that has no engine; with real ones: `tests/e2e`."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from tests.daemon.wires import run
from transport.keys import KeyStore
from transport.link import LinkError
from zerocopy.config import DaemonConfig
from zerocopy.daemon import paths
from zerocopy.daemon.main import serve

WORKER = (sys.executable, "-m", "tests.daemon.scripted_worker", "serve")


def test_a_daemon_with_a_damaged_entry_among_those_it_trusts_does_not_start(tmp_path: Path) -> None:
    """It would refuse every peer, and those would be told to look at their side."""
    KeyStore(tmp_path).new("a")
    (tmp_path / "trusted").mkdir(0o700)
    (tmp_path / "trusted/b.pem").write_text("half a certif")
    config = DaemonConfig(name="a", model=Path("m.gguf"), keys=tmp_path, listen="127.0.0.1:0", http="127.0.0.1:0")
    with pytest.raises(LinkError, match=r"trusted/b\.pem"):
        run(serve(config, WORKER))


def test_a_daemon_that_stops_dialling_its_peers_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would live on without peers, and nobody would know why."""
    keys = KeyStore(tmp_path)
    keys.new("a")
    monkeypatch.setattr(paths, "MAX_REDIAL_S", None)  # a bug: the second pause cannot be reckoned
    config = DaemonConfig(
        name="a", model=Path("m.gguf"), keys=tmp_path, rings=1, ring_mib=1,
        listen="127.0.0.1:0", http="127.0.0.1:0", peers={"b": ("127.0.0.1:1",)},
    )  # fmt: skip

    async def scenario() -> None:
        async with asyncio.timeout(20):
            await serve(config, WORKER)

    with caplog.at_level(logging.INFO, "zc"), pytest.raises(ExceptionGroup) as ended:
        run(scenario())
    assert ended.group_contains(TypeError)
    said = [record.message for record in caplog.records]
    assert said.index("dialling failed") < said.index("draining") < said.index("stopping")
