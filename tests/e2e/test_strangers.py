"""Who is not trusted gets nothing and costs nothing (acceptance 6, X1): no threads, no descriptors, no memory, and
peers are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.e2e.conftest import ModelFile
from tests.e2e.pair import ENGINE, Pair, assert_nothing_held, assert_still_exact, make_pair, wait_until
from tests.transport.hosts import Host as TransportHost
from transport.address import parse
from transport.keys import KeyStore
from transport.link import LinkError
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


@pytest.fixture(scope="module")
def floor(peers: Pair) -> tuple[int, int]:
    """What the prefiller holds at rest."""
    held = (0, 0)
    while held != (held := _held(peers.prefiller)):
        time.sleep(0.3)
    return held


@pytest.fixture(autouse=True)
def _costs_nothing(peers: Pair, floor: tuple[int, int]) -> Iterator[None]:
    process = psutil.Process(_pid(peers.prefiller))
    before = process.memory_info().rss
    yield
    wait_until(lambda: _held(peers.prefiller) == floor, f"threads and descriptors to be {floor} again")
    grown = process.memory_info().rss - before
    assert grown < 4 << 20, f"grew by {grown} bytes"


def _pid(host: Host) -> int:
    assert host.process is not None
    return host.process.pid


def _held(host: Host) -> tuple[int, int]:
    """Threads and descriptors. The host may see a moment later than its client that an HTTP request is over: such a
    descriptor once stood in what was compared with."""
    process = psutil.Process(_pid(host))

    def asked() -> bool:
        found = process.net_connections("tcp")
        return any(one.laddr.port == host.http_port and one.status != psutil.CONN_LISTEN for one in found)

    wait_until(lambda: not asked(), "the last request to be over")
    return process.num_threads(), process.num_fds()


def _address(host: Host) -> tuple[str, int]:
    address = parse(host.address)
    return address.host, address.port


def _dial(host: Host) -> socket.socket:
    return socket.create_connection(_address(host), timeout=30)


def _hears_nothing(sock: socket.socket) -> bool:
    """The other side closes without a word."""
    with contextlib.suppress(ConnectionError):
        return not sock.recv(1)
    return True


def test_random_bytes(peers: Pair) -> None:
    rng = random.Random(1)
    for _ in range(MANY):
        with _dial(peers.prefiller) as sock, contextlib.suppress(ConnectionError):
            first = rng.choice([b"\x16", b"Z", b"G", b"\x00", b"\xff"])
            sock.sendall(first + rng.randbytes(rng.choice([0, 1, 15, 300, 5000])))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(10 * MANY):  # every kind of first byte: long headers, short ones, neither
            sock.sendto(rng.randbytes(rng.choice([0, 1, 20, 300, 1200, 1500])), _address(peers.prefiller))
    assert_still_exact(peers)


def test_a_port_scanner(peers: Pair) -> None:
    """Connects and leaves; or asks what is here and is not told."""
    for _ in range(MANY):
        _dial(peers.prefiller).close()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-scan\r\n", b"\x00" * 64, b"hello\n"):
        with _dial(peers.prefiller) as sock:
            sock.sendall(greeting)
            assert _hears_nothing(sock)
    assert_still_exact(peers)


def test_tls_without_a_key(peers: Pair) -> None:
    for _ in range(20):
        with _dial(peers.prefiller) as sock, pytest.raises((OSError, ssl.SSLError)):
            _speak(sock, _anyone())
    assert_still_exact(peers)


def test_tls_with_a_key_that_nobody_trusts(peers: Pair, tmp_path: Path) -> None:
    KeyStore(tmp_path).new("stranger")
    context = _anyone()
    context.load_cert_chain(tmp_path / "identity.pem")
    for _ in range(20):
        with _dial(peers.prefiller) as sock, pytest.raises((OSError, ssl.SSLError)):
            _speak(sock, context)
    assert_still_exact(peers)


@pytest.mark.parametrize("transport", ["quic"], indirect=True, scope="session")
def test_quic_with_a_key_that_nobody_trusts(peers: Pair, hosts: tuple[Hosts, Path], tmp_path: Path) -> None:
    """More than there are links: one that stayed would be missed before the end."""
    stranger = TransportHost(tmp_path, "stranger", "quic")
    stranger.keys.trust("prefiller", KeyStore(hosts[1] / "prefiller").show()[0])

    async def knock() -> None:
        stranger.open()
        for _ in range(2 * MANY):
            with pytest.raises(LinkError) as caught:
                await stranger.endpoint.connect("prefiller", peers.prefiller.address)
            assert caught.value.reason == "refused"
        await stranger.endpoint.close()

    asyncio.run(knock())
    assert stranger.links == []
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


def _refused(stranger: Host) -> bool:
    (peer,) = stranger.status()["peers"]
    return not peer["connected"] and peer["last_error"] != "not connected yet"


@pytest.mark.parametrize("transport", ["tcp"], indirect=True, scope="session")  # QUIC's: test_quic_strangers.py
def test_half_open_connections_keep_no_peer_out(peers: Pair) -> None:
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
            sock.settimeout(GREET_S + 20)
            assert _hears_nothing(sock)
    assert_nothing_held(peers.prefiller, peers.decoder)


def _still_open(held: contextlib.ExitStack) -> list[socket.socket]:
    return [exit_.__self__ for _, exit_ in held._exit_callbacks]  # type: ignore[attr-defined]


def test_nothing_was_said_in_the_log_that_a_stranger_chose(peers: Pair) -> None:
    """Strangers can neither fill the log nor write into it."""
    log = peers.prefiller.log_path.read_text()
    assert "SSH-2.0-scan" not in log and "Traceback" not in log
    assert len(log.splitlines()) < MANY
    assert os.path.getsize(peers.prefiller.log_path) < 1 << 20
