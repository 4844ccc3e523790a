"""The thread that runs one QUIC endpoint in C, and the door between it and Python.

The C (native/quic.h) knows no threads: the engine's thread runs it with the GIL released, wakes up for commands, and
calls back for events. Owns the thread, the endpoint in C and its sockets' descriptors; knows nothing of messages or
loops. Bounds: those of native/quic.h, and `max_links`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from native._quic import ffi, lib
from transport.link import LinkError

MAX_HEADER: Final = int(lib.QUIC_MAX_HEADER)
MAX_PAGES: Final = int(lib.QUIC_MAX_PAGES)
Congestion = Literal["bbr", "cubic"]


@dataclass(frozen=True)
class EngineOptions:
    """`window_bytes` is what a peer may send beyond what is in its landing, and so the memory a link can take."""

    congestion: Congestion = "bbr"
    datagram_bytes: int = 1452
    window_bytes: int = 32 << 20  # 10 Gb/s over 25 ms
    idle_s: float = 10.0
    ping_s: float = 1.0
    greet_s: float = 5.0
    max_links: int = 256
    max_greeting: int = 32


@dataclass(frozen=True)
class Path:
    rtt_s: float | None
    congestion_window: int
    in_flight: int
    datagram_bytes: int


class EngineEvents(Protocol):
    """Called on the engine's thread. `link` is a number; it is never used again after `closed`."""

    def verify(self, link: int, certificate: bytes) -> bool: ...

    def opened(self, link: int) -> None: ...

    def control(self, link: int, data: bytes) -> None: ...

    def control_acked(self, link: int, size: int) -> None: ...

    def claim(self, link: int, page: int, header: bytes, payload_bytes: int) -> Any:
        """A cffi pointer to room for the payload, valid until `landed` or `lost`; ffi.NULL to drop the page."""

    def landed(self, link: int, page: int) -> None: ...

    def lost(self, link: int, page: int, written: int) -> None: ...

    def sent(self, link: int, page: int, outcome: int) -> None: ...

    def closed(self, link: int, why: int, code: int, reason: str) -> None: ...


