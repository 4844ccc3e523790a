"""zc-handoff's link beside what others would use, in the same run: python -m benches.peers [--json]

iperf3, NIXL, Mooncake, pyzmq, a plain asyncio/ssl stream, aioquic and ours move the same memory between two processes
on loopback, one after another, for several rounds; medians are reported, and ratios are of the same round. Ours,
asyncio/ssl and aioquic encrypt. CPU-seconds count both processes.

Each peer lives in a virtual environment of its own under the cache folder ($ZC_CACHE, else ~/.cache/zc-handoff), made
when it is first needed and said so; none of them is a dependency. A peer that cannot be had is named with the reason,
never estimated. This is a bench, not a test: figures of a busy machine are figures of that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from zerocopy.cli import iperf3
from zerocopy.cli.ending import temporary_folder

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPTS: Final = Path(__file__).with_name("peer")
OURS: Final = "zc-handoff-tcp"
YARDSTICK: Final = "iperf3"
SAMPLE_TIMEOUT_S: Final = 300
INSTALL_TIMEOUT_S: Final = 1800


@dataclass(frozen=True)
class Peer:
    """`script` in `benches/peer`; `packages` are what its own environment gets, none means ours."""

    name: str
    encrypted: bool
    script: str = ""
    packages: tuple[str, ...] = ()
    hint: str = ""


PEERS: Final = (
    Peer(YARDSTICK, encrypted=False, hint="apt-get install iperf3"),
    Peer(OURS, encrypted=True, script="zc_handoff_tcp.py"),
    # Without its dependencies: it asks for PyTorch (5 GB), which moving memory does not use.
    Peer("nixl-tcp", False, "nixl_tcp.py", ("--no-deps", "nixl-cu12", "numpy"), "it is built for Linux on x86-64"),
    Peer(
        "mooncake-tcp", False, "mooncake_tcp.py", ("mooncake-transfer-engine-non-cuda", "numpy"),
        "apt-get install libibverbs1 ibverbs-providers",
    ),
    Peer("pyzmq-tcp", False, "pyzmq_tcp.py", ("pyzmq",)),
    Peer("asyncio-ssl", True, "asyncio_ssl.py"),
    Peer("aioquic", True, "aioquic_quic.py", ("aioquic",)),
)  # fmt: skip


class Sample(NamedTuple):
    gbps: float
    cpu_s_per_gib: float


class Absent(Exception):
    """The peer cannot be measured here; the message says why."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- where each peer lives -------------------------------------------------------------------------------------------


def interpreter(peer: Peer) -> str:
    """Its Python; made if it is not there. Raises Absent."""
    if not peer.packages:
        return sys.executable
    cache = Path(os.environ.get("ZC_CACHE") or Path.home() / ".cache" / "zc-handoff")
    folder = cache / "peers" / peer.name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = " ".join(peer.packages)
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"{peer.name}: installing {wanted} into {folder}")
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        if done.returncode:
            raise Absent(f"pip install {wanted} failed: {last_line(done.stderr)}")
        stamp.write_text(wanted)
    return str(python)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


# -- one measurement -------------------------------------------------------------------------------------------------


def measure(peer: Peer, mib: int, block_kib: int) -> Sample:
    """Raises Absent."""
    if peer.name == YARDSTICK:
        return measure_iperf3(mib)
    command = [interpreter(peer), str(SCRIPTS / peer.script), str(mib), str(block_kib)]
    with temporary_folder("zc-peer-") as folder:  # keys and the like: their processes end without cleaning up
        environment = os.environ | {"TMPDIR": str(folder)} | ({} if peer.packages else {"PYTHONPATH": str(ROOT)})
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_TIMEOUT_S, env=environment)
        except subprocess.TimeoutExpired:
            raise Absent(f"no result within {SAMPLE_TIMEOUT_S} s") from None
    figures = [line for line in done.stdout.splitlines() if line.startswith('{"gbps"')]
    if done.returncode or not figures:
        raise Absent("; ".join(filter(None, [last_line(done.stderr), peer.hint])))
    return Sample(**json.loads(figures[-1]))


