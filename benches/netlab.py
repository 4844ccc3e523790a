"""Our link beside iperf3 on emulated links: python -m benches.netlab [LINK ...] [--json]

For each link (as `scripts/netlab` takes them) a lab is made, `zc-handoff bench link` runs between its hosts with
defaults, and iperf3 in the same rounds; the ratio of the medians is what counts: 0.98 or more is the aim at 1 and 10
Gb/s. Needs root and iperf3. Owns nothing: the lab ends with its command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from transport.keys import trusting_pair
from zerocopy.cli.ending import temporary_folder

ROOT: Final = Path(__file__).resolve().parents[1]
LINKS: Final = ("1gbit", "10gbit")
ADDRESS: Final = "10.78.0.2:7600"
BENCH: Final = (sys.executable, "-m", "zerocopy", "bench", "link")


def measure(link: str, congestion: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Raises SystemExit with what the lab said."""
    inside = [sys.executable, "-m", "benches.netlab", "--inside", "--rounds", str(rounds), "--seconds", str(seconds)]
    command = [str(ROOT / "scripts" / "netlab"), link, "--congestion", congestion, "--", *inside]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{link}: {done.stderr}")
    report = json.loads(done.stdout)
    row, iperf3 = report["default"] or report["best"], report["ceiling"]["iperf3_gbps"]
    return {
        "link": link,
        "congestion": congestion,
        "gbps": row["gbps"],
        "iperf3_gbps": iperf3,
        "ratio_iperf3": round(row["gbps"] / iperf3, 3) if iperf3 else None,
        "cpu_s_per_gib": row["cpu_s_per_gib"],
        "streams": row["streams"],
        "record_bytes": row["record_bytes"],
    }


def inside(rounds: int, seconds: float) -> None:
    """On neither host of the lab: the landing end goes to B, the sending one to A, which prints the report."""
    with temporary_folder("zc-lab-") as folder:
        trusting_pair(folder, "a", "b")
        on = {host: ["ip", "netns", "exec", host, *BENCH, "--keys", f"{folder}/{host.lower()}"] for host in "AB"}
        landing = subprocess.Popen([*on["B"], "--listen", ADDRESS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert landing.stdout is not None
        landing.stdout.readline()  # it listens
        sweep = ["--record-kib", "2048", "--page-kib", "8192", "--codec", "none"]
        timing = ["--rounds", str(rounds), "--seconds", str(seconds), "--json"]
        try:
            subprocess.run([*on["A"], "--connect", ADDRESS, "--peer", "b", *sweep, *timing], check=True)
        finally:
            landing.terminate()
            landing.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", nargs="*", default=LINKS, metavar="LINK", help="default: " + " ".join(LINKS))
    parser.add_argument("--congestion", default="cubic", help="on both hosts, for both programs (default: cubic)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.rounds, options.seconds)
        return
    rows = [measure(link, options.congestion, options.rounds, options.seconds) for link in options.links]
    if options.json:
        print(json.dumps({"rounds": options.rounds, "rows": rows}))
        return
    print(f"{'link':24}{'Gb/s':>8}{'iperf3':>8}{'ratio':>8}{'CPU-s/GiB':>11}")
    for row in rows:
        ratio = "-" if row["ratio_iperf3"] is None else f"{row['ratio_iperf3']:.3f}"
        print(f"{row['link']:24}{row['gbps']:8.2f}{row['iperf3_gbps'] or 0:8.2f}{ratio:>8}{row['cpu_s_per_gib']:11.2f}")


if __name__ == "__main__":
    main()
