"""Whose key is not the one trusted is refused in both directions, over both transports, before anything of it exists
here (X1; issue 4, acceptance 6)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from transport.link import LinkError

from .conftest import Run
from .hosts import Host, pattern, two_hosts


@contextlib.asynccontextmanager
async def third(directory: Path, transport: str) -> AsyncIterator[tuple[Host, str]]:
    """A host that nobody trusts yet, and where it listens."""
    c = Host(directory, "c", transport)
    try:
        yield c, await c.open().listen("127.0.0.1:0")
    finally:
        await c.endpoint.close()


@pytest.mark.parametrize("others", [True, False], ids=["others-trusted", "nobody-trusted"])
def test_a_client_whose_key_is_not_trusted_is_refused_by_the_server(
    run: Run, tmp_path: Path, transport: str, others: bool
) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (_, b, address), third(tmp_path, transport) as (c, _):
            if not others:
                b.keys.forget("a")  # an empty table must not mean everybody
            c.trust(b)  # it knows b's key; b does not know its
            with pytest.raises(LinkError, match="is this host's key trusted there") as caught:
                await c.endpoint.connect("b", address)
            assert caught.value.reason == "refused"
            assert b.links == c.links == []

    run(work())


@pytest.mark.parametrize("trusted", [False, True], ids=["stranger", "another-peer"])
def test_a_server_whose_key_is_not_that_peers_is_refused_by_the_client(
    run: Run, tmp_path: Path, transport: str, trusted: bool
) -> None:
    """That c's key is trusted does not make c b."""

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, _), third(tmp_path, transport) as (c, address):
            c.trust(a)  # it would accept a; a takes it for b
            if trusted:
                a.trust(c)
            with pytest.raises(LinkError, match="compare") as caught:
                await a.endpoint.connect("b", address)
            assert caught.value.reason == "wrong-key"
            assert a.links == b.links == c.links == []

    run(work())


def test_trust_given_or_taken_away_counts_from_the_next_connection(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (_, b, address), third(tmp_path, transport) as (c, _):
            c.trust(b)
            with pytest.raises(LinkError):
                await c.endpoint.connect("b", address)
            b.trust(c)
            link = await c.endpoint.connect("b", address)
            assert [link.peer for link in b.links] == ["c"]
            b.keys.forget("c")
            await link.send_page(b"still", pattern(1000))  # links already open stay
            with pytest.raises(LinkError):
                await c.endpoint.connect("b", address)
            assert len(b.links) == 1

    run(work())


def test_a_peer_that_is_not_trusted_is_not_dialled_at_all(run: Run, tmp_path: Path, transport: str) -> None:
    """Nobody listens at that address: a dial would end otherwise."""

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, _, _address):
            a.keys.forget("b")
            with pytest.raises(LinkError, match="zc-handoff keys trust b") as caught:
                await a.endpoint.connect("b", "127.0.0.1:1")
            assert caught.value.reason == "unknown-peer"

    run(work())
