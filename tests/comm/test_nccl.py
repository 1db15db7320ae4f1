"""The nccl backend on as many GPUs as mpirun starts ranks: the conformance suite, streams, graphs, failures.

mpirun -n 8 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_nccl.py
"""

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp, cuda
from kos.comm.gpu.nccl_binding import ranks_may_share_a_gpu
from kos.cuda import driver, streams
from kos.errors import BackendUnavailable, CollectiveTimeout, InvalidArgument
from kos.memory.array import Array
from kos.testing.conformance.model import check, in_rank_order
from kos.testing.conformance.values import LARGE
from tests.comm import test_conformance as conformance
from tests.comm.gpu_ranks import GPURanks
from tests.comm.ranks import ALL_DTYPES, assert_bits, assert_same_on_all_ranks, inputs, on_each_rank, poison
from tests.comm.test_conformance import *  # noqa: F403 -- the tests that GPUs run too

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
BACKEND = "nccl"

TIMEOUT = 20.0
SHORT = 1.5  # seconds, where a timeout is to be seen
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def ranks(gpu_world, mpi_world):
    return GPURanks(gpu_world, mpi_world)


@pytest.mark.parametrize("name", conformance.names_of(gpu=True))
def test_promise(ranks, seed, name):
    conformance.check(ranks, seed, name)


def on_gpu(comm: Any, x: np.ndarray, stream: Any = None) -> Array:
    """A copy on this rank's GPU that is there when this returns."""
    array = Array.from_numpy(x, comm.device, stream=stream)
    streams.synchronize(stream, comm.device)
    return array


@pytest.mark.parametrize(
    ("dtype", "op"),
    [  # each dtype and each operation with a third of the others
        pytest.param(dtype, op, marks=pytest.mark.slow if (i + j) % 3 else (), id=f"{dtype}-{op.name}")
        for i, dtype in enumerate(d for d in ALL_DTYPES if d.kind in "fV")
        for j, op in enumerate((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, ReduceOp.PREMUL_SUM))
    ],
)
@on_each_rank("ranks.run")
def test_deterministic_is_in_rank_order(gpu, /, seed, dtype, op):
    n, me = gpu.size, gpu.rank
    factors = [0.3 + 0.7 * rank for rank in range(n)]
    mine = PremulSum(factors[me]) if op is ReduceOp.PREMUL_SUM else op
    for count in (1, 7, 997, LARGE):  # small ones go whole to everybody, large ones by parts
        xs = [(4 * x.astype(np.float32)).astype(dtype) for x in inputs(seed, n, count, dtype)]
        expected = in_rank_order(xs, op, factors)
        x = xs[me].copy()
        gpu.all_reduce(x, mine, deterministic=True)
        assert_bits(x, expected, f"all_reduce of {count}")
        out = poison(count, dtype)
        gpu.reduce(xs[me], n - 1, mine, out=out, deterministic=True)
        if me == n - 1:
            assert_bits(out, expected, f"reduce of {count}")
    xs = inputs(seed, n, 33 * n, dtype)
    part = gpu.reduce_scatter(xs[me], op=mine, deterministic=True)
    assert_bits(part, in_rank_order(xs, op, factors)[33 * me : 33 * me + 33], "reduce_scatter")


@on_each_rank("ranks.run")
def test_host_does_not_wait(gpu, /):
    """Calls return while the GPU is still busy with earlier work, and the order of the work is kept."""
    comm, stream = gpu.comm, cuda.create_stream(gpu.device)
    big = on_gpu(comm, np.full(1 << 26, 1.0, np.float32), stream)
    small = on_gpu(comm, np.full(4, 1.0, np.float32), stream)
    comm.all_reduce(small)  # connected, loaded
    comm.synchronize()
    other = Array.empty(1 << 26, np.float32, comm.device, stream=stream)
    for _ in range(200):  # 25 ms of copies or more
        other.copy_from(big, stream)
    begun = time.perf_counter()
    comm.all_reduce(small)
    work = comm.all_reduce(small, async_op=True)
    assert work.wait() is small
    spent = time.perf_counter() - begun
    assert not streams.is_idle(streams.handle(stream)), f"waited: {spent * 1e3:.1f} ms"
    assert (small.numpy(stream) == comm.size**3).all()
    assert work.done()


