"""All-reduce over peer memory.  Ranks are threads that share one GPU, or have one each."""

import os
import secrets
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import cuda
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.comm.tuning import KernelConfig
from kos.cuda import streams
from kos.cuda.kernels import load_kernel
from kos.dtypes import dtype_of
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, RankLost
from kos.memory.array import Array
from kos.memory.symmetric import SymmetricMemory
from kos.testing import spawn
from tests.comm import peer_storm as storms

pytestmark = pytest.mark.gpu

FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
DTYPES = [np.dtype(x) for x in (*FLOATS, *INTS)]
LAUNCHES = [
    KernelConfig("one_shot", threads=128),
    KernelConfig("one_shot", blocks=3, threads=64),
    KernelConfig("two_shot", threads=128),
    KernelConfig("two_shot", blocks=2, threads=256),
    KernelConfig("ring", threads=128),
    KernelConfig("tree", threads=128),
    KernelConfig("push", blocks=4, threads=256),
    KernelConfig("direct", blocks=4, threads=256),
]
SPECIALIZED = KernelConfig("specialized", threads=256, tile=1024)  # between symmetric buffers alone
NAMES = [f"{launch.algorithm}-{launch.blocks}" for launch in LAUNCHES]


def seed() -> int:
    value = int(os.environ.get("KOS_TEST_SEED") or secrets.randbits(32))
    print(f"KOS_TEST_SEED={value}")
    return value


def device_of(rank: int) -> int:
    device = rank % len(cuda.visible_devices())
    cuda.set_device(device)
    return device


def on_ranks(function: Any, size: int, *arguments: Any) -> list[Any]:
    """``function(rendezvous, device, *arguments)`` on ``size`` ranks."""
    return spawn(lambda comm: function(comm.rendezvous, device_of(comm.rank), *arguments), size)


def draw(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
    if dtype.kind == "b":
        return rng.choice([0, 1, 2, 255], count).astype(np.uint8).view(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    return (rng.standard_normal(count) * 3).astype(dtype)


def expected(inputs: list[np.ndarray], op: Any, algorithm: str) -> np.ndarray:
    """The reduction on the host, in rank order or up the tree, rounded once."""
    size, dtype = len(inputs), dtype_of(inputs[0].dtype)
    ops = op if isinstance(op, list) else [op] * size
    reductions = [resolve(x, dtype, size) for x in ops]
    staged = [r.stage(x, None) for r, x in zip(reductions, inputs, strict=True)]
    reduction = reductions[0]
    if algorithm == "tree":
        total = tree_sum(staged, reduction, 0)
    else:
        total = staged[0].copy()
        for x in staged[1:]:
            reduction.combine(total, x)
    out = np.empty_like(inputs[0])
    reduction.finish(total, out)
    return out


def tree_sum(staged: list[np.ndarray], reduction: Any, node: int) -> np.ndarray:
    total = staged[node].copy()
    for child in (2 * node + 1, 2 * node + 2):
        if child < len(staged):
            reduction.combine(total, tree_sum(staged, reduction, child))
    return total


def same(got: np.ndarray, want: np.ndarray, exact: bool) -> None:
    if got.dtype.kind == "b":
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    elif exact or got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want)
    else:
        tolerance = {8: 1e-12, 4: 1e-5, 2: 2e-2}[got.dtype.itemsize]
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), tolerance, tolerance * 10)


def reduce_once(
    rendezvous: ControlPlane, device: int, engine: PeerEngine, launch: KernelConfig, inputs: list[np.ndarray],
    ops: list[Any], *, offset: int = 0, in_place: bool = False,
) -> np.ndarray:  # fmt: skip
    """This rank's result; guards around the output must stay as they were."""
    x, op = inputs[rendezvous.rank], ops[rendezvous.rank]
    factor = op.factor if isinstance(op, PremulSum) else 1.0
    name = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    stream = cuda.create_stream(device)
    guard = 16
    room = guard + offset + x.size + guard
    source, target = (Array.empty(room, x.dtype, device, stream=stream) for _ in range(2))
    host = np.zeros(room, x.dtype)
    host[guard + offset :][: x.size] = x
    source.copy_from(host, stream)
    if in_place:
        target = source
    else:
        target.fill_bytes(0xFF, stream)
    before = target.numpy(stream)
    start = (guard + offset) * x.itemsize
    run = engine.bind_all_reduce(
        source.pointer + start, target.pointer + start, x.size, dtype_of(x.dtype), name,
        factor=factor, launch=launch,
    )  # fmt: skip
    cuda.synchronize(device)
    rendezvous.barrier()
    run(stream)
    streams.synchronize(stream, device)
    engine.record.check("all_reduce")
    got = target.numpy(stream)
    inside = slice(guard + offset, guard + offset + x.size)
    rest = np.ones(room, bool)
    rest[inside] = False
    np.testing.assert_array_equal(*(a.view(np.uint8).reshape(room, -1)[rest] for a in (got, before)))
    rendezvous.barrier()
    return got[inside]


