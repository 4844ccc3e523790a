"""Counters of one link since it opened; written by the link's threads under their own locks, read by anyone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TcpStats:
    rtt_s: float | None = None
    page_bytes_sent: int = 0
    page_bytes_received: int = 0
    pages_sent: int = 0  # acknowledged by the peer
    pages_received: int = 0  # published
    pages_dropped: int = 0  # refused by the sink, or cancelled by the peer after it began
    records_repeated: int = 0  # arrived again, or late, after a stream was lost
    streams: int = 0  # alive now
    streams_reason: str = "the other host's choice"
    streams_lost: int = 0
    bandwidth_bps: float | None = None
