"""Calls on GPUs: calls by the core, and mismatched calls, which are named on all ranks.

mpirun -n 2 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_gpu_calls.py
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp, cuda
from kos.errors import CollectiveMismatch, InvalidArgument, KosError
from kos.memory.array import Array
from tests.comm.test_nccl import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

TIMEOUT = 15.0
ENOUGH = 1000
"""Calls after which a rank that never waits must have learned of a mismatch."""

Call = Callable[[kos.Communicator], Any]


def ones(comm: kos.Communicator, count: int = 1000, dtype: Any = np.float32) -> Array:
    return on_gpu(comm, np.ones(count, dtype))


CASES: dict[str, tuple[Call, Call, Any, Any]] = {
    "operation": (lambda c: c.all_reduce(ones(c)), lambda c: c.broadcast(ones(c)), "all_reduce", "broadcast"),
    "count": (lambda c: c.all_reduce(ones(c)), lambda c: c.all_reduce(ones(c, 1001)), 1000, 1001),
    "dtype": (lambda c: c.all_gather(ones(c)), lambda c: c.all_gather(ones(c, 1000, np.int32)), "float32", "int32"),
    "op": (lambda c: c.all_reduce(ones(c)), lambda c: c.all_reduce(ones(c), ReduceOp.AVG), "SUM", "AVG"),
    "root": (lambda c: c.reduce(ones(c), 0), lambda c: c.reduce(ones(c), 1), 0, 1),
}
"""What ranks call, what another one calls, and what differs."""


def differ(case: str) -> str:
    """A pattern of the difference."""
    one, other = CASES[case][2:]
    return rf"{case} ({one} against {other}|{other} against {one})"


@pytest.fixture
def comm(world, mpi_world):
    """One to break; afterwards the GPU works as before."""
    comm = world.duplicate()
    x = ones(comm)
    comm.all_reduce(x)
    comm.broadcast(x)
    comm.synchronize()
    yield comm
    comm.close()
    mpi_world.barrier()
    assert (world.all_reduce(ones(world)).numpy() == world.size).all(), "the GPU is not fit any more"


@pytest.mark.parametrize("library", ["kos", "torch"])
def test_known_calls_are_made_by_the_core(world, library):
    """On new arrays, on the default stream and on another one, each call is ordered with the work on its stream."""
    comm = world.duplicate()
    torch = pytest.importorskip("torch") if library == "torch" else None
    if comm._core_group is None or (torch and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")):
        pytest.skip("needs the compiled core, and with torch DLPack's C exchange API")
    made, device, calls = 0, f"cuda:{comm.device}", 40
    stream = None if torch else cuda.create_stream(comm.device)
    side = torch.cuda.Stream(comm.device) if torch else None
    for turn, on_side in enumerate((False, True, False, True)):
        outer = torch.cuda.stream(side) if torch and on_side else contextlib.nullcontext()
        at = stream if on_side else None
        with outer:
            before = comm._core_group.hits
            for number in range(calls):
                values = np.full(1000, comm.rank + number + turn, np.float32)
                if torch:
                    x = torch.full((1000,), comm.rank + number + turn, device=device, dtype=torch.float32)
                    y = torch.empty(1000 * comm.size, device=device)
                else:
                    x = Array.from_numpy(values, comm.device, stream=at)
                    y = Array.empty(1000 * comm.size, np.float32, comm.device, stream=at)
                assert comm.all_reduce(x) is x and comm.all_gather(x, y) is y
                found = y.cpu().numpy() if torch else y.numpy(at)
                assert (found == comm.size * (comm.size - 1) / 2 + comm.size * (number + turn)).all()
            made += comm._core_group.hits - before
    assert made > 0.8 * 4 * 2 * calls
    comm.close()


def test_a_thread_that_has_no_device_of_its_own(world):
    """The current device of CUDA belongs to a thread.

    Calls of a new thread, also overlapped ones, use the communicator's.
    """
    x, y, failures = ones(world), world.allocate(1 << 21, np.float32), []
    z = Array.from_numpy(np.ones(1000, np.float32), world.device, stream=cuda.create_stream(world.device))
    y.copy_from(ones(world, 1 << 21))  # as large as what copy engines carry

    def body():
        try:
            world.all_reduce(x)
            for array in (x, y):
                world.all_reduce(array, async_op=True).wait()
            for _ in range(4):  # the last ones are cached, and on a stream of their own
                world.all_reduce(z)
            world.synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(TIMEOUT)
    assert not failures and not thread.is_alive(), failures
    for array, calls in ((x, 2), (y, 1), (z, 4)):
        assert (array.numpy() == world.size**calls).all()


LATER = "all_reduce: the communicator failed before: "


def alike(mpi_world: kos.Communicator, error: pytest.ExceptionInfo[CollectiveMismatch]) -> None:
    texts = mpi_world.rendezvous.allgather(str(error.value).encode())
    assert len(set(texts)) == 1, texts


@pytest.mark.parametrize("case", CASES)
def test_a_wait_names_what_differs(comm, mpi_world, case):
    usual, other = CASES[case][:2]
    odd = comm.size - 1
    begun = time.monotonic()

    def run():
        (other if comm.rank == odd else usual)(comm)
        comm.synchronize()

    with pytest.raises(CollectiveMismatch, match=differ(case)) as error:
        run()
    assert f"rank {odd} called" in str(error.value) and "#2" in str(error.value)
    assert time.monotonic() - begun < TIMEOUT / 2, "found at the timeout only"
    alike(mpi_world, error)
    with pytest.raises(KosError, match="failed before"):
        usual(comm)


@pytest.mark.parametrize("case", ["operation", "count"])
def test_a_rank_that_never_waits_raises_the_mismatch_too(comm, mpi_world, case):
    usual, other = CASES[case][:2]
    x = ones(comm)

    def run():
        try:
            (other if comm.rank == 0 else usual)(comm)
        finally:
            mpi_world.barrier()  # no rank makes its later calls before all have made the calls that differ
        for _ in range(ENOUGH):
            comm.all_reduce(x)

    with pytest.raises(CollectiveMismatch, match=differ(case)) as error:
        run()
    # Another thread of a rank may find it between two of its calls: then the next one says that it comes after.
    found = mpi_world.rendezvous.allgather(str(error.value).removeprefix(LATER).encode())
    assert len(set(found)) == 1, found


def test_a_process_that_drives_two_gpus(comm):
    """Each rank has one communicator per GPU, and calls them alternately."""
    devices = len(cuda.visible_devices())
    if devices < max(2, comm.size):
        pytest.skip("needs a GPU for each rank, and two")
    backend = "auto" if "+" in comm.backend_name else comm.backend_name
    with kos.init(backend, device=(comm.device + 1) % devices, timeout=TIMEOUT) as other:
        for turn in range(5):
            for each in (comm, other):
                x = Array.from_numpy(np.full(1000, each.rank + turn, np.float32), each.device)
                each.all_reduce(x)
                assert (x.numpy() == comm.size * (comm.size - 1) / 2 + comm.size * turn).all()
        with pytest.raises(InvalidArgument, match=f"cuda:{comm.device} .* cuda:{other.device}; a comm"):
            comm.all_reduce(x)


def test_what_a_graph_captures_is_compared_once(comm, mpi_world):
    """A comparison queues no work, so it may run while a graph is captured.  Replays do not count as calls."""
    stream = cuda.create_stream(comm.device)
    x = Array.zeros(1000, np.float32, comm.device, stream=stream)
    comm.all_reduce(x)
    comm.synchronize()
    calls, before = 200, comm.recorder.count  # compared in the midst of the capture
    with cuda.capture(stream, keep=[x]) as graph:
        for _ in range(calls):
            comm.all_reduce(x)
    for _ in range(3):
        graph.replay(stream)
    comm.synchronize(stream=stream)
    assert comm.recorder.count == before + calls
    graph.close()

    y = ones(comm, 1000 + comm.rank // (comm.size - 1))
    with cuda.capture(stream, keep=[y]) as graph:
        comm.all_reduce(y, stream=stream)
    graph.close()  # NCCL ends when no graph holds its calls any more
    mpi_world.barrier()  # all ranks have made the call
    with pytest.raises(CollectiveMismatch, match="count 1000 against 1001") as error:
        comm.synchronize(stream=stream)  # found without a replay, which would hang
    alike(mpi_world, error)
