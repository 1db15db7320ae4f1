"""Collectives in a single copy: numbers of ranks, memory that cannot be read, and lost ranks."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat

import numpy as np
import pytest

import kos
from kos.comm.host.shared import transport
from kos.comm.host.shared.segment import PID
from kos.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import end_process, needs_core, run
from tests.comm.tcp_ranks import run_processes

pytestmark = needs_core

COUNT = 5 << 14  # elements of float64: 640 KB, a part that takes one copy


def contributions(comm: kos.Communicator) -> np.ndarray:
    return np.full(COUNT, 1.0 + comm.rank)


@on_each_rank(run, 2)
def test_a_list_of_counts_that_has_changed_is_another_call(comm, /):
    counts, x, out = [1, 1], np.full(1, comm.rank), np.empty(2, int)
    for _ in range(4):
        assert comm.all_gather_v(x, counts, out).tolist() == [0, 1]
    counts[0] = 2
    with pytest.raises(kos.errors.InvalidArgument, match="expected" if comm.rank else "counts"):
        comm.all_gather_v(x, counts, out)


@on_each_rank(run, 2)
def test_a_call_behind_one_whose_counts_differ(comm, /):
    """The later call, which has no array, fails for the same reason."""
    counts = [2, 2] if comm.rank == 0 else [1, 2]
    x = np.zeros(sum(counts))
    differ = "all_to_all_v #0 .*rank 0 expected 2 elements of float64 from rank 1, got 1 elements"
    expected = pytest.raises(CollectiveMismatch, match=differ)
    if comm.rank == 1:
        comm.rendezvous.barrier()
        with expected:
            comm.all_to_all_v(x, counts, [2, 2])
        return
    works = [comm.all_to_all_v(x, counts, [2, 2], async_op=True), comm.barrier(async_op=True)]
    comm.rendezvous.barrier()
    for work in works:
        with expected:
            work.wait()


CALLS = {
    "scatter": lambda comm, x: (comm.scatter(np.tile(x, comm.size) if comm.rank == 1 else None, x, 1) == 2).all(),
    "all_to_all": lambda comm, x: (comm.all_to_all(np.tile(x, comm.size))[COUNT : 2 * COUNT] == 2).all(),
}


@contextmanager
def of_no_process(comm: kos.Communicator) -> Iterator[None]:
    """Meanwhile nobody can read this rank's memory."""
    calls = comm.backend.calls
    at = calls._line + PID
    number, calls.words[at] = calls.words[at], (1 << 22) + 1
    yield
    calls.words[at] = number


@pytest.mark.parametrize("got", [None, bytes(16)], ids=["not permitted", "another process has its number"])
def test_ranks_that_may_not_read_each_other_use_slots(monkeypatch, got):
    """Also in containers with PID namespaces of their own, where a process number belongs to another process.

    One rank cannot read the memory of one other, and all ranks of the host use slots.
    """
    reads = chain([lambda *_: got], repeat(transport.read_memory))
    monkeypatch.setattr(transport, "read_memory", lambda *arguments: next(reads)(*arguments))

    def body(comm):
        assert all(call(comm, contributions(comm)) for call in CALLS.values())
        return "process_vm_readv is not permitted" in comm.explain()

    assert run(body, 3) == [True] * 3


@pytest.mark.parametrize(("vendor", "direct"), [("other", 512 << 10), ("intel", 100 << 10)])
def test_what_depends_on_the_cpu(vendor, direct, monkeypatch):
    """The smallest size of a part that is read in one copy, and whether cache lines are marked."""
    monkeypatch.setenv("KOS_CPU_VENDOR", vendor)
    cores = run(lambda comm: (comm.backend.calls.core.marks, comm.backend.calls.core.direct), 2)
    assert cores == [(vendor == "other", direct)] * 2


def test_an_unknown_vendor_is_refused_on_every_rank(monkeypatch):
    monkeypatch.setenv("KOS_CPU_VENDOR", "amd")
    with pytest.raises(AssertionError, match="KOS_CPU_VENDOR of rank 0: expected intel or other, got 'amd'"):
        run(lambda comm: comm.size, 2)


@pytest.mark.parametrize(("vendors", "expected"), [
    (["intel", "other", "other", "other"], "rank 1: expected intel, got 'other'"),
    (["other", "amd", "other", "other"], "rank 1: expected other, got 'amd'"),
    (["other", "other", "amd", "other"], "rank 2: expected intel or other, got 'amd'"),
])  # fmt: skip
def test_vendors_that_differ_on_one_host_are_refused_on_all_hosts(vendors, expected):
    text = f"""import os, kos
rank = int(os.environ["RANK"])
os.environ |= {{"KOS_HOST": str(rank // 2), "KOS_CPU_VENDOR": {vendors}[rank]}}
try:
    kos.init("tcp", timeout=60)
except kos.errors.InvalidArgument as error:
    print(error)
"""
    assert run_processes(text, 4) == [(0, f"KOS_CPU_VENDOR of {expected}\n")] * 4


@pytest.mark.parametrize("how", ["message", "collective"])
@on_each_rank(run, 2, close=False)
def test_a_read_from_a_rank_that_has_ended(comm, /, how):
    comm.barrier()
    if comm.rank == 1:
        with of_no_process(comm):
            if how == "message":
                comm.send(contributions(comm), 0, async_op=True)
            else:
                comm.backend.calls.core.direct = 1
                comm.all_to_all(np.ones(2 * COUNT), async_op=True)
            end_process(comm)
            comm.rendezvous.barrier()
            comm.rendezvous.barrier()
        return
    comm.rendezvous.barrier()
    with pytest.raises(RankLost, match="rank 1 is gone: its process"):
        comm.recv(contributions(comm), 1) if how == "message" else comm.all_to_all(np.ones(2 * COUNT))
    comm.rendezvous.barrier()


def test_memory_freed_after_a_failure_does_not_hide_it():
    """The reader arrives after the timeout of the rank whose memory it would read."""
    given_up, memory = threading.Event(), mmap.mmap(-1, 2 << 20)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def body(comm):
        if comm.rank == 0:
            x = np.frombuffer(memory, np.uint8)
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] did not arrive"):
                comm.scatter(x, np.empty(1 << 20, np.uint8), timeout=0.3)
            assert protect(x.ctypes.data, x.nbytes, 0) == 0  # as if it had been freed
            given_up.set()
        else:
            assert given_up.wait(20)
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] did not arrive"):
                comm.scatter(None, np.empty(1 << 20, np.uint8))

    run(body, 2, close=False)