class Engine:
    """`post` from any thread; everything else as it says."""

    def __init__(self, identity_pem: str, events: EngineEvents, options: EngineOptions) -> None:
        """Starts the thread. Raises LinkError if the identity cannot be used."""
        self.events = events
        self._handle = ffi.new_handle(self)
        self._endpoint = _open(identity_pem, self._handle, options)
        if self._endpoint == ffi.NULL:
            raise LinkError(
                "quic-identity", "QUIC cannot use this host's key: make a new one with `zc-handoff keys new`"
            )
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="zc-quic", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> bool:
        """Have the engine's thread make this call, in order. False after `stop`: it will not be made."""
        with self._lock:
            if self._stopping:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                lib.quic_wake(self._endpoint)
            return True

    def stop(self) -> None:
        """End every link and the thread; returns when both are gone. Not from the engine's thread."""
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first:
                lib.quic_wake(self._endpoint)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._obey()
            lib.quic_run(self._endpoint)
        self._obey()  # whoever posted them waits for what came of them
        lib.quic_free(self._endpoint)
        for sock in self._sockets:
            sock.close()

    def _obey(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            try:
                command()
            except Exception:  # the other links live on
                logging.getLogger(__name__).exception("a QUIC command failed by a bug")

    # -- commands: on the engine's thread

    def add_socket(self, sock: socket.socket, *, accept: bool) -> int:
        """Takes over a bound socket; returns its index. Raises LinkError."""
        sock.setblocking(False)
        index = int(lib.quic_add_socket(self._endpoint, sock.fileno(), accept))
        if index < 0:
            sock.close()
            raise LinkError("cannot-listen", f"an endpoint has at most {lib.QUIC_MAX_SOCKETS} QUIC sockets")
        self._sockets.append(sock)
        return index

    def connect(self, sock: int, address: bytes) -> int:
        """`address` is a struct sockaddr. Returns the link, 0 at a limit."""
        return int(lib.quic_connect(self._endpoint, sock, address, len(address)))

    def send_control(self, link: int, data: bytes) -> None:
        lib.quic_send_control(self._endpoint, link, data, len(data))

    def consumed(self, link: int, size: int) -> None:
        lib.quic_consumed(self._endpoint, link, size)

    def accept_pages(self, link: int) -> None:
        lib.quic_accept_pages(self._endpoint, link)

    def send_page(self, link: int, page: int, header: bytes, payload: Any) -> bool:
        """`payload` is a cffi buffer; it must stay until `sent`. False: there will be no `sent`."""
        return bool(lib.quic_send_page(self._endpoint, link, page, header, len(header), payload, len(payload)) == 0)

    def cancel_page(self, link: int, page: int) -> None:
        lib.quic_cancel_page(self._endpoint, link, page)

    def close(self, link: int, reason: str, flush_s: float) -> None:
        lib.quic_close(self._endpoint, link, reason.encode("ascii", "replace"), int(flush_s * 1e9))

    def path(self, link: int) -> Path | None:
        stats = ffi.new("quic_path_stats *")
        if lib.quic_path(self._endpoint, link, stats) != 0:
            return None
        rtt = stats.rtt_ns / 1e9 if stats.rtt_ns else None
        return Path(rtt, stats.congestion_window, stats.in_flight, stats.datagram)

    def counts(self) -> dict[str, int]:
        counts = ffi.new("quic_counts *")
        lib.quic_count(self._endpoint, counts)
        names = (
            "datagrams_received",
            "datagrams_sent",
            "ignored",
            "retries_sent",
            "resets_sent",
            "refused",
            "links",
            "gso",
            "gro",
        )
        return {name: int(getattr(counts, name)) for name in names}


def engine_name() -> str:
    return str(ffi.string(lib.quic_engine()).decode())


def _open(identity_pem: str, handle: Any, options: EngineOptions) -> Any:
    identity = ffi.new("char[]", identity_pem.encode())
    values = {
        "identity_pem": identity,
        "congestion": lib.QUIC_CUBIC if options.congestion == "cubic" else lib.QUIC_BBR,
        "datagram": options.datagram_bytes,
        "window": options.window_bytes,
        "idle_ns": int(options.idle_s * 1e9),
        "ping_ns": int(options.ping_s * 1e9),
        "greet_ns": int(options.greet_s * 1e9),
        "max_links": options.max_links,
        "max_greeting": options.max_greeting,
    }
    endpoint = lib.quic_open(ffi.new("quic_events *", {"user": handle, **_EVENTS}), ffi.new("quic_options *", values))
    ffi.buffer(identity)[:] = bytes(len(identity))
    return endpoint


# -- events: called by C on the engine's thread


def _events(user: Any) -> EngineEvents:
    engine: Engine = ffi.from_handle(user)
    return engine.events


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator]
def zc_quic_verify(user: Any, link: int, certificate: Any, size: int) -> int:
    return int(_events(user).verify(link, bytes(ffi.buffer(certificate, size))))


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_opened(user: Any, link: int) -> None:
    _events(user).opened(link)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_control(user: Any, link: int, data: Any, size: int) -> None:
    _events(user).control(link, bytes(ffi.buffer(data, size)))


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_control_acked(user: Any, link: int, size: int) -> None:
    _events(user).control_acked(link, size)


@ffi.def_extern(error=ffi.NULL)  # type: ignore[untyped-decorator]
def zc_quic_claim(user: Any, link: int, page: int, header: Any, header_size: int, payload_bytes: int) -> Any:
    return _events(user).claim(link, page, bytes(ffi.buffer(header, header_size)), payload_bytes)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_landed(user: Any, link: int, page: int) -> None:
    _events(user).landed(link, page)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_lost(user: Any, link: int, page: int, written: int) -> None:
    _events(user).lost(link, page, written)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_sent(user: Any, link: int, page: int, outcome: int) -> None:
    _events(user).sent(link, page, outcome)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def zc_quic_closed(user: Any, link: int, why: int, code: int, reason: Any) -> None:
    _events(user).closed(link, why, code, ffi.string(reason).decode("ascii", "replace"))


_EVENTS: Final = {
    "verify": lib.zc_quic_verify,
    "opened": lib.zc_quic_opened,
    "control": lib.zc_quic_control,
    "control_acked": lib.zc_quic_control_acked,
    "claim": lib.zc_quic_claim,
    "landed": lib.zc_quic_landed,
    "lost": lib.zc_quic_lost,
    "sent": lib.zc_quic_sent,
    "closed": lib.zc_quic_closed,
}
