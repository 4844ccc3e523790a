"""Both transports behind one endpoint: the address says which, the port is the same, and QUIC may be missing (T1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.link import LinkError
from transport.quic_choice import BothEndpoints, built, over_same, split_scheme
from transport.tcp import TcpEndpoint

from .conftest import Run
from .hosts import Host, pattern


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("quic://10.0.0.1:7600", ("quic", "10.0.0.1:7600")),
        ("quic://[::1]:7600", ("quic", "[::1]:7600")),
        ("10.0.0.1:7600", ("tcp", "10.0.0.1:7600")),
        ("http://10.0.0.1:7600", ("tcp", "http://10.0.0.1:7600")),  # no address, as TCP will say
    ],
)
def test_the_scheme_of_an_address_names_the_transport(address: str, parts: tuple[str, str]) -> None:
    assert split_scheme(address) == parts


@pytest.mark.parametrize(
    ("configured", "tried"),
    [
        (["h:1"], ["h:2"]),
        (["quic://h:1"], ["quic://h:2"]),
        (["h:1", "quic://h:1"], ["quic://h:2", "h:2"]),
        ([], ["h:2"]),
    ],
)
def test_what_a_peer_tells_is_tried_over_the_transports_that_were_asked_for(
    configured: list[str], tried: list[str]
) -> None:
    assert over_same(["h:2"], configured) == tried


def test_without_the_engine_a_quic_address_is_refused_with_what_to_install(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        a = Host(tmp_path, "a")
        both = BothEndpoints(TcpEndpoint(a.keys, a), None)
        assert both.transports == ("tcp",)
        with pytest.raises(LinkError, match="apt-get install libngtcp2-dev") as caught:
            await both.connect("b", "quic://127.0.0.1:1")
        assert caught.value.reason == "no-quic"
        await both.close()

    run(work())


@pytest.mark.skipif(not built(), reason="ngtcp2 is not installed")
def test_one_port_serves_both_and_each_address_gets_its_own(run: Run, tmp_path: Path) -> None:
    from transport.quic import QuicEndpoint

    async def work() -> None:
        a, b = Host(tmp_path, "a"), Host(tmp_path, "b")
        a.trust(b)
        b.trust(a)
        ends = [BothEndpoints(TcpEndpoint(host.keys, host), QuicEndpoint(host.keys, host)) for host in (a, b)]
        assert ends[0].transports == ("tcp", "quic")
        address = await ends[1].listen("127.0.0.1:0")
        for prefix, transport in (("", "tcp"), ("quic://", "quic")):
            link = await ends[0].connect("b", prefix + address)
            assert link.transport == transport
            await link.send_page(transport.encode(), pattern(100_000))
            await b.until(lambda t=transport: any(s.header == t.encode() for s in b.landings.published))  # type: ignore[misc]
        for end in ends:
            await end.close()

    run(work())
