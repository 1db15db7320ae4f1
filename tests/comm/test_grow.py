"""Groups that grow: newcomers join, lost ranks are replaced, ranks that did not answer stay out."""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, RankLost, RendezvousError
from kos.memory.array import Array
from tests import grow_faults
from tests.comm import fake_nccl, fake_peer
from tests.comm.growing import both, check, join, known, run
from tests.comm.tcp_ranks import LAUNCHERS_VARIABLES, SECRET, run_processes
from tests.comm.test_shared_failures import ULFM, job
from tests.forked import PATHS, fork_server
from tests.host_compiler import needs_compiler
from tests.launcher import needs_mpirun

__all__ = ["known"]  # a fixture of every test


@both
@pytest.mark.parametrize("members", [1, 3])
def test_a_group_grows(backend, members):
    """It grows twice, also by a newcomer's address.  Members keep their order, and newcomers come after them.

    The old communicator and its groups are closed.
    """

    def body(comm):
        comm.barrier()
        half = comm.duplicate()
        new = comm.grow(2)
        assert type(new) is type(comm) and new.name == "world" and new.timeout == comm.timeout
        assert new.world_ranks == list(range(members + 2)) and new.backend_name == backend
        for old in (comm, half):
            with pytest.raises(CollectiveError, match="is closed"):
                old.barrier()
        return comm.rank, check(new.grow(1))

    def newcomer(address):
        comm = join(address)
        assert comm.timeout == 20.0 and comm.backend_name == backend
        addresses.append(comm.address)
        return check(comm.grow(1))

    def last(address):
        while not addresses:
            time.sleep(0.01)
        return check(join(addresses[0]))

    addresses = list[str]()
    results = run(backend, members, body, newcomer, newcomer, last)
    size = members + 3
    assert results[:members] == [(rank, (rank, size)) for rank in range(members)]
    assert sorted(results[members:]) == [(rank, size) for rank in range(members, size)]


@both
def test_a_group_grows_while_a_receive_waits(backend):
    """The message of the receive would be sent after the call.  The receive ends with the old communicator."""

    def body(comm):
        message = comm.recv(np.zeros(3), 1 - comm.rank, async_op=True)
        new = comm.grow(1)
        with pytest.raises(CollectiveError, match="aborted"):
            message.wait()
        return check(new)

    assert sorted(run(backend, 2, body, lambda address: check(join(address)))) == [(rank, 3) for rank in range(3)]


@both
def test_without_enough_newcomers_the_communicator_is_as_it_was(backend):
    def body(comm):
        while not comm.broadcast(np.array(comm.newcomers()), 0):
            time.sleep(0.01)
        with pytest.raises(RendezvousError, match=r"world: grow 2: 1 of 2 newcomers joined at .* within 2 s$"):
            comm.grow(2, timeout=2.0)  # in which all members come, also on a busy machine
        assert comm.failure is None and comm.timeout == 20.0
        comm.barrier()
        return check(comm.grow(1))

    assert sorted(run(backend, 2, body, lambda address: check(join(address)))) == [(rank, 3) for rank in range(3)]


@both
@pytest.mark.parametrize("changes", [("grow 1", "grow 2"), ("shrink", "replace 0")], ids=str)
@pytest.mark.parametrize("last", [0, 1])
def test_changes_that_differ(backend, changes, last):
    """The mismatch is found whichever rank calls last, also if no newcomer is awaited.  Nothing else has changed."""

    def body(comm):
        comm.barrier()
        time.sleep(0.2 * (comm.rank == last))
        name, *count = changes[comm.rank].split()
        either = f"called ({'|'.join(changes)})"
        with pytest.raises(CollectiveMismatch, match=f"{either} but rank [01] {either}") as caught:
            getattr(comm, name)(*map(int, count))
        error = caught.value
        assert sorted(error.ranks) == [0, 1] and {error.expected, error.got} == {*changes}
        if name == "grow":  # the other changes close the communicator first
            comm.barrier()
        return check(comm.shrink())

    assert run(backend, 2, body) == [(0, 2), (1, 2)]