@pytest.mark.parametrize("deterministic", [False, True])
@on_each_rank("ranks.run")
def test_graph_capture_and_replay(gpu, /, seed, deterministic):
    """A graph is captured once and replayed with other data, also if the capture has the first call of its kind."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream = cuda.create_stream(comm.device)
    count = 12_345 + 64 * deterministic  # a size of its own
    x = Array.empty(count, BF16, comm.device, stream=stream)
    total = Array.empty(count, BF16, comm.device, stream=stream)
    both = Array.empty((n, count), BF16, comm.device, stream=stream)
    with cuda.capture(stream, keep=[x, total, both]) as graph:
        comm.all_reduce(x, out=total, deterministic=deterministic)
        work = comm.all_gather(total, both, async_op=True)
        comm.barrier(stream=stream)
        work.wait()
        comm.all_reduce(total, ReduceOp.MAX)
    for turn in range(5):
        xs = inputs(seed + turn, n, count, BF16)
        x.copy_from(xs[me], stream)
        both.fill_bytes(255, stream)
        graph.replay(stream)
        comm.synchronize(stream=stream)
        got = total.numpy(stream)
        check(got, xs, ReduceOp.SUM, [])
        assert_same_on_all_ranks(gpu, got, f"replay {turn}")
        assert_bits(both.numpy(stream), np.stack([got] * n), "all_gather")
    graph.close()


@pytest.mark.parametrize("scale", [1, 40_000])
@pytest.mark.parametrize("windows", [False, True])
@on_each_rank("ranks.run")
def test_uneven_shards_in_place_in_a_graph(gpu, /, seed, windows, scale):
    """Each rank's shard lies in the larger array.  With several ranks, the shard of the last one is empty."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream = cuda.create_stream(comm.device)
    counts = [scale * (2 * r + 1) for r in range(n)]
    counts[-1] *= n == 1
    ends = np.cumsum(counts)
    mine, total = slice(int(ends[me]) - counts[me], int(ends[me])), int(ends[-1])
    make = comm.allocate if windows else lambda size, dtype: Array.empty(size, dtype, comm.device, stream=stream)
    gathered, at_root, added, scattered = arrays = [make(total, np.int32) for _ in range(4)]
    root = n - 1

    def calls():
        comm.all_gather_v(gathered[mine], counts, gathered, stream=stream)
        comm.gather_v(at_root[mine], counts, root, at_root if me == root else None, stream=stream)
        comm.reduce_scatter_v(added, counts, added[mine], stream=stream)
        comm.scatter_v(scattered if me == root else None, counts, scattered[mine], root, stream=stream)

    calls()  # connects
    comm.synchronize(stream=stream)
    with cuda.capture(stream, keep=arrays) as graph:
        calls()
    for turn in range(6):
        xs = np.random.default_rng([seed, turn]).integers(0, 1 << 20, (n, total), np.int32)
        comm.barrier(stream=stream)
        for x in arrays:
            x.copy_from(xs[me], stream)
        graph.replay(stream) if turn % 2 else calls()
        comm.synchronize(stream=stream)
        whole = np.concatenate([x[end - count : end] for x, count, end in zip(xs, counts, ends, strict=True)])
        assert_bits(gathered.numpy(stream), whole, f"all_gather_v {turn}")
        assert_bits(at_root.numpy(stream), whole if me == root else xs[me], f"gather_v {turn}")
        for x, shard in ((added, xs.sum(0, np.int32)[mine]), (scattered, xs[root][mine])):
            expected = xs[me].copy()
            expected[mine] = shard
            assert_bits(x.numpy(stream), expected, f"turn {turn}")
    graph.close()


