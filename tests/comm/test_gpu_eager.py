"""Calls on GPUs that the compiled core makes: they are as those through Python, and Python makes all others.

The driver, NCCL and memory are stand-ins; kernels of peer run on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm import Persistent
from kos.comm.operation import EAGER
from kos.errors import InvalidArgument
from kos.memory.array import Array
from tests.comm.fake_nccl import FakeNCCL, FakeRanks, Stream, captures
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.gpu_eager import Run, by, hits, known, needs_compiler, on_gpu
from tests.comm.shared_ranks import needs_core

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


def own(comm: kos.Communicator, y: Array) -> Array:
    """This rank's half."""
    half = y.size // 2
    return y[comm.rank * half : (comm.rank + 1) * half]


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, x, y: c.all_reduce(x),
    "all_reduce out": lambda c, x, y: c.all_reduce(x, ReduceOp.MAX, out=y[: x.size]),
    "all_reduce in place": lambda c, x, y: c.all_reduce(x, out=x),
    "reduce": lambda c, x, y: c.reduce(x, 1),
    "broadcast": lambda c, x, y: c.broadcast(x, 0),
    "all_gather": lambda c, x, y: c.all_gather(x, y),
    "all_gather in place": lambda c, x, y: c.all_gather(own(c, y), y.reshape(2, -1)),
    "reduce_scatter in place": lambda c, x, y: c.reduce_scatter(y.reshape(2, -1), own(c, y)),
    "reduce_scatter": lambda c, x, y: c.reduce_scatter(y, x),
    "gather": lambda c, x, y: c.gather(x, 1, out=y if c.rank == 1 else None),
    "scatter": lambda c, x, y: c.scatter(y if c.rank == 1 else None, x, 1),
}
BY_PEER = {
    "all_to_all": lambda c, x, y: c.all_to_all(y, on_gpu(np.zeros(2 * x.size, np.int32))),
    "scan": lambda c, x, y: c.scan(x),
    "exscan": lambda c, x, y: c.exscan(x),
    "exscan out": lambda c, x, y: c.exscan(x, out=y[: x.size]),
    "send_recv": lambda c, x, y: c.send_recv(x, y[: x.size], 1 - c.rank, 1 - c.rank),
    "all_gather_v": lambda c, x, y: c.all_gather_v(x, [x.size, x.size], y),
    "reduce_scatter_v": lambda c, x, y: c.reduce_scatter_v(y, (x.size, x.size), x),
    "all_gather_v in place": lambda c, x, y: c.all_gather_v(own(c, y), [x.size, x.size], y.reshape(2, -1)),
    "reduce_scatter_v in place": lambda c, x, y: c.reduce_scatter_v(y.reshape(2, -1), (x.size, x.size), own(c, y)),
    "gather_v in place": lambda c, x, y: c.gather_v(*(
        (own(c, y), [x.size] * 2, 1, y.reshape(2, -1)) if c.rank == 1 else (x, [x.size] * 2, 1)
    )),
    "scatter_v in place": lambda c, x, y: c.scatter_v(*(
        (y.reshape(2, -1), [x.size] * 2, own(c, y), 1) if c.rank == 1 else (None, [x.size] * 2, x, 1)
    )),
}  # fmt: skip


def test_results_are_those_of_calls_through_python(gpu_run: Run, seed: int) -> None:
    """On fresh arrays, of two sizes, all of which the core knows after a call or two."""

    def body(comm: kos.Communicator) -> None:
        plain = comm.duplicate()
        for name in EAGER:
            plain.__dict__.pop(name, None)  # the method of the class
        random = np.random.default_rng(seed + comm.rank)
        for name, call in (CALLS | (BY_PEER if comm.backend_name == "peer" else {})).items():
            for count in (3, 400):
                before = hits(comm)
                for _ in range(5):
                    values = [random.integers(0, 99, n).astype(np.int32) for n in (count, 2 * count)]
                    mine, others = ([on_gpu(each) for each in values] for _ in range(2))
                    got, expected = call(comm, *mine), call(plain, *others)
                    for a, b in zip(mine, others, strict=True):
                        np.testing.assert_array_equal(a.numpy(), b.numpy(), name)
                    assert (got is None) == (expected is None), name
                    if got is not None:
                        np.testing.assert_array_equal(got.numpy(), expected.numpy(), name)
                assert hits(comm) - before >= 2, name
        assert hits(plain) == 0
        plain.close()

    gpu_run(body)


def test_the_recorder_has_them(gpu_run: Run) -> None:
    def body(comm: kos.Communicator) -> None:
        for _ in range(4):
            comm.all_reduce(on_gpu([1.0, 2.0]))  # this line
        entries = comm.recorder.entries()[-4:]
        assert [entry["collective_seq_id"] for entry in entries] == [0, 1, 2, 3]
        assert len({entry["frames"][0]["line"] for entry in entries}) == 1
        assert "test_gpu_eager.py" in entries[-1]["frames"][0]["filename"]
        assert "all_reduce #3 at" in comm.recorder.last_call() and hits(comm) >= 2
        last = comm.backend._last
        assert last is comm.backend.shared.last and last.sequence == 3 and last.record[4] == 3

    gpu_run(body)


