"""What ``kos.testing.spawn`` finds: deadlocks, arrays written in flight, messages that nobody received."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, KosError, RankLost
from kos.testing import Deadlock, Fault, spawn
from tests.comm.ranks import on_each_rank

LONG = 600.0  # seconds: a deadlock is not found by waiting for its timeout


def ring(comm: kos.Communicator) -> None:
    """Every rank sends first."""
    got = np.empty(3)
    comm.send(np.full(3, float(comm.rank)), (comm.rank + 1) % comm.size)
    comm.recv(got, (comm.rank - 1) % comm.size)
    assert (got == (comm.rank - 1) % comm.size).all()


def test_sends_before_receives_are_a_cycle():
    began = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        spawn(ring, 3, LONG)
    assert time.monotonic() - began < 60
    told = str(caught.value)
    for rank in range(3):
        peer = (rank + 1) % 3
        assert f"rank {rank} waits for rank {peer} in world: send #0 of float64[3], to rank {peer} with tag 0" in told
    assert told.endswith("the cycle: rank 0 -> rank 1 -> rank 2 -> rank 0")


@pytest.mark.parametrize("buffer_bytes", [24, float("inf")])
def test_sends_that_are_buffered(buffer_bytes):
    spawn(ring, 3, 60, buffer_bytes=buffer_bytes)
    if buffer_bytes == 24:
        with pytest.raises(Deadlock):
            spawn(ring, 3, LONG, buffer_bytes=23)


@on_each_rank(spawn, 2, 60, check_arrays=False)
def test_a_send_is_done_when_its_array_may_change(comm, /):
    """It is not complete while the receiver copies the array."""
    for number in range(16):
        x = np.full(1 << 22, float(number), np.float32)
        if comm.rank == 0:
            work = comm.send(x, 1, async_op=True)
            comm.barrier()
            while not work.done():
                pass
            x.fill(-1)
        else:
            comm.barrier()
            comm.recv(x, 0)
            assert (x == number).all()


def waits(comm: kos.Communicator, name: str) -> None:
    if name == "collective and message":
        comm.barrier() if comm.rank else comm.recv(np.empty(1), 1)
    elif name == "two groups":
        other = comm.duplicate()
        (comm if comm.rank else other).all_reduce(np.ones(2))
    elif name == "bytes":
        comm.rendezvous.allgather(b"") if comm.rank else comm.barrier()
    elif name == "a thread that ends":
        threading.Thread(target=lambda: time.sleep(0.2)).start()
        comm.recv(np.empty(1), 1 - comm.rank)
    elif name == "a watchdog":  # it acts on failures alone, and is no reason to wait for a timeout
        comm.on_failure(lambda error: None)
        ring(comm)
    elif comm.rank < 2:  # a rank that has ended
        comm.recv(np.empty(1), 1 - comm.rank)


CYCLE = "the cycle: rank . -> rank . -> rank ."


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        *((name, 2, CYCLE) for name in ("collective and message", "two groups", "bytes")),
        ("a thread that ends", 2, "deadlock"),
        ("a watchdog", 2, "deadlock"),
        ("a rank that has ended", 3, "rank 2 has ended: its function returned"),
    ],
)
def test_other_deadlocks(name, size, message):
    with pytest.raises(Deadlock, match=message):
        spawn(lambda comm: waits(comm, name), size, LONG)


def later(comm: kos.Communicator, how: str) -> None:
    """Rank 1 waits in kos at once; rank 0, which can help it, does so too or is busy meanwhile."""
    x, other = np.ones(1), comm.duplicate()
    if comm.rank == 1:
        other.recv(x, 0)
        comm.send(x, 0)
        return
    if how == "sleep":
        time.sleep(0.3)
        other.send(x, 1)
        comm.recv(x, 1)
    elif how in ("thread", "timer"):
        helper = threading.Timer(0.3, other.send, (x, 1))
        if how == "thread":
            helper = threading.Thread(target=lambda: (time.sleep(0.3), other.send(x, 1)))
        helper.start()
        comm.recv(np.empty(1), 1)
        helper.join()
    else:  # a wait that ends by itself
        with pytest.raises(CollectiveTimeout, match="not complete after 0.3 s; rank 1 sent nothing"):
            comm.recv(np.empty(1), 1, timeout=0.3)
        other.send(x, 1)
        comm.recv(x, 1)


@pytest.mark.parametrize("how", ["sleep", "thread", "timer", "timeout"])
def test_who_may_yet_go_on_is_in_no_deadlock(how):
    spawn(lambda comm: later(comm, how), 2, 60)


def test_a_callback_that_aborts_a_communicator_ends_its_waits():
    """The watchdog calls it a little later, when all ranks are already waiting."""

    def body(comm: kos.Communicator) -> None:
        other = comm.duplicate()
        comm.on_failure(lambda failure: comm.abort(reason=f"the callback, because {failure}"))
        work = comm.all_reduce(np.ones(1 + comm.rank), async_op=True)
        with pytest.raises(KosError, match="was aborted|the callback") as caught:
            other.recv(np.empty(1), 1 - comm.rank)
        assert not isinstance(caught.value, Deadlock)
        with pytest.raises(KosError, match="they differ in count|was aborted") as caught:  # whichever a rank sees first
            work.wait()
        assert not isinstance(caught.value, Deadlock)

    spawn(body, 2, LONG)


def in_flight(comm: kos.Communicator, write: Callable[[np.ndarray, np.ndarray], Any], name: str) -> None:
    x, out, other = np.ones(100), np.zeros(100), 1 - comm.rank
    if name == "all_reduce":
        work = comm.all_reduce(x, out=out, async_op=True)
    elif name == "send":
        work = comm.send(x, other, async_op=True) if comm.rank else comm.recv(out, other, async_op=True)
    else:
        work = comm.send_recv(x, out, other, other, async_op=True)
    if comm.rank == 1:
        write(x, out)
    work.wait()
    assert comm.rank == 1 or (out[0] == 1 + (name == "all_reduce"))


@pytest.mark.parametrize(
    ("name", "result"), [("all_reduce", False), ("send", False), ("send_recv", False), ("send_recv", True)]
)
def test_arrays_that_are_written_in_flight(name, result):
    def write(x, out):
        (out if result else x)[7] = 3

    with pytest.raises(CollectiveError, match=f"{name} #0 .*: rank 1 wrote to its array while the operation was in"):
        spawn(lambda comm: in_flight(comm, write, name), 2, 60)
    spawn(lambda comm: in_flight(comm, lambda x, out: (x.sum(), out.sum()), name), 2, 60)
    if result:
        spawn(lambda comm: in_flight(comm, write, name), 2, 60, check_arrays=False)


def test_two_operations_in_flight_on_one_array():
    def body(comm):
        x = np.ones(4)
        works = [comm.all_reduce(x, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()

    with pytest.raises(CollectiveError, match="wrote to its array .*, or another operation did"):
        spawn(body, 2, 60)


def test_messages_that_nobody_received():
    def body(comm):
        part = comm.split(0)
        if comm.rank == 0:
            comm.send(np.ones(3, np.float32), 1, 5)
            part.send(np.ones(2, np.int8), 1)

    expected = r"rank 0 sent float32\[3\] to rank 1 with tag 5; rank 0 sent int8\[2\] to rank 1 with tag 0"
    with pytest.raises(CollectiveError, match=expected):
        spawn(body, 2, 60, buffer_bytes=100)
    spawn(body, 2, 60, buffer_bytes=100, check_messages=False)
    with pytest.raises(CollectiveError, match=expected):  # a delay loses no message
        spawn(body, 2, 60, buffer_bytes=100, faults=[Fault("delay", 0)])
    spawn(body, 2, 60, buffer_bytes=100, faults=[Fault("drop", 0, 0, call="send")])  # dropped messages are not reported
    with pytest.raises(RankLost, match="rank 1 is gone: it closed its communicator"):  # nothing is buffered
        spawn(lambda comm: comm.rank or comm.send(np.ones(3), 1), 2, 60)


def test_init_in_the_thread_of_a_rank_is_no_group_of_one():
    with pytest.raises(InvalidArgument, match=r"init: expected the function to use the comm .*, got kos.init\(\)"):
        spawn(lambda comm: kos.init().size, 2)


@pytest.mark.parametrize("debug", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_pytest_shows_the_frames_of_the_program(tmp_path, debug):
    file = tmp_path / "test_mine.py"
    file.write_text(
        "def test_mine(spawn_ranks):\n    spawn_ranks(lambda comm: comm.barrier() if comm.rank else None)\n"
    )
    command = ("-m", "pytest", "-p", "kos.testing.plugin", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(file))
    environ = {**os.environ, "KOS_DEBUG": debug}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=environ)
    assert "test_mine.py:2: RankLost" in done.stdout or debug == "1"
    assert ("communicator.py" in done.stdout or "collectives.py" in done.stdout) == (debug == "1"), done.stdout


@pytest.mark.parametrize("how", ["alone", "batch", "message", "group"])
def test_a_work_that_is_never_waited_for(how):
    def body(comm):
        x = np.ones(2)
        if how == "batch":
            with comm.batch(async_op=True):
                comm.all_reduce(x)
        elif how == "message":
            comm.send(x, 1, async_op=True) if comm.rank == 0 else comm.recv(x, 0)
        else:
            (comm if how == "alone" else comm.split(0)).all_reduce(x, async_op=True)
        comm.rendezvous.barrier()  # else the Work of the later rank may fail, for the other one has ended

    expected = r"^spawn: rank 0 never waited for .*(all_reduce|send) #0 .*, at .*test_spawn\.py:\d+"
    with pytest.raises(CollectiveError, match=expected):
        spawn(body, 2)
    spawn(body, 2, strict=False)


@on_each_rank(spawn, 2)
def test_works_that_a_synchronize_or_the_end_of_their_group_waits_for(comm, /):
    part = comm.split(0)
    assert part is not None
    for each, wait in ((comm, comm.synchronize), (part, part.close)):
        each.all_reduce(np.ones(2), async_op=True)
        wait()
