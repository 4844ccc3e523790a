"""The kernel's figures of a connection: segments are counted as they go, nothing is invented elsewhere."""

from __future__ import annotations

import socket
import sys

import pytest

from transport.tcp_info import read_tcp_info

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@linux
def test_data_segments_are_counted_and_none_is_repeated_on_a_quiet_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            before = read_tcp_info(client)
            for _ in range(3):
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
            after = read_tcp_info(client)
    assert before is not None and after is not None
    assert before.segments_sent == 0 and after.segments_sent == 3
    assert after.segments_repeated == 0 and 0 < after.shortest_rtt_s <= after.rtt_s < 10


def test_another_system_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with socket.socket() as sock:
        assert read_tcp_info(sock) is None