@on_each_rank("ranks.run")
def test_graph_of_batches(gpu, /, seed):
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream, count = cuda.create_stream(comm.device), 10_007
    arrays = [Array.empty(count, np.float32, comm.device, stream=stream) for _ in range(5)]
    x, out, y, ordered, beside = arrays
    both = Array.empty((n, count), np.float32, comm.device, stream=stream)
    with cuda.capture(stream, keep=[*arrays, both]) as graph:
        for _ in range(3):
            comm.all_reduce(x, out=out)
        with comm.batch():
            comm.all_reduce(y)
            comm.all_gather(x, both)
            comm.all_reduce(ordered, deterministic=True)
        work = comm.all_reduce(beside, async_op=True)
        work.wait()
    for turn in range(4):
        xs = inputs(seed + turn, n, count, np.float32)
        for array in (x, y, ordered, beside):
            array.copy_from(xs[me], stream)
        graph.replay(stream)
        comm.synchronize(stream=stream)
        for array in (out, y, ordered, beside):
            check(array.numpy(stream), xs, ReduceOp.SUM, [])
            assert_same_on_all_ranks(gpu, array.numpy(stream), f"replay {turn}")
        assert_bits(both.numpy(stream), np.stack(xs), "all_gather")
    graph.close()


@on_each_rank("ranks.run")
def test_several_communicators(gpu, /):
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    other = comm.duplicate()
    halves = comm.split(me % 2, -me)
    nobody = comm.split(None if me == 0 else 7)
    assert (nobody is None) == (me == 0)
    assert halves is not None and halves.device == comm.device
    mates = [rank for rank in reversed(range(n)) if rank % 2 == me % 2]
    for _ in range(3):
        x = on_gpu(comm, np.full(3, me, np.int32))
        got = halves.all_gather(x)
        other.all_reduce(x)
        assert got.numpy().tolist() == [[rank] * 3 for rank in mates]
        assert (x.numpy() == sum(range(n))).all()
    if nobody is not None:
        assert nobody.size == n - 1
        x = on_gpu(comm, np.ones(2, np.float64))
        assert (nobody.all_reduce(x).numpy() == n - 1).all()
        nobody.close()
    halves.close()
    other.close()


ALGORITHMS = {  # one that each backend does not have, and those that it has
    "nccl": ("ring", "'auto' for all_reduce on nccl"),
    "peer": ("halving_doubling", "'auto', one_shot, two_shot, ring, tree"),
}


@on_each_rank("ranks.run")
def test_refusals(gpu, /):
    """A refused call sends nothing, so the communicator works after each."""
    comm = gpu.comm
    x, y = (on_gpu(comm, np.ones(4, np.float32)) for _ in range(2))
    freed = Array.empty(4, np.float32, comm.device)
    freed.owner.close()

    def described(pointer=x.pointer, count=4, device=comm.device, **more):
        return Array(pointer, (count,), np.float32, device, owner=y, **more)

    algorithm, known = ALGORITHMS[comm.backend_name]
    stream = 7 if driver.unavailable() else cuda.create_stream(comm.device)
    here = rf"cuda:{comm.device} \(backend {comm.backend_name}\)"
    refused = {
        f"x: expected memory of {here}, got ndarray in memory of the host": lambda: comm.all_reduce(np.ones(4)),
        f"x: .* got Array in memory of cuda:{comm.device + 1}": lambda: comm.all_reduce(
            described(8, device=comm.device + 1)
        ),
        "out: expected memory of cuda:., got memory of the host": lambda: comm.all_reduce(
            x, out=np.ones(4, np.float32)
        ),
        "x: expected an array with memory, got one that was freed": lambda: comm.all_reduce(freed),
        "x: expected a writable array": lambda: comm.all_reduce(described(readonly=True)),
        "out: expected dtype float32, got int32": lambda: comm.all_reduce(x, out=x.view(np.int32)),
        "overlap": lambda: comm.all_reduce(x[:3], out=x[1:]),
        f"algorithm: expected {known}": lambda: comm.all_reduce(x, algorithm=algorithm),
        "out: expected an array of the stream of x": lambda: comm.all_reduce(
            x, out=described(y.pointer, stream=stream)
        ),
        "stream: expected a handle, or .*, got 'x'": lambda: comm.all_reduce(x, stream="x"),
        "stream: expected a handle, or .*, got -1": lambda: comm.barrier(stream=-1),
        "stream: expected a handle, or .*, got True": lambda: comm.synchronize(stream=True),
    }
    if comm.size > 1:
        refused["tag: expected 0"] = lambda: comm.send(x, (comm.rank + 1) % comm.size, 3)
    if comm.backend_name == "peer" and comm.size > 1:  # in place, a group of one does nothing
        refused["elements at multiples of 4 bytes"] = lambda: comm.all_reduce(described(x.pointer + 2, 3))
    before = comm.recorder.count
    for message, call in refused.items():
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert comm.recorder.count == before
    assert (comm.all_reduce(x).numpy() == comm.size).all()


