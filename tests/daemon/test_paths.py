from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from tests.daemon import wires
from tests.daemon.slow_relay import SlowRelay
from tests.daemon.test_peers import Node, nodes
from tests.daemon.wires import keys, until
from tests.transport.hosts import needs_ipv6
from tests.transport.udp_relay import Relay
from transport import probe
from transport.link import LinkError
from zerocopy.daemon import paths
from zerocopy.daemon import peers as peers_module
from zerocopy.daemon.advertise import MAX_ADVERTISED, advertised, believed

SLOW, FAST = 100e6, 100e9


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("FIRST_REDIAL_S", 0.01), ("MAX_REDIAL_S", 0.05), ("BUSY_RETRY_S", 0.02)):
        monkeypatch.setattr(paths, name, seconds)
    monkeypatch.setattr(paths, "CONFIRM_AFTER_S", 0.1)
    monkeypatch.setattr(peers_module, "RETIRE_AFTER_S", 0.1)


# Faults of a path and handoffs on it are tried over both transports; the choice among paths sees no transport.
over_both = pytest.mark.usefixtures("transport")


class Pair:
    """`a` dials `b`, which can be reached over relays of its own choosing and, at `direct`, without one."""

    def __init__(self, folder: Path) -> None:
        self.stores = keys(folder, "a", "b")
        self.b = Node("b", self.stores["b"])
        self.a: Node
        self.relays: list[SlowRelay | Relay] = []
        self.direct = ""

    async def relay(self, bits_per_s: float) -> str:
        relay: SlowRelay | Relay = SlowRelay(self.direct, bits_per_s)
        if wires.transport == "quic":
            host, _, port = self.direct.rpartition(":")
            relay = Relay((host, int(port)), bits_per_s=bits_per_s)
        self.relays.append(relay)
        return await relay.listen()

    def start(self, *addresses: str) -> None:
        self.a = Node("a", self.stores["a"], {"b": addresses})
        self.a.dial()

    def status(self) -> dict[str, Any]:
        (peer,) = self.a.peers.all()
        return self.a.peers.describe(peer)

    async def uses(self, address: str) -> None:
        """Until new handoffs go over that address, on both hosts, and over no other any more."""
        (peer,) = self.a.peers.all()
        await until(lambda: self.status()["path"] == address and peer.link is peer.preferred)
        await until(lambda: len(self.a.links("b")) == len(self.b.links("a")) == 1)
        await until(lambda: len(self.b.endpoint._links) == 1)  # also of those that were only measured


