from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocopy.daemon.http_api import MAX_BODY_BYTES
from zerocopy.worker import protocol as p
from zerocopy.worker.sampling import Sampling

RELEASE = p.Release(9)
GENERATE = p.Generate(3, [1, 2, 3], max_tokens=4, sampling=Sampling(), stop=("x",), proof_key=b"k" * 16)


class Ends:
    def __init__(self) -> None:
        self.daemon, theirs = socket.socketpair()
        self.worker = p.WorkerSocket(theirs)
        self.theirs = theirs

    def receive(self) -> list[p.ToWorker]:
        """All that has been sent so far."""
        messages: list[p.ToWorker] = []
        while select.select([self.theirs], [], [], 0)[0]:
            messages += self.worker.receive()
        return messages


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.daemon.close()
    both.theirs.close()


def test_a_message_arrives_as_it_was_sent(ends: Ends) -> None:
    ends.daemon.sendall(p.encode(GENERATE))
    assert ends.receive() == [GENERATE]


def test_messages_that_arrive_together_are_taken_in_order(ends: Ends) -> None:
    ends.daemon.sendall(b"".join(p.encode(m) for m in (GENERATE, RELEASE, p.Shutdown())))
    assert ends.receive() == [GENERATE, RELEASE, p.Shutdown()]


def test_a_frame_that_arrives_byte_by_byte_is_one_message(ends: Ends) -> None:
    frame, received = p.encode(GENERATE) + p.encode(RELEASE), list[p.ToWorker]()
    for at in range(len(frame)):
        ends.daemon.sendall(frame[at : at + 1])
        received += ends.receive()
    assert received == [GENERATE, RELEASE]


def test_a_frame_longer_than_a_read_is_one_message(ends: Ends) -> None:
    long = p.Generate(3, list(range(100_000)), 4, Sampling(), (), None)
    frame = p.encode(long)
    received = []
    for at in range(0, len(frame), 50_000):
        ends.daemon.sendall(frame[at : at + 50_000])
        received += ends.receive()
    assert received == [long]


def test_messages_sent_together_leave_at_the_end_in_order_even_if_something_failed(ends: Ends) -> None:
    first, second, after = p.Dropped(1), p.TextDelta(2, "a", 1), p.Pong()
    with pytest.raises(ZeroDivisionError), ends.worker.together():
        ends.worker.send(first)
        ends.worker.send(second)
        assert not select.select([ends.daemon], [], [], 0)[0]
        raise ZeroDivisionError
    assert ends.daemon.recv(4096) == p.encode(first) + p.encode(second)
    ends.worker.send(after)
    assert ends.daemon.recv(4096) == p.encode(after)


def test_frames_of_two_threads_are_not_mixed(ends: Ends) -> None:
    """Each is larger than the socket takes at once."""
    many = list(range(100_000))

    def gathered() -> None:
        for _ in range(20):
            with ends.worker.together():
                ends.worker.send(p.Tokenized(1, many))
            ends.worker.send(p.Tokenized(1, many))

    threads = [
        threading.Thread(target=gathered),
        threading.Thread(target=lambda: [ends.worker.send_at_once(p.Tokenized(2, many)) for _ in range(40)]),
    ]
    for thread in threads:
        thread.start()
    frames, jobs = p.Frames(), list[int]()
    ends.daemon.settimeout(20)
    while len(jobs) < 80:
        for body in frames.feed(ends.daemon.recv(1 << 20)):
            message = p.decode_to_daemon(body)
            assert isinstance(message, p.Tokenized) and message.tokens == many
            jobs.append(message.job)
    for thread in threads:
        thread.join()
    assert jobs.count(1) == jobs.count(2) == 40


def test_what_another_thread_sends_does_not_wait_for_what_is_gathered(ends: Ends) -> None:
    with ends.worker.together():
        ends.worker.send(p.Pong())
        ends.worker.send_at_once(p.Dropped(7))
        ends.daemon.settimeout(20)
        assert ends.daemon.recv(1 << 16) == p.encode(p.Dropped(7))


def test_half_a_frame_is_no_message(ends: Ends) -> None:
    ends.daemon.sendall(p.encode(GENERATE)[:-1])
    assert ends.receive() == []


