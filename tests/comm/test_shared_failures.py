"""Mismatched calls, ranks that do not arrive and ranks that die, detected through shared memory."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.identity import process
from kos.comm.failures import FailureLog, PendingRanks
from kos.comm.host.shared import Segment
from kos.comm.host.shared import status as shared_status
from kos.comm.host.shared.segment import CALL_BYTES, PID, STARTED
from kos.comm.host.shared.status import SharedStatus
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, CollectiveTimeout, RankLost
from kos.testing import spawn
from tests.comm.ranks import on_each_rank, until
from tests.comm.shared_ranks import TIMEOUT, needs_core, run, through_slots
from tests.comm.test_failures import F4
from tests.comm.test_jobs import mpirun, program
from tests.comm.test_message_failures import Interrupted
from tests.comm.test_recorder import line_of

pytestmark = needs_core


def with_the_next(call: Callable[..., Any], comm: kos.Communicator, *arguments: Any) -> None:
    """Make a call and another: a rank that only gives data, as a broadcast's root, raises in its next call."""
    call(comm, *arguments)
    comm.barrier()


@pytest.mark.parametrize("start", [run, spawn])
@pytest.mark.parametrize("other", [lambda c: c.barrier(), lambda c: c.all_gather(np.zeros((), np.int64))])
@on_each_rank("start", 2)
def test_errors_name_the_call_that_was_made(comm, /, other):
    """For example ``all_gather_bytes``, which begins with an ``all_gather``."""
    with pytest.raises(CollectiveMismatch, match=r"1 called all_gather #0 of uint8\[128\], for all_gather_bytes: "):
        comm.all_gather_bytes(b"x") if comm.rank == 1 else other(comm)


@pytest.mark.parametrize("call", [lambda c, x: c.all_reduce(x), lambda c, x: c.broadcast(x, 1)])
def test_a_mismatch_is_seen_before_a_third_rank_comes(call):
    seen = threading.Event()

    def body(comm):
        if comm.rank == 0:
            assert seen.wait(20)
        with pytest.raises(CollectiveMismatch, match="they differ in count 4 against 5"):
            with_the_next(call, comm, np.zeros(3 + comm.rank))
        seen.set()

    run(body, 3)


def test_a_mismatch_between_ranks_that_only_give_data_is_found_in_a_later_call():
    def body(comm):
        x = np.zeros(4)
        comm.barrier()
        for _ in range(2):  # both are over at once on both ranks
            comm.broadcast(x, 0) if comm.rank == 0 else comm.reduce(x, 0)
        with pytest.raises(CollectiveMismatch, match="broadcast #1 .* but rank 1 called reduce #1 .* in oper") as error:
            comm.all_reduce(x)
        return str(error.value).split("all_reduce #3: ")[-1]

    assert len(set(run(body, 2))) == 1


@on_each_rank(run, 3)
def test_the_same_calls_in_other_shapes_belong_together(comm, /):
    """The negative control: ranks compare only what must be equal."""
    x = np.full((2, 6) if comm.rank else (12,), comm.rank, np.float32)
    assert (comm.all_reduce(x, timeout=5.0 + comm.rank) == 3).all()
    comm.gather(x, 1)
    comm.scatter(np.zeros((3, 4)) if comm.rank == 2 else None, np.zeros(4), 2)


def test_a_process_whose_name_is_not_utf8():
    name = Path("/proc/self/comm")
    before, expected = name.read_bytes(), process(os.getpid())
    try:
        name.write_bytes(b"caf\xc3) \xff")  # cut within a letter, as at 15 bytes
        assert process(os.getpid())[1] == expected[1] > 0
    finally:
        name.write_bytes(before.strip())


@pytest.mark.parametrize("letter", ["a", '"', "ж", "𝄞"])
@on_each_rank(run, 2, close=False)
def test_a_long_reason_is_cut_not_lost(comm, /, letter):
    if comm.rank == 0:
        comm.abort(reason=f"it had enough: {letter * 10_000}")
        return
    with pytest.raises(RankLost, match=f"rank 0 is gone: it had enough: {letter * 100}"):
        comm.barrier()


@on_each_rank(run, 2, close=False)
def test_a_description_that_is_half_written_does_not_hide_the_others(comm, /):
    calls, segment = comm.backend.calls, comm.backend._segment
    calls.texts[0], calls._added = b"", 1  # a call whose description is being written has the first place
    at = segment.text(segment.rank, 0)
    segment.bytes[at : at + 5] = b"[12, "
    with pytest.raises(CollectiveMismatch, match="count 4 against 5"):
        comm.all_reduce(np.zeros(4 + comm.rank))


