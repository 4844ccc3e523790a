"""One host wired together, without its sockets and with a worker that has no engine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.scripted_worker import FACTS
from tests.daemon.wires import Peer, joined, run, until
from zerocopy.cli.status import MAX_BYTES
from zerocopy.config import DaemonConfig
from zerocopy.daemon.core import SHUTDOWN_RETRY_S, Core
from zerocopy.daemon.requests import GenerationRequest, RequestError
from zerocopy.daemon.telemetry import Telemetry
from zerocopy.daemon.trace import KEPT, Trace
from zerocopy.handoff.components import Component, PageHeader
from zerocopy.handoff.messages import Abort, Hello, Prefill, Reserve, pack_tokens

REQUEST = GenerationRequest(prompt=[1, 2, 3], max_tokens=4)
HELLO = Hello(boot_id=b"b" * 16, name="a", roles=("decode",), addresses=(), transports=("tcp",))


@contextlib.asynccontextmanager
async def running(script: str = "serve", **settings: Any) -> AsyncIterator[Core]:
    config = DaemonConfig(name="b", model=Path("m.gguf"), rings=1, ring_mib=1, **settings)
    core = Core(config, Telemetry(), (sys.executable, "-m", "tests.daemon.scripted_worker", script))
    engine = asyncio.create_task(core.worker.run())
    try:
        yield core
    finally:
        await core.stop()
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        core.memory.close()


@contextlib.asynccontextmanager
async def greeted(folder: Path, core: Core) -> AsyncIterator[Peer]:
    """A peer that has said what it is."""
    peer = Peer()
    async with joined(folder, peer, core.peers):
        peer.say(HELLO)
        await peer.hear(Hello)
        yield peer


async def refusal(core: Core, request: GenerationRequest = REQUEST) -> RequestError:
    with pytest.raises(RequestError) as error:
        async with contextlib.aclosing(core.generate(request)) as events:
            async for _ in events:
                pass
    return error.value


def prefill(handoff_id: bytes = b"h" * 16) -> Prefill:
    return Prefill(
        handoff_id=handoff_id,
        identity=FACTS.identity,
        prompt=pack_tokens([1, 2, 3]),
        tenant="",
        queue_deadline_s=10.0,
        probe=False,
    )


def metric(core: Core, name: str, **labels: str) -> float:
    return core.telemetry.registry.get_sample_value(name, labels) or 0.0


def test_a_host_serves_once_its_engine_is_up() -> None:
    async def scenario() -> None:
        async with running(role="decode") as core:
            assert (core.status().serving, core.status().reason) == (False, "the engine is starting")
            assert core.model_name() is None
            assert (await refusal(core)).reason == "worker-lost"
            await until(lambda: core.status().serving)
            assert core.model_name() == "scripted"
            assert core.status().detail["n_ctx"] == 512

    run(scenario())


def test_an_engine_that_cannot_start_says_why_in_the_status() -> None:
    async def scenario() -> None:
        async with running("start_failed", role="decode") as core:
            await until(lambda: core.status().reason == "the engine cannot load it: give another file")

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_host_that_only_prefills_needs_a_decode_peer_to_serve(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="prefill") as core:
            await until(lambda: core.worker.facts)
            assert core.status().reason == "no decode peer is connected"
            error = await refusal(core)
            assert (error.reason, error.status) == ("no-decoder", 503)
            assert metric(core, "zc_requests_total", outcome="failed", reason="no-decoder", placement="none") == 1

    run(scenario())


def test_a_request_that_ends_by_a_bug_is_not_counted_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(role="decode") as core:
            await until(lambda: core.worker.facts)
            monkeypatch.setattr(core.generation, "lanes", None)  # a bug
            with pytest.raises(AttributeError):
                await refusal(core)
            assert metric(core, "zc_requests_total", outcome="failed", reason="internal", placement="none") == 1

    run(scenario())


def test_a_proof_is_refused_unless_the_daemon_allows_it() -> None:
    """X4."""

    async def scenario() -> None:
        async with running(role="decode") as core:
            error = await refusal(core, GenerationRequest(prompt=[1], max_tokens=1, proof_key="ab" * 16))
            assert (error.reason, error.status) == ("proofs-off", 403)

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_host_that_stops_refuses_what_is_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="prefill") as core, greeted(tmp_path, core) as peer:
            await core.stop()
            assert (await refusal(core)).reason == "shutdown"
            assert core.status().reason == "draining: it ends what runs and takes nothing new"
            peer.say(prefill())
            assert (await peer.hear(Abort)).reason == "shutdown"

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_host_that_drains_takes_nothing_new_and_ends_what_runs(tmp_path: Path) -> None:
    """Q2: its peers know it at once."""

    async def scenario() -> None:
        async with running(role="prefill+decode") as core, greeted(tmp_path, core) as peer:
            await until(lambda: core.worker.facts)
            begun = asyncio.create_task(refusal(core))
            await until(lambda: core.status().detail["slots"]["decode"]["held_sequences"])  # type: ignore[index]
            core.drain()
            error = await refusal(core)
            assert (error.reason, error.status, error.retry_after_s) == ("shutdown", 503, SHUTDOWN_RETRY_S)
            assert not core.status().serving
            await until(lambda: peer.all(Hello)[-1].identity is None)
            drained = asyncio.create_task(core.drained())
            await asyncio.sleep(0.1)
            assert not drained.done()
            await core.stop()
            assert (await begun).reason == "shutdown"
            await drained

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_host_prefills_only_if_that_is_its_role(tmp_path: Path) -> None:
    """H9."""

    async def scenario() -> None:
        async with running(role="decode") as core, greeted(tmp_path, core) as peer:
            await until(lambda: core.worker.facts)
            peer.say(prefill())
            abort = await peer.hear(Abort)
            assert (abort.reason, abort.message) == ("role", "b does not prefill: its role is decode")

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_prompt_of_a_peer_becomes_a_handoff_until_its_link_falls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="prefill") as core:
            await until(lambda: core.worker.facts)
            async with greeted(tmp_path, core) as peer:
                peer.say(prefill())
                await peer.hear(Reserve)
                assert core.status().detail["handoffs_out"] == 1
                (link,) = core.peers.all()[0].links
                assert core.busy(link)
            await until(lambda: core.outgoing.running == 0)
            assert [(trace.outcome, trace.reason) for trace in core._traces] == [("aborted", "link-lost")]

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_replayed_prompt_closes_the_link(tmp_path: Path) -> None:
    """X7."""

    async def scenario() -> None:
        async with running(role="prefill") as core, greeted(tmp_path, core) as peer:
            await until(lambda: core.worker.facts)
            peer.say(prefill())
            await peer.hear(Reserve)
            peer.say(prefill())
            await until(lambda: peer.closed)

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_page_of_no_handoff_is_dropped_and_counted(tmp_path: Path) -> None:
    """Invariant: late frames of a dead epoch are dropped and counted."""

    async def scenario() -> None:
        async with running(role="decode") as core, greeted(tmp_path, core) as peer:
            header = PageHeader(
                handoff_id=b"h" * 16, identity=b"i" * 16, epoch=1, sequence=0, component=Component.TOKENS,
                layers=(0, 1), tokens=(0, 1), payload_bytes=4, checksum=0,
            )  # fmt: skip
            await peer.link.send_page(header.pack(), memoryview(bytearray(4)))
            assert metric(core, "zc_late_pages_total") == 1
            assert not peer.closed

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_page_header_that_cannot_be_read_closes_the_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="decode") as core, greeted(tmp_path, core) as peer:
            peer.link.send_page(bytes(128), memoryview(bytearray(4)))
            await until(lambda: peer.closed)

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_messages_of_unknown_handoffs_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="prefill+decode") as core, greeted(tmp_path, core) as peer:
            await until(lambda: core.worker.facts)
            peer.say(Abort(handoff_id=b"x" * 16, epoch=3, reason="cancelled", message=""))
            peer.say(prefill())
            await peer.hear(Reserve)
            assert not peer.closed

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_peers_hear_when_the_engine_comes_and_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="decode") as core, greeted(tmp_path, core) as peer:
            await until(lambda: [hello for hello in peer.all(Hello) if hello.identity == FACTS.identity])
            core.worker.kill("test")
            await until(lambda: peer.all(Hello)[-1].identity is None)
            await until(lambda: peer.all(Hello)[-1].identity == FACTS.identity)

    run(scenario())


def test_a_host_remembers_only_its_last_handoffs() -> None:
    async def scenario() -> None:
        async with running(role="decode") as core:
            for number in range(KEPT + 5):
                core._keep(Trace(f"{number:032x}", "decoder", "p", "tcp", 9, outcome="aborted", reason="cancelled"))
            kept = core.status().detail["recent_handoffs"]
            assert isinstance(kept, list)
            assert [int(trace["handoff"], 16) for trace in kept] == list(range(5, KEPT + 5))

    run(scenario())


def test_the_status_stays_readable_after_handoffs_of_many_pages() -> None:
    """A million tokens are thousands of pages each: `zc-handoff status` took what it could not read for a stranger."""

    async def scenario() -> None:
        async with running(role="decode") as core:
            for number in range(KEPT):
                trace = Trace(f"{number:032x}", "decoder", "p", "tcp", 9, outcome="aborted", reason="cancelled")
                trace.wire = [(123456.789012345, 123456.789012345, 8_388_608, "attention KV")] * 20_000
                core._keep(trace)
            assert len(trace.wire) == 20_000, "its maker's own"
            status = core.status().detail
            assert len(msgspec.json.encode(status)) < MAX_BYTES
            kept = status["recent_handoffs"]
            assert isinstance(kept, list) and [len(each["wire"]) for each in kept[-3:]] == [0, 20_000, 20_000]

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_metrics_can_be_read_at_any_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(role="prefill") as core:
            assert b"zc_reserved_bytes 0.0" in core.metrics_text()
            async with greeted(tmp_path, core):
                assert b"zc_link_up" in core.metrics_text()

    run(scenario())
