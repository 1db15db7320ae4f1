"""The peer backend on as many ranks as mpirun starts, which may share a GPU: the conformance suite, graphs, failures.

mpirun -n 4 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_peer.py
"""

import re
from functools import partial

import numpy as np
import pytest

import kos
from kos import ReduceOp, cuda
from kos.comm.gpu.peer import engine as peer_engine
from kos.comm.tuning import KernelConfig, Launches
from kos.cuda import driver
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable
from kos.memory.array import Array
from kos.testing.conformance.model import check
from kos.testing.conformance.values import LARGE, SIZES
from tests.comm.gpu_ranks import GPURanks, engine_of, prepared_of
from tests.comm.ranks import assert_bits, inputs, on_each_rank, poison
from tests.comm.test_conformance import *  # noqa: F403 -- the tests that GPUs run too
from tests.comm.test_nccl import (  # noqa: F401 -- collected here
    BF16,
    in_rank_order,
    on_gpu,
    test_a_rank_that_does_not_come,
    test_deterministic_is_in_rank_order,
    test_graph_capture_and_replay,
    test_host_does_not_wait,
    test_promise,
    test_refusals,
    test_several_communicators,
    test_uneven_shards_in_place_in_a_graph,
)
from tests.comm.test_nccl_windows import test_windows  # noqa: F401 -- collected here
from tests.comm.test_peer_kernels import expected as in_turn

MUCH = 5_000_000  # bytes: more than slots hold
OVERLAPPED_FROM = 4 << 20  # bytes from which copy engines carry what overlaps

REDUCTIONS = [
    (np.dtype(DTYPES[name].numpy), ReduceOp[op])
    for names, ops in (
        ("bfloat16", "SUM PROD MIN MAX AVG"), ("int16", "SUM PROD MIN MAX BAND BOR BXOR"),
        ("float64 float32 float16 int8 int32 int64 uint64", "SUM"), ("float8_e4m3fn float8_e5m2 bool", "MAX"),
        ("bool", "BXOR"),
    )
    for name in names.split()
    for op in ops.split()
]  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
BACKEND = "peer"


@pytest.fixture
def ranks(gpu_world, mpi_world):
    return GPURanks(gpu_world, mpi_world)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "tree"])
@on_each_rank("ranks.run")
def test_named_algorithms(gpu, /, seed, algorithm):
    for count in (*SIZES, LARGE):
        xs = inputs(seed, gpu.size, count, BF16)
        x = xs[gpu.rank].copy()
        gpu.all_reduce(x, algorithm=algorithm)
        check(x, xs, ReduceOp.SUM, [])
        if algorithm.endswith("shot"):
            assert_bits(x, in_rank_order(xs), algorithm)