def scenario(folder: Path, play: Callable[[Pair], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pair(folder) as both:
            await play(both)

    uvloop.run(run())


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    both = Pair(folder)
    both.direct = await both.b.endpoint.listen("127.0.0.1:0")
    try:
        yield both
    finally:
        async with nodes(*([both.a] if hasattr(both, "a") else []), both.b):
            pass
        for relay in both.relays:
            await relay.close()


@over_both
def test_the_fastest_of_several_addresses_is_used_and_the_status_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T6. The slow one is first in the list and carries the link until both are measured."""

    async def play(both: Pair) -> None:
        slow = await both.relay(SLOW)
        both.start(slow, both.direct)
        with caplog.at_level(logging.INFO):
            await both.uses(both.direct)
        status = both.status()
        assert status["path_reason"].startswith(f"{both.direct}: 64 MiB in ")
        assert slow in status["path_reason"]
        by_address = {path["address"]: path for path in status["paths"]}
        assert by_address[slow]["gbps"] < by_address[both.direct]["gbps"]
        assert by_address[both.direct]["measured_by"] == "probe"
        assert "path chosen" in caplog.text
        assert both.b.peers.link_to("a") is not None and both.a.obstacle("b") is None

    scenario(tmp_path, play)


def test_a_change_of_the_paths_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: measured again and again; the path in use becomes slow, the other fast."""
    monkeypatch.setattr(paths, "MEASURE_EVERY_S", 0.3)

    async def play(both: Pair) -> None:
        first, second = await both.relay(FAST), await both.relay(SLOW)
        both.start(first, second)
        await until(lambda: both.status()["path_reason"] != "not measured yet")
        await both.uses(first)
        both.relays[0].bits_per_s, both.relays[1].bits_per_s = SLOW, FAST
        await both.uses(second)

    scenario(tmp_path, play)


@over_both
def test_when_the_path_in_use_falls_the_other_takes_over(tmp_path: Path) -> None:
    async def play(both: Pair) -> None:
        slow = await both.relay(SLOW)
        other = await both.relay(FAST)
        both.start(other, slow)
        await until(lambda: all(path["gbps"] for path in both.status()["paths"]))
        await both.uses(other)
        await both.relays[1].close()
        await both.uses(slow)
        by_address = {path["address"]: path for path in both.status()["paths"]}
        await until(lambda: both.a.obstacle("b") is None)
        assert by_address[other]["error"] is not None

    scenario(tmp_path, play)


def test_after_a_lost_link_the_other_path_is_tried_first(tmp_path: Path) -> None:
    """A path that has just failed may accept connections again and fail again."""

    async def play(both: Pair) -> None:
        fast, slow = await both.relay(FAST), await both.relay(SLOW)
        both.start(fast, slow)
        await until(lambda: all(path["gbps"] for path in both.status()["paths"]))
        await both.uses(fast)
        await both.relays[0].cut()
        await until(lambda: both.status()["path"] == slow)
        await both.uses(fast)

    scenario(tmp_path, play)


def test_slow_handoffs_lead_to_a_better_path(tmp_path: Path) -> None:
    """Long before the next measurement is due, and after a second look."""

    async def play(both: Pair) -> None:
        first, second = await both.relay(FAST), await both.relay(SLOW)
        both.start(first, second)
        await until(lambda: all(path["gbps"] for path in both.status()["paths"]))
        await until(lambda: both.status()["path_reason"].startswith(first))
        both.relays[0].bits_per_s, both.relays[1].bits_per_s = SLOW, FAST
        both.a.peers.transferred("b", 8 << 20, 8 * (8 << 20) / SLOW)
        await both.uses(second)

    scenario(tmp_path, play)


def test_nothing_is_measured_while_a_handoff_runs(tmp_path: Path) -> None:
    async def play(both: Pair) -> None:
        both.start(await both.relay(SLOW), both.direct)
        await both.uses(both.direct)
        (link,) = both.a.links("b")
        both.a.busy_links.add(link)
        before = link.stats.page_bytes_sent, both.b.opened
        both.a.peers.transferred("b", 8 << 20, 100.0)  # so slow that it asks for a measurement
        await asyncio.sleep(0.3)
        assert (link.stats.page_bytes_sent, both.b.opened) == before
        both.a.busy_links.clear()
        await until(lambda: link.stats.page_bytes_sent > before[0] and both.b.opened > before[1])

    scenario(tmp_path, play)


@over_both
def test_a_handoff_that_comes_during_a_measurement_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_S", 5.0)

    async def play(both: Pair) -> None:
        both.start(await both.relay(SLOW))
        await until(lambda: both.a.links("b"))
        (link,) = both.a.links("b")
        await until(lambda: link.stats.page_bytes_sent)
        both.a.busy_links.add(link)
        await asyncio.sleep(0.3)
        sent = link.stats.page_bytes_sent
        await asyncio.sleep(0.3)
        assert link.stats.page_bytes_sent == sent
        assert both.status()["paths"][0]["gbps"] is None, "half a measurement is none"

    scenario(tmp_path, play)


def test_the_old_link_stays_until_its_handoff_is_over(tmp_path: Path) -> None:
    """New handoffs take the better path, one that runs is not moved."""

    async def play(both: Pair) -> None:
        slow = await both.relay(SLOW)
        both.start(slow, both.direct)
        await until(lambda: both.a.links("b"))
        (old,) = both.a.links("b")
        await until(lambda: len(both.a.links("b")) == 2)
        both.a.busy_links.add(old)
        await asyncio.sleep(0.4)
        assert old in both.a.links("b")
        assert both.a.peers.link_to("b") is not old
        both.a.busy_links.clear()
        await both.uses(both.direct)

    scenario(tmp_path, play)


def test_an_address_that_the_peer_advertises_is_tried_too(tmp_path: Path) -> None:
    async def play(both: Pair) -> None:
        both.b.hello = msgspec.structs.replace(both.b.hello, addresses=("127.0.0.1:9", both.direct))
        both.start(await both.relay(SLOW))
        await both.uses(both.direct)

    scenario(tmp_path, play)


def test_an_address_that_becomes_known_during_a_measurement_is_measured_after_it(tmp_path: Path) -> None:
    async def play(both: Pair) -> None:
        both.start(await both.relay(SLOW))
        await until(lambda: both.a.links("b") and both.a.links("b")[0].stats.page_bytes_sent)
        both.b.hello = msgspec.structs.replace(both.b.hello, addresses=(both.direct,))
        both.b.peers.announce()
        await both.uses(both.direct)

    scenario(tmp_path, play)


def test_a_slow_transfer_makes_the_paths_be_measured_again(tmp_path: Path) -> None:
    """T5: what handoffs reach is the measurement, and where it contradicts the probe, the probe is repeated."""

    async def play(both: Pair) -> None:
        both.start(both.direct)
        measured = lambda: both.status()["paths"][0]  # noqa: E731
        await until(lambda: measured()["gbps"] is not None)
        probed = measured()["gbps"]
        both.a.peers.transferred("b", 1 << 20, 10.0)
        assert measured()["gbps"] == probed, "a small transfer says nothing about bandwidth"
        both.a.peers.transferred("b", 8 << 20, 8 * (8 << 20) / (0.9e9 * probed))
        assert (measured()["measured_by"], measured()["gbps"]) == ("transfer", pytest.approx(0.9 * probed))
        await asyncio.sleep(0.3)
        assert measured()["measured_by"] == "transfer", "a lone path that handoffs measure needs no probe"
        both.a.peers.transferred("b", 8 << 20, 8 * (8 << 20) / (0.1e9 * probed))
        await until(lambda: measured()["measured_by"] == "probe")

    scenario(tmp_path, play)


def test_a_host_that_was_dialled_leaves_the_choice_to_the_peer(tmp_path: Path) -> None:
    async def play(both: Pair) -> None:
        both.start(both.direct)
        await until(lambda: both.b.links("a"))
        (peer,) = both.b.peers.all()
        assert both.b.peers.describe(peer)["path_reason"] == paths.BY_PEER

    scenario(tmp_path, play)


@needs_ipv6
def test_ipv6_addresses_work(tmp_path: Path) -> None:
    async def run() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        address = await b.endpoint.listen("[::1]:0")
        a = Node("a", stores["a"], {"b": (address,)})
        async with nodes(a, b):
            a.dial()
            (peer,) = a.peers.all()
            await until(lambda: a.peers.describe(peer)["paths"][0]["gbps"] is not None)  # type: ignore[index]
            assert a.peers.describe(peer)["path"] == address

    uvloop.run(run())


def test_loopback_advertised_to_a_remote_peer_is_refused_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node.__new__(Node)  # only its `PeerPaths` is used: no link to a remote host here
    peers = peers_module.Peers({"b": ("192.0.2.1:7600",)}, lambda: None, node)  # type: ignore[arg-type,return-value]
    (peer,) = peers.all()
    assert peer.paths is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            peer.paths.heard(("127.0.0.1:7600", "192.0.2.2:7600"))
    assert caplog.text.count("useless address advertised") == 1
    addresses = [path["address"] for path in peer.paths.describe()["paths"]]  # type: ignore[attr-defined]
    assert addresses == ["192.0.2.1:7600", "192.0.2.2:7600"]
    for port in range(1, 1000):
        peer.paths.heard((f"127.0.0.1:{port}",))
    assert len(peer.paths._warned) == 1  # not one for each that a peer thinks of


# -- what is told and what is believed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("127.0.0.1:7600", "127.0.0.1:7600 is loopback: advertise an address that peers can reach"),
        ("[::1]:7600", "is loopback"),
        ("localhost:7600", "is this machine for whoever reads it"),
        ("0.0.0.0:7600", "means every interface"),
        ("10.0.0.2:0", "has no port"),
        ("nonsense", "is no address"),
    ],
)
def test_what_only_the_peer_itself_could_use_is_not_believed(told: str, why: str) -> None:
    good, refused = believed([told, "10.0.0.2:7600"], ["10.0.0.1:7600"])
    assert good == ["10.0.0.2:7600"]
    assert why in refused[0]


