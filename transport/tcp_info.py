"""What the kernel says of one TCP connection: round trip, segments, retransmissions. Linux only, elsewhere None."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

# struct tcp_info of linux/tcp.h, stable by ABI: tcpi_rtt, tcpi_total_retrans, tcpi_data_segs_out (since 4.6).
_RTT: Final = 68
_TOTAL_RETRANS: Final = 100
_DATA_SEGS_OUT: Final = 156
_SIZE: Final = 160


@dataclass(frozen=True)
class TcpInfo:
    rtt_s: float  # smoothed
    segments_sent: int  # with data, repetitions included
    segments_repeated: int


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    if sys.platform != "linux":
        return None
    data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(data) < _SIZE:
        return None
    rtt, repeated, sent = (struct.unpack_from("=I", data, at)[0] for at in (_RTT, _TOTAL_RETRANS, _DATA_SEGS_OUT))
    return TcpInfo(rtt / 1e6, sent, repeated)