def every_reduction(rendezvous: ControlPlane, device: int, launch: KernelConfig, start: int) -> None:
    """Every dtype at odd sizes, and every operation, at any place and in place."""
    rng, size = np.random.default_rng(start), rendezvous.size
    engine = PeerEngine(rendezvous, device, timeout=5.0, staging=1 << 14)
    floats = [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.PREMUL_SUM]
    ints = [ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    cases = [
        (dtype, ReduceOp.SUM if dtype.kind in "iu" else ReduceOp.AVG, count)
        for dtype in DTYPES for count in (1, 7, 1003, 20011)
    ]  # fmt: skip
    cases += [(np.dtype(ml_dtypes.bfloat16), op, 4099) for op in floats]
    cases += [(np.dtype(np.bool_), op, 4099) for op in ints[1:]]
    cases += [(np.dtype(np.int16), op, 4099) for op in ints] + [(np.dtype(np.float64), ReduceOp.PREMUL_SUM, 4099)]
    for dtype, op, count in cases:
        inputs = [draw(rng, dtype, count) for _ in range(size)]
        factors = rng.standard_normal(size)
        ops: list[Any] = [PremulSum(float(f)) for f in factors] if op is ReduceOp.PREMUL_SUM else [op] * size
        where = {"offset": int(rng.integers(16)), "in_place": bool(rng.integers(2))}
        got = reduce_once(rendezvous, device, engine, launch, inputs, ops, **where)
        exact = launch.algorithm != "ring"
        same(got, expected(inputs, ops, launch.algorithm if exact else "rank order"), exact)
    engine.close()


@pytest.mark.parametrize("launch", LAUNCHES, ids=NAMES)
def test_every_dtype_and_operation(launch):
    on_ranks(every_reduction, 3, launch, seed())


def ring_order(rendezvous: ControlPlane, device: int, start: int) -> None:
    """Chunk b is added from rank b on: values for which every order gives another sum."""
    rng = np.random.default_rng(start)
    engine = PeerEngine(rendezvous, device, timeout=5.0, staging=1 << 14)
    size, blocks, per = rendezvous.size, 2, 40
    count = size * blocks * per * 3  # float32: 3 to a packet
    inputs = [(rng.standard_normal(count) * 10.0 ** rng.integers(-6, 7, count)).astype(np.float32) for _ in range(size)]
    launch = KernelConfig("ring", blocks=blocks, threads=64)
    got = reduce_once(rendezvous, device, engine, launch, inputs, [ReduceOp.SUM] * size)
    want, chunk = np.empty_like(got), count // size
    for b in range(size):
        part = slice(b * chunk, (b + 1) * chunk)
        want[part] = inputs[b][part]
        for k in range(1, size):
            want[part] = inputs[(b + k) % size][part] + want[part]
    np.testing.assert_array_equal(got, want)
    engine.close()


def test_ring_adds_in_ring_order():
    on_ranks(ring_order, 4, seed())


def moving(rendezvous: ControlPlane, device: int, start: int, kinds: list[str], turns: int, macros: dict) -> int:
    stream = cuda.create_stream(device)
    # CUDA's first cooperative launch on a stream waits for all running kernels of the process.  During the storm these
    # include kernels of other ranks on the same GPU, which wait for this rank: a deadlock.
    load_kernel(Path(__file__).with_name("empty.cu"), "empty", device).bind(1, 32, cooperative=True)(stream)
    stream.sync()
    return storms.storm(rendezvous, SymmetricMemory, start, kinds, turns, device=device, stream=stream, **macros)


@pytest.mark.parametrize("stall", [0, 20_000])
def test_every_kernel_back_to_back(stall):
    macros = {"STALL": stall} if stall else {}
    assert on_ranks(moving, 3, seed(), storms.KINDS, 100, macros) == [0] * 3


@pytest.mark.parametrize("kind", [
    "exchange", "all_gather", "all_to_all", "reduce_scatter", *(name for name in storms.LAUNCHES if name != "copies")
])  # fmt: skip
def test_without_flags_the_storm_is_wrong(kind):
    """The negative control: without the waits, ranks that stall must read data that has not arrived."""
    assert sum(on_ranks(moving, 2, seed(), [kind], 30, {"STALL": 20_000, "BROKEN": 1})) > 0


def test_epochs_start_over():
    """When the counter of a channel reaches its end, the channel clears its inbox and continues."""
    packets = ["one_shot", "two_shot", "ring", "tree"]
    assert on_ranks(moving, 3, seed(), packets, 60, {"RENEW_EPOCH": 20}) == [0] * 3


def compressing(rendezvous: ControlPlane, device: int, start: int, form: str, macros: dict) -> int:
    where = {"device": device, "stream": cuda.create_stream(device)}
    return storms.compressed_storm(rendezvous, start, form, ml_dtypes.bfloat16, 30, **where, **macros)


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stall", [0, 20_000])
def test_compressed_reductions_back_to_back(size, form, stall):
    """With the bits of the host."""
    macros = {"STALL": stall} if stall else {}
    assert on_ranks(compressing, size, seed(), form, macros) == [0] * size


def absent(rendezvous: ControlPlane, device: int, all_ended: threading.Barrier, launch: KernelConfig, how: str) -> str:
    """Rank 1 launches nothing.  ``all_ended`` is no wait that the log knows: it would be followed to its cause."""
    engine = PeerEngine(rendezvous, device, timeout=0.5, staging=1 << 14)
    stream = cuda.create_stream(device)
    memory = SymmetricMemory(rendezvous, 1 << 16, device)
    if launch.algorithm == "specialized":
        engine.register(memory)
    x = Array(memory.pointer, (1000,), np.float32, device)
    run = engine.bind_all_reduce(
        x.pointer, x.pointer, 1000, dtype_of(np.dtype(np.float32)), ReduceOp.SUM, launch=launch
    )
    cuda.synchronize(device)
    rendezvous.barrier()
    message = ""
    if rendezvous.rank != 1:
        if how == "abort":
            engine.record.timeout = 60.0
        run(stream)
        if how == "abort":
            engine.record.abort()
        streams.synchronize(stream, device)
        with pytest.raises((CollectiveTimeout, RankLost, CollectiveError)) as caught:
            engine.record.check("all_reduce #7")
        message = str(caught.value)
    engine.record.abort()  # rank 1 knows of nothing: all of them close alone
    all_ended.wait(60)
    engine.close()
    rendezvous.barrier()
    again = PeerEngine(rendezvous, device, staging=1 << 14)
    got = reduce_once(rendezvous, device, again, launch, [np.ones(9, np.float32)] * rendezvous.size,
                      [ReduceOp.SUM] * rendezvous.size)  # fmt: skip
    np.testing.assert_array_equal(got, np.full(9, rendezvous.size))
    again.close()
    memory.close()
    return message


@pytest.mark.parametrize("launch", [*LAUNCHES, SPECIALIZED], ids=[*NAMES, "specialized"])
def test_absent_rank_is_named(launch):
    messages = on_ranks(absent, 2, threading.Barrier(2), launch, "timeout")
    assert messages[0].startswith("all_reduce #7: rank 1 did not arrive or went no further within 0.5 s")


def test_the_other_ranks_raise_too():
    messages = on_ranks(absent, 3, threading.Barrier(3), KernelConfig("one_shot"), "timeout")
    told = [text for text in (messages[0], messages[2]) if "ended early" in text]
    named = [text for text in messages if "rank 1 did not arrive" in text]
    assert named and len(named) + len(told) == 2, messages


def test_abort_ends_a_wait():
    messages = on_ranks(absent, 2, threading.Barrier(2), KernelConfig("two_shot"), "abort")
    assert "aborted while it waited for rank 1" in messages[0]


def barriers(rendezvous: ControlPlane, device: int) -> None:
    engine = PeerEngine(rendezvous, device, timeout=5.0, staging=1 << 14)
    stream = cuda.create_stream(device)
    run = engine.bind_barrier()
    with cuda.capture(stream) as graph:
        for _ in range(100):
            run(stream)
    streams.synchronize(stream, device)
    rendezvous.barrier()
    graph.replay(stream)
    streams.synchronize(stream, device)
    engine.record.check("barrier")
    with pytest.raises(InvalidArgument, match="multiples of 4 bytes"):
        engine.bind_all_reduce(2, 4, 1, dtype_of(np.dtype(np.float32)), ReduceOp.SUM)
    rendezvous.barrier()
    graph.close()
    engine.close()


def test_barrier_and_bad_arguments():
    on_ranks(barriers, 3)
