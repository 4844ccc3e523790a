"""Who is not trusted gets nothing and costs nothing (acceptance 6, X1): no threads, no descriptors, no memory, and
peers are served meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.e2e.conftest import ModelFile
from tests.e2e.pair import ENGINE, Pair, assert_nothing_held, assert_still_exact, make_pair, wait_until
from transport.address import parse
from transport.keys import KeyStore
from zerocopy.cli.hosts import Host, Hosts

MANY: Final = 200
HALF_OPEN: Final = 40  # more than a door keeps of one address
GREET_S: Final = 5.0  # transport: a stranger's time to prove its key
CLIENT_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of one


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[tuple[Hosts, Path]]:
    folder = tmp_path_factory.mktemp("hosts")
    with Hosts(folder) as running:
        yield running, folder


@pytest.fixture(scope="module")
def peers(hosts: tuple[Hosts, Path], model_file: ModelFile, transport: str) -> Pair:
    pair = make_pair(hosts[0], model_file("nemotron_h_moe+mtp"), hosts[1], transport=transport)
    pair.start()
    assert_still_exact(pair)  # first use touches memory for the first time
    return pair


class _Cost:
    """What a host holds: no more of it afterwards. Less may be: a connection of the request before timed out."""

    def __init__(self, host: Host) -> None:
        assert host.process is not None
        self._process = psutil.Process(host.process.pid)
        self.threads, self.fds = self._counts()
        self.memory = self._process.memory_info().rss

    def check(self) -> None:
        wait_until(self._no_more, f"no more than {self.threads} threads and {self.fds} descriptors", 10)
        grown = self._process.memory_info().rss - self.memory
        assert grown < 4 << 20, f"grew by {grown} bytes"

    def _no_more(self) -> bool:
        threads, fds = self._counts()
        return threads <= self.threads and fds <= self.fds

    def _counts(self) -> tuple[int, int]:
        return self._process.num_threads(), self._process.num_fds()


def _address(host: Host) -> tuple[str, int]:
    address = parse(host.address)
    return address.host, address.port


def _dial(host: Host) -> socket.socket:
    return socket.create_connection(_address(host), timeout=10)


def _hears_nothing(sock: socket.socket) -> bool:
    """The other side closes without a word."""
    with contextlib.suppress(ConnectionError):
        return not sock.recv(1)
    return True


def test_random_bytes(peers: Pair) -> None:
    cost, rng = _Cost(peers.prefiller), random.Random(1)
    for _ in range(MANY):
        with _dial(peers.prefiller) as sock, contextlib.suppress(ConnectionError):
            first = rng.choice([b"\x16", b"Z", b"G", b"\x00", b"\xff"])
            sock.sendall(first + rng.randbytes(rng.choice([0, 1, 15, 300, 5000])))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(10 * MANY):  # every kind of first byte: long headers, short ones, neither
            sock.sendto(rng.randbytes(rng.choice([0, 1, 20, 300, 1200, 1500])), _address(peers.prefiller))
    cost.check()
    assert_still_exact(peers)


def test_a_port_scanner(peers: Pair) -> None:
    """Connects and leaves; or asks what is here and is not told."""
    cost = _Cost(peers.prefiller)
    for _ in range(MANY):
        _dial(peers.prefiller).close()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-scan\r\n", b"\x00" * 64, b"hello\n"):
        with _dial(peers.prefiller) as sock:
            sock.sendall(greeting)
            assert _hears_nothing(sock)
    cost.check()
    assert_still_exact(peers)


def test_tls_without_a_key(peers: Pair) -> None:
    cost = _Cost(peers.prefiller)
    for _ in range(20):
        with _dial(peers.prefiller) as sock, pytest.raises((OSError, ssl.SSLError)):
            _speak(sock, _anyone())
    cost.check()
    assert_still_exact(peers)


def test_tls_with_a_key_that_nobody_trusts(peers: Pair, tmp_path: Path) -> None:
    KeyStore(tmp_path).new("stranger")
    context = _anyone()
    context.load_cert_chain(tmp_path / "identity.pem")
    cost = _Cost(peers.prefiller)
    for _ in range(20):
        with _dial(peers.prefiller) as sock, pytest.raises((OSError, ssl.SSLError)):
            _speak(sock, context)
    cost.check()
    assert_still_exact(peers)


def _anyone() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _speak(sock: socket.socket, context: ssl.SSLContext) -> None:
    """TLS 1.3 lets a client finish before the server has judged it: the judgement comes with the first read."""
    with context.wrap_socket(sock) as tls:
        tls.sendall(b"\0" * 64)
        if not tls.recv(1):
            raise ConnectionResetError("closed")


def test_a_whole_host_that_is_not_trusted(peers: Pair, hosts: tuple[Hosts, Path], model_file: ModelFile) -> None:
    """It knows the prefiller's certificate, the prefiller does not know its."""
    cost = _Cost(peers.prefiller)
    model = str(model_file("nemotron_h_moe+mtp"))
    flags = ["--role", "decode", "--model", model, *ENGINE]
    stranger = hosts[0].add("stranger", flags, peers=[peers.prefiller], trusted=False, transport=peers.transport)
    KeyStore(hosts[1] / "stranger").trust("prefiller", KeyStore(hosts[1] / "prefiller").show()[0])
    stranger.start()
    stranger.wait_ready()
    wait_until(lambda: _refused(stranger), "a refusal")
    assert [peer["name"] for peer in peers.prefiller.status()["peers"]] == ["decoder"]
    assert_still_exact(peers)
    assert stranger.stop() == 0
    cost.check()


def _refused(stranger: Host) -> bool:
    (peer,) = stranger.status()["peers"]
    return not peer["connected"] and peer["last_error"] != "not connected yet"


@pytest.mark.parametrize("transport", ["tcp"], indirect=True, scope="session")  # QUIC's: test_quic_strangers.py
def test_half_open_connections_keep_no_peer_out(peers: Pair) -> None:
    cost = _Cost(peers.prefiller)
    with contextlib.ExitStack() as held:
        for number in range(HALF_OPEN):
            sock = held.enter_context(_dial(peers.prefiller))
            with contextlib.suppress(ConnectionError):
                sock.sendall(CLIENT_HELLO[: number % len(CLIENT_HELLO)])
        assert_still_exact(peers)  # over the links that stand
        assert peers.decoder.stop(signal.SIGKILL) == -signal.SIGKILL
        peers.decoder.start()
        peers.wait_ready()  # and a new link gets through
        assert_still_exact(peers)
        for sock in _still_open(held):
            sock.settimeout(GREET_S + 5)
            assert _hears_nothing(sock)
    assert_nothing_held(peers.prefiller, peers.decoder)
    cost.check()


def _still_open(held: contextlib.ExitStack) -> list[socket.socket]:
    return [exit_.__self__ for _, exit_ in held._exit_callbacks]  # type: ignore[attr-defined]


def test_nothing_was_said_in_the_log_that_a_stranger_chose(peers: Pair) -> None:
    """Strangers can neither fill the log nor write into it."""
    log = peers.prefiller.log_path.read_text()
    assert "SSH-2.0-scan" not in log and "Traceback" not in log
    assert len(log.splitlines()) < MANY
    assert os.path.getsize(peers.prefiller.log_path) < 1 << 20