@pytest.mark.parametrize("sent", [b"", p.encode(GENERATE)[:7]])
def test_a_daemon_that_is_gone_is_the_end(ends: Ends, sent: bytes) -> None:
    ends.daemon.sendall(sent)
    ends.daemon.close()
    with pytest.raises(EOFError):
        ends.receive()


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read(ends: Ends) -> None:
    ends.daemon.sendall((p.MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(p.ProtocolError, match=f"frame of {p.MAX_FRAME + 1} bytes, at most {p.MAX_FRAME}"):
        ends.receive()


def test_a_message_beyond_the_bound_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "MAX_FRAME", 10)
    with pytest.raises(p.ProtocolError, match="at most 10"):
        p.encode(GENERATE)


def test_the_longest_prompt_fits_a_frame() -> None:
    """Five bytes a token at most, a token for each byte of the text: of a model that takes digits one by one, 16 MiB of
    them were more than a frame, which ended the worker."""
    assert p.frame_length(p.MAX_FRAME.to_bytes(4, "little")) == p.MAX_FRAME
    assert len(p.encode(p.Prefill(1, [1 << 31] * 1000, b"i" * 16, 1, 1, 0, 0, True))) < 5 * 1000 + 200
    assert p.MAX_FRAME > 5 * MAX_BODY_BYTES + 100


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa7Release", p.encode(p.Dropped(1))[4:]])
def test_a_frame_that_is_no_message_to_a_worker_is_a_protocol_error(ends: Ends, body: bytes) -> None:
    ends.daemon.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(p.ProtocolError, match="does not decode"):
        ends.receive()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(max_size=40), max_size=6))
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = p.Frames()
    pieces = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    assert [body for piece in pieces for body in frames.feed(piece)] == bodies


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_from_a_worker_are_a_message_or_a_protocol_error(body: bytes) -> None:
    try:
        message = p.decode_to_daemon(body)
    except p.ProtocolError:
        return
    assert isinstance(message, p.ToDaemon)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    body = bytearray(p.encode(p.Verified(1, False, 0.5))[4:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        p.decode_to_daemon(bytes(body))
    except p.ProtocolError as error:
        assert "does not decode" in str(error)


# -- descriptors


def pipes(count: int) -> tuple[list[int], list[int]]:
    both = [os.pipe() for _ in range(count)]
    return [r for r, _ in both], [w for _, w in both]


def close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def test_descriptors_come_in_the_order_in_which_they_were_sent(ends: Ends) -> None:
    readers, writers = pipes(5)
    socket.send_fds(ends.daemon, [p.encode(RELEASE)], readers)
    assert ends.receive() == [RELEASE]
    taken = [ends.worker.take_fd() for _ in readers]
    for number, writer in enumerate(writers):
        os.write(writer, bytes([number]))
    assert [os.read(fd, 1) for fd in taken] == [bytes([n]) for n in range(5)]
    close(*readers, *writers, *taken)


def test_descriptors_that_come_with_the_rest_of_a_frame_are_kept(ends: Ends) -> None:
    readers, writers = pipes(2)
    frame = p.encode(RELEASE)
    socket.send_fds(ends.daemon, [frame[:3]], readers[:1])
    socket.send_fds(ends.daemon, [frame[3:]], readers[1:])
    assert ends.receive() == [RELEASE]
    taken = [ends.worker.take_fd(), ends.worker.take_fd()]
    os.write(writers[1], b"x")
    assert os.read(taken[1], 1) == b"x"
    close(*readers, *writers, *taken)


def test_a_descriptor_that_did_not_come_is_missed(ends: Ends) -> None:
    ends.daemon.sendall(p.encode(RELEASE))
    ends.receive()
    with pytest.raises(p.ProtocolError, match="did not come"):
        ends.worker.take_fd()


def test_as_many_descriptors_as_the_bound_arrive(ends: Ends) -> None:
    fds = [os.dup(0) for _ in range(p.MAX_FDS)]
    socket.send_fds(ends.daemon, [p.encode(RELEASE)], fds)
    ends.receive()
    taken = [ends.worker.take_fd() for _ in fds]
    close(*fds, *taken)