@both
def test_a_newcomer_that_waits_is_taken_after_another_change(backend):
    def body(comm):
        while not comm.broadcast(np.array(comm.newcomers()), 0):
            time.sleep(0.01)
        return check(comm.shrink().grow(1))

    assert sorted(run(backend, 2, body, lambda address: check(join(address)))) == [(rank, 3) for rank in range(3)]


def test_a_grow_fails_at_once_if_a_member_is_lost():
    failed = threading.Event()

    def body(comm):
        if comm.rank == 1:
            comm.rendezvous.threads.world.end(1, "it is dead")
            return
        assert comm.rank == 0 or failed.wait(10)  # half of the timeout
        with pytest.raises(RankLost, match="world: grow: rank 1 is gone: it is dead"):
            comm.grow(1)
        failed.set()

    run("mock", 3, body)


@pytest.mark.parametrize("backend", ["nccl", pytest.param("peer", marks=needs_compiler)])
def test_the_backend_of_gpus_is_made_again(backend, monkeypatch):
    """It has its own slabs, kernels and communicators, on stand-ins for GPUs."""
    with fake_nccl.no_gpu(monkeypatch) if backend == "nccl" else fake_peer.no_gpus(monkeypatch, 3):
        grow_on_gpus(backend, monkeypatch)


