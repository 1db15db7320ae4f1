"""Ranks compare many calls at a time, while the compared ranks continue or end."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import kos
from kos.comm.host.shared import FingerprintRing
from kos.comm.host.shared.segment import ARRIVED, RING
from kos.comm.prepared import Fingerprints
from kos.comm.work import Work
from kos.errors import CollectiveMismatch
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core, run
from tests.comm.works import work_of

pytestmark = needs_core


def call(sequence: int, root: int | None = None) -> Work[Any]:
    work = work_of("barrier", sequence=sequence, root=root)
    Fingerprints().add(work.prepared)
    return work


def varied(sequence: int) -> Work[Any]:
    """No call is like the one that has its place a ring later."""
    return call(sequence, sequence % 3)


def together(body: Callable[[list[FingerprintRing]], None], size: int = 2) -> None:
    """Run ``body`` once, with the calls of all ranks."""
    calls: list[Any] = [None] * size

    def rank(comm: kos.Communicator) -> None:
        calls[comm.rank] = comm.backend.calls
        comm.rendezvous.barrier()
        if comm.rank == 0:
            body(calls)
        comm.rendezvous.barrier()

    run(rank, size, close=False)


class Words:
    """The control words of the segment; calls ``then`` after the first read of the word at ``place``."""

    def __init__(self, calls: FingerprintRing, then: Callable[[], None], place: int) -> None:
        self.words, self.then, self.place = calls.segment.words, then, place

    def __getitem__(self, place: Any) -> Any:
        word = self.words[place]
        if place == self.place:
            then, self.then = self.then, lambda: None
            then()
        return word

    def __setitem__(self, place: int, word: int) -> None:
        self.words[place] = word


@on_each_rank(together)
def test_a_rank_that_announces_another_call_during_a_check(calls, /):
    """Whether all ranks have begun a call is known only once the call was compared with theirs."""
    mine, theirs = calls
    mine.announce(varied(0))
    mine.words = Words(mine, lambda: theirs.announce(call(0, 1)), mine.segment.line(1) + ARRIVED)
    with contextlib.suppress(CollectiveMismatch):
        assert not mine.check(varied(0))
    with pytest.raises(CollectiveMismatch):
        mine.check(varied(0))


@on_each_rank(together)
def test_own_calls_that_are_overwritten_while_they_are_read(calls, /):
    """The watchdog reads them to report them to other hosts, while the program goes on."""
    mine = calls[0]
    for sequence in range(RING):
        mine.announce(varied(sequence))

    def go_on():
        for sequence in range(RING, RING + 20):
            mine.announce(varied(sequence))

    mine.words = Words(mine, go_on, mine.segment.line(0) + ARRIVED)
    first, marks = mine.since(0)
    assert first == 21 and marks == [varied(sequence).prepared.fingerprint for sequence in range(21, RING)]
    assert mine.since(RING + 20) == (RING + 20, []) and mine.since(RING + 100) == (RING + 100, [])


@pytest.mark.parametrize("ahead", [0, 1])
@on_each_rank(together)
def test_calls_that_are_no_longer_on_record(calls, /, ahead):
    """A rank that waits for no other rank goes on.  A backend of ``auto`` compares its own last call later."""
    for each, count in zip(calls, (RING + 20, 11) if ahead == 0 else (11, RING + 20), strict=True):
        for sequence in range(count):
            each.announce(varied(sequence))
    assert calls[0].check(varied(10))