@on_each_rank(run, 3, close=False)
def test_a_failure_of_an_earlier_call_that_comes_after_one_of_a_later_call(comm, /):
    """A rank that waits in the earlier call raises it at once, not at its timeout."""
    if comm.rank == 2:
        assert _later.wait(TIMEOUT)
        _later.clear()
        comm._collectives = Interrupted(comm._collectives)
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.ones(3))
        return
    first, began = comm.all_reduce(np.ones(3), async_op=True), time.monotonic()
    if comm.rank == 1:
        with pytest.raises(CollectiveTimeout, match="barrier #1"):
            comm.barrier(timeout=0.1)
        _later.set()
    with pytest.raises(RankLost, match="rank 2 is gone: all_reduce was interrupted by KeyboardInterrupt") as caught:
        first.wait()
    assert caught.value.ranks == (2,) and time.monotonic() - began < TIMEOUT / 2


_later = threading.Event()


@on_each_rank(run, 2, close=False)
def test_a_rank_that_was_stopped_while_it_reported_its_failure(comm, /):
    """It was overwriting its report of the failure of a later call.

    Ranks that wait raise that failure, without its text.
    """
    calls = comm.backend.calls
    comm.barrier()
    if comm.rank == 1:
        calls.report_failure(CollectiveError("of a later call"), 1)
        at = calls.segment.report_of(1)
        calls.segment.bytes[at : at + 5] = b"[12, "
        comm.rendezvous.barrier()
        return
    comm.rendezvous.barrier()
    with pytest.raises(CollectiveError, match="collective #1 failed on a rank that was stopped meanwhile"):
        comm.barrier()


def test_a_failure_of_a_class_that_ranks_do_not_share():
    error = kos.errors.from_record(kos.errors.to_record(BackendUnavailable("no memory")))
    assert (type(error), str(error)) == (CollectiveError, "no memory")


def test_a_segment_that_cannot_be_mapped_gives_its_file_back():
    file = os.memfd_create("kos-test")  # empty
    inode = os.fstat(file).st_ino
    with pytest.raises(ValueError, match="mmap"):
        Segment(file, [0, 1], 0)
    with contextlib.suppress(OSError):  # another thread may have opened one of that number meanwhile
        assert os.fstat(file).st_ino != inode


@on_each_rank(run, 2)
def test_a_rank_that_has_not_written_its_process_number_has_not_ended(comm, /):
    """The others may look for lost ranks while it opens the segment."""
    segment, status = comm.backend._segment, comm.rendezvous.failures.status
    place = segment.line(1) + PID
    comm.rendezvous.barrier()
    if comm.rank == 0:
        pid, segment.words[place] = segment.words[place], 0
        assert not status.ended(1) and not status.halted(1) and comm.rendezvous.failures.suspects() == []
        segment.words[place] = pid
    comm.rendezvous.barrier()


@on_each_rank(run, 2)
def test_a_failure_whose_text_is_not_there_yet_is_none(comm, /):
    """A rank may see the flag of another rank before its text, or with the text of an earlier failure."""
    backend = comm.backend
    mine = SharedStatus(backend._segment, [0, 1])
    if comm.rank == 0:
        words, _, line, _ = mine._memory
        for why in ("it was late", "it was gone"):
            mine.post_failure(kos.errors.from_record(["RankLost", why, [1]]))
            error, _ = mine.failure(0) or (None, 0.0)
            assert str(error) == why
        flag = words[line + shared_status.FAILED]
        mine.post_failure(kos.errors.from_record(["RankLost", "it was late", [1]]))
        words[line + shared_status.FAILED] = flag  # with the text of another one, as long
        assert mine.failure(0) is None
        words[line + shared_status.FAILED] = flag + 1
        assert mine.failure(0) is None
        mine.clear_failure()
        assert mine.failure(0) is None
    comm.barrier()


@on_each_rank(run, 2)
def test_the_status_may_be_freed_while_another_thread_reads_it(comm, /, monkeypatch):
    """The hub of a rendezvous checks for ranks that have ended while the program closes its last communicator."""
    status = comm.rendezvous.failures.status
    read, usual = SharedStatus(comm.backend._segment, [0, 1]), shared_status.process

    def free(pid):
        read.free()
        return usual(pid)

    comm.barrier()
    if comm.rank == 0:
        monkeypatch.setattr(shared_status, "process", free)
        assert read.runs(1) and not read.runs(1)  # freed within the first
        monkeypatch.setattr(shared_status, "process", usual)
        assert status.runs(1) and not status.ended(1)
    comm.barrier()


