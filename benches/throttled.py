"""One handoff at 1 MB/s beside another on the same link (issue 5, acceptance 5): python -m benches.throttled, JSON.

The prefiller is a test build of the daemon that paces the pages of every prompt of `SLOW` tokens. A round measures the
other request alone, then started after a slow one: once while the slow one only transfers, and once at the same moment,
when the two prompts share the engine too. The limit of 1.2 is for the former: it is the wire, memory and credit that
must not be shared unfairly. The last slow request runs to its end, which shows that it was slow and came over right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil

import zerocopy.daemon.outgoing as outgoing
from benches.two_hosts import MOVED, Two, two_hosts
from zerocopy.cli.hosts import Host
from zerocopy.cli.main import run as run_cli
from zerocopy.cli.measuring import median
from zerocopy.cli.workload import Arrival, prompt_of
from zerocopy.daemon.memory import Lease
from zerocopy.daemon.outgoing import Outgoing, _Page

BYTES_PER_S: Final = 1_000_000
SLOW: Final = 500  # prompt tokens: 11.5 MB of SmolLM2's state
OTHER: Final = 300
LIMIT: Final = 1.2
WORDS: Final = 40_000


class Paced(Outgoing):
    """A page leaves only when those before it have taken their time at the cap."""

    _next_at = 0.0

    def _next_page(self, lease: Lease) -> _Page | None:
        if (early := self._next_at - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(early, self._wake.set)
            return None
        return super()._next_page(lease)

    def _send(self, page: _Page) -> None:
        if len(self._tokens) == SLOW:
            self._next_at = max(self._next_at, time.monotonic()) + page.header.payload_bytes / BYTES_PER_S
        super()._send(page)


def ask(host: Host, tokens: int, number: int) -> tuple[float, dict[str, Any]]:
    """(seconds, the answer's handoff)"""
    began = time.monotonic()
    body = {"prompt": prompt_of(Arrival(0.0, tokens, 8), number, WORDS), "max_tokens": 8}
    answer = host.complete(body, MOVED)
    if answer.status != 200 or answer.headers["x-zc-placement"] != "disaggregated":
        raise SystemExit(f"a request of {tokens} tokens failed: {answer.body}")
    return time.monotonic() - began, answer.body["timings"]["handoff"]


def beside(two: Two, number: int, *, computed: bool) -> tuple[float, float]:
    """(seconds of the other, KV bytes a second of the slow one)"""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, two.decoder, SLOW, number)
        while not two.prefiller.status()["handoffs_out"]:
            time.sleep(0.01)
        if computed:
            wait_for_idle(two.processes()["prefiller worker"])
        took, _ = ask(two.decoder, OTHER, number + 1)
        if slow.done():
            raise SystemExit("the throttled handoff ended before the other")
        slow_s, handoff = slow.result()
        return took, handoff["kv_bytes"] / slow_s


def wait_for_idle(worker: psutil.Process) -> None:
    """Until it has used hardly any processor time for a while."""
    used = -1.0
    while (now := sum(worker.cpu_times()[:2])) > used + 0.02:
        used = now
        time.sleep(0.4)


def run(rounds: int) -> dict[str, Any]:
    flags = ["--n-ctx", "1024", "--threads", "1", "--log-level", "warning"]
    command = (sys.executable, "-m", "benches.throttled", "--host")
    alone, transferring, at_once = list[float](), list[float](), list[float]()
    with two_hosts(flags, prefill_command=command) as two:
        ask(two.decoder, OTHER, 0)  # warm
        for turn in range(rounds):
            alone.append(ask(two.decoder, OTHER, 10 * turn + 1)[0])
            took, slow_rate = beside(two, 10 * turn + 2, computed=True)
            transferring.append(took)
            at_once.append(beside(two, 10 * turn + 4, computed=False)[0])
            print(f"alone {alone[-1]:.2f} s, beside {took:.2f} s, at once {at_once[-1]:.2f} s", file=sys.stderr)
    return {
        "alone_s": round(median(alone), 3),
        "beside_s": round(median(transferring), 3),
        "ratio": round(median(transferring) / median(alone), 3),
        "at_once_s": round(median(at_once), 3),
        "ratio_at_once": round(median(at_once) / median(alone), 3),
        "slow_bytes_per_s": round(slow_rate),
        "rounds": rounds,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    if sys.argv[1:2] == ["--host"]:
        outgoing.Outgoing = Paced  # type: ignore[misc]
        del sys.argv[1]
        return run_cli()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    report = run(parser.parse_args().rounds)
    print(json.dumps({**report, "holds": report["ratio"] <= LIMIT}, indent=2))
    return 0 if report["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
