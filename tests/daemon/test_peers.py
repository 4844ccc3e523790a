from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.daemon.wires import Peer, Refuses, endpoint, joined, keys, run, until
from transport.keys import KeyStore
from transport.link import Link, PageSink
from zerocopy.daemon import paths
from zerocopy.daemon import peers as module
from zerocopy.daemon.peers import Peers
from zerocopy.handoff.components import Identity
from zerocopy.handoff.messages import Abort, AnyMessage, Hello, encode

pytestmark = pytest.mark.usefixtures("transport")

IDENTITY = Identity("m", "t", "llama", "f16/f16", "on", "e", "s", "x")
ABORT = Abort(handoff_id=b"h" * 16, epoch=0, reason="cancelled", message="")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "FIRST_REDIAL_S", 0.01)
    monkeypatch.setattr(paths, "MAX_REDIAL_S", 0.05)


class Node:
    """One host: `Peers`, its listener and its endpoint."""

    def __init__(self, name: str, store: KeyStore, addresses: dict[str, tuple[str, ...]] | None = None) -> None:
        self.name = name
        self.hello = Hello(
            boot_id=name.encode().ljust(16, b"-"),
            name=name,
            roles=("prefill",),
            addresses=(),
            transports=("tcp",),
            identity=IDENTITY,
        )
        self.messages: list[AnyMessage] = []
        self.lost: list[str] = []
        self.opened = 0
        self.asked = 0  # whether a link is busy
        self.busy_links: set[Link] = set()
        self.peers = Peers(addresses or {}, lambda: self.hello, self)
        self.endpoint = endpoint(store, self.peers)
        self._dialling: asyncio.Task[None] | None = None

    def dial(self) -> None:
        self._dialling = asyncio.create_task(self.peers.dial(self.endpoint))

    async def close(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dialling
        await self.endpoint.close()

    async def connect(self, name: str, address: str) -> Link:
        """A link that is to be used: HELLO is said on it."""
        link = await self.endpoint.connect(name, address)
        self.peers.use(link)
        return link

    def knows(self, name: str) -> bool:
        return any(peer.name == name and peer.hello is not None for peer in self.peers.all())

    def links(self, name: str) -> list[Link]:
        return next((peer.links for peer in self.peers.all() if peer.name == name), [])

    def obstacle(self, name: str, identity: Identity = IDENTITY) -> str | None:
        (found,) = [p.obstacle for p in self.peers.prefillers(identity) if p.name == name]
        return found

    # -- LinkListener

    def sink(self, link: Link) -> PageSink:
        self.opened += 1
        return Refuses()

    def busy(self, link: Link) -> bool:
        self.asked += 1
        return link in self.busy_links

    def peer_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)


@contextlib.asynccontextmanager
async def nodes(*some: Node) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for node in some:
            await node.close()


def test_both_sides_say_hello_and_know_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})
        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b") and b.knows("a"))
            assert (a.obstacle("b"), b.obstacle("a")) == (None, None)
            assert a.peers.link_to("b") is not None
            assert a.messages == b.messages == []

    run(scenario())


def test_hello_is_answered_once_however_often_it_comes(tmp_path: Path) -> None:
    """Two hosts that answered each other's answers would never stop."""

    async def scenario() -> None:
        peer, node = Peer(), Node("b", keys(tmp_path / "unused", "b")["b"])
        async with joined(tmp_path, peer, node.peers):
            for _ in range(3):
                peer.say(msgspec.structs.replace(node.hello, name="a"))
            await peer.hear(Hello)
            node.peers.announce()
            await peer.hear(Hello, 2)
            await asyncio.sleep(0.05)
            assert len(peer.all(Hello)) == 2
        await node.close()

    run(scenario())


def test_a_message_after_hello_reaches_the_listener(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})
        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b") and b.knows("a"))
            link = a.peers.link_to("b")
            assert link is not None
            link.send(encode(ABORT))
            await until(lambda: b.messages == [ABORT])

    run(scenario())


