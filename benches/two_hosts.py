"""Two hosts on this machine for the benches that load them: SmolLM2, one prefills, one decodes.

Owns a folder for keys and logs and the hosts' processes; both end with the block.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psutil

from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Host, Hosts, smollm2

MOVED: Final = {"x-zc-placement": "disaggregated", "x-zc-fallback": "deny"}


@dataclass(frozen=True)
class Two:
    prefiller: Host
    decoder: Host

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.prefiller, self.decoder

    def processes(self) -> dict[str, psutil.Process]:
        """Both daemons and both workers."""
        found = dict[str, psutil.Process]()
        for host in self.hosts:
            assert host.process is not None
            found[f"{host.name} daemon"] = psutil.Process(host.process.pid)
            found[f"{host.name} worker"] = psutil.Process(host.status()["worker"]["pid"])
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """What each host holds for requests: all zero when it is idle."""
        return {host.name: _held(host.status()) for host in self.hosts}

    def free_after_s(self, within_s: float) -> float | None:
        """Seconds until neither host holds anything; None when one still does at the end."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if not any(count for host in self.held().values() for count in host.values()):
                return time.monotonic() - began
            time.sleep(0.01)
        return None

    def faults(self) -> list[str]:
        """Workers that were started again, and what the daemons logged as errors."""
        found = [f"{host.name}: a worker was restarted" for host in self.hosts if host.status()["worker"]["restarts"]]
        for host in self.hosts:
            lines = host.log_path.read_text(errors="replace").splitlines()
            found += [f"{host.name}: {line}" for line in lines if " error " in line or line.startswith("Traceback")]
        return found


def _held(status: dict[str, Any]) -> dict[str, int]:
    slots = status["slots"].values()
    return {
        "reserved_bytes": status["reserved_bytes"],
        "requests": status["requests"],
        "handoffs": status["handoffs_in"] + status["handoffs_out"],
        "sequences": sum(line["held_sequences"] for line in slots),
        "cells": sum(line["held_tokens"] for line in slots),
        "waiting": sum(line["waiting"] for line in slots),
    }


@contextlib.contextmanager
def two_hosts(
    flags: Iterable[str],
    *,
    prefill_flags: Iterable[str] = (),
    decode_flags: Iterable[str] = (),
) -> Iterator[Two]:
    """Both ready."""
    model = ["--model", str(smollm2())]
    with temporary_folder("zc-two-") as folder, Hosts(folder) as hosts:
        prefiller = hosts.add("prefiller", ["--role", "prefill", *model, *flags, *prefill_flags])
        decoder = hosts.add("decoder", ["--role", "decode", *model, *flags, *decode_flags], peers=[prefiller])
        for host in (prefiller, decoder):
            host.start()
        prefiller.wait_ready()
        decoder.wait_ready(connected_to=["prefiller"])
        try:
            yield Two(prefiller, decoder)
        except BaseException:
            for host in (prefiller, decoder):
                print(f"{host.name}:\n{host.log_tail()}", file=sys.stderr)
            raise
