"""`zc-handoff daemon`: binds the sockets, runs the core on uvloop until SIGTERM or SIGINT, leaves nothing behind.

The first signal drains: nothing new is taken, and what runs may end within `drain_s`. The second ends it at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TextIO

import uvloop
from aiohttp import web

from transport.keys import KeyStore
from transport.link import LinkError, LinkOwner
from transport.quic_choice import BothEndpoints, built
from transport.tcp import TcpEndpoint
from zerocopy.config import DaemonConfig
from zerocopy.daemon.advertise import advertised, is_loopback
from zerocopy.daemon.core import Core
from zerocopy.daemon.http_api import make_app, start
from zerocopy.daemon.telemetry import Telemetry, configure_logging, log_event
from zerocopy.daemon.worker_process import WORKER_COMMAND

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1


def run(config: DaemonConfig, worker_command: Sequence[str] = WORKER_COMMAND, *, lifeline: TextIO | None = None) -> int:
    """Serve until told to stop, or until `lifeline`, a pipe whose other end is whoever started this, ends. Returns the
    exit code."""
    configure_logging(config.log_level, config.log_format)
    return uvloop.run(serve(config, worker_command, lifeline))


async def serve(
    config: DaemonConfig, worker_command: Sequence[str] = WORKER_COMMAND, lifeline: TextIO | None = None
) -> int:
    """The daemon's life on the running event loop."""
    signals = asyncio.Semaphore(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.release)
    if lifeline is not None:
        _watch(lifeline, signals)
    core = Core(config, Telemetry(config.peers), worker_command)
    endpoint = _endpoints(config, core.peers)
    core.transports = endpoint.transports
    try:
        front = await _bind(config, core, endpoint)
    except (OSError, LinkError) as error:
        print(f"zc-handoff: {error}", file=sys.stderr)
        await endpoint.close()
        return EXIT_FAILED
    _warn_of_a_neighbour(config)
    _warn_of_an_open_door(config)
    engine = asyncio.create_task(core.worker.run())
    dialling = asyncio.create_task(core.peers.dial(endpoint))
    await _first_of(asyncio.wait({engine, dialling}, return_when=asyncio.FIRST_COMPLETED), signals.acquire())
    if dialling.done():
        detail = "a bug: peers that are lost would stay so. This host ends, and its last words say what failed"
        log_event("dialling failed", level=logging.ERROR, reason="internal", detail=detail)
    log_event("draining", seconds=config.drain_s, detail="a second signal ends what still runs")
    core.drain()
    await _first_of(core.drained(), signals.acquire(), asyncio.sleep(config.drain_s))
    log_event("stopping")
    dialling.cancel()
    await core.stop()  # while clients are still connected: each hears why its request ends
    await front.cleanup()
    engine.cancel()
    await endpoint.close()
    await asyncio.wait({engine, dialling})
    core.memory.close()
    for task in (engine, dialling):
        if not task.cancelled():
            task.result()  # or the bug that it ended with
    if core.worker.start_failed is not None:
        print(f"zc-handoff: {core.worker.start_failed.message}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _watch(lifeline: TextIO, signals: asyncio.Semaphore) -> None:
    """Its end counts as two signals: nobody waits for what still runs. Nothing is ever written to it."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(lifeline)
        for _ in range(2):
            signals.release()

    loop.add_reader(lifeline, ended)


async def _first_of(*events: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _endpoints(config: DaemonConfig, owner: LinkOwner) -> BothEndpoints:
    keys = KeyStore(config.keys)
    keys.trusted()  # with a damaged entry nobody is let in: not in silence
    tcp = TcpEndpoint(keys, owner, streams=config.streams)
    if not built():
        return BothEndpoints(tcp, None)
    from transport.quic import QuicEndpoint

    return BothEndpoints(tcp, QuicEndpoint(keys, owner))


async def _bind(config: DaemonConfig, core: Core, endpoint: BothEndpoints) -> web.AppRunner:
    """Both doors open, or an error that names the address."""
    try:
        bound = await endpoint.listen(config.listen)
    except OSError as error:
        raise OSError(f"cannot listen on {config.listen}: {error.strerror or error}") from error
    core.advertised = advertised(bound, config.advertise)
    try:
        runner, http = await start(make_app(core, config), config.http)
    except OSError as error:
        # uvloop's own words repeat the address; a name that does not resolve has no errno of the system's.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        taken = error.errno == errno.EADDRINUSE
        hint = f"{'is a daemon running there already? Else ' if taken else ''}choose another --http"
        raise OSError(f"cannot serve HTTP on {config.http}: {why}: {hint}") from error
    log_event("listening", address=bound, detail=f"HTTP on http://{http}")
    return runner


def _warn_of_a_neighbour(config: DaemonConfig) -> None:
    """A peer that is dialled on loopback, or that can reach this prefiller there only, computes on these cores."""
    addresses = [address for many in config.peers.values() for address in many]
    if config.role == "prefill":
        addresses.append(config.listen)
    near = next((address for address in addresses if is_loopback(address)), None)
    if near is not None and config.cores == "own":
        log_event(
            "cores are shared",
            level=logging.WARNING,
            address=near,
            detail="this is a peer on the same machine: start both with --cores shared, unless a tunnel begins here",
        )


def _warn_of_an_open_door(config: DaemonConfig) -> None:
    """Who reaches the HTTP API may use it; only on loopback that goes without saying."""
    if not is_loopback(config.http) and not config.tenant_keys():
        log_event(
            "no API key",
            level=logging.WARNING,
            address=config.http,
            detail="whoever reaches the HTTP API can use it: give --api-key-file, or --http on loopback",
        )
