"""Two hosts, one handoff and simulated time: everything that can happen next is a list, and somebody picks.

The hosts here do what a daemon, a link and an engine do, and nothing more: they carry out the machines' actions,
move frames over faulty channels, keep account of landing memory, and run a "model" whose next logits depend on every
byte of its state. `finish` brings it to an end and `check` states what must hold whatever happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

from tests.handoff import scene
from tests.handoff.channel import Channel, Fault
from tests.handoff.scene import IDENTITY, PROMPT, SCHEMA, SEED, C, Page
from zerocopy.handoff.components import HEADER_BYTES, Component, PageHeader, record_bytes
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.machine import Action, Ended, Machine, Outcome, Release, Send
from zerocopy.handoff.messages import (
    CancelGenerate,
    Generate,
    GenerateEnd,
    GenerateEvent,
    HandoffMessage,
    Hello,
    Prefill,
    decode,
    encode,
    unpack_tokens,
)
from zerocopy.handoff.seen import SeenIds
from zerocopy.handoff.sink import SinkHandoff
from zerocopy.handoff.source import SourceHandoff
from zerocopy.handoff.states import State

Step = tuple[str, Callable[[], None]]
Sabotage = Callable[[list[Page]], list[Page]]

DISRUPTIONS: Final = ("cancel sink", "cancel source", "lose link")
WINDOW: Final = 700  # bytes of landing ring: two or three pages, so that credit matters
MAX_STEPS: Final = 2000
OF_NO_HANDOFF: Final = (Hello, Generate, GenerateEvent, GenerateEnd, CancelGenerate)
Address = tuple[Component, tuple[int, int], tuple[int, int]]


class Host:
    """What both hosts keep of their machine: outcomes and releases, to be counted."""

    def __init__(self, out: Channel) -> None:
        self.machine: Machine | None = None
        self.outcomes: list[Outcome] = []
        self.releases = 0
        self.out = out

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.out.put(encode(message))
                case Ended(outcome):
                    self.outcomes.append(outcome)
                case Release():
                    self.released()

    def released(self) -> None:
        self.releases += 1
        assert self.outcomes, "memory was given back before there was an outcome"

    def fail(self, reason: str) -> None:
        if self.machine is not None:
            self.do(self.machine.fail(reason, f"{reason} in a test"))


class SourceHost(Host):
    """The prefiller: exports a state, with whatever `sabotage` makes of its pages before they are checksummed."""

    machine: SourceHandoff | None

    def __init__(self, out: Channel, bulk: Channel, sabotage: Sabotage | None) -> None:
        super().__init__(out)
        self.bulk = bulk
        self.sabotage = sabotage or (lambda pages: pages)
        self.seen = SeenIds()
        self.pages: list[Page] = []
        self.unread: list[PageHeader] = []  # sent, and the link may still read them
        self.sealed = False

    def receive(self, message: HandoffMessage, now: float) -> None:
        if isinstance(message, Prefill):
            try:
                self.seen.use(message.handoff_id)
            except RemoteProtocolError:
                return
            largest = SCHEMA.components[0].page_bytes((0, 2), (0, 4))
            self.machine = SourceHandoff(message, IDENTITY, SCHEMA, largest_page=largest, now=now)
            self.prompt = unpack_tokens(message.prompt)
        elif self.machine is not None and message.handoff_id == self.machine.handoff_id:
            before = self.machine.grant
            self.do(self.machine.receive(message, now))
            if before is None and (grant := self.machine.grant):
                made = scene.pages(
                    SCHEMA, self.prompt, handoff_id=message.handoff_id, epoch=grant.epoch, seed=grant.seed
                )
                made = [p for p in made if self.machine.probe or p[0].component is not C.PROBE]
                self.pages = [scene.page(h, p, grant.seed) for h, p in self.sabotage(prove(made, self.prompt))]

    def steps(self) -> list[Step]:
        machine = self.machine
        steps: list[Step] = [("link has read a page", self.page_done)] if self.unread else []
        if machine is None or machine.over:
            return steps
        if machine.state is State.QUEUED:
            steps.append(("reserve", lambda: self.do(machine.reserve())))
        elif machine.state is State.STREAMING and self.pages and machine.may_send(self.pages[0][0]):
            steps.append(("send a page", self.send_page))
        elif machine.state is State.STREAMING and not self.pages and not self.sealed:
            steps.append(("manifest", self.manifest))
        return steps

    def send_page(self) -> None:
        assert self.machine is not None
        header, payload = self.pages.pop(0)
        try:
            self.machine.page_sent(header)
        except LocalProtocolError as error:
            self.do(self.machine.fail_with(error))
            return
        self.bulk.put(header.pack() + payload)
        self.unread.append(header)

    def page_done(self) -> None:
        assert self.machine is not None
        self.unread.pop(0)
        self.do(self.machine.page_done())

    def manifest(self) -> None:
        assert self.machine is not None
        self.sealed = True
        end = self.machine.tokens - 1
        try:
            self.do(self.machine.manifest(end, end))
        except LocalProtocolError as error:
            self.do(self.machine.fail_with(error))

    def released(self) -> None:
        super().released()
        assert not self.unread, "export memory was given back while the link still reads it"


class SinkHost(Host):
    """The decoder: lands pages, imports, verifies, commits, and only then generates."""

    machine: SinkHandoff

    def __init__(self, out: Channel, prompt: list[int], probe: bool, now: float) -> None:
        super().__init__(out)
        self.prompt = prompt
        self.probe = probe
        self.machine = SinkHandoff(
            scene.HANDOFF, IDENTITY, SCHEMA, prompt, tenant="anna", probe=probe, queue_deadline_s=10, now=now
        )
        self.receiving: list[tuple[PageHeader, bytes]] = []  # claimed, bytes still coming in
        self.in_ring: list[PageHeader] = []
        self.landed: dict[Address, bytes] = {}
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self.told = set[str]()
        self.answer: bytes | None = None

    def receive(self, message: HandoffMessage, now: float) -> None:
        if message.handoff_id == self.machine.handoff_id:
            self.do(self.machine.receive(message, now))

    def page_arrives(self, frame: bytes) -> None:
        """Raises RemoteProtocolError for what is not a page at all: the link closes."""
        header, payload = PageHeader.unpack(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
        accepted, actions = self.machine.accept_page(header, len(payload))
        if accepted:
            assert not self.releases, "a page was let into memory that had been given back"
            self.reserved_bytes += record_bytes(header.component, len(payload))
            self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
            self.receiving.append((header, payload))
        self.do(actions)

    def steps(self, now: float) -> list[Step]:
        machine, told = self.machine, self.told
        steps: list[Step] = [("a page is whole", self.page_whole)] if self.receiving else []
        if self.in_ring:
            steps.append(("the engine frees a record", self.free_record))
        if machine.over:
            return steps
        if machine.state is State.MINTED:
            steps.append(("offer", lambda: self.do(machine.offer())))
        if machine.state is State.RESERVED:
            steps.append(("grant", lambda: self.do(machine.grant(
                epoch=scene.EPOCH, seed=SEED, window=WINDOW, deadline_s=20, now=now))))  # fmt: skip
        if machine.state_complete and "imported" not in told:
            steps.append(("import", self.imported))
        if "imported" in told and self.probe and machine.landed(C.PROBE) and "verified" not in told:
            steps.append(("verify", self.verify))
        if machine.committable:
            steps.append(("commit", lambda: self.commit(now)))
        return steps

    def page_whole(self) -> None:
        header, payload = self.receiving.pop(0)
        fault = self.machine.inspect_page(header, memoryview(payload))
        published, actions = self.machine.page_landed(header, fault)
        if published:
            self.landed[header.component, header.layers, header.tokens] = payload
            self.in_ring.append(header)
        self.do(actions)

    def free_record(self) -> None:
        header = self.in_ring.pop(0)
        self.reserved_bytes -= record_bytes(header.component, header.payload_bytes)
        self.do(self.machine.released(header))

    def imported(self) -> None:
        self.told.add("imported")
        self.machine.imported()

    def verify(self) -> None:
        self.told.add("verified")
        mine = logits({a: p for a, p in self.landed.items() if a[0] is not C.PROBE}, self.prompt)
        theirs = next(p for a, p in self.landed.items() if a[0] is C.PROBE)
        self.do(self.machine.verified(mine == theirs, "bit-equal" if mine == theirs else "logits differ"))

    def commit(self, now: float) -> None:
        self.do(self.machine.commit(now))
        if self.machine.outcome is not None and self.machine.outcome.committed:
            self.answer = logits({a: p for a, p in self.landed.items() if a[0] is not C.PROBE}, self.prompt)

    def lose(self) -> None:
        """The link gives up pages whose bytes will not come."""
        while self.receiving:
            self.do(self.machine.page_discarded(self.receiving.pop(0)[0]))

    def released(self) -> None:
        super().released()
        assert not self.receiving, "landing memory was given back while a link still writes to it"
        self.reserved_bytes = 0
        self.in_ring.clear()


def logits(state: dict[Address, bytes], prompt: Sequence[int]) -> bytes:
    """The "model": every byte of state, at its address, decides."""
    parts = sorted((repr(address), payload) for address, payload in state.items() if address[0] is not C.TOKENS)
    return hashlib.shake_128(repr((parts, prompt[-1])).encode()).digest(88)


def prove(some: list[Page], prompt: Sequence[int]) -> list[Page]:
    """Put the source's true probe into its probe page."""
    truth = {(h.component, h.layers, h.tokens): p for h, p in scene.pages(SCHEMA, list(prompt))}
    del truth[C.PROBE, (0, 1), (0, len(prompt) - 1)]
    proof = logits(truth, prompt)
    return [(h, proof if h.component is C.PROBE else p) for h, p in some]


