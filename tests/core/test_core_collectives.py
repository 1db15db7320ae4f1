"""Collectives of the compiled core: counts that differ, who waits for whom, and arrays that do not fit."""

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


def test_arrays_that_do_not_fit_are_refused():
    read_only = np.ones(3)
    read_only.flags.writeable = False
    with groups(2) as (group, _):
        call = group.prepare("reduce", "float64", 3, root=1)
        gather = group.prepare("all_gather", "float64", 3)
        unaligned = np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float64)
        for run, given, text in (
            (call.run, (np.ones(4),), "x: expected 24 contiguous bytes aligned to 8, got 32 at"),
            (call.run, (unaligned,), "aligned to 8, got 24"), (call.run, (np.ones(6)[::2],), "not C-contiguous"),
            (call.run, ([1, 2, 3],), "bytes-like"), (gather.run, (np.ones(3), None), "bytes-like"),
            (gather.run, (np.ones(3),), "x: expected 48"), (gather.run, (np.ones(3), np.ones(5)), "out: expected 48"),
            (gather.run, (np.ones(6),), "x: expected 24"), (gather.run, (), "bytes-like"),
            (group.prepare("all_reduce", "float64", 3).run, (read_only,), "read-only"),
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError, BufferError), match=text):
                run(*given)
        assert group.begun == 0


def test_counts_of_another_number_of_ranks_are_refused():
    with groups(2) as (group, _):
        for counts in ({"send_counts": [1]}, {"recv_counts": [1, 2, 3]}):
            with pytest.raises(ValueError, match="^expected counts of 16 bytes or None, got (8|24)$"):
                group.prepare("all_to_all", "uint8", varies=True, **counts)