@pytest.mark.parametrize("start", [partial(run, close=False), partial(spawn, check_deadlock=False)])
def test_a_timeout_shows_the_last_call_of_a_late_rank(start):
    over = threading.Event()

    def body(comm):
        comm.all_reduce(F4())
        comm.all_reduce(F4())  # the last call of rank 1
        if comm.rank == 1:
            over.wait(TIMEOUT)
            return
        status = comm.rendezvous.failures.status
        until(lambda: "all_reduce #1" in status.last_call(1))  # the watchdog copies it in intervals
        with pytest.raises(CollectiveTimeout) as caught:
            comm.barrier(timeout=0.1)
        over.set()
        call = f"world: all_reduce #1 at {__file__}:{line_of('the last call of rank 1', __file__)}"
        assert str(caught.value).endswith(f"ranks [1] did not arrive; the last known call of rank 1: {call}")
        with contextlib.suppress(CollectiveError):
            comm.abort()

    start(body, 2)


def test_a_call_that_a_rank_has_begun_is_not_shown_as_its_last():
    failures = FailureLog([0, 1], 0)
    call = "world: barrier #1 at train.py:6"
    failures.status.last_call = lambda rank: call
    texts = [str(failures.timeout_error(PendingRanks([1]), f"world: barrier #{number}")) for number in (1, 12)]
    assert [text.partition("; ")[2] for text in texts] == ["", f"the last known call of rank 1: {call}"]


@on_each_rank(run, 2, close=False)
def test_a_long_path_of_a_last_call_is_cut_not_lost(comm, /):
    status = comm.rendezvous.failures.status
    status._read_call = lambda: f"world: barrier #0 at /{'é' * CALL_BYTES}/train.py:6"
    status.watch()
    comm.barrier()
    text = status.last_call(1 - comm.rank)
    assert text.endswith("é/train.py:6") and len(text.encode()) <= CALL_BYTES + 2
    status.free()
    status.watch()
    assert status.last_call(1 - comm.rank) == ""


@on_each_rank(run, 3, close=False)
def test_a_rank_that_ends_for_a_dead_one_names_it(comm, /):
    """Rank 0 may wait only for rank 2, which has aborted because of rank 1 and ended."""
    backend = comm.backend
    comm.barrier()
    if comm.rank == 1:
        calls = backend.calls
        calls.words[calls._line + STARTED] += 1  # as if another process had its number by now
    comm.rendezvous.barrier()
    if comm.rank == 2:
        backend.report_end("its process ended")
    comm.rendezvous.barrier()
    if comm.rank == 0:
        with pytest.raises(RankLost, match="rank 1 is gone: its process ended; rank 2 aborted because of it"):
            comm.barrier()


ULFM = ["--with-ft", "ulfm"]


def job(tmp_path: Path, ranks: int, text: str, *options: str) -> list[str]:
    """What a program under mpirun printed, line by line."""
    done = mpirun(ranks, program(tmp_path, text), *options)
    if "unknown option" in done.stderr:
        pytest.skip(f"this mpirun does not know {' '.join(options)}")
    print(done.stderr)  # pytest shows it if the test fails
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


COUNT = 6 * (128 << 10)  # bytes: more stages than there are slots
CALLS: dict[str, tuple[int, Callable[[kos.Communicator, Any], Any]]] = {  # and a rank that waits for rank 1 itself
    "broadcast": (0, lambda c, o: c.broadcast(x(), 0, **o)),
    "gather": (2, lambda c, o: c.gather(x(), 2, **o)),
    "scatter": (0, lambda c, o: c.scatter(x(3) if c.rank == 0 else None, x(), **o)),
    "all_reduce": (0, lambda c, o: c.all_reduce(x(), kos.ReduceOp.MAX, **o)),
    "all_gather": (2, lambda c, o: c.all_gather(x(), **o)),
    "all_to_all": (2, lambda c, o: c.all_to_all(x(3), **o)),
}


def x(parts: int = 1) -> np.ndarray:
    return np.zeros(parts * COUNT, np.uint8)


@pytest.mark.parametrize(("name", "one_copy"), [*((name, False) for name in CALLS), ("all_to_all", True)])
def test_only_those_that_are_waited_for_are_named(name, one_copy, monkeypatch):
    if not one_copy:
        through_slots(monkeypatch)
    begun, over = threading.Event(), threading.Event()
    impatient, call = CALLS[name]

    def body(comm):
        comm.barrier()
        if comm.rank == 1:  # takes its first steps and no more
            call(comm, {"async_op": True})
            begun.set()
            over.wait(20)
            comm.abort()
            return ""
        assert begun.wait(20)
        work = call(comm, {"async_op": True})
        until(lambda: comm.rank != impatient or (not work.done() and comm.backend.late(work).ranks == [1]))
        with pytest.raises(CollectiveTimeout) as caught:
            work.wait(0.3 if comm.rank == impatient else TIMEOUT)
        over.set()
        comm.abort()
        return str(caught.value)

    first, _, last = run(body, 3)
    assert first.endswith("not complete after 0.3 s; every rank arrived, but ranks [1] went no further")
    assert last == first, "all hear of the first failure"
