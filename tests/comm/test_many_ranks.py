"""Buffers of fixed size that hold ranks, names or counts: with 64 ranks, and with the data of thousands of ranks."""

import json
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.control.wire import MAX_MESSAGE
from kos.comm.host.shared.segment import FAILURE_BYTES, PID, STARTED, Segment, started
from kos.comm.host.shared.status import SharedStatus, fitting
from kos.comm.operation import Operation, Options
from kos.comm.prepared import TEXT_BYTES, Fingerprints, Prepared, described
from kos.comm.work import Work
from kos.errors import CollectiveMismatch, CollectiveTimeout, KosError, RankLost, RendezvousError
from kos.memory import as_buffer
from tests.comm.ranks import on_threads
from tests.comm.shared_ranks import needs_core, run
from tests.comm.tcp_ranks import TCPRanks

MANY = 4096
GROUP = f"group {list(range(MANY))}"
CALLS = [GROUP, "allocate of " + "x" * 5000, "é" * 5000, "\U0001f600" * 5000, '"\\' * 5000, "x" * 200, ""]


class _Many(ControlPlane):
    """Rank 0 of ``MANY``, whose other ranks send what it sends."""

    def __init__(self) -> None:
        self.rank, self.size, self.timeout = 0, MANY, 1.0
        self.sent = b""

    def _exchange(self, message: bytes) -> list[bytes]:
        self.sent = message
        return [message] * self.size

    def split(self, color: int | None, key: int = 0) -> ControlPlane | None:
        return None


def _prepared(o: Operation, kernel: str | None = None) -> Prepared:
    backend = SimpleNamespace(name="a backend with a long name" * 3, work=Work, group_suffix="")
    return Prepared(o, backend, lambda work: None, kernel and SimpleNamespace(name=kernel))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[:10])
def test_an_exchange_of_thousands_of_ranks_fits_a_message(call):
    place = _Many()
    place.call = call
    assert place.allgather(b"x" * 1000) == [b"x" * 1000] * MANY
    assert MANY * (len(place.sent) + 4) < MAX_MESSAGE


def test_long_calls_that_differ_at_their_end_are_told_apart():
    def body(rendezvous):
        rendezvous.call = f"group {[*range(20_000), rendezvous.rank]}"
        with pytest.raises(CollectiveMismatch) as caught:
            rendezvous.allgather(b"")
        return str(caught.value)

    for text in on_threads(2, body):
        assert text.startswith("rank 0 called group [0, 1, 2, ") and "rank 1 called group [0, 1, 2, " in text
        assert len(text) < 1000


@pytest.mark.parametrize("kernel", [None, "k" * 3000])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[:10])
def test_the_description_of_a_call_fits_its_place(call, kernel):
    memory = memoryview(bytearray(4 * TEXT_BYTES))
    fingerprints, texts = Fingerprints(memory), []
    for end in "ab":
        o = Operation("split", 0, Options(1.0, purpose=call + end, algorithm="auto" + call))
        texts.append(fingerprints.add(_prepared(o, kernel)).text)
    assert texts[0] != texts[1]
    for place, text in enumerate(texts):
        assert bytes(memory[TEXT_BYTES * place : TEXT_BYTES * (place + 1)]).rstrip(b" ") == text
    (name, first), (_, second) = (described(text, 3) for text in texts)
    assert name.startswith("split #3")
    assert [key for key in first if first[key] != second[key]] == ["purpose"]


@pytest.mark.parametrize("size", [2, 16, 17, MANY])
def test_the_description_of_long_counts_fits_its_place(size):
    x, texts = as_buffer(np.zeros(1), "x", False), []
    for last in (1, 2):
        counts = [2**57 - 1] * (size - 1) + [last]
        o = Operation("all_gather_v", 0, Options(1.0), send=x, recv=x, recv_counts=tuple(counts))
        texts.append(Fingerprints(memoryview(bytearray(TEXT_BYTES))).add(_prepared(o)).text)
        assert len(texts[-1]) <= TEXT_BYTES
    first, second = (described(text, 0)[1] for text in texts)
    assert [key for key in first if first[key] != second[key]] == ["counts"]


@pytest.mark.parametrize("text", ["late", "é" * 5000, "\U0001f600" * 5000])
@pytest.mark.parametrize("count", [0, 1, 64, 700, MANY])
def test_a_failure_of_thousands_of_ranks_fits_shared_memory(count, text):
    failure = CollectiveTimeout(text, ranks=range(100_000, 100_000 + count))
    data = fitting(kos.errors.to_record(failure))
    assert len(data) <= FAILURE_BYTES
    known = kos.errors.from_record(json.loads(data))
    assert type(known) is CollectiveTimeout and known.ranks == failure.ranks[: len(known.ranks)]
    assert str(failure).startswith(str(known)) and len(str(known)) >= min(len(text), 100)
    assert len(known.ranks) >= min(count, 100)


@needs_core
def test_waits_for_ranks_of_any_number():
    segment = Segment(-1, [0], 0)
    segment.words[segment.line(0) + PID] = os.getpid()
    segment.words[segment.line(0) + STARTED] = started(os.getpid())
    status = SharedStatus(segment, [0])
    for ranks, shown in (
        ((0, 4095), (0, 4095)), ((65_534,), (65_534,)), ((65_535,), ()), ((4095, 1 << 20, 7), (4095, 7)),
        ((1 << 31,), ()), (range(MANY), (0, 1, 2, 3)), ((), ()),
    ):  # fmt: skip
        status.post_wait(ranks)
        assert status.awaited(0) == shown


@pytest.mark.parametrize("kind", [RankLost, CollectiveTimeout, RendezvousError])
@pytest.mark.usefixtures("apart")
def test_a_failure_of_thousands_of_ranks_reaches_other_hosts(kind):
    failure = kind("é" * 5000, ranks=range(MANY))

    def body(comm):
        if comm.rank == 0:
            comm.rendezvous.channel.report_failure(failure, 0)
            with pytest.raises(KosError):  # until rank 1 has ended
                comm.recv_bytes(1)
            return
        with pytest.raises(kind) as caught:
            comm.all_reduce(np.ones(1))
        assert caught.value.ranks == tuple(range(MANY))

    TCPRanks(2).run(body)


def _in_a_group_of_all(comm: kos.Communicator) -> Any:
    group = comm.group(range(comm.size))
    assert group is not None
    total = float(group.all_reduce(np.ones(1))[0])
    group.close()
    return total, float(comm.all_reduce(np.ones(1))[0])


@needs_core
def test_a_group_of_many_ranks():
    assert run(_in_a_group_of_all, 150) == [(150, 150)] * 150