def test_other_calls_are_made_by_python(gpu_run: Run) -> None:
    """Of another shape, alignment, dtype, stream or option; once, if the core can make them."""

    def body(comm: kos.Communicator) -> None:
        x, whole = on_gpu(np.ones(4, np.float32)), on_gpu(np.ones(64, np.float32))
        known(comm, x)
        others = [on_gpu(np.ones(5, np.float32)), on_gpu(np.ones((2, 2), np.float32)), on_gpu(np.ones(4)), whole[1:5]]
        for other in others:
            with by(comm, 0):
                comm.all_reduce(other)
            known(comm, other)
        with by(comm, len(others)):
            for other in others:
                comm.all_reduce(other)
        for options in ({"async_op": True}, {"timeout": 9.0, "async_op": True}):
            with by(comm, 0):
                for _ in range(3):
                    comm.all_reduce(x, **options).wait()
        comm.all_reduce(x)  # follows the last one, on another stream
        with by(comm, 1):
            comm.all_reduce(x)

    gpu_run(body)


def test_wrong_arrays_are_refused(gpu_run: Run) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = on_gpu(np.ones(8, np.float32)), on_gpu(np.ones(8, np.float32))
        known(comm, x[:4], out=None)
        known(comm, x[:4], out=y[:4])
        frozen = Array(x.pointer, (4,), "float32", 0, owner=x, readonly=True)
        freed = on_gpu(np.ones(4, np.float32))
        freed.owner.close()
        for wrong, out in ((frozen, None), (freed, None), (x[:4], x[2:6])):
            with pytest.raises(InvalidArgument), by(comm, 0):
                comm.all_reduce(wrong, out=out)
        for _ in range(3):
            comm.all_gather_v(own(comm, x), [4, 4], x)
            with pytest.raises(InvalidArgument, match="does not overlap"), by(comm, 0):
                comm.all_gather_v(x[2:6], [4, 4], x)
        with by(comm, 0):
            comm.all_reduce(x[:4], out=x[:4])

    gpu_run(body)


def test_in_place_is_another_call(gpu_run: Run) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = on_gpu(np.zeros(4, np.float32)), on_gpu(np.zeros(4, np.float32))
        known(comm, x, out=x)
        known(comm, x, out=y)
        with by(comm, 4):
            for out in (x, y, x, y):
                assert comm.all_reduce(x, out=out) is out
        x.copy_from(np.ones(4, np.float32))
        for out in (x, x, x, y, y, y, x, y):  # where the first argument is no array
            y.copy_from(np.zeros(4, np.float32))
            assert comm.all_reduce(op=ReduceOp.MAX, x=x, out=out) is out
            assert y.numpy().tolist() == [float(out is y)] * 4

    gpu_run(body)


def test_another_stream_is_ordered_by_python(gpu_run: Run) -> None:
    def body(comm: kos.Communicator) -> None:
        streams = Stream(40), Stream(41)
        arrays = [on_gpu(np.ones(4, np.float32), stream) for stream in streams]
        for x in arrays:
            known(comm, x)
        for x in arrays:
            with by(comm, 0):
                comm.all_reduce(x)
            with by(comm, 2):
                comm.all_reduce(x)
                comm.all_reduce(x)
        known(comm, arrays[0], stream=streams[1])
        with by(comm, 0):  # of a handle nobody keeps the stream
            for _ in range(3):
                comm.all_reduce(arrays[0], stream=40)

    gpu_run(body)


