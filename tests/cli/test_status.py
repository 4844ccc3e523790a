"""`status` against a served front door, and against everything that is not one (U3)."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.daemon.front_door import ScriptedService, on_uvloop, open_door, run
from zerocopy.cli import main, status
from zerocopy.daemon.requests import ServiceStatus

DETAIL: dict[str, object] = {
    "name": "decode-1",
    "roles": ["decode"],
    "model": None,
    "reserved_bytes": 3 << 20,
    "worker": {"pid": 7, "restarts": 0},
    "peers": [
        {"name": "p1", "connected": True, "rtt_ms": 0.1234, "roles": ["prefill"], "last_error": None},
        {"name": "p2", "connected": False, "rtt_ms": None, "roles": [], "last_error": "refused"},
    ],
    "recent_handoffs": [
        {
            "handoff": "0123456789abcdef",
            "role": "decoder",
            "outcome": "committed",
            "marks": {"asked": 1.0, "prefilled": 2.0, "committed": 2.25},
            "chunks": [[0, 1, 2]],
            "component_bytes": {"attention KV": 1 << 20, "token history": 1 << 19},
        }
    ],
}


class Detailed(ScriptedService):
    def status(self) -> ServiceStatus:
        return ServiceStatus(self.not_serving is None, self.not_serving, DETAIL)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_a_serving_daemon_is_shown_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with open_door(Detailed()) as door:
            for url in (door.address, f"http://{door.address}/"):
                assert await asyncio.to_thread(main.run, ["status", url]) == 0

    run(check())
    text = capsys.readouterr().out
    for words in (
        "serving",
        "decode-1",
        "3.0 MiB",
        "peers",
        "last error",
        "refused",
        "0.123",
        "yes",
        "no",
        "01234567",
        "250",
        "1.5 MiB",
    ):
        assert words in text, words
    assert "None" not in text and "{" not in text and "[" not in text and "0123456789" not in text


def test_json_is_the_daemons_own_report(capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with open_door(Detailed()) as door:
            assert await asyncio.to_thread(main.run, ["status", door.address, "--json"]) == 0

    run(check())
    assert json.loads(capsys.readouterr().out) == {"serving": True, "reason": None, **DETAIL}


def test_a_daemon_that_cannot_serve_is_shown_and_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        service = Detailed()
        service.not_serving = "worker-starting"
        async with open_door(service) as door:
            assert await asyncio.to_thread(main.run, ["status", door.address]) == 3

    run(check())
    assert "not serving: worker-starting" in capsys.readouterr().out


def test_the_api_key_comes_from_flag_or_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with open_door(Detailed(), api_key="k1") as door:
            assert await asyncio.to_thread(main.run, ["status", door.address]) == 3
            assert await asyncio.to_thread(main.run, ["status", door.address, "--api-key", "k1"]) == 0
            monkeypatch.setenv("ZC_API_KEY", "k1")
            assert await asyncio.to_thread(main.run, ["status", door.address]) == 0

    run(check())
    assert "--api-key" in capsys.readouterr().err


def test_where_no_daemon_is_the_answer_is_one_line_and_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = socket.create_server(("127.0.0.1", 0))
        nobody = free.getsockname()[1]
        free.close()
        for url in (
            f"127.0.0.1:{nobody}",
            f"127.0.0.1:{silent.getsockname()[1]}",
            "http://[::1",
            "nohost.invalid:1",
            "ftp://x",
        ):
            assert main.run(["status", url]) == 3, url
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.count("\n") == 1, captured.err


@on_uvloop
async def test_another_http_server_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(main.run, ["status", f"127.0.0.1:{port}"]) == 3
    assert "not a zc-handoff daemon" in capsys.readouterr().err
