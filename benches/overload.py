"""Ten times what two hosts can serve (issue 5, acceptance 3): python -m benches.overload, JSON on stdout.

Capacity first: requests in a closed loop, two more at once than there are lanes, so that no lane is ever empty and
nobody is refused (a host may refuse once as many wait as there are lanes). Then an open loop at `--factor` times that
rate. Every request must be refused within a second or answered within its deadline (`--request-s`);
goodput counts the answers that came in time while the load lasted. The four processes' memory is sampled throughout.
Exit code 1 when something that must hold does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Final

import psutil

from benches.two_hosts import MOVED, Two, two_hosts
from zerocopy.cli.bench_serve import Seen, Target, closed_loop, open_loop
from zerocopy.cli.measuring import median, quantiles
from zerocopy.cli.workload import Arrival, poisson

SEQUENCES: Final = 4
REFUSED_S: Final = 1.0
# Of one process, between the first and the last quarter of the load: what an allocator's arenas still take by chance.
FLAT_MIB: Final = 16.0
WORDS: Final = 40_000  # below SmolLM2's vocabulary


def lengths(rng: random.Random) -> tuple[int, int]:
    """Tokens in and out: short enough that a minute holds hundreds of requests on two cores."""
    return rng.randrange(16, 129), rng.randrange(4, 17)


def load(rate: float, seconds: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    return [Arrival(at, *lengths(rng)) for at in takewhile(lambda at: at < seconds, poisson(rate, seed))]


class Memory:
    """Resident MiB of each process, twice a second."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.samples: dict[str, list[float]] = {name: [] for name in processes}
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            for name, process in self._processes.items():
                self.samples[name].append(process.memory_info().rss / (1 << 20))

    def report(self) -> dict[str, dict[str, float]]:
        return {name: _growth(samples) for name, samples in self.samples.items()}


def _growth(samples: Sequence[float]) -> dict[str, float]:
    quarter = max(1, len(samples) // 4)
    first, last = median(samples[:quarter]), median(samples[-quarter:])
    figures = {"first_mib": first, "last_mib": last, "peak_mib": max(samples), "growth_mib": last - first}
    return {name: round(value, 1) for name, value in figures.items()}


def in_time(seen: Seen, deadline_s: float) -> bool:
    return seen.failure is None and seen.ended - seen.sent <= deadline_s


def broken(seen: Seen, deadline_s: float) -> str | None:
    """Why a request was neither refused at once nor answered in time."""
    took = seen.ended - seen.sent
    if seen.failure is None:
        return None if took <= deadline_s else "answered late"
    return (
        None if took <= REFUSED_S and seen.refused else f"{seen.failure} after {'<' if took <= REFUSED_S else '>'} 1 s"
    )


def capacity(target: Target, seconds: float, deadline_s: float) -> float:
    """Requests a second, answered in time."""
    rng, end = random.Random(1), time.monotonic() + seconds
    endless = (Arrival(0.0, *lengths(rng)) for _ in iter(lambda: time.monotonic() < end, False))
    seen = asyncio.run(closed_loop(target, endless, SEQUENCES + 2))
    failed = Counter(one.failure for one in seen if one.failure)
    if failed:
        raise SystemExit(f"requests failed while capacity was measured: {dict(failed)}")
    return sum(in_time(one, deadline_s) and one.ended <= end for one in seen) / seconds


def overloaded(two: Two, target: Target, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    memory = Memory(two.processes())
    arrivals = load(rate, args.seconds, seed=2)
    with memory.watched():
        began = time.monotonic()
        seen = asyncio.run(open_loop(target, arrivals, lambda _: None))
    served = [one for one in seen if one.failure is None]
    refused = [one.ended - one.sent for one in seen if one.refused]
    good = sum(in_time(one, args.request_s) and one.ended - began <= args.seconds for one in seen)
    return {
        "offered_rps": round(len(arrivals) / args.seconds, 2),
        "requests": len(seen),
        "completed": len(served),
        "refused": dict(Counter(one.failure for one in seen if one.refused)),
        "broken": dict(Counter(why for one in seen if (why := broken(one, args.request_s)))),
        "goodput_rps": round(good / args.seconds, 3),
        "refused_after_s": _three(refused),
        "refused_at_most_s": round(max(refused, default=0.0), 3),
        "served_after_s": _three([one.ended - one.sent for one in served]),
        "served_at_most_s": round(max((one.ended - one.sent for one in served), default=0.0), 3),
        "memory": memory.report(),
    }


def _three(samples: Sequence[float]) -> dict[str, float] | None:
    found = quantiles(samples)
    return None if found is None else {"p50": found.p50, "p90": found.p90, "p99": found.p99}


def run(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--n-ctx", "1024", "--threads", "1", "--chunk-tokens", "128", "--sequences", str(SEQUENCES),
             "--rings", str(SEQUENCES), "--tenant-requests", "4096", "--queue-s", str(args.queue_s),
             "--request-s", str(args.request_s), "--log-level", "warning"]  # fmt: skip
    with two_hosts(flags) as two:
        target = Target(two.decoder.url, headers=MOVED, words=WORDS, timeout_s=args.request_s + 30)
        asyncio.run(closed_loop(target, [Arrival(0.0, 64, 4)] * 2, 1))  # warm
        able = capacity(target, args.capacity_s, args.request_s)
        print(f"capacity {able:.2f} requests/s", file=sys.stderr)
        report = overloaded(two, target, args.factor * able, args)
        free_s = two.free_after_s(10)
        report |= {"held_afterwards": two.held(), "free_after_s": free_s, "faults": two.faults()}
    ratio = report["goodput_rps"] / able
    return {"capacity_rps": round(able, 3), "goodput_ratio": round(ratio, 3), **report, "load": os.getloadavg()[0]}


def verdict(report: dict[str, Any]) -> dict[str, bool]:
    checks: dict[str, Callable[[], bool]] = {
        "no_fault": lambda: not report["faults"],
        "refused_at_once_or_served_in_time": lambda: not report["broken"],
        "memory_flat": lambda: all(each["growth_mib"] <= FLAT_MIB for each in report["memory"].values()),
        "goodput": lambda: report["goodput_ratio"] >= 0.9,
        "nothing_held": lambda: report["free_after_s"] is not None,
    }
    return {name: check() for name, check in checks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--capacity-s", type=float, default=30.0, help="of the closed loop")
    parser.add_argument("--factor", type=float, default=10.0, help="of capacity")
    parser.add_argument("--queue-s", type=float, default=10.0, help="longest wait for a lane, told to the daemons")
    parser.add_argument("--request-s", type=float, default=20.0, help="deadline of a request, told to the daemons")
    report = run(args := parser.parse_args())
    passed = verdict(report)
    print(json.dumps({"factor": args.factor, "seconds": args.seconds, **report, "holds": passed}, indent=2))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
