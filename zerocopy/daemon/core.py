"""One host's daemon without its sockets: worker, shared memory, peers and requests, wired together.

Implements `GenerationService` for the front door and `LinkListener` for the peers. Owns no policy: what a request goes
through is `generation`, what a peer's prompt goes through is `outgoing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import msgspec

from transport.link import Landing, Link, PageSink
from zerocopy.config import DaemonConfig
from zerocopy.daemon.admission import Admission
from zerocopy.daemon.forward import Forwarding
from zerocopy.daemon.generation import WORKER_RETRY_S, Generation
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.outgoing import OutgoingService
from zerocopy.daemon.peers import Peers
from zerocopy.daemon.requests import ChatTemplate, Event, GenerationRequest, RequestError, ServiceStatus, Started
from zerocopy.daemon.telemetry import Outcome, Placement, Telemetry, log_event
from zerocopy.daemon.trace import KEPT, KEPT_SPANS, Trace
from zerocopy.daemon.worker_process import WORKER_COMMAND, WorkerProcess
from zerocopy.handoff.components import Identity, PageHeader
from zerocopy.handoff.messages import (
    AnyMessage,
    CancelGenerate,
    Generate,
    GenerateEnd,
    GenerateEvent,
    Hello,
    Prefill,
)
from zerocopy.runtime.base import EngineFacts
from zerocopy.runtime.llama.engine import LlamaOptions
from zerocopy.runtime.pages import most_page_bytes
from zerocopy.worker import protocol as p
from zerocopy.worker.main import WorkerOptions

# By then a host that was only restarted is back.
SHUTDOWN_RETRY_S = 5.0
_LOOK_S = 0.05  # how often a host that drains looks whether it is done


class Core:
    """Build inside a running event loop."""

    def __init__(
        self, config: DaemonConfig, telemetry: Telemetry, worker_command: Sequence[str] = WORKER_COMMAND
    ) -> None:
        self.config = config
        self.telemetry = telemetry
        self.roles = tuple(config.role.split("+"))
        self.advertised: tuple[str, ...] = ()
        self.transports: tuple[str, ...] = ("tcp",)
        self._boot_id = secrets.token_bytes(16)
        self._traces: deque[Trace] = deque(maxlen=KEPT)
        self._identity: Identity | None = None  # the engine's; it stays known while that is started again
        self._draining = self._stopping = False
        self._requests = 0
        self.memory = SharedMemory(
            export="prefill" in self.roles,
            landing="decode" in self.roles,
            rings=config.rings,
            ring_bytes=config.ring_mib << 20,
            share=lambda leases: self.peers.share(leases),
        )
        self.worker = WorkerProcess(
            worker_options(config), self._attach, self._engine_changed, self.memory.recover, worker_command,
            config.engine_call_s,
        )  # fmt: skip
        self.peers = Peers(config.peers, self._hello, self)
        self.outgoing = OutgoingService(self.worker, self.memory, self._keep, self.peers.share)
        self.generation = Generation(config, telemetry, self.worker, self.memory, self.peers, self._keep)
        self.forwarding = Forwarding(self.generate)

    # -- GenerationService ---------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.telemetry.request_started()
        self._requests += 1
        outcome: Outcome = "cancelled"
        reason = "cancelled"
        placement: Placement = "none"
        try:
            if self._draining:
                raise _shutdown()
            if request.proof_key is not None and not self.config.allow_proofs:
                raise RequestError("proofs-off", "this host gives no proofs: start it with --allow-proofs", 403)
            async with contextlib.aclosing(self._route(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        placement = event.placement
                    yield event
            outcome, reason = "ok", "ok"
        except RequestError as error:
            why = _shutdown() if self._stopping else error  # whatever it ended with then
            outcome, reason = "failed", why.reason
            raise why from None
        except Exception:
            outcome, reason = "failed", "internal"
            raise
        finally:
            self._requests -= 1
            self.telemetry.request_ended(outcome, reason, placement)

    def _route(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Here, or on a decode peer when this host only prefills."""
        if "decode" in self.roles:
            return self.generation.generate(request)
        if self._identity is None:
            raise RequestError("worker-lost", self.worker.reason, 503, WORKER_RETRY_S)
        link, why = self.peers.decoder(self._identity)
        if link is None:
            raise RequestError("no-decoder", f"this host only prefills, and {why}", 503, 1.0)
        return self.forwarding.forward(link, request)

    def status(self) -> ServiceStatus:
        reason = None
        if self._draining:
            reason = "draining: it ends what runs and takes nothing new"
        elif self.worker.facts is None:
            reason = self.worker.reason
        elif "decode" not in self.roles:
            reason = self.peers.decoder(self.worker.facts.identity)[1] or None
        return ServiceStatus(reason is None, reason, self._detail(), self.worker.reason or None)

    def model_name(self) -> str | None:
        return self.worker.facts.model_name if self.worker.facts else None

    def chat_template(self) -> ChatTemplate | None:
        facts = self.worker.facts
        if facts is None or facts.chat_template is None:
            return None
        return ChatTemplate(facts.chat_template, facts.bos_token, facts.eos_token, facts.control_tokens)

    def metrics_text(self) -> bytes:
        self.telemetry.serving(self.status().serving)
        self.telemetry.reserved(self.memory.reserved_bytes())
        for peer in self.peers.all():
            stats = peer.link.stats if peer.link else None
            self.telemetry.link(peer.name, up=stats is not None, rtt_s=stats.rtt_s if stats else None)
        return self.telemetry.exposition()

    def _detail(self) -> dict[str, object]:
        facts = self.worker.facts
        return {
            "name": self.config.name,
            "roles": list(self.roles),
            "advertise": list(self.advertised),
            "engine": msgspec.to_builtins(facts.identity) if facts else None,
            "model": facts.model_name if facts else None,
            "n_ctx": facts.n_ctx if facts else None,
            "page_tokens": facts.page_tokens if facts else None,
            "worker": {
                "pid": self.worker.pid,
                "restarts": self.worker.restarts,
                "state": self.worker.reason or "ready",
            },
            "reserved_bytes": self.memory.reserved_bytes(),
            "slots": {role: msgspec.to_builtins(line.use()) for role, line in self._lines().items()},
            "requests": self._requests,
            "handoffs_out": self.outgoing.running,
            "handoffs_in": len(self.generation.incoming),
            "peers": [self.peers.describe(peer) for peer in self.peers.all()],
            "recent_handoffs": [msgspec.to_builtins(trace) for trace in self._traces],
        }

    def _lines(self) -> dict[str, Admission]:
        lines = {"decode": self.generation.lanes, "prefill": self.outgoing.lanes}
        return {role: line for role, line in lines.items() if role in self.roles}

    # -- LinkListener --------------------------------------------------------------------------------------

    def sink(self, link: Link) -> PageSink:
        return _PageDoor(self, link)

    def busy(self, link: Link) -> bool:
        return any(service.uses(link) for service in (self.generation, self.outgoing, self.forwarding))

    def peer_message(self, link: Link, message: AnyMessage) -> None:
        match message:
            case Prefill():
                self._prefill(link, message)
            case Generate() | GenerateEvent() | GenerateEnd() | CancelGenerate():
                self.forwarding.message(link, message)
            case Hello():
                pass  # `Peers` has taken it
            case _:
                handoff = self.generation.incoming.get(message.handoff_id)
                if handoff is not None and handoff.link is link:
                    handoff.message(message)
                else:
                    self.outgoing.message(link, message)

    def link_lost(self, link: Link, reason: str) -> None:
        self.generation.link_lost(link, reason)
        self.outgoing.link_lost(link, reason)
        self.forwarding.link_lost(link)

    def _prefill(self, link: Link, message: Prefill) -> None:
        if "prefill" not in self.roles:
            self.outgoing.refuse(link, message, "role", f"{self.config.name} does not prefill: its role is decode")
        elif self._draining:
            self.outgoing.refuse(link, message, "shutdown", f"{self.config.name} is shutting down")
        else:
            self.outgoing.prefill(link, message)

    # -- engine --------------------------------------------------------------------------------------------

    def _attach(self, facts: EngineFacts) -> tuple[p.Attach, Sequence[int]]:
        self._identity = facts.identity
        log_event("engine ready", model=facts.model_name, detail=f"{facts.schema.family}, MTP {facts.mtp}")
        return self.memory.attach(facts.schema)

    def _engine_changed(self) -> None:
        self.telemetry.serving(self.worker.facts is not None)
        if self._draining:
            return
        if self.worker.facts is None:
            self.telemetry.worker_restarted("worker-lost")
        self.peers.announce()

    def _hello(self) -> Hello:
        return Hello(
            boot_id=self._boot_id,
            name=self.config.name,
            roles=self.roles,
            addresses=self.advertised,
            transports=self.transports,
            identity=self.worker.facts.identity if self.worker.facts and not self._draining else None,
        )

    def _keep(self, trace: Trace) -> None:
        self._traces.append(trace)
        left = KEPT_SPANS
        for at in reversed(range(len(self._traces))):
            left -= self._traces[at].spans
            if left < 0:
                self._traces[at] = self._traces[at].without_spans()
        if trace.outcome == "committed":
            self.peers.transferred(trace.peer, *trace.moved())
        self.telemetry.handoff_ended(trace.record())
        log_event(
            "handoff ended", handoff=trace.handoff, role=trace.role, peer=trace.peer,
            state=trace.outcome, reason=trace.reason, level=logging.INFO,
        )  # fmt: skip

    def drain(self) -> None:
        """From now on nothing new: clients are refused, and peers know."""
        self._draining = True
        self.peers.announce()

    async def drained(self) -> None:
        """Returns once no request and no handoff runs, here or for a peer."""
        while self._requests or self.outgoing.running:
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Refuse what is new, end what runs, stop the worker, free the memory."""
        self._draining = self._stopping = True
        self.generation.stop()
        await self.outgoing.stop()
        await self.worker.stop()
        await self.forwarding.stop()


def _shutdown() -> RequestError:
    return RequestError("shutdown", "this host is shutting down: ask again or another", 503, SHUTDOWN_RETRY_S)


class _PageDoor:
    """Finds the handoff of each page that comes in over one link. Called on receiver threads."""

    def __init__(self, core: Core, link: Link) -> None:
        self._core = core
        self._link = link

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        page = PageHeader.unpack(header)
        handoff = self._core.generation.incoming.get(page.handoff_id)
        if handoff is None or handoff.link is not self._link:
            self._core.telemetry.late_page()  # of a handoff that is over, or never was: dropped
            return None
        return handoff.claim(page, payload_bytes)


def worker_options(config: DaemonConfig) -> WorkerOptions:
    """What the worker's command line says."""
    return WorkerOptions(
        model=str(config.model),
        roles=tuple(config.role.split("+")),
        llama=LlamaOptions(
            n_ctx=config.n_ctx,
            sequences=config.sequences,
            kv_tokens=config.kv_tokens,
            chunk_tokens=config.chunk_tokens,
            page_tokens=config.page_tokens,
            page_bytes=most_page_bytes(config.ring_mib << 20),
            kv_type_k=config.kv_type,
            kv_type_v=config.kv_type,
            flash_attention=config.flash_attention == "on",
            batch_invariant=config.batch_invariant,
            threads=config.threads,
            shared_cores=config.cores == "shared",
            mtp=config.mtp != "off",
        ),
    )