def measure_iperf3(mib: int) -> Sample:
    """One stream, one core at each end: what it calls a ceiling. Raises Absent."""
    if shutil.which("iperf3") is None:
        raise Absent(f"not installed: {PEERS[0].hint}")
    try:
        found = iperf3.measured(lambda: iperf3.on_loopback(mib << 20))
    except iperf3.Iperf3Failed as error:
        raise Absent(str(error)) from None
    return Sample(found.gbps, found.cpu_s_per_gib)


# -- all of them -----------------------------------------------------------------------------------------------------


def measure_all(
    peers: Sequence[Peer], rounds: int, mib: int, block_kib: int
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples by name, one a round; and who is absent, why."""
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
    absent: dict[str, str] = {}
    for number in range(rounds):
        for peer in peers:
            if peer.name in absent:
                continue
            try:
                sample = measure(peer, mib, block_kib)
            except Absent as why:
                absent[peer.name] = str(why)
                say(f"{peer.name}: absent: {why}")
                continue
            samples[peer.name].append(sample)
            figures = f"{sample.gbps:6.2f} Gb/s {sample.cpu_s_per_gib:5.2f} CPU-s/GiB"
            say(f"round {number + 1}/{rounds}  {peer.name:14} {figures}")
    return {name: many for name, many in samples.items() if name not in absent}, absent


def row(peer: Peer, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians; ratios are medians over the rounds of the ratio in that round."""
    mine = samples[peer.name]

    def ratio(over: str, of: str, figure: str) -> float | None:
        if over not in samples or of not in samples:
            return None
        pairs = zip(samples[over], samples[of], strict=True)
        ratios: list[float] = [getattr(a, figure) / getattr(b, figure) for a, b in pairs]
        return round(statistics.median(ratios), 3)

    return {
        "name": peer.name,
        "encrypted": peer.encrypted,
        "gbps": round(statistics.median(sample.gbps for sample in mine), 3),
        "cpu_s_per_gib": round(statistics.median(sample.cpu_s_per_gib for sample in mine), 3),
        "ratio_iperf3": ratio(peer.name, YARDSTICK, "gbps"),
        "ours_gbps_ratio": ratio(OURS, peer.name, "gbps"),
        "ours_cpu_ratio": ratio(OURS, peer.name, "cpu_s_per_gib"),
    }


def report(peers: Sequence[Peer], rounds: int, mib: int, block_kib: int) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    samples, absent = measure_all(peers, rounds, mib, block_kib)
    return {
        "rounds": rounds,
        "rows": [row(peer, samples) for peer in peers if peer.name in samples],
        "absent": [{"name": name, "why": why} for name, why in absent.items()],
        "mib": mib,
        "block_kib": block_kib,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(load_before, 2),
    }


def table(result: dict[str, Any]) -> str:
    head = f"{'':16}{'Gb/s':>8}{'x iperf3':>10}{'CPU-s/GiB':>11}{'ours: speed':>13}{'ours: CPU':>11}"
    lines = [head]
    for one in result["rows"]:
        text = [f"{one[key]:.2f}" if one[key] is not None else "-" for key in (
            "gbps", "ratio_iperf3", "cpu_s_per_gib", "ours_gbps_ratio", "ours_cpu_ratio")]  # fmt: skip
        name = one["name"] + ("" if one["encrypted"] else " *")
        lines.append(f"{name:16}{text[0]:>8}{text[1]:>10}{text[2]:>11}{text[3]:>13}{text[4]:>11}")
    lines.append("* plaintext, not authenticated")
    lines += [f"{one['name']}: absent: {one['why']}" for one in result["absent"]]
    return "\n".join([*lines, f"{result['rounds']} rounds of {result['mib']} MiB, {result['machine']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=2048, help="per peer and round, in multiples of 256 (default: 2048)")
    parser.add_argument("--block-kib", type=int, default=4096, help="one transfer or page (default: 4096)")
    parser.add_argument("--only", metavar="NAME,...", help="some of: " + ", ".join(peer.name for peer in PEERS))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [peer.name for peer in PEERS]
    chosen = [peer for peer in PEERS if peer.name in names]
    if unknown := set(names) - {peer.name for peer in PEERS}:
        parser.error(f"no peer is called {', '.join(sorted(unknown))}")
    result = report(chosen, options.rounds, options.mib, options.block_kib)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
