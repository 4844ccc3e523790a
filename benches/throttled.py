"""One handoff at 1 MB/s beside another (issue 5, acceptance 5): python -m benches.throttled, one JSON object.

One prefiller, two decoders; the path to one of them is a relay of 1 MB/s. A round measures a request of the other
decoder alone, then started after a slow one: once while the slow one only transfers, and once at the same moment, when
the two prompts share the engine too. The limit of 1.2 is for the former: it is the prefiller's memory, credit and lanes
that must not be shared unfairly. Every slow request runs to its end, which shows that it was slow and came over right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil

from benches.two_hosts import MOVED
from tests.daemon.slow_relay import prefiller_far_and_near, slow_path_to
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Host, Hosts, free_port, smollm2
from zerocopy.cli.measuring import median
from zerocopy.cli.workload import Arrival, prompt_of

BYTES_PER_S: Final = 1_000_000
SLOW: Final = 500  # prompt tokens: 11.5 MB of SmolLM2's state
OTHER: Final = 300
LIMIT: Final = 1.2
WORDS: Final = 40_000
FLAGS: Final = ("--n-ctx", "1024", "--threads", "1", "--log-level", "warning")


def ask(host: Host, tokens: int, number: int) -> tuple[float, dict[str, Any]]:
    """(seconds, the answer's handoff)"""
    began = time.monotonic()
    body = {"prompt": prompt_of(Arrival(0.0, tokens, 8), number, WORDS), "max_tokens": 8}
    answer = host.complete(body, MOVED)
    if answer.status != 200 or answer.headers["x-zc-placement"] != "disaggregated":
        raise SystemExit(f"a request of {tokens} tokens failed: {answer.body}")
    return time.monotonic() - began, answer.body["timings"]["handoff"]


def beside(prefiller: Host, far: Host, near: Host, number: int, *, computed: bool) -> tuple[float, float]:
    """(seconds of the near one, KV bytes a second of the far one)"""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, far, SLOW, number)
        while not prefiller.status()["handoffs_out"]:
            if slow.done():
                raise SystemExit(f"the throttled request ended before it was handed over: {slow.result()}")
            time.sleep(0.01)
        if computed:
            wait_for_idle(psutil.Process(prefiller.status()["worker"]["pid"]))
        took, _ = ask(near, OTHER, number + 1)
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
    alone, transferring, at_once = list[float](), list[float](), list[float]()
    port = free_port()
    with (
        temporary_folder("zc-throttled-") as folder,
        slow_path_to(port, 8 * BYTES_PER_S, "tcp") as (slow_path, _),
        Hosts(folder) as hosts,
    ):
        flags = ["--model", str(smollm2()), *FLAGS]
        prefiller, far, near = prefiller_far_and_near(hosts, flags, f"127.0.0.1:{port}", slow_path)
        ask(near, OTHER, 0)  # warm
        for turn in range(rounds):
            alone.append(ask(near, OTHER, 10 * turn + 1)[0])
            took, slow_rate = beside(prefiller, far, near, 10 * turn + 2, computed=True)
            transferring.append(took)
            at_once.append(beside(prefiller, far, near, 10 * turn + 4, computed=False)[0])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    report = run(parser.parse_args().rounds)
    print(json.dumps({**report, "holds": report["ratio"] <= LIMIT}, indent=2))
    return 0 if report["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
