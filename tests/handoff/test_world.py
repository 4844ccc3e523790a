"""Source and sink against each other under every fault: never two outcomes, never a commit of less than the whole
truth, nothing generated uncommitted, everything freed (H3, H7, H8; `World.check` is the statement)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.handoff.channel import Fault, Kind
from tests.handoff.scene import PROMPT, C, Page, content, renumbered, replaced
from tests.handoff.world import DISRUPTIONS, World
from zerocopy.handoff.components import Component

CHANNELS: Final = ("up", "down", "bulk")


def frames() -> list[tuple[str, int, int]]:
    """Channel, number and length of every frame of a handoff without faults."""
    world = World().finish()
    channels = {"up": world.up, "down": world.down, "bulk": world.bulk}
    return [(name, i, length) for name, channel in channels.items() for i, length in enumerate(channel.lengths)]


FRAMES: Final = frames()
STEPS: Final = len(World().finish().history)


def test_without_faults_the_state_is_committed_and_the_answer_is_right() -> None:
    world = World().finish().check()
    assert world.committed
    assert world.source.outcomes[0].committed
    assert world.sink.machine.late == 0


@settings(max_examples=150)
@given(st.lists(st.integers(0, 11), max_size=200))
def test_without_faults_it_commits_in_whatever_order_things_happen(choices: list[int]) -> None:
    world = World()
    for choice in choices:
        world.step(choice)
    assert world.finish().check().committed


def test_without_a_probe_it_commits_too() -> None:
    world = World(probe=False).finish().check()
    assert world.committed
    assert not any(address[0] is C.PROBE for address in world.sink.landed)


@pytest.mark.parametrize("disruption", DISRUPTIONS)
@pytest.mark.parametrize("at", range(STEPS))
def test_it_can_be_disrupted_at_every_step(at: int, disruption: str) -> None:
    """H7: whoever gives up, whenever: both sides end, free everything, and agree as far as they must."""
    world = World()
    for _ in range(at):
        world.step()
    world.disrupt(disruption)
    world.finish().check()


@settings(max_examples=150)
@given(st.lists(st.integers(0, 11), max_size=120), st.sampled_from(DISRUPTIONS), st.integers(0, 11))
def test_it_can_be_disrupted_in_whatever_order_things_happen(choices: list[int], disruption: str, after: int) -> None:
    world = World()
    for choice in choices:
        world.step(choice)
    world.disrupt(disruption)
    for _ in range(after):
        world.step(after)
    world.disrupt("cancel sink")
    world.finish().check()


@pytest.mark.parametrize("kind", [Kind.DROP, Kind.DUPLICATE, Kind.SWAP, Kind.HOLD])
@pytest.mark.parametrize(("channel", "frame", "length"), FRAMES)
def test_one_fault_in_any_frame_is_survived(channel: str, frame: int, length: int, kind: Kind) -> None:
    World({channel: [Fault(kind, frame)]}).finish().check()


@pytest.mark.parametrize(("channel", "frame", "length"), FRAMES)
def test_a_frame_cut_at_any_byte_never_commits(channel: str, frame: int, length: int) -> None:
    """Truncation accepted as success is a field report. Only what the sink says after it has everything (credit that
    is of no use any more, COMMIT_ACK) may be cut without costing the handoff; PREFILL and GRANT are before that."""
    for at in range(length):
        world = World({channel: [Fault(Kind.TRUNCATE, frame, at)]}).finish().check()
        assert not world.committed or (channel == "up" and frame > 1)


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(CHANNELS),
            st.builds(Fault, st.sampled_from(list(Kind)), st.integers(0, 14), st.integers(0, 2000)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(0, 11), max_size=120),
)
def test_many_faults_at_once_are_survived(some: list[tuple[str, Fault]], choices: list[int]) -> None:
    faults = {name: [fault for channel, fault in some if channel == name] for name in CHANNELS}
    world = World(faults)
    for choice in choices:
        world.step(choice)
    world.finish().check()


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.integers(0, 1 << 20))
def test_one_wrong_bit_anywhere_is_survived(frame: tuple[str, int, int], at: int) -> None:
    channel, number, _length = frame
    World({channel: [Fault(Kind.FLIP, number, at)]}).finish().check()


@pytest.mark.parametrize("frame", [f for c, f, _ in FRAMES if c == "bulk"])
def test_a_late_page_is_counted_and_dropped(frame: int) -> None:
    """Foreign state: a frame of a handoff that is over must not touch memory that was given to another."""
    world = World({"bulk": [Fault(Kind.HOLD, frame)]}).finish().check()
    assert not world.committed
    assert world.sink.machine.late >= 1
    assert world.sink.machine.state.value == "released"


def test_late_messages_are_counted_and_dropped() -> None:
    last = max(f for c, f, _ in FRAMES if c == "up")
    world = World({"up": [Fault(Kind.DUPLICATE, last)]}).finish().check()
    assert world.committed
    assert world.source.machine is not None
    assert world.source.machine.late == 1
    assert world.source.outcomes == world.sink.outcomes


def test_a_lost_grant_ends_at_the_deadline_on_both_sides() -> None:
    world = World({"up": [Fault(Kind.DROP, 1)]}).finish().check()
    assert world.reason in ("transfer-deadline", "queue-deadline")
    assert world.now >= 10


def test_a_lost_commit_ack_costs_the_source_its_time_and_nobody_the_state() -> None:
    last = max(f for c, f, _ in FRAMES if c == "up")
    world = World({"up": [Fault(Kind.DROP, last)]}).finish().check()
    assert world.committed
    assert world.source.outcomes[0].reason == "transfer-deadline"


# -- faults of the source itself (acceptance 7 of issue 2), for each component in turn ---------------------------------

Change = Callable[[Component, list[Page]], list[Page]]


def planted(change: Change, component: Component) -> World:
    return World(sabotage=lambda pages: change(component, pages)).finish().check()


def omit(component: Component, pages: list[Page]) -> list[Page]:
    return renumbered([p for p in pages if p[0].component is not component])


def truncate(component: Component, pages: list[Page]) -> list[Page]:
    return [(h, p[:-1] if h.component is component else p) for h, p in pages]


def swap_layers(component: Component, pages: list[Page]) -> list[Page]:
    """The rows of the neighbouring layers under this address."""
    made = []
    for header, payload in pages:
        if header.component is component:
            moved = (header.layers[0] + 1, header.layers[1] + 1)
            payload = content(component, moved, header.tokens, len(payload), PROMPT)
        made.append((header, payload))
    return made


def of_another_request(component: Component, pages: list[Page]) -> list[Page]:
    other = [99, 98, 97, 96, 95, 94, 93, 92, 91, 90, 89]
    return [
        (h, content(component, h.layers, h.tokens, len(p), other) if h.component is component else p) for h, p in pages
    ]


def zero(component: Component, pages: list[Page]) -> list[Page]:
    return [(h, bytes(len(p)) if h.component is component else p) for h, p in pages]


@pytest.mark.parametrize("component", list(Component))
@pytest.mark.parametrize("fault", [omit, truncate])
def test_a_component_left_out_or_cut_is_refused_by_the_source_itself(component: Component, fault: Change) -> None:
    world = planted(fault, component)
    assert not world.committed
    assert component.label in world.message
    assert world.reason in ("state-incomplete", "page-size")


LAYERED: Final = [C.ATTENTION_KV, C.RECURRENT, C.CONVOLUTION]
WRONG: Final = [*((c, f) for c in Component for f in (of_another_request, zero)), *((c, swap_layers) for c in LAYERED)]


@pytest.mark.parametrize(("component", "fault"), WRONG)
def test_wrong_content_under_a_right_checksum_is_caught_before_commit(component: Component, fault: Change) -> None:
    """H2: zeroed, swapped or foreign bytes *before* the checksum is taken pass every sum; the continuation tells."""
    world = planted(fault, component)
    assert not world.committed
    assert world.sink.answer is None
    assert world.reason == ("token-history" if component is C.TOKENS else "probe-mismatch")


def test_pages_in_another_order_under_right_numbers_are_as_good() -> None:
    """The ledger addresses pages; their order is the exporter's business."""
    world = World(sabotage=lambda pages: renumbered(in_order(pages))).finish().check()
    assert world.committed


def in_order(pages: list[Page]) -> list[Page]:
    finals = {h.component: h for h, _ in pages if h.final}
    turned = [(replaced(h, final=False), p) for h, p in pages[::-1]]
    last = {h.component: i for i, (h, _) in enumerate(turned)}
    return [(replaced(h, final=last[h.component] == i and h.component in finals), p) for i, (h, p) in enumerate(turned)]
