"""How many bulk connections a link should have, and why. Pure: cores, round-trip time and bandwidth are arguments.

A stream keeps about one core busy at each end (encryption and the kernel's copies), so a link begins with one for
every two cores: the rest is for the engine, the event loop and the other end of a loopback. A long path may need more,
because one connection has no more on its way than its socket buffers hold.
"""

from __future__ import annotations

from typing import Final

# Measured, in Gb/s: on 2 cores 26 with one stream, 23 with two; on 16 cores 22, 51, 60, 61 with one to four, 65 with
# six, 45 to 55 with eight, whose threads wait for the interpreter's lock; each costs two threads and 13 MiB.
MAX_BY_CORES: Final = 4
MAX_CHOSEN: Final = 8


class StreamCount:
    """The number of streams of one link: `configured`, or chosen where that is 0, and then it may grow."""

    def __init__(self, configured: int, cores: int, window_bytes: int) -> None:
        """`window_bytes`: the most that one stream can have on its way."""
        self._chosen = not configured
        self._window_bytes = window_bytes
        self.count = configured or max(1, min(MAX_BY_CORES, cores // 2))
        self.reason = "configured" if configured else f"one for every two of {cores} cores, at most {MAX_BY_CORES}"

    def observe(self, rtt_s: float, bandwidth_bps: float) -> bool:
        """True if the path turned out to need one more, which is counted then. It does when what is on its way fills
        more than half of what all streams can have on their way. `rtt_s`: idle, without the queues of a transfer."""
        if not self._chosen or self.count >= MAX_CHOSEN:
            return False
        on_its_way = rtt_s * bandwidth_bps / 8
        if on_its_way <= self.count * self._window_bytes / 2:
            return False
        self.count += 1
        self.reason = (
            f"{bandwidth_bps / 1e9:.1f} Gb/s x {1e3 * rtt_s:.1f} ms keeps {on_its_way / 2**20:.0f} MiB on their way, "
            f"a stream's buffers hold {self._window_bytes >> 20} MiB"
        )
        return True
