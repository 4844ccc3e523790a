"""scripts/netlab itself, and what links do on networks that are no loopback.

Rates, round trips and losses are those of the emulation; nothing here asserts a speed from below. Congestion control is
named in every test: the default of this machine may be any.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
NETLAB: Final = ROOT / "scripts" / "netlab"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces need Linux")
# All that a lab is made of, without the program under test.
RAW_LAB: Final = r"""
ip link add dev raw0 type veth peer name raw1
tc qdisc add dev raw0 root tbf rate 1mbit burst 131072 limit 393216
ip addr add fd78::1/64 dev raw0
ip tuntap add dev raw2 mode tun
printf 'table inet t {\n chain c {\n type filter hook input priority 0;\n numgen random mod 9 < 1 drop\n }\n}\n' |
    nft -f -
ethtool -K raw0 tso off
cc --version
"""


def lacking() -> str:
    """What this machine does not have, in its own words; nothing where labs can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    try:
        words = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-ec", RAW_LAB]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"status {done.returncode}" if done.returncode else ""


LACKING: Final = lacking()
in_a_lab = pytest.mark.skipif(bool(LACKING), reason=f"no lab can be made here: {LACKING}")


def netlab(*words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(NETLAB), *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def link(
    tmp_path: Path, transport: str, spec: str, congestion: str, mib: int, kind: str = "ipv4"
) -> tuple[dict[str, Any], str]:
    """Figures of `tests.transport.lab_link` on such a link, and what the lab said."""
    program = [sys.executable, "-m", "tests.transport.lab_link", str(tmp_path), transport, congestion, str(mib), kind]
    done = netlab(spec, "--congestion", congestion, "--", *program)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["right"] == figures["pages"] == mib
    return figures, done.stderr


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument for `sleep` by which this test's processes are told from those of any other run. None of them is
    left, however the test ends."""
    seconds = f"4711.{random.randrange(10**9)}"
    yield seconds
    for path in processes(seconds):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.parent.name), signal.SIGKILL)


def wait_until(happened: Callable[[], bool]) -> bool:
    """Whether it has, after 30 s at most."""
    deadline = time.monotonic() + 30
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


def processes(word: str) -> list[Path]:
    """Those of this machine that have the word as one of their command line's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found += [path] if word in words else []
    return found


# -- the lab ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("25gbit", "rate is emulated honestly up to 10gbit"),
        ("5gbit,rtt=1ms", "rate and rtt are emulated honestly up to 4gbit"),
        ("3gbit,loss=1%", "rate and loss are emulated honestly up to 2gbit"),
        ("2gbit,rtt=1ms,loss=1%", "rate and rtt and loss are emulated honestly up to 1.5gbit"),
        ("1gbit,jitter=1ms", "'jitter=1ms'"),
        ("1gbit,rtt=1ms,rtt=2ms", "at most once"),
        ("1gbit,loss=1", "is no loss"),
        ("0gbit", "is no rate"),
        ("fast", "is no rate"),
        ("1gbit,mtu=500", "1280"),
        ("1gbit,rtt=5000ms", "at most 500ms"),
    ],
)
def test_what_cannot_be_emulated_honestly_is_refused_with_the_limit(spec: str, why: str) -> None:
    done = netlab(spec, "--", "true")
    assert done.returncode == 2
    assert why in done.stderr


def test_help_says_what_is_real_and_what_is_not() -> None:
    told = netlab("--help").stdout
    for word in ("rtt=", "loss=", "ip netns exec A", "What is real and what is not", "refused"):
        assert word in told


@in_a_lab
def test_the_exit_status_is_the_command_s_and_nothing_is_left(mark: str) -> None:
    done = netlab("1gbit", "10mbit,rtt=2ms", "--congestion", "cubic", "--", "sh", "-c", f"sleep {mark} & exit 7")
    assert done.returncode == 7, done.stderr
    assert "wire0" in done.stderr and "1 Gb/s by TBF" in done.stderr and "RTT 2 ms" in done.stderr
    assert processes(mark) == []
    assert not list(Path("/run/netns").glob("[AB]")) if Path("/run/netns").exists() else True


