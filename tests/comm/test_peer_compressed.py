"""Compressed reductions in one kernel of the peer backend, without a GPU (``fake_peer``)."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import ReduceOp
from kos.comm.compression import FORMATS
from kos.comm.gpu.peer.bind import bind_compressed
from kos.comm.gpu.peer.engine import PeerEngine
from kos.memory.array import Array
from kos.testing.conformance.model import Step, result
from kos.testing.conformance.values import vector
from tests.comm.fake_gpu import captures
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.gpu_ranks import engine_of
from tests.comm.peer_storm import FLOAT, compressed_storm
from tests.host_compiler import needs_compiler

pytestmark = needs_compiler

BF16, INT8 = np.dtype(ml_dtypes.bfloat16), FORMATS["int8"]


def reduced(form: str, data: list[Any], op: ReduceOp = ReduceOp.SUM) -> Any:
    """What an all_reduce of ``data`` gives every rank."""
    return result(Step("all_reduce", dtype=data[0].dtype, op=op, compress=form), data, 0)


@pytest.fixture(params=[2, 3, 4])
def ranks(monkeypatch, request):
    with no_gpus(monkeypatch, request.param) as fake:
        yield ThreadRanks(request.param, fake)


@pytest.mark.parametrize(("form", "dtype"), [("fp8", BF16), ("int8", np.dtype(np.float32)), ("int4", BF16)], ids=str)
def test_back_to_back(ranks, seed, form, dtype):
    """Any count and alignment, in place and out of place, in few and in many batches, with the bits of the host."""
    for start in range(3):
        assert ranks.run_bare(lambda r, s=seed + start: compressed_storm(r, s, form, dtype, 8)) == [0] * ranks.size


def test_ranks_that_run_apart(ranks, seed):
    storm = lambda r: compressed_storm(r, seed // 3 * 3, "int4", BF16, 5, STALL=50_000)  # noqa: E731
    assert ranks.run_bare(storm) == [0] * ranks.size


def test_without_waits_the_storm_is_wrong(ranks, seed):
    assert sum(ranks.run_bare(lambda r: compressed_storm(r, seed, "int8", BF16, 10, BROKEN=1))) > 0


def test_batches_that_only_other_kernels_have_counted(ranks, seed):
    """After 2**31 batches of push, the counter "added" is so far behind that it would seem to be ahead."""
    rng = np.random.default_rng(seed)
    data = [rng.standard_normal(50_000).astype(np.float32) for _ in range(ranks.size)]

    def body(rendezvous):
        engine = PeerEngine(rendezvous, 0, timeout=20.0, staging=1 << 17)
        lines = np.ctypeslib.as_array((ctypes.c_uint32 * (64 * engine.blocks)).from_address(engine.memory.pointer))
        for word in (2, *range(32, 40), *range(48, 56)):  # batches, pushed, taken
            lines[word::64] = (1 << 31) + 5
        rendezvous.barrier()
        x = Array.from_numpy(data[rendezvous.rank], 0)
        run = bind_compressed(engine, "all_reduce", x.pointer, x.pointer, x.size, FLOAT, ReduceOp.SUM, INT8)
        assert run is not None
        run(0)
        engine.record.check("all_reduce")
        assert x.numpy().tobytes() == reduced("int8", data).tobytes()
        engine.close()

    ranks.run_bare(body)


def test_one_kernel_carries_it_in_graphs_too(ranks, seed):
    """No exchange runs around kernels.

    What a graph would replay is launched again, with other data in the same arrays.
    """
    load = ranks.fake.load_kernel

    def load_one(path, *about, **defines):
        assert path.name == "all_reduce_compressed.cu", "not one kernel"
        return load(path, *about, **defines)

    ranks.fake.load_kernel = load_one

    def body(gpu):
        comm, count = gpu.comm, 10_001
        x = Array.zeros(count, BF16, 0)
        for turn in range(4):
            data = [vector([seed + turn, rank], count, BF16, "hostile") for rank in range(comm.size)]
            x.copy_from(data[comm.rank])
            if turn % 2:
                with captures():
                    comm.all_reduce(x, ReduceOp.AVG, compress="fp8")
            else:
                comm.all_reduce(x, ReduceOp.AVG, compress="fp8")
            got, expected = (each.astype(np.float32) for each in (x.numpy(), reduced("fp8", data, ReduceOp.AVG)))
            np.testing.assert_array_equal(got, expected)

    ranks.run(body)


def test_what_finds_no_place_is_exchanged(ranks, seed):
    """If the staging memory is too small for a tile, exchanges between kernels give the same bits."""
    rng = np.random.default_rng(seed)
    data = [rng.standard_normal(5000).astype(np.float32) for _ in range(ranks.size)]

    def body(gpu):
        engine = engine_of(gpu.comm)
        usual, engine.staging = engine.staging, 1 << 10
        x = Array.from_numpy(data[gpu.rank], 0)
        gpu.comm.all_reduce(x, compress="int8")
        assert bind_compressed(engine, "all_reduce", x.pointer, x.pointer, 5000, FLOAT, ReduceOp.SUM, INT8) is None
        engine.staging = usual
        assert x.numpy().tobytes() == reduced("int8", data).tobytes()

    ranks.run(body)