def test_ranks_that_share_a_gpu_are_refused(mpi_world, gpu_world):
    if mpi_world.size == 1 or ranks_may_share_a_gpu():
        pytest.skip("needs two ranks or more, and an NCCL that does not let them share a GPU")
    with pytest.raises(BackendUnavailable, match="nccl: ranks 0 and 1 share GPU"):
        kos.init("nccl", device=0, timeout=TIMEOUT)
    with pytest.raises(BackendUnavailable, match="for GPU 0 of rank 0, got none: nccl: ranks 0 and 1 share GPU"):
        kos.init(device=0, timeout=TIMEOUT)


def test_auto_takes_both(mpi_world, gpu_world, seed):
    with kos.init(timeout=TIMEOUT) as comm:
        assert comm.backend_name in ("nccl+mpi", "nccl+peer+mpi")  # peer where a tuning table names it
        rows = [line.split() for line in comm.explain().splitlines()]
        assert {"mpi", "nccl"} <= {row[0] for row in rows if row[1:3] == ["in", "use"]}
        host, gpu = np.ones(3, np.float32), on_gpu(comm, np.ones(3, np.float32))
        with comm.batch() as batch:
            comm.all_reduce(host)
            comm.all_reduce(gpu)
        assert len(batch.works) == 2
        assert (host == comm.size).all() and (gpu.numpy() == comm.size).all()
        part = comm.split(comm.rank % 2)
        assert (part.all_reduce(on_gpu(comm, np.ones(3))).numpy() == part.size).all()
        part.barrier()
        part.close()
        comm.barrier()
        assert comm.all_gather_bytes(b"%d" % comm.rank) == [b"%d" % rank for rank in range(comm.size)]


@pytest.mark.parametrize("met", [True, False])
def test_a_rank_that_does_not_come(mpi_world, gpu_world, met):
    """The host's wait ends in time, whether or not the ranks were connected before.  The GPU can be used afterwards."""
    if mpi_world.size == 1:
        pytest.skip("needs two ranks or more")
    comm = gpu_world.duplicate()
    x = on_gpu(comm, np.ones(5000, np.float32))
    if met:
        comm.all_reduce(x)
        comm.synchronize()
    late = comm.size - 1
    if comm.rank != late:
        begun = time.monotonic()

        def all_reduce():
            comm.all_reduce(x, timeout=SHORT)
            comm.synchronize(SHORT)

        absent = rf"ranks \[{late}\] did not|rank {late} did not arrive|begun by all"
        message = rf"all_reduce #\d of float32\[5000\].*({absent})"
        with pytest.raises(CollectiveTimeout, match=message):
            all_reduce()
        assert SHORT <= time.monotonic() - begun < SHORT + 8
    mpi_world.barrier()
    comm.abort() if comm.rank == late else comm.close()
    mpi_world.barrier()
    x = on_gpu(gpu_world, np.ones(1000, np.float32))
    assert (gpu_world.all_reduce(x).numpy() == gpu_world.size).all(), "the GPU is not fit any more"
