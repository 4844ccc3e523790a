"""What the kernel says of one TCP connection: round trip, segments, retransmissions. Linux only, elsewhere None."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

# struct tcp_info of linux/tcp.h, stable by ABI: tcpi_rtt, tcpi_total_retrans and, since 4.6, tcpi_min_rtt and
# tcpi_data_segs_out.
_RTT: Final = 68
_TOTAL_RETRANS: Final = 100
_MIN_RTT: Final = 148
_DATA_SEGS_OUT: Final = 156
_SIZE: Final = 160


@dataclass(frozen=True)
class TcpInfo:
    rtt_s: float  # smoothed
    shortest_rtt_s: float  # of the last minutes; very long while there was none
    segments_sent: int  # with data, repetitions included
    segments_repeated: int


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    if sys.platform != "linux":
        return None
    data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(data) < _SIZE:
        return None
    places = (_RTT, _MIN_RTT, _DATA_SEGS_OUT, _TOTAL_RETRANS)
    rtt, shortest, sent, repeated = (struct.unpack_from("=I", data, at)[0] for at in places)
    return TcpInfo(rtt / 1e6, shortest / 1e6, sent, repeated)
