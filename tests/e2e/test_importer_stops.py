"""An importer that stops in mid-transfer stops the sender: nobody's memory grows, and then it goes on (T5, G3)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import psutil
import pytest

from tests.e2e.pair import (
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    make_pair,
    new_key,
    proof_of,
    wait_until,
)
from zerocopy.cli.hosts import Host, Hosts
from zerocopy.runtime.synthetic import SUFFIX, Descriptor, write_descriptor

TOKENS: Final = 20_000
PREFILL_S: Final = 1.2  # and 60 MB of KV: what would be in somebody's memory if nobody were held back
RING_MIB: Final = 2
STOPPED_S: Final = 5.0
FLAT: Final = 6 << 20  # well below what is still to come, above what a Python process does by itself
FLAGS: Final = (
    "--n-ctx", str(TOKENS + 64), "--chunk-tokens", "256", "--page-tokens", "128", "--rings", "1",
    "--ring-mib", str(RING_MIB), "--transfer-s", "60", "--allow-proofs",
)  # fmt: skip


@pytest.fixture(scope="module")
def paced(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two hosts whose engine takes its time for a prompt and none for anything else."""
    folder = tmp_path_factory.mktemp("paced")
    model = folder / f"small{SUFFIX}"
    write_descriptor(model, Descriptor("small", prefill_tokens_per_s=TOKENS / PREFILL_S))
    with Hosts(folder) as hosts:
        pair = make_pair(hosts, model, folder, transport=transport, engine=FLAGS)
        pair.start()
        yield pair


def test_an_importer_that_stops_for_five_seconds_holds_the_sender_back(paced: Pair) -> None:
    _check_held_back(paced, "worker")


@pytest.mark.parametrize("transport", ["quic"], indirect=True, scope="session")
def test_so_does_a_daemon_that_stops_with_the_engine_of_the_link_in_it(paced: Pair) -> None:
    """Over TCP its kernel would go on acknowledging; here nobody does."""
    _check_held_back(paced, "daemon")


def _check_held_back(paced: Pair, which: str) -> None:
    prompt, key = [(7 * i + i // 13) % 500 for i in range(TOKENS)], new_key()
    local = ask(paced.decoder, prompt, "local", key=key)
    processes = [psutil.Process(pid) for host in (paced.prefiller, paced.decoder) for pid in _pids(host)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, paced.decoder, prompt, "disaggregated", key=key)
        wait_until(lambda: all(host.status()["reserved_bytes"] for host in (paced.prefiller, paced.decoder)), "a ring")
        time.sleep(PREFILL_S / 6)
        with _stopped(_pids(paced.decoder)[which == "worker"]):
            time.sleep(0.2)  # what was on its way has arrived; most of the prompt is still to come
            grown = _growth(processes, STOPPED_S)
            assert not answer.done()
        moved = answer.result(60)
    assert max(grown) < FLAT, dict(zip(processes, grown, strict=True))
    assert_disaggregated(moved)
    assert moved.body["timings"]["handoff"]["transport"] == paced.transport
    assert proof_of(moved) == proof_of(local)
    assert_nothing_held(paced.prefiller, paced.decoder)


def _pids(host: Host) -> tuple[int, int]:
    """Of the daemon and of its worker."""
    assert host.process is not None
    return host.process.pid, int(host.status()["worker"]["pid"])


def _growth(processes: list[psutil.Process], seconds: float) -> list[int]:
    """How much more memory each had at most than at the beginning."""
    before = [process.memory_info().rss for process in processes]
    peak, until = before, time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        peak = [max(had, process.memory_info().rss) for had, process in zip(peak, processes, strict=True)]
    return [most - had for most, had in zip(peak, before, strict=True)]


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