@pytest.mark.parametrize("sent", [encode(ABORT), b"\x01garbage", b"\x09\x80"])
def test_anything_before_hello_closes_the_link(tmp_path: Path, sent: bytes) -> None:
    """X1: nothing is done for a peer that has not said what it is."""

    async def scenario() -> None:
        stranger, node = Peer(), Node("b", keys(tmp_path / "unused", "b")["b"])
        async with joined(tmp_path, stranger, node.peers) as link:
            link.send(sent)
            await until(lambda: stranger.closed)
            assert node.messages == []
        await node.close()

    run(scenario())


def test_a_message_that_breaks_the_protocol_closes_the_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer, node = Peer(), Node("b", keys(tmp_path / "unused", "b")["b"])
        async with joined(tmp_path, peer, node.peers) as link:
            link.send(encode(msgspec.structs.replace(node.hello, name="a")))
            await until(lambda: node.knows("a"))
            link.send(b"\x01\xc1")
            await until(lambda: peer.closed)
            assert peer.closed == ["peer-closed/message"]
        await node.close()

    run(scenario())


def test_an_absent_peer_is_named_with_the_reason_and_dialled_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        first = Node("b", stores["b"])
        address = await first.endpoint.listen("127.0.0.1:0")
        await first.close()
        a = Node("a", stores["a"], {"b": (address,)})
        with caplog.at_level(logging.WARNING):
            a.dial()
            await until(lambda: "cannot be reached" in (a.obstacle("b") or ""))
            await asyncio.sleep(0.2)
        assert caplog.text.count("cannot reach peer") == 1, "one line per reason, not one per try"
        late = Node("b", stores["b"])
        async with nodes(a, late):
            await late.endpoint.listen(address)
            await until(lambda: a.knows("b"))

    run(scenario())


