"""`doctor`: fine here, and for each thing that can be missing it says what to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from transport.keys import KeyStore
from transport.quic_choice import built
from zerocopy.cli import doctor, main
from zerocopy.config import DaemonConfig


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def get() -> tuple[int, dict[str, Any]]:
        code = main.run(["doctor", "--keys", str(tmp_path / "keys"), "--json"])
        body = json.loads(capsys.readouterr().out)
        return code, {check["name"]: check for check in body["checks"]} | {"ok": body["ok"]}

    return get


def test_this_machine_has_what_a_daemon_needs(report: Any) -> None:
    code, checks = report()
    assert code == 0 and checks["ok"]
    for name in ("Python", "engine", "compiled ring", "crypto"):
        assert checks[name]["state"] == "ok", checks[name]
    assert checks["QUIC"]["state"] == ("ok" if built() else "absent")


@pytest.mark.skipif(not built(), reason="ngtcp2 is not installed")
@pytest.mark.parametrize(
    ("engine", "machine", "hint"),
    [
        ("ngtcp2 0.12.1, GnuTLS 3.7.9", "x86_64", "libipsec-mb-dev"),
        ("ngtcp2 0.12.1, GnuTLS 3.7.9", "aarch64", None),
        ("ngtcp2 1.24.0, OpenSSL 3.6.5", "x86_64", None),
        ("ngtcp2 0.12.1, GnuTLS 3.7.9, packets by ipsec-mb 1.3.0", "x86_64", None),
        ("ngtcp2 0.12.1, GnuTLS 3.7.9, no ipsec-mb on this CPU", "x86_64", None),
    ],
)
def test_what_makes_quic_faster_is_named_where_it_is_missing_and_exists(
    report: Any, monkeypatch: pytest.MonkeyPatch, engine: str, machine: str, hint: str | None
) -> None:
    from transport import quic_engine

    monkeypatch.setattr(quic_engine, "engine_name", lambda: engine)
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    check = report()[1]["QUIC"]
    assert check["found"] == engine
    assert (hint in check["next_step"]) if hint else check["next_step"] is None


def test_keys_go_from_missing_to_lonely_to_ready(report: Any, tmp_path: Path) -> None:
    assert "keys new" in report()[1]["keys"]["next_step"]
    mine, peer = KeyStore(tmp_path / "keys"), KeyStore(tmp_path / "peer")
    mine.new("mine")
    peer.new("peer")
    assert "keys trust" in report()[1]["keys"]["next_step"]
    mine.trust("peer", peer.show()[0])
    assert report()[1]["keys"]["state"] == "ok"
    (tmp_path / "keys" / "identity.pem").chmod(0o644)
    code, checks = report()
    assert (code, checks["keys"]["state"]) == (1, "failed") and "chmod" in checks["keys"]["next_step"]


def test_a_port_that_is_taken_is_a_warning(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(doctor, "DaemonConfig", lambda: DaemonConfig(http=address))
        code, checks = report()
    assert code == 0
    assert checks["HTTP port"]["state"] == "warning" and address in checks["HTTP port"]["found"]


def test_a_missing_engine_is_a_failure_with_the_command_to_install_it(
    report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerocopy.runtime.llama import abi

    monkeypatch.setattr(abi, "PACKAGE", "no_such_package")
    abi._library.cache_clear()
    try:
        code, checks = report()
    finally:
        abi._library.cache_clear()
    assert (code, checks["ok"], checks["engine"]["state"]) == (1, False, "failed")
    assert "pip install" in checks["engine"]["next_step"]


def test_the_screen_has_a_line_for_each_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main.run(["doctor", "--keys", "/absent"]) == 0
    text = capsys.readouterr().out
    for name in ("Python", "engine", "compiled ring", "crypto", "keys", "memory", "peer port", "HTTP port", "QUIC"):
        assert name in text