class World:
    """The whole thing. `faults` by channel: "up" (to the source), "down" (to the sink), "bulk"."""

    def __init__(
        self,
        faults: dict[str, list[Fault]] | None = None,
        *,
        sabotage: Sabotage | None = None,
        probe: bool = True,
    ) -> None:
        faults = faults or {}
        self.now = 0.0
        self.up, self.down, self.bulk = (Channel(faults.get(name)) for name in ("up", "down", "bulk"))
        self.source = SourceHost(self.down, self.bulk, sabotage)
        self.sink = SinkHost(self.up, PROMPT, probe, self.now)
        self.connected = True
        self.history: list[str] = []

    # -- what can happen next ------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        steps = [*self.source.steps(), *self.sink.steps(self.now)]
        if self.connected:
            steps += [("message to source", self._to_source)] if len(self.up) else []
            steps += [("message to sink", self._to_sink)] if len(self.down) else []
            steps += [("page to sink", self._page)] if len(self.bulk) else []
        return steps

    def disrupt(self, name: str) -> None:
        self.history.append(name)
        match name:
            case "cancel sink":
                self.sink.fail("cancelled")
            case "cancel source":
                self.source.fail("cancelled")
            case "lose link":
                self._lose_link("link-lost")

    def step(self, choice: int = 0) -> bool:
        """Do one of the things that can happen; with none, let time pass. False when all is over."""
        steps = self.steps()
        if steps:
            name, do = steps[choice % len(steps)]
            self.history.append(name)
            do()
            return True
        waiting = [h.machine for h in (self.source, self.sink) if h.machine is not None and not h.machine.over]
        if not waiting:
            return False
        self.now = min(machine.deadline for machine in waiting)
        self.history.append(f"time passes to {self.now}")
        for host in (self.source, self.sink):
            if host.machine is not None:
                host.do(host.machine.tick(self.now))
        return True

    def finish(self) -> World:
        """Run to the end; then bring what was held back, and run again."""
        for _ in range(2):
            for _ in range(MAX_STEPS):
                if not self.step():
                    break
            else:
                raise AssertionError(f"never ends: {self.history[-20:]}")
            for channel in (self.up, self.down, self.bulk):
                channel.let_go()
        return self

    # -- what must hold ------------------------------------------------------------------------------------

    def check(self) -> World:
        """At the end, whatever happened on the way."""
        for host in (self.source, self.sink):
            if host.machine is not None:
                assert len(host.outcomes) == 1, "exactly one outcome"
                assert host.releases == 1, "memory is given back exactly once"
                assert host.machine.state is State.RELEASED
                assert host.machine.outcome == host.outcomes[0]
        assert self.sink.reserved_bytes == 0
        assert self.sink.peak_bytes <= WINDOW, "landing memory beyond the credit"
        if self.source.outcomes and self.source.outcomes[0].committed:
            assert self.committed, "the source let go of a state that the sink does not have"
        if self.committed:
            truth = {(h.component, h.layers, h.tokens): p for h, p in scene.pages(SCHEMA, PROMPT)}
            state = {address: p for address, p in truth.items() if address[0] is not C.PROBE}
            landed = {address: p for address, p in self.sink.landed.items() if address[0] is not C.PROBE}
            assert landed == state, "committed a state that is not the whole truth"
            assert self.sink.answer == logits(state, PROMPT)
        else:
            assert self.sink.answer is None, "generated from an uncommitted state"
        return self

    @property
    def committed(self) -> bool:
        return bool(self.sink.outcomes) and self.sink.outcomes[0].committed

    @property
    def reason(self) -> str:
        return self.sink.outcomes[0].reason

    @property
    def message(self) -> str:
        return self.sink.outcomes[0].message

    # -- the link ------------------------------------------------------------------------------------------

    def _to_source(self) -> None:
        self._deliver(self.up, self.source)

    def _to_sink(self) -> None:
        self._deliver(self.down, self.sink)

    def _deliver(self, channel: Channel, host: SourceHost | SinkHost) -> None:
        try:
            message = decode(channel.get())
        except RemoteProtocolError as error:
            self._lose_link(error.reason)
            return
        if not isinstance(message, OF_NO_HANDOFF):
            host.receive(message, self.now)

    def _page(self) -> None:
        try:
            self.sink.page_arrives(self.bulk.get())
        except RemoteProtocolError as error:
            self._lose_link(error.reason)

    def _lose_link(self, reason: str) -> None:
        """The link closes: frames on the way are lost, both hosts are told."""
        self.connected = False
        self.source.fail(reason)
        self.sink.fail(reason)
        self.sink.lose()