def test_a_peer_that_restarts_is_found_again_under_its_new_boot(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        address = await b.endpoint.listen("127.0.0.1:0")
        a = Node("a", stores["a"], {"b": (address,)})
        a.dial()
        await until(lambda: a.knows("b"))
        await b.close()
        await until(lambda: a.lost)
        assert any(said in (a.obstacle("b") or "") for said in ("link closed", "cannot be reached"))
        again = Node("b", stores["b"])
        again.hello = msgspec.structs.replace(again.hello, boot_id=b"another boot id.")
        async with nodes(a, again):
            await again.endpoint.listen(address)
            await until(lambda: a.knows("b"))
            assert a.obstacle("b") is None
            (peer,) = a.peers.all()
            assert peer.hello is not None
            assert peer.hello.boot_id == b"another boot id."

    run(scenario())


def test_a_new_boot_id_ends_the_links_of_the_old_one_at_once(tmp_path: Path) -> None:
    """The old process may be gone without a word: nothing of it may be waited for."""

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a = Node("a", stores["a"])
        address = await a.endpoint.listen("127.0.0.1:0")
        old, new = Node("b", stores["b"]), Node("b", stores["b"])
        new.hello = msgspec.structs.replace(new.hello, boot_id=b"another boot id.")
        async with nodes(a, old, new):
            await old.connect("a", address)
            await until(lambda: a.knows("b"))
            await new.connect("a", address)
            await until(lambda: a.lost == ["peer-restarted"])
            await until(lambda: old.lost == ["peer-closed/peer-restarted"])
            assert a.obstacle("b") is None

    run(scenario())


@pytest.mark.parametrize("first", ["a", "b"])
def test_when_both_have_dialled_both_use_the_link_of_the_lower_boot_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whoever was first. The other link ends once nothing runs over it (T6)."""
    monkeypatch.setattr(module, "RETIRE_AFTER_S", 0.05)

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a, b = Node("a", stores["a"]), Node("b", stores["b"])
        to_a, to_b = await a.endpoint.listen("127.0.0.1:0"), await b.endpoint.listen("127.0.0.1:0")
        async with nodes(a, b):
            ours = await a.connect("b", to_b) if first == "a" else None
            spare = await b.connect("a", to_a)
            b.busy_links.add(spare)
            await until(lambda: set(a.links("b")) - {ours})
            (at_a,) = set(a.links("b")) - {ours}
            a.busy_links.add(at_a)
            ours = ours or await a.connect("b", to_b)
            await until(lambda: len(a.links("b")) == len(b.links("a")) == 2)
            assert a.peers.link_to("b") is ours
            assert b.peers.link_to("a") is not spare
            await asyncio.sleep(0.2)
            assert a.lost == b.lost == [], "a handoff still runs over it"
            a.busy_links.clear()
            await until(lambda: a.lost == ["superseded"] and b.lost == ["peer-closed/superseded"])
            assert (a.obstacle("b"), b.obstacle("a")) == (None, None)

    run(scenario())


def test_links_that_wait_to_be_retired_are_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them are busy and however long: one timer a peer."""
    monkeypatch.setattr(module, "RETIRE_AFTER_S", 0.02)

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a, b = Node("a", stores["a"]), Node("b", stores["b"])
        to_b = await b.endpoint.listen("127.0.0.1:0")
        async with nodes(a, b):
            for _ in range(4):
                a.busy_links.add(await a.connect("b", to_b))
            await until(lambda: len(a.links("b")) == 4)
            began, a.asked = time.monotonic(), 0
            await asyncio.sleep(0.2)
            rounds = (time.monotonic() - began) / module.RETIRE_AFTER_S + 1
            assert 3 <= a.asked <= 3 * rounds
            a.busy_links.clear()
            await until(lambda: a.lost == ["superseded"] * 3)

    run(scenario())


def test_when_the_link_in_use_falls_another_that_stands_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a, b = Node("a", stores["a"]), Node("b", stores["b"])
        to_b = await b.endpoint.listen("127.0.0.1:0")
        async with nodes(a, b):
            first = await a.connect("b", to_b)
            await until(lambda: a.peers.link_to("b") is first)
            second = await a.connect("b", to_b)
            await until(lambda: a.peers.link_to("b") is second)
            second.close("test")
            await until(lambda: a.peers.link_to("b") is first)
            assert a.obstacle("b") is None, "what it said on the other link still holds"

    run(scenario())


def test_a_link_without_hello_is_no_connection(tmp_path: Path) -> None:
    """It carries probe pages and nothing else: neither host may send a handoff over it."""

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a, b = Node("a", stores["a"]), Node("b", stores["b"])
        async with nodes(a, b):
            link = await a.endpoint.connect("b", await b.endpoint.listen("127.0.0.1:0"))
            await until(lambda: link.stats.rtt_s is not None)
            assert a.peers.link_to("b") is None and b.peers.link_to("a") is None
            link.close("path-measured")
            await a.endpoint.close()
            assert a.lost == b.lost == []

    run(scenario())


def test_a_change_is_announced_to_every_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})
        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b"))
            b.hello = msgspec.structs.replace(b.hello, identity=None)
            b.peers.announce()
            await until(lambda: a.obstacle("b") == "its engine is not up")

    run(scenario())


def test_every_obstacle_is_a_sentence(tmp_path: Path) -> None:
    """L5."""

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})
        async with nodes(a, b):
            assert a.obstacle("b") == "not connected yet"
            a.dial()
            await until(lambda: a.knows("b"))
            other = msgspec.structs.replace(IDENTITY, kv_type="q8_0/q8_0")
            assert "q8_0/q8_0" in (a.obstacle("b", other) or "")
            assert "f16/f16" in (a.obstacle("b", other) or "")
            b.hello = msgspec.structs.replace(b.hello, roles=("decode", "sings"))
            b.peers.announce()
            await until(lambda: a.obstacle("b") == "its roles are decode, sings, not prefill")

    run(scenario())


