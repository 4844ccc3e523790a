"""Opens TCP connections from the event loop; uvloop's `sock_connect` forgets the scope of link-local addresses."""

from __future__ import annotations

import asyncio
import os
import socket

from transport.address import SocketAddress


async def dial(address: SocketAddress) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError; closes the socket if it fails or is cancelled."""
    sock = socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            await _writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, resolve_once, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def resolve_once(future: asyncio.Future[None]) -> None:
    """For callbacks that may come again before they are removed."""
    if not future.done():
        future.set_result(None)