@on_each_rank("ranks.run")
def test_symmetric_buffers_at_every_size(gpu, /, seed):
    """Each launch of the tables, out of place and in place, with odd counts and unaligned views."""
    comm, me = gpu.comm, gpu.rank
    x, out = (comm.allocate((8 << 20) + 64, BF16) for _ in range(2))
    for count in (5, 120_001, 180_000, 400_001, 2_000_003, 8 << 20):
        xs = inputs(seed, gpu.size, count, BF16)
        expected = in_rank_order(xs)
        for start in (0, 8, 3):
            source, target = x[start : start + count], out[start : start + count]
            source.copy_from(xs[me])
            out.fill_bytes(255)
            comm.all_reduce(source, out=target)
            comm.all_reduce(source)
            comm.synchronize()
            assert_bits(target.numpy(), expected, f"{count} from {start}")
            assert_bits(source.numpy(), expected, f"{count} from {start} in place")
            rest = out.numpy()[start + count :].view(np.uint8)
            assert (rest == 255).all(), f"{count} from {start}: wrote beyond its end"


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=lambda x: getattr(x, "name", str(x)))
@on_each_rank("ranks.run")
def test_blocks_of_one_role_each(gpu, /, seed, dtype, op):
    """The algorithm ``specialized``, in place and out of place, from one vector to several tiles per block.

    Some chunks end early. Between these calls, ``push`` runs with another grid.
    """
    comm, me = gpu.comm, gpu.rank
    launches = engine_of(comm).launches
    mixed = KernelConfig("specialized", tile=512), KernelConfig("push", 2), KernelConfig("specialized", tile=1024)
    x, out = (comm.allocate(LARGE // 8 * 16 // dtype.itemsize, dtype) for _ in range(2))
    for turn, vectors in enumerate((1, 9, 8 * gpu.size, 1001, LARGE // 8)):
        count = vectors * 16 // dtype.itemsize
        assert gpu.size == 1 or engine_of(comm)._roles(16 * vectors)
        for launch in mixed:
            comm.backend.routes[0].use(Launches(*[((None, launch),)] * 2))
            xs = inputs(seed + turn, gpu.size, count, dtype)
            expected = in_turn(xs, op, "rank order")
            x[:count].copy_from(xs[me])
            out.fill_bytes(255)
            comm.all_reduce(x[:count], op, out=out[:count])
            comm.all_reduce(x[:count], op)
            comm.synchronize()
            assert_bits(out[:count].numpy(), expected, f"{launch} of {count}")
            assert_bits(x[:count].numpy(), expected, f"{launch} of {count} in place")
            assert (out[count:].numpy().view(np.uint8) == 255).all(), f"{launch} of {count}: wrote beyond its end"
    comm.backend.routes[0].use(launches)


@pytest.mark.parametrize("algorithm", ["two_shot", "push"])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(BF16, ReduceOp.AVG), (np.dtype(np.int8), ReduceOp.SUM), (np.dtype(np.float64), ReduceOp.PROD)],
    ids=str,
)
@on_each_rank("ranks.run")
def test_parts_of_any_size_go_by_one_kernel(gpu, /, seed, dtype, op, algorithm):
    """By packets and by direct writes, in one or several batches, with empty and unaligned parts."""
    comm, n, me, guard = gpu.comm, gpu.size, gpu.rank, 24
    launches = engine_of(comm).launches
    comm.backend.routes[0].use(Launches(*[((None, KernelConfig(algorithm, threads=64)),)] * 2))
    for turn, sizes in enumerate(((64, 16, 32), (1001, 0, 7), (0, LARGE // 2 + 3, 2), (33, 33, 33), (16, 16, 16))):
        counts = [sizes[rank % 3] for rank in range(n)]
        begin, total = sum(counts[:me]), sum(counts)
        for start in (0, 1, 2):
            xs = inputs(seed + turn, n, total, dtype)
            expected = in_turn([x[begin : begin + counts[me]] for x in xs], op, "rank order")
            x, around = on_gpu(comm, np.concatenate([xs[me][:start], xs[me]])), on_gpu(comm, poison(100 + LARGE, dtype))
            x, out = x[start:], around[guard + start : guard + start + counts[me]]
            before = around.numpy()
            plan = prepared_of(comm, partial(comm.reduce_scatter_v, x, counts, out, op)).plan
            assert n == 1 or not plan.kernels  # those of an exchange and a sum in rank order
            for counted in (True, False) if len(set(counts)) == 1 else (True,):
                comm.reduce_scatter_v(x, counts, out, op) if counted else comm.reduce_scatter(x, out, op)
                comm.synchronize()
                assert_bits(out.numpy(), expected, f"{counts} from {start}")
            after = around.numpy()
            after[guard + start : guard + start + counts[me]] = before[guard + start : guard + start + counts[me]]
            assert_bits(after, before, f"{counts} from {start}: wrote beyond its end")
    comm.backend.routes[0].use(launches)


@pytest.mark.parametrize(("dtype", "op"), [(np.dtype(np.float32), ReduceOp.SUM), (BF16, ReduceOp.AVG)], ids=str)
@on_each_rank("ranks.run")
def test_what_overlaps_goes_by_copy_engines(gpu, /, seed, dtype, op):
    """Between symmetric buffers, in place and out of place, repeatedly with other data.

    An all_reduce of other memory uses no copy engines.
    """
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    part = -(-OVERLAPPED_FROM // dtype.itemsize // n // 8) * 8 + 8
    x, out = (comm.allocate(n * part, dtype) for _ in range(2))
    mine = slice(me * part, (me + 1) * part)
    elsewhere = on_gpu(comm, poison(n * part, dtype))
    for turn in range(3):
        xs = inputs(seed + turn, n, n * part, dtype)
        total = in_rank_order(xs, op)
        parts = np.concatenate([xs[r][r * part : (r + 1) * part] for r in range(n)])
        for name, source, target, expected in (
            ("all_reduce", x, out, total), ("all_reduce", x, x, total), ("all_reduce", elsewhere, x, total),
            ("reduce_scatter", x, out[mine], total[mine]), ("reduce_scatter", x, x[mine], total[mine]),
            ("reduce_scatter", x, elsewhere[mine], total[mine]),
            ("all_gather", x[mine], out, parts), ("all_gather", elsewhere[mine], x, parts),
        ):  # fmt: skip
            for each in (x, out, elsewhere):
                each.fill_bytes(255)
            source.copy_from(xs[me][mine] if name == "all_gather" else xs[me])
            options = {} if name == "all_gather" else {"op": op}
            work = getattr(comm, name)(source, out=target, async_op=True, **options)
            here = name != "all_reduce" or source is not elsewhere
            assert ("copies" in str(work.prepared.plan.name)) == (here and n > 1), (name, work.prepared.plan.name)
            work.wait()
            comm.synchronize()
            assert_bits(target.numpy(), expected, f"{name}, turn {turn}")


@on_each_rank("ranks.run")
def test_what_overlaps_in_a_graph(gpu, /, seed):
    """The graph is replayed with other data.

    Later work on the first stream finds all that the other ranks' engines copied.
    """
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream = cuda.create_stream(comm.device)
    part = OVERLAPPED_FROM // 4 // n // 4 * 4 + 4
    whole, gathered = (comm.allocate(n * part, np.float32) for _ in range(2))
    x, out = (Array(a.pointer, a.shape, a.dtype, a.device, owner=a, stream=stream) for a in (whole, gathered))
    mine = slice(me * part, (me + 1) * part)
    copies = [Array.empty(n * part, np.float32, comm.device, stream=stream) for _ in range(2)]
    with cuda.capture(stream, keep=[x, out, *copies]) as graph:
        comm.reduce_scatter(x, x[mine], async_op=True).wait()
        comm.all_gather(x[mine], out, async_op=True).wait()
        copies[0].copy_from(out, stream)
        comm.all_reduce(out, async_op=True).wait()
        copies[1].copy_from(out, stream)
    for turn in range(5):
        xs = inputs(seed + turn, n, n * part, np.dtype(np.float32))
        x.copy_from(xs[me], stream)
        out.fill_bytes(255, stream)
        graph.replay(stream)
        comm.synchronize(stream=stream)
        total = in_rank_order(xs)
        assert_bits(copies[0].numpy(stream), total, f"gathered, turn {turn}")
        assert_bits(copies[1].numpy(stream), in_rank_order([total] * n), f"added, turn {turn}")
    graph.close()


@on_each_rank("ranks.run")
def test_any_bytes_to_and_from_anybody(gpu, /, seed):
    """all_to_all_v with random lengths and alignments: some parts are empty, and some take many batches."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    rng = np.random.default_rng(seed)
    for turn in range(20):
        matrix = rng.integers(0, MUCH ** rng.uniform(0.1, 0.9, (n, n)))
        matrix[rng.random((n, n)) < 0.2] = 0
        shift = [int(s) for s in rng.integers(0, 17, 2 * n)]
        xs = [inputs(seed + r + turn, 1, int(matrix[r].sum()), np.uint8)[0] for r in range(n)]
        pieces = [np.split(x, np.cumsum(matrix[r])[:-1]) for r, x in enumerate(xs)]
        expected = np.concatenate([pieces[r][me] for r in range(n)])
        memory = on_gpu(comm, np.full(xs[me].size + expected.size + 64, 7, np.uint8))
        x = memory[shift[me] : shift[me] + xs[me].size]
        at = 32 + xs[me].size + shift[n + me]
        out = memory[at : at + expected.size]
        x.copy_from(xs[me])
        comm.all_to_all_v(x, matrix[me].tolist(), matrix[:, me].tolist(), out)
        comm.synchronize()
        assert_bits(out.numpy(), expected, f"turn {turn}: {matrix.tolist()}")
        left, right = memory[shift[me] + xs[me].size : at].numpy(), memory[at + expected.size :].numpy()
        assert (left == 7).all() and (right == 7).all(), f"turn {turn}: wrote beside the output"


@on_each_rank("ranks.run")
def test_messages_of_a_batch_wait_for_none_of_it(gpu, /, seed):
    """Every rank sends before it receives, several times to the same rank, and more than the slots hold."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    counts = [3, MUCH, 0, MUCH // 71]
    mine = [[inputs(seed + to, 1, c, np.uint8)[0] ^ me for c in counts] for to in range(n)]
    there = [[on_gpu(comm, x) for x in row] for row in mine]
    got = [[on_gpu(comm, poison(c, np.uint8)) for c in counts] for _ in range(n)]
    with comm.batch():
        for k in range(len(counts)):
            for to in (r for r in range(n) if r != me):
                comm.send(there[to][k], to)
        for of in (r for r in range(n) if r != me):
            for k in range(len(counts)):
                comm.recv(got[of][k], of)
    comm.synchronize()
    for of in (r for r in range(n) if r != me):
        for k, count in enumerate(counts):
            assert_bits(got[of][k].numpy(), inputs(seed + me, 1, count, np.uint8)[0] ^ of, f"{of}, {k}")


@pytest.mark.parametrize("first", ["recv", "send"])
@on_each_rank("ranks.run")
def test_a_send_recv_meets_the_two_one_after_the_other(gpu, /, seed, first):
    """The messages have more bytes than the slots hold.  Each direction proceeds without the other."""
    comm, other, count = gpu.comm, gpu.rank ^ 1, 4 * MUCH
    if other >= comm.size:
        return
    x = on_gpu(comm, inputs(seed + gpu.rank, 1, count, np.uint8)[0])
    out = on_gpu(comm, poison(count, np.uint8))
    if gpu.rank < other:
        comm.send_recv(x, out, other, other)
    elif first == "recv":
        comm.recv(out, other)
        comm.send(x, other)
    else:
        comm.send(x, other)
        comm.recv(out, other)
    comm.synchronize()
    assert_bits(out.numpy(), inputs(seed + other, 1, count, np.uint8)[0], "what came")


@on_each_rank("ranks.run")
def test_views_put_and_get(gpu, /):
    """``barrier(stream=)`` orders what ranks write to each other's arrays."""
    comm, me, n = gpu.comm, gpu.rank, gpu.size
    stream = cuda.create_stream(comm.device)
    x = comm.allocate((n, 100_000), np.float32)
    views = comm.views(x)
    for turn in range(20):
        comm.barrier(stream=stream)  # all ranks have read the former values
        for r, view in enumerate(views):
            view[me].copy_from(np.full(100_000, 1000 * turn + 10 * me + r, np.float32), stream)
        comm.barrier(stream=stream)
        wanted = [[1000 * turn + 10 * by + r for by in range(n)] for r in range(n)]
        assert [[view.numpy(stream)[by, -1] for by in range(n)] for view in views] == wanted  # got from all ranks
        assert (x.numpy(stream) == np.array(wanted[me])[:, None]).all()


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
@on_each_rank("ranks.run")
def test_large_moves_by_copy_engines(gpu, /, name, seed, monkeypatch):
    """From ``_COPIES_FROM`` bytes on, copy engines are used: also in graphs, in place and out of place."""
    comm, me, n, part = gpu.comm, gpu.rank, gpu.size, 400_000  # too large for packets
    if n <= 2:
        pytest.skip("needs three GPUs: two ranks use bind_exchange, one copies")
    monkeypatch.setattr(peer_engine, "_COPIES_FROM", 0)
    stream = cuda.create_stream(comm.device)
    x, out = comm.allocate(n * part, np.int32), comm.allocate(n * part, np.int32)
    source = x if name == "all_to_all" else x[me * part : (me + 1) * part]
    for target in (out, x)[: 1 if name == "all_to_all" else 2]:  # an all_gather may be in place
        getattr(comm, name)(source, target, stream=stream)
        with cuda.capture(stream) as graph:
            getattr(comm, name)(source, target, stream=stream)
        for turn in range(3):
            data = np.random.default_rng([seed, turn]).integers(0, 1 << 30, (n, n * part), np.int32)
            comm.barrier(stream=stream)
            target.fill_bytes(255, stream)
            source.copy_from(data[me, : source.size], stream)
            graph.replay(stream)
            expected = data[:, :part] if name == "all_gather" else data[:, me * part : (me + 1) * part]
            assert_bits(target.numpy(stream), expected.reshape(-1), f"turn {turn}")
        assert "copies" in str(prepared_of(comm, partial(getattr(comm, name), source, target)).plan.name)


@on_each_rank("ranks.run")
def test_windows_are_freed_once_no_rank_uses_them(gpu, /):
    comm, backend = gpu.comm.duplicate(), None
    backend = comm.backend
    kept = comm.allocate(10, np.float32)
    for turn in range(4):
        x = comm.allocate(1 << 20, np.float32)
        x.copy_from(np.full(1 << 20, turn, np.float32))
        assert (comm.all_reduce(x).numpy() == turn * comm.size).all()
        if turn != 2 or comm.rank:
            del x
    assert len(backend.routes[0]._windows.memories) == 3  # kept, the one that rank 0 held on to, and the last
    comm.close()
    kept.fill_bytes(0)  # outlives the communicator
    assert (kept.numpy() == 0).all()


def test_ranks_that_are_threads_are_refused():
    why = re.escape(driver.unavailable() or "the ranks are threads of one process")

    def body(comm):
        with pytest.raises(BackendUnavailable, match=f"peer: {why}"):
            kos.init("peer", rendezvous=comm.rendezvous)

    kos.testing.spawn(body, 2)