def test_hosts_on_one_machine_know_each_other_by_loopback() -> None:
    assert believed(["127.0.0.1:7600", "[::1]:7600"], ["127.0.0.1:7601", "quic://[::1]:7601", "localhost:1"]) == (
        ["127.0.0.1:7600", "[::1]:7600"], [],
    )  # fmt: skip
    assert believed(["127.0.0.1:7600"], ["127.0.0.1:7601", "10.0.0.1:7601"])[0] == []


def test_names_and_link_local_addresses_of_a_peer_are_left_aside() -> None:
    """A name is not resolved on a peer's word; a link-local address needs an interface of this host."""
    assert believed(["inside.example:22", "[fe80::1%eth0]:7600"], ["10.0.0.1:7600"]) == ([], [])


@pytest.mark.parametrize("setting", ["127.0.0.1:7600", "[::1]:7600", "0.0.0.0:7600", "localhost:7600", "10.0.0.1:0"])
@pytest.mark.parametrize("bound", ["0.0.0.0:7600", "10.0.0.1:7600", "host.example:7600"])
def test_a_host_that_listens_to_others_cannot_advertise_what_they_cannot_use(bound: str, setting: str) -> None:
    with pytest.raises(LinkError, match="cannot advertise"):
        advertised(bound, setting)


def test_the_setting_is_what_is_advertised_else_where_it_listens() -> None:
    assert advertised("0.0.0.0:7600", "gate.example:9000") == ("gate.example:9000",)
    assert advertised("127.0.0.1:7600", None) == ("127.0.0.1:7600",)
    assert advertised("127.0.0.1:7600", "127.0.0.1:7700") == ("127.0.0.1:7700",)
    assert advertised("10.0.0.1:7600", None) == ("10.0.0.1:7600",)


def test_a_host_bound_to_everything_advertises_its_interfaces() -> None:
    """The addresses themselves differ by machine: tests/transport/test_netlab.py has known ones."""
    told = advertised("[::]:7600", None)
    assert len(told) <= MAX_ADVERTISED
    assert believed(told, ["10.0.0.1:7600"]) == (list(told), [])