def test_a_stream_that_its_owner_closes(gpu_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle is then that of the legacy stream, as Python reads it."""

    def body(comm: kos.Communicator) -> None:
        stream = Stream(40)
        x, y = on_gpu(np.ones(4, np.float32), stream), on_gpu(np.ones(4, np.float32))
        known(comm, x)
        known(comm, y, stream=stream)
        known(comm, x)
        comm.rendezvous.barrier()
        stream.handle = 0
        with by(comm, 0):
            comm.all_reduce(x)
        with by(comm, 0):
            comm.all_reduce(y, stream=stream)

    gpu_run(body)


def test_a_batch_gets_them(gpu_run: Run) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = on_gpu(np.ones(4, np.float32)), on_gpu(np.ones(4, np.float32))
        known(comm, x)
        with by(comm, 0), comm.batch():
            comm.all_reduce(x)
            comm.all_reduce(y)
        assert (y.numpy() == 2).all()

    gpu_run(body)


def test_graphs_keep_windows(fake: FakeNCCL) -> None:
    """A captured call goes through Python, which keeps the memory of windows for the graph."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        x, y = comm.allocate(4, np.float32), comm.allocate(4, np.float32)
        stream = Stream(40)
        known(comm, x, stream=stream)
        with captures() as graph, by(comm, 0):
            comm.all_reduce(x, stream=stream)
        with by(comm, 1):
            comm.all_reduce(x, stream=stream)
        with by(comm, 0):  # in another window
            comm.all_reduce(y, stream=stream)
        graph.destroy()

    FakeRanks(2).run(body)


def test_a_captured_call_says_nothing_of_eager_ones(fake: FakeNCCL) -> None:
    """Whose route may be another one."""

    def body(gpu: Any) -> None:
        comm, x, stream = gpu.comm, on_gpu([1.0]), Stream(40)
        known(comm, x)
        with captures(), by(comm, 0):
            for _ in range(3):
                comm.all_reduce(x, stream=stream)
        with by(comm, 0):
            comm.all_reduce(x, stream=stream)
        with by(comm, 1):
            comm.all_reduce(x, stream=stream)

    FakeRanks(2).run(body)


def test_objects_that_are_new_each_time_are_not_kept(fake: FakeNCCL) -> None:
    """They would push out calls that the core knows."""

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        fresh = type("ExternalStream", (Stream,), {"__module__": "torch.cuda"})
        for number in range(40):
            comm.all_reduce(x, timeout=10.0 + number)
            comm.all_reduce(x, stream=fresh(40))
        comm.all_reduce(x)
        with by(comm, 1):
            comm.all_reduce(x)

    FakeRanks(2).run(body)


@needs_compiler
def test_sizes_that_travel_do_so_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(gpu: Any) -> None:
        comm = gpu.comm
        for size in (2, 2, 2, 3):
            mine = 2 if comm.rank else size
            x, out = on_gpu(np.full(mine, comm.rank)), on_gpu(np.zeros(2 + size, np.int64))
            with by(comm, 0):
                comm.all_gather_v(x, out=out)
            assert out.numpy().tolist() == [0] * size + [1, 1]

    with no_gpus(monkeypatch, 2):
        ThreadRanks(2).run(body)


PERSISTENT: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, x, y: c.all_reduce_init(x, out=y[: x.size]),
    "broadcast": lambda c, x, y: c.broadcast_init(x, 1),
    "all_gather": lambda c, x, y: c.all_gather_init(x, y),
    "reduce_scatter": lambda c, x, y: c.reduce_scatter_init(y, x),
    "gather": lambda c, x, y: c.gather_init(x, 1, y if c.rank == 1 else None),
}


def test_persistent_starts_are_those_through_python(gpu_run: Run, seed: int) -> None:
    """Each start reads the arrays anew, and is an entry of the recorder."""

    def body(comm: kos.Communicator) -> None:
        plain = comm.duplicate()
        random = np.random.default_rng(seed + comm.rank)
        for name, make in PERSISTENT.items():
            mine, others = ([on_gpu(np.zeros(n, np.int32)) for n in (5, 10)] for _ in range(2))
            one, other = make(comm, *mine), make(plain, *others)
            before = hits(comm)
            for _ in range(5):
                for a, b in zip(mine, others, strict=True):
                    values = random.integers(0, 99, a.size).astype(np.int32)
                    _ = a.copy_from(values), b.copy_from(values)
                got = one.start()
                expected = Persistent.start(other).wait()  # the method that needs no core
                assert (got.wait() is None) == (expected is None), name
                for a, b in zip(mine, others, strict=True):
                    np.testing.assert_array_equal(a.numpy(), b.numpy(), name)
                assert f"{name} #{got.sequence} " in f"{comm.recorder.last_call()} " and got.sequence in got.record
            assert hits(comm) - before >= 2, name
        plain.close()

    gpu_run(body)


def test_works_of_persistent_starts(gpu_run: Run) -> None:
    """A start returns a Work that the program has let go; if it has none, Python makes another one."""

    def body(comm: kos.Communicator) -> None:
        x = on_gpu(np.ones(4, np.float32))
        start = comm.all_reduce_init(x).start
        for _ in range(3):
            work = start()
        with by(comm, 6):
            for _ in range(6):
                work = start()  # the last one is still there
        kept = [start() for _ in range(5)]
        assert len({id(each) for each in [work, *kept]}) == 6
        assert [each.sequence for each in kept] == list(range(work.sequence + 1, work.sequence + 6))
        del work, kept
        with by(comm, 0), comm.batch():
            start()
        comm.timeout = 19.0
        with by(comm, 0):
            start()
        with by(comm, 1):
            start()
        assert x.numpy().tolist() == [2.0**17] * 4

    gpu_run(body)


def test_a_persistent_start_in_a_capture(fake: FakeNCCL) -> None:
    """Of memory in a window, which is kept for the graph."""

    def body(gpu: Any) -> None:
        comm, stream = gpu.comm, Stream(40)
        start = comm.all_reduce_init(comm.allocate(4, np.float32), stream=stream).start
        for _ in range(3):
            start()
        with captures() as graph, by(comm, 0):
            start()
        with by(comm, 1):
            start()
        graph.destroy()

    FakeRanks(2).run(body)