@in_a_lab
def test_after_sigkill_of_the_runner_nothing_is_left(mark: str) -> None:
    """Processes in the background, in other sessions and inside the hosts; namespaces and devices go with them."""
    script = f"ip netns exec A sleep {mark} & setsid sleep {mark} & ip netns exec B sleep {mark} & exec sleep {mark}"
    lab = subprocess.Popen([sys.executable, str(NETLAB), "10mbit", "10mbit,rtt=2ms", "--", "sh", "-c", script])
    try:
        assert wait_until(lambda: len(processes(mark)) == 4), "the lab has processes to leave behind"
    finally:
        lab.send_signal(signal.SIGKILL)
        lab.wait()
    assert wait_until(lambda: processes(mark) == [])


@in_a_lab
@pytest.mark.parametrize("after_s", [None, *(step / 25 for step in range(12))], ids=lambda after_s: f"after-{after_s}")
def test_sigterm_ends_the_command_and_the_lab_reports(after_s: float | None, mark: str) -> None:
    """Also a signal that comes while the lab is being built; None: once the command runs."""
    lab = subprocess.Popen(
        [sys.executable, str(NETLAB), "10mbit", "--", "sh", "-c", f"echo up; exec sleep {mark}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if after_s is None:
            assert lab.stdout is not None and lab.stdout.readline() == "up\n"
        else:
            time.sleep(after_s)
        lab.send_signal(signal.SIGTERM)
        _, said = lab.communicate(timeout=30)
    finally:
        lab.kill()
    if lab.returncode == -signal.SIGTERM:  # Python itself was still starting: there was no lab
        assert after_s is not None and not said
    else:
        assert lab.returncode == 128 + signal.SIGTERM
        assert "0 packets lost on purpose" in said
    assert processes(mark) == []


@in_a_lab
def test_labs_run_side_by_side() -> None:
    """Each has its own A, B and wire0, so names need not be unique."""
    words = [sys.executable, str(NETLAB), "10mbit", "--", "sh", "-c", "read line; ip -n A -o addr show wire0"]
    with contextlib.ExitStack() as ending:
        labs = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for lab in labs:
            ending.callback(lab.kill)
        for lab in labs:
            shown, _ = lab.communicate("go\n", timeout=30)
            assert (lab.returncode, "10.78.0.1/24" in shown) == (0, True)


# -- links on it -----------------------------------------------------------------------------------------------------


@in_a_lab
def test_every_page_is_exact_at_1_gbit(tmp_path: Path, transport: str) -> None:
    figures, said = link(tmp_path, transport, "1gbit", "cubic", 32)
    assert figures["gbps"] < 1.05
    assert "cubic" in said


@in_a_lab
def test_every_page_is_exact_under_loss(tmp_path: Path, transport: str) -> None:
    _, said = link(tmp_path, transport, "1gbit,rtt=2ms,loss=1%", "bbr", 16)
    lost = int(said.rpartition("wire0  ")[2].split()[0])
    assert lost > 16 * 700 * 0.01 / 2, "as many packets as that were lost, roughly"


@in_a_lab
def test_every_page_is_exact_over_a_long_round_trip_and_the_round_trip_is_seen(tmp_path: Path, transport: str) -> None:
    figures, _ = link(tmp_path, transport, "1gbit,rtt=20ms", "cubic", 24)
    assert 0.019 < figures["rtt_s"] < 1


@in_a_lab
@pytest.mark.parametrize("kind", ["ipv6", "link-local"])
def test_ipv6_and_link_local_addresses_work(tmp_path: Path, transport: str, kind: str) -> None:
    """A link-local address with its zone is what a cable between two machines has without any configuration."""
    link(tmp_path, transport, "1gbit,mtu=9000", "cubic", 8, kind)


@in_a_lab
def test_hosts_find_the_faster_link_by_what_is_advertised_and_leave_it_when_it_goes_down(tmp_path: Path) -> None:
    """T6: told one address, on the slow link. Over TCP alone: the choice among paths sees no transport."""
    program = [sys.executable, "-m", "tests.daemon.lab_paths", str(tmp_path)]
    done = netlab("100mbit", "1gbit", "--congestion", "cubic", "--", *program)
    assert done.returncode == 0, done.stderr
    on_fast, on_slow = map(json.loads, done.stdout.splitlines())
    addresses = [path["address"] for path in on_fast["paths"]]
    assert addresses == ["10.78.0.2:7600", "10.78.1.2:7600", "[fd78::2]:7600", "[fd78:1::2]:7600"]
    assert on_fast["path"] in ("10.78.1.2:7600", "[fd78:1::2]:7600")
    assert "Gb/s" in on_fast["path_reason"]
    assert on_slow["path"] in ("10.78.0.2:7600", "[fd78::2]:7600")
