"""Many requests at once: all finish, nobody blocks anybody, nothing is held afterwards (Q1, Q2, H5, G3, G6)."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.slow_relay import prefiller_far_and_near, slow_path_to
from tests.e2e.conftest import ModelFile, StartPair
from tests.e2e.pair import (
    ENGINE,
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    assert_still_exact,
    error_of,
    headers,
    prompt_of,
    send_only,
    text_of,
    wait_until,
)
from zerocopy.cli.hosts import Answer, Host, Hosts, free_port

MORE = ("--sequences", "4", "--kv-tokens", "4096", "--rings", "4")


@pytest.fixture(scope="module")
def busy_pair(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    roles = {"prefill_role": "prefill+decode", "transport": transport}
    with start_pair(**roles, prefill_flags=MORE, decode_flags=MORE) as pair:
        yield pair


def at_once(host: Host, lengths: list[int], mode: str, **how: object) -> list[Answer]:
    with ThreadPoolExecutor(len(lengths)) as pool:
        asked = [pool.submit(ask, host, prompt_of(n, seed), mode, **how) for seed, n in enumerate(lengths)]  # type: ignore[arg-type]
        return [one.result() for one in asked]


def test_many_prompts_of_all_lengths_at_once_are_all_handed_over(busy_pair: Pair) -> None:
    """Q1: more than there are lanes."""
    lengths = [2, 900, 33, 64, 65, 300, 5, 700, 128, 31, 450, 90]
    answers = at_once(busy_pair.decoder, lengths, "disaggregated")
    for length, answer in zip(lengths, answers, strict=True):
        assert_disaggregated(answer)
        assert answer.body["usage"]["total_tokens"] == length + 8
        assert answer.body["timings"]["prompt_tokens_evaluated_here"] == 1
    assert_still_exact(busy_pair)


def test_local_and_disaggregated_requests_run_side_by_side(busy_pair: Pair) -> None:
    """Both hosts prefill for themselves and one for the other, at the same time."""
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(at_once, busy_pair.decoder, [400, 200, 100], "disaggregated"),
            pool.submit(at_once, busy_pair.decoder, [150, 350, 60], "local"),
            pool.submit(at_once, busy_pair.prefiller, [250, 80], "local"),
        ]
        answers = [answer for one in asked for answer in one.result()]
    assert [answer.status for answer in answers] == [200] * 8
    assert_still_exact(busy_pair)


def test_a_probe_of_a_busy_host_is_held_to_the_tolerance_not_to_the_bit(busy_pair: Pair) -> None:
    answers = at_once(busy_pair.decoder, [300] * 6, "disaggregated")
    for answer in answers:
        probe = answer.body["timings"]["handoff"]["probe"]
        assert probe == "bit-equal" or "tolerance 0.03" in probe


def test_with_memory_for_one_and_a_half_prompts_four_long_ones_all_finish(
    start_pair: StartPair, transport: str
) -> None:
    """Field report: deadlock of buffers."""
    scarce = ("--sequences", "4", "--kv-tokens", "1536")
    with start_pair(transport=transport, prefill_flags=scarce, decode_flags=scarce) as pair:
        for answer in at_once(pair.decoder, [1000] * 4, "disaggregated"):
            assert_disaggregated(answer)
        assert_nothing_held(pair.prefiller, pair.decoder)


def test_a_prompt_that_can_never_fit_is_refused_at_once_with_both_figures(busy_pair: Pair) -> None:
    answer = ask(busy_pair.decoder, prompt_of(1020), "local")
    code, message = error_of(answer)
    assert (answer.status, code) == (400, "context-length")
    assert "1028" in message and "1024" in message


def test_a_full_line_is_a_typed_refusal_with_a_time_to_come_back(start_pair: StartPair) -> None:
    """G3. The engine stands still until all have come, so that none is answered before."""
    short = ("--sequences", "1", "--queue", "1")
    with start_pair("llama", decode_flags=short) as pair, ThreadPoolExecutor(6) as pool:
        worker = pair.decoder.status()["worker"]["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            asked = [pool.submit(ask, pair.decoder, prompt_of(300, n), "local") for n in range(6)]
            wait_until(lambda: sum(one.done() for one in asked) == 4, "four refusals")
            refused = [one.result() for one in asked if one.done()]
        finally:
            os.kill(worker, signal.SIGCONT)
        for answer in refused:
            assert (answer.status, error_of(answer)[0]) == (503, "queue-full")
            assert int(answer.headers["retry-after"]) >= 1
        assert sorted(one.result().status for one in asked) == [200, 200, 503, 503, 503, 503]
        assert_nothing_held(pair.decoder)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(busy_pair: Pair) -> None:
    """H7: at every stage, on both hosts, and the next request is exact."""
    rng = random.Random(5)
    open_sockets: list[socket.socket] = []
    for n in range(60):
        body = {"prompt": prompt_of(rng.choice([3, 100, 500, 900]), n), "max_tokens": 60, "stream": n % 2 == 0}
        open_sockets.append(send_only(busy_pair.decoder, body, headers(rng.choice(["local", "disaggregated"]))))
        if len(open_sockets) > 6:
            open_sockets.pop(rng.randrange(len(open_sockets))).close()
        time.sleep(rng.random() * 0.05)
    for sock in open_sockets:
        sock.close()
    assert_nothing_held(busy_pair.prefiller, busy_pair.decoder)
    assert_still_exact(busy_pair)


def test_a_decoder_whose_engine_stands_still_blocks_no_other(
    model_file: ModelFile, tmp_path: Path, transport: str
) -> None:
    """H5: one prefiller, two decoders; the pages of one are taken by nobody."""
    with Hosts(tmp_path) as hosts:
        common = ["--model", str(model_file("llama")), *ENGINE, *MORE]
        prefiller = hosts.add("prefiller", ["--role", "prefill", *common])
        how: dict[str, Any] = {"peers": [prefiller], "transport": transport}
        stuck, fine = (hosts.add(name, ["--role", "decode", *common], **how) for name in ("stuck", "fine"))
        for host in (prefiller, stuck, fine):
            host.start()
        prefiller.wait_ready()
        for host in (stuck, fine):
            host.wait_ready(connected_to=["prefiller"])
        worker = stuck.status()["worker"]["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            body = {"prompt": prompt_of(900), "max_tokens": 4}
            waiting = [send_only(stuck, body, headers("disaggregated")) for _ in range(6)]
            wait_until(lambda: prefiller.status()["handoffs_out"] >= 3, "the stuck decoder's handoffs to have begun")
            for answer in at_once(fine, [700, 50, 300], "disaggregated"):
                assert_disaggregated(answer)
            for sock in waiting:
                sock.close()
        finally:
            os.kill(worker, signal.SIGCONT)
        assert_nothing_held(prefiller, stuck, fine)
        assert text_of(ask(stuck, prompt_of(50), "disaggregated")) == text_of(ask(fine, prompt_of(50), "disaggregated"))


def test_a_decoder_takes_from_several_prefillers(model_file: ModelFile, tmp_path: Path, transport: str) -> None:
    """And goes on with the one that is left."""
    with Hosts(tmp_path) as hosts:
        common = ["--model", str(model_file("llama")), *ENGINE, *MORE]
        first, second = (hosts.add(name, ["--role", "prefill", *common]) for name in ("first", "second"))
        decoder = hosts.add("decoder", ["--role", "decode", *common], peers=[first, second], transport=transport)
        for host in (first, second, decoder):
            host.start()
        first.wait_ready()
        second.wait_ready()
        decoder.wait_ready(connected_to=["first", "second"])
        answers = at_once(decoder, [500, 400, 300, 200], "disaggregated")
        assert all(answer.status == 200 for answer in answers)
        used = {answer.headers["x-zc-prefiller"] for answer in answers}
        gone = first if "first" in used else second
        gone.stop()
        for answer in at_once(decoder, [120, 220], "disaggregated"):
            assert_disaggregated(answer)
        assert_nothing_held(decoder)


def test_a_handoff_over_a_slow_link_holds_up_no_other(model_file: ModelFile, tmp_path: Path, transport: str) -> None:
    """H5: one prefiller, one decoder behind 0.1 MB/s a connection; what another asks for afterwards is there before."""
    with Hosts(tmp_path) as hosts, ThreadPoolExecutor(1) as pool:
        common = ["--model", str(model_file("llama", scale=4)), *ENGINE, *MORE]
        port = free_port()
        with slow_path_to(port, 8e5, transport) as (slow_path, relay):
            prefiller, far, near = prefiller_far_and_near(hosts, common, f"127.0.0.1:{port}", slow_path, transport)
            slow = pool.submit(ask, far, prompt_of(1000), "disaggregated")
            wait_until(lambda: prefiller.status()["handoffs_out"] == 1, "the slow handoff to begin")
            for n in range(3):
                assert_disaggregated(ask(near, prompt_of(1000, n), "disaggregated"))
            assert not slow.done(), "the link was not slow: this shows nothing"
            relay.bits_per_s = 1e9
            assert_disaggregated(slow.result())