def grow_on_gpus(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nccl.usable(monkeypatch, NCCLBackend if backend == "nccl" else PeerBackend)

    def use(comm: kos.Communicator) -> tuple[int, int]:
        assert comm.backend_name == backend and comm.device == 0
        x = Array.from_numpy(np.full(3, comm.rank + 1, np.int32), 0)
        comm.all_reduce(x)
        comm.synchronize()
        assert (x.numpy() == comm.size * (comm.size + 1) // 2).all()
        return comm.rank, comm.size

    def body(comm: kos.Communicator) -> Any:
        use(comm)
        new = comm.grow(1)
        found = use(new)
        new.close()
        return found

    def newcomer(address: str) -> Any:
        comm = join(address, device=0, timeout=60.0)
        found = use(comm)
        comm.close()
        return found

    # A busy machine takes long to compile the kernels, which each group does when it is made.
    assert sorted(run(backend, 2, body, newcomer, timeout=60.0, device=0)) == [(rank, 3) for rank in range(3)]


@pytest.mark.parametrize("grace", [{"control.grow": 0.1}], ids=[""])
def test_a_leader_that_came_too_late_leads_the_next_time(grace):
    """The other ranks have marked it as silent, and follow it again as soon as it answers."""

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            failed.wait()
        else:
            with pytest.raises(RendezvousError, match=r"grow: ranks \[0\] did not arrive within 0.3 s"):
                comm.grow(1, timeout=0.3)
            failed.wait()
        began.wait()
        if comm.rank == 0:
            time.sleep(0.3)  # the next one leads already
        return check(comm.grow(1))

    failed, began = threading.Barrier(3, timeout=20), threading.Barrier(3, timeout=20)
    results = run("tcp", 3, body, lambda address: check(join(address)))
    assert results == [(rank, 4) for rank in range(4)]


@pytest.mark.parametrize("grace", [{"control.grow": 2.0}], ids=[""])
def test_ranks_do_not_call_again_at_a_leader_that_was_silent(grace):
    """They would then be late for the next leader, which waits for the silent one no longer than the timeout."""

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            assert over.wait(40)
            comm.abort()
            return 0.0
        with pytest.raises(CollectiveTimeout, match=r"ranks \[0\]"):
            comm.all_reduce(np.ones(1), timeout=0.3)
        comm.timeout = 1.0
        with pytest.raises(CollectiveMismatch):
            comm.shrink() if comm.rank == 1 else comm.replace(0)
        began = time.monotonic()
        try:
            rest = comm.shrink()
        finally:
            over.set()
        seconds = time.monotonic() - began
        assert rest.size == 2
        rest.close()
        return seconds

    over = threading.Event()
    assert max(run("tcp", 3, body)) < 1.0 + 2.0


STOPPED = """
import os, signal, time, numpy as np, kos
if not {shared}:
    os.environ["KOS_HOST"] = os.environ["RANK"]
comm = kos.init(timeout=60)
pids = [int(pid) for pid in comm.all_gather_bytes(str(os.getpid()).encode())]
comm.timeout = 1.0
if comm.rank == {stopped}:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    while True:
        comm.all_reduce(np.ones(1000))
except kos.errors.CollectiveError as error:
    assert comm.rank == {stopped} or not {shared} or error.ranks == ({stopped},), error
try:
    try:
        rest = comm.shrink()
    except kos.errors.RendezvousError as error:  # between hosts, of a rank that the failure has not named
        assert not {shared} and error.ranks == ({stopped},), error
        rest = comm.shrink()
except kos.errors.RankLost as error:
    assert comm.rank == {stopped} and error.ranks == (comm.rank,), error
    print("out:", str(error).partition(" (epoch")[0], flush=True)
    os._exit(0)
rest.barrier()
if rest.rank == 0:
    os.kill(pids[{stopped}], signal.SIGCONT)
    while not rest.broadcast(np.array(os.path.exists(f"/proc/{{pids[{stopped}]}}")), 0).any() is np.False_:
        rest.newcomers()
else:
    while not rest.broadcast(np.array(True), 0).any() is np.False_:
        rest.newcomers()
print(rest.size, flush=True)
rest.close()
"""


@pytest.mark.parametrize(("stopped", "shared"), [(0, True), (2, True), (0, False), (1, False)], ids=str)
def test_a_stopped_rank_wakes_up_and_is_out(stopped, shared):
    """It learns that the others have continued without it, whether it would have led or followed them."""
    texts = [text for _, text in run_processes(STOPPED.format(stopped=stopped, shared=shared), 3)]
    out = f"out: world: shrink: rank {stopped} was left out: the others continued without it, because it did not answer"
    assert sorted("".join(texts).splitlines()) == ["2", "2", out]


@needs_mpirun
def test_ranks_of_mpi_are_replaced_over_tcp(tmp_path):
    """The newcomer is no process of the MPI job."""
    known = f"""
import os
os.environ |= {{"KOS_JOIN": "{tmp_path}/address", "KOS_SECRET": "{SECRET}"}}
"""
    newcomer = known + """
import numpy as np, kos
comm = kos.join(timeout=60)
print("joined", comm.rank, comm.backend_name, comm.all_reduce(np.ones(1))[0], flush=True)
comm.close()
"""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    joining = fork_server().start("tests.forked:run_program", [newcomer], env | {"PYTHONPATH": PATHS}, tmp_path / "new")
    text = known + """
with kos.init("mpi", timeout=60) as comm:
    comm.barrier()
    comm.rendezvous.barrier()  # without the core, MPI fails also collectives that the lost rank has completed
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    try:
        while True:
            comm.all_reduce(np.ones(1000))
    except kos.errors.RankLost:
        pass
    new = comm.replace()
    print(new.rank, new.backend_name, new.all_reduce(np.ones(1))[0], new.rendezvous.mpi_comm, flush=True)
    new.close()
"""
    try:
        lines = sorted(job(tmp_path, 3, text, *ULFM))
        assert joining.wait(20) == 0
    finally:
        joining.kill()
    assert (tmp_path / "new").read_text() == "joined 2 tcp 3.0\n"
    assert lines == ["0 tcp 3.0 None", "1 tcp 3.0 None"]


@pytest.mark.parametrize("seed", [3, 12, 13, 16, 21, 39, 57, 141])
def test_random_changes(seed):
    """Ranks are killed and join during collectives, also rank 0 and several at once.

    ``tests.faults grow`` runs more.
    """
    trial = grow_faults.Trial.of(seed, 3.0)
    verdict, story = grow_faults.run_trial(trial)
    assert verdict == grow_faults.RIGHT, f"{trial}: {story}"