def test_a_peer_without_an_address_is_not_dialled_but_may_dial(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        a = Node("a", stores["a"], {"b": ()})
        b = Node("b", stores["b"], {"a": (await a.endpoint.listen("127.0.0.1:0"),)})
        async with nodes(a, b):
            a.dial()
            b.dial()
            await until(lambda: a.knows("b"))

    run(scenario())


def test_the_second_address_is_tried_when_the_first_is_dead(tmp_path: Path) -> None:
    """T6."""

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b, gone = Node("b", stores["b"]), Node("b", stores["b"])
        dead = await gone.endpoint.listen("127.0.0.1:0")
        await gone.close()
        a = Node("a", stores["a"], {"b": (dead, await b.endpoint.listen("127.0.0.1:0"))})
        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b"))

    run(scenario())


def test_a_peer_whose_key_is_not_trusted_does_not_keep_others_from_being_dialled(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        address = await b.endpoint.listen("127.0.0.1:0")
        a = Node("a", stores["a"], {"nobody": (address,), "b": (address,)})
        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b"))
            await until(lambda: a.obstacle("nobody") != "not connected yet")
            assert "nobody" in (a.obstacle("nobody") or "")

    run(scenario())


def test_a_decode_peer_is_one_whose_engine_is_up_with_the_same_model(tmp_path: Path) -> None:
    """A prefill-only host answered in its own model's name with what another model had written."""

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})

        def say(**changes: object) -> None:
            b.hello = msgspec.structs.replace(b.hello, **changes)
            b.peers.announce()

        def why_not() -> str:
            return a.peers.decoder(IDENTITY)[1]

        async with nodes(a, b):
            a.dial()
            await until(lambda: a.knows("b"))
            assert a.peers.decoder(IDENTITY) == (None, "no decode peer is connected")
            say(roles=("prefill", "decode"))
            await until(lambda: a.peers.decoder(IDENTITY)[0] is not None)
            assert why_not() == ""
            say(identity=None)
            await until(lambda: why_not() == "no decode peer can serve (b: its engine is not up)")
            for field in ("model", "tokenizer", "architecture"):
                say(identity=msgspec.structs.replace(IDENTITY, **{field: f"another {field}"}))
                await until(lambda name=field: f" another {name}, prefiller " in why_not())
                assert a.peers.decoder(IDENTITY)[0] is None
            say(identity=msgspec.structs.replace(IDENTITY, kv_type="q8_0/q8_0"))  # it can still read prompts itself
            await until(lambda: a.peers.decoder(IDENTITY)[0] is not None)

    run(scenario())


def test_hosts_that_will_never_hand_over_say_so_once_and_in_the_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S8, M2. Both ends logged `link open` and every request fell back, which only its own headers said."""

    def said() -> list[str]:
        events = [r for r in caplog.records if r.msg == "no handoffs with peer"]
        return [vars(r)["zc_fields"]["detail"] for r in events]

    def status(node: Node) -> object:
        return node.peers.describe(node.peers.all()[0])["mismatch"]

    async def scenario() -> None:
        stores = keys(tmp_path, "a", "b")
        b = Node("b", stores["b"])
        a = Node("a", stores["a"], {"b": (await b.endpoint.listen("127.0.0.1:0"),)})
        a.hello = msgspec.structs.replace(a.hello, roles=("decode",))
        b.hello = msgspec.structs.replace(b.hello, identity=msgspec.structs.replace(IDENTITY, kv_type="q8_0/q8_0"))
        async with nodes(a, b):
            a.dial()
            await until(lambda: status(a) is not None and b.peers.all() and status(b) is not None)
            b.peers.announce()
            await until(lambda: len(a.peers.all()) == 1)
            wanted = "decoder has KV type f16/f16, prefiller q8_0/q8_0: start both with the same --kv-type"
            assert (status(a), status(b), said()) == (wanted, wanted, [wanted, wanted])  # once each
            a.hello = msgspec.structs.replace(
                a.hello, roles=("prefill",)
            )  # who prefills both have nothing to hand over
            a.peers.announce()
            await until(lambda: status(a) is None and status(b) is None)

    run(scenario())
