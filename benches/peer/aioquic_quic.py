"""aioquic, QUIC in pure Python: one connection, one stream, its own defaults; encrypted, the peer not authenticated."""

from __future__ import annotations

import asyncio
import datetime
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

from aioquic.asyncio import connect, serve
from aioquic.quic.configuration import QuicConfiguration
from both_ends import Once, answer, memory, run, say
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PIECE = 256 << 10
SIZE = 16 << 20  # it takes a second for these
AHEAD = 1 << 20  # bytes written and not yet sent: it has no drain that waits


def identity(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today)
        .not_valid_after(today + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / "certificate").write_bytes(made.public_bytes(pem))
    return folder / "certificate", folder / "key"


def receive(block: int) -> NoReturn:
    landed = memory(False, SIZE)

    def arriving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(land(reader, writer)))

    async def land(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = 0
        while piece := await reader.read(PIECE):
            first = min(len(piece), len(landed) - at)
            landed[at : at + first] = piece[:first]
            at += len(piece)
            if at >= len(landed):
                writer.write(b"1")
                at = 0

    async def listen() -> None:
        configuration = QuicConfiguration(is_client=False, alpn_protocols=["bench"])
        configuration.load_cert_chain(*identity(Path(tempfile.mkdtemp())))
        server = await serve("127.0.0.1", 0, configuration=configuration, stream_handler=arriving)
        say({"port": server._transport.get_extra_info("sockname")[1]})
        await asyncio.Event().wait()

    tasks: list[asyncio.Future[None]] = []
    threading.Thread(target=asyncio.run, args=(listen(),), daemon=True).start()
    answer(landed)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    loop = asyncio.new_event_loop()
    configuration = QuicConfiguration(is_client=True, alpn_protocols=["bench"], verify_mode=0)

    async def open_stream() -> tuple[Any, Any, asyncio.StreamReader, asyncio.StreamWriter]:
        connection = connect("127.0.0.1", setup["port"], configuration=configuration)
        client = await connection.__aenter__()
        reader, writer = await client.create_stream()
        return connection, client, reader, writer

    connection, client, reader, writer = loop.run_until_complete(open_stream())

    async def send() -> None:
        for start in range(0, len(source), PIECE):
            writer.write(source[start : start + PIECE].tobytes())
            while len(client._quic._streams[0].sender._buffer) > AHEAD:
                await asyncio.sleep(0)
        await reader.readexactly(1)

    def once() -> None:
        assert connection is not None  # it ends when it is forgotten
        loop.run_until_complete(send())

    return once


if __name__ == "__main__":
    run(receive, prepare, SIZE)
