"""Golden wire vectors: one message or page header per file. `python -m tests.handoff.vectors` writes them anew.

Writing them anew is a change of the wire format: do it only together with WIRE_VERSION or for a field that was added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.handoff.scene import EPOCH, HANDOFF, IDENTITY, SCHEMA, SEED, TOKENS, C, pages, prefill
from zerocopy.handoff import messages as m

FOLDER: Final = Path(__file__).parent / "vectors"
REQUEST: Final = bytes(range(100, 116))

MESSAGES: Final[dict[str, m.AnyMessage]] = {
    "hello": m.Hello(
        boot_id=bytes(16),
        name="mac-1",
        roles=("prefill", "decode"),
        addresses=("192.0.2.7:9400", "[2001:db8::7]:9400"),
        transports=("tcp",),
        capabilities=("codec:none",),
        identity=IDENTITY,
    ),
    "hello-engine-down": m.Hello(boot_id=bytes(16), name="n", roles=(), addresses=(), transports=()),
    "prefill": prefill(),
    "reserve": m.Reserve(
        handoff_id=HANDOFF,
        identity=IDENTITY,
        state=SCHEMA,
        tenant="anna",
        tokens=TOKENS,
        largest_page=4096,
        components=(m.Estimate(C.ATTENTION_KV, 1 << 40), m.Estimate(C.PROBE, 88)),
    ),
    "grant": m.Grant(handoff_id=HANDOFF, epoch=EPOCH, credit=1 << 25, seed=SEED, deadline_s=30.0),
    "reject": m.Reject(handoff_id=HANDOFF, reason="no-memory", message="no landing ring", have="0", want="1"),
    "credit": m.Credit(handoff_id=HANDOFF, epoch=EPOCH, limit=1 << 33),
    "manifest": m.Manifest(
        handoff_id=HANDOFF,
        epoch=EPOCH,
        components=(
            m.ComponentManifest(
                component=C.ATTENTION_KV, layers=(0, 2), tokens=(0, 10), pages=3, nbytes=1 << 32, digest=bytes(16)
            ),
        ),
        position=9,
        mtp_position=9,
        timings={"prefill_end_s": 1.5},
    ),
    "commit-ack": m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH),
    "abort": m.Abort(handoff_id=HANDOFF, epoch=0, reason="cancelled", message="client went away"),
    "generate": m.Generate(request_id=REQUEST, payload=b'{"prompt":"x"}'),
    "generate-event": m.GenerateEvent(request_id=REQUEST, payload=b"\x00\xff"),
    "generate-end": m.GenerateEnd(request_id=REQUEST, reason="worker-lost", message="the worker died"),
    "generate-cancel": m.CancelGenerate(request_id=REQUEST),
}


def encoded() -> dict[str, bytes]:
    vectors = {f"{name}.bin": m.encode(message) for name, message in MESSAGES.items()}
    header, _payload = pages()[2]
    return {**vectors, "page-header.bin": header.pack()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in encoded().items():
        (FOLDER / name).write_bytes(data)
