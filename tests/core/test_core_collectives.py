"""Calls of the compiled core: which ranks wait for which, and for how long; counts for a wrong number of ranks."""

import time

import numpy as np
import pytest

from tests.core.core_ranks import groups, needs_core

pytestmark = needs_core


def test_who_only_gives_data_is_ahead_of_the_others():
    """By 64 calls whose data is beside the stamps, by 2 of larger ones.  Then it waits, until half of the 64 are read,
    and names who is behind."""
    for count, ahead, read in ((6, 64, 33), (7, 2, 1), (1000, 2, 1)):
        with groups(3) as made:
            calls = [group.prepare("broadcast", "float64", count, root=1) for group in made]
            works = [calls[1].start(np.full(count, float(number))) for number in range(ahead + 1)]
            assert [work.done() for work in works] == [True] * ahead + [False]
            got = np.zeros(count)
            for number in range(ahead + 1):
                for rank in (0, 2):
                    last = works[-1]
                    assert last.done() == (number >= read)
                    assert [last.missing(r) for r in range(3)] == [number + (rank == 2) < read, 0, number < read]
                    assert calls[rank].start(got).done() and (got == number).all()


@pytest.mark.parametrize("operation", ["reduce", "gather", "scatter", "scan", "exscan"])
def test_who_needs_no_data_of_others_does_not_wait_for_them(operation):
    with groups(3) as made:
        for count in (2, 5000):
            calls = [group.prepare(operation, "float64", count) for group in made]
            takes = {"reduce": (1, 0, 0), "gather": (3, 0, 0), "exscan": (0, 1, 1)}.get(operation, (1, 1, 1))
            gives = (3, 0, 0) if operation == "scatter" else (1, 1, 1)
            order = (1, 2, 0) if operation in ("reduce", "gather") else (0, 1, 2)
            for rank in order:
                ends = [np.ones(parts * count) if parts else None for parts in (gives[rank], takes[rank])]
                assert calls[rank].start(*ends).done(), rank


def test_counts_of_another_number_of_ranks_are_refused():
    with groups(2) as (group, _):
        for counts in ({"send_counts": [1]}, {"recv_counts": [1, 2, 3]}):
            with pytest.raises(ValueError, match="^expected counts of 16 bytes or None, got (8|24)$"):
                group.prepare("all_to_all", "uint8", varies=True, **counts)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", [1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_counts_beyond_what_the_core_counts_are_refused(size, count):
    """Also those whose sum over the ranks is 0 modulo 2**64."""
    with groups(size) as (group, *_):
        for counts in ({"count": count}, {"varies": True, "recv_counts": [count] * size}):
            with pytest.raises(ValueError, match="^all_gather(_v)?: expected .* counts"):
                group.prepare("all_gather", "float64", **counts)


def test_a_start_that_waits_returns_a_work_after_ten_milliseconds():
    with groups(2) as (a, b):
        for call, theirs in (
            (a.prepare("barrier").start, b.prepare("barrier").start),
            (lambda **o: a.prepare("recv", "uint8", src=1).start(b"", **o), b.prepare("send", "uint8").start),
        ):
            began = time.monotonic()
            work = call(waits=True)
            assert 0.0099 < time.monotonic() - began < 20 and not work.done()
            theirs()
            assert work.done()


def test_a_spin_ends_if_one_check_takes_longer_than_the_spin_may():
    """As on a busy machine, where a rank that yields its core gets it back much later.  The spin must end there too."""
    with groups(2, spin=1e-9) as (a, _):
        assert a.core.spin_ns == 1
        assert not a.prepare("barrier").start(waits=True).done()
