"""100,000 operations back to back, of random kinds, sizes, types, places and algorithms, on data that changes.

mpirun -n 4 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_peer_soak.py
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp, cuda
from kos.comm.tuning import KernelConfig
from kos.dtypes import DTYPES
from kos.memory.array import Array
from tests.comm.gpu_ranks import engine_of

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
BACKEND = "peer"

TOTAL = int(os.environ.get("KOS_SOAK_OPERATIONS", 100_000))
IN_A_GRAPH = 250
LARGEST = 4 << 20  # bytes of a buffer
KINDS = [
    "all_reduce", "launch", "launch", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv",
]  # fmt: skip
TYPES = ["float32", "bfloat16", "float64", "int8", "float8_e4m3fn"]
LAUNCHES = [
    KernelConfig("one_shot", threads=128), KernelConfig("two_shot", threads=128), KernelConfig("ring", threads=128),
    KernelConfig("tree", threads=128), KernelConfig("direct", 32),
    KernelConfig("push", 64), KernelConfig("copies", pieces=2), KernelConfig("specialized", tile=16384),
]  # fmt: skip


def plan(comm: kos.Communicator, rng: np.random.Generator, places: list[Any], step: Callable[..., Any]) -> str:
    """Queue one operation with the kernels before and after it; the same on all ranks."""
    n, me = comm.size, comm.rank
    dtype = DTYPES[TYPES[int(rng.integers(len(TYPES)))]]
    most = LARGEST // dtype.itemsize // n - 16
    count = int(most ** rng.random())
    kind, root = str(rng.choice(KINDS)), int(rng.integers(n))
    symmetric, start = bool(rng.random() < 0.5), int(rng.choice([0, 0, 16 // dtype.itemsize or 1, 1]))
    launch = LAUNCHES[int(rng.integers(len(LAUNCHES)))]
    if kind == "launch" and launch.algorithm == "specialized":
        count = -(-count // 16) * 16  # whole vectors
    spread = {"reduce_scatter": (n, 1), "all_to_all": (n, n), "all_gather": (1, n)}.get(kind, (1, 1))
    source, target = (
        Array(place.pointer + start * dtype.itemsize, (count * times,), dtype, comm.device, owner=place)
        for place, times in zip(places[2 * symmetric : 2 * symmetric + 2], spread, strict=True)
    )

    def run(stream: Any) -> None:
        if kind == "launch":
            bind = engine_of(comm).bind_all_reduce
            bind(source.pointer, target.pointer, count, dtype, ReduceOp.SUM, launch=launch)(stream)
        elif kind == "all_reduce":
            comm.all_reduce(source, out=target, stream=stream)
        elif kind == "broadcast":
            comm.broadcast(source, root, out=target, stream=stream)
        elif kind == "reduce":
            comm.reduce(source, root, out=target if me == root else None, stream=stream)
        elif kind == "send_recv":
            comm.send_recv(source, target, (me + 1) % n, (me - 1) % n, stream=stream)
        else:
            getattr(comm, kind)(source, target, stream=stream)

    expected = {  # first element, elements of each rank (0: a sum), of which rank the first
        "reduce_scatter": (me * count, 0, 0), "all_to_all": (me * count, count, 0), "all_gather": (0, count, 0),
        "broadcast": (0, count, root), "send_recv": (0, count, (me - 1) % n),
    }.get(kind, (0, 0, 0))  # fmt: skip
    step(dtype, source, target, expected, run, 0 if kind == "reduce" and me != root else target.size)
    return f"{kind} {launch.algorithm if kind == 'launch' else ''} {count} {dtype}"


def test_soak(gpu_world, mpi_world, seed):
    comm, device = gpu_world, gpu_world.device
    stream = cuda.create_stream(device)
    turn, wrong = Array.zeros(1, np.uint32, device), Array.zeros(1, np.uint64, device)
    places = [Array.empty(LARGEST, np.uint8, device) for _ in range(2)]
    places += [comm.allocate(LARGEST, np.uint8) for _ in range(2)]
    rounds, done, operation = 0, 0, 0

    def kernel(name, dtype):
        path = Path(__file__).with_name("soak.cu")
        return cuda.load_kernel(path, name, device, DTYPE=dtype.name, OP="SUM", RANKS=comm.size)

    def step(dtype, source, target, expected, run, results):
        nonlocal operation
        operation += 1
        sizes = source.pointer, source.size, target.pointer, target.size
        kernel("fill", dtype)(stream, 64, 256, *sizes, comm.rank, operation, turn.pointer)
        run(stream)
        last = target.pointer, results, *expected, operation
        kernel("check", dtype)(stream, 64, 256, *last, turn.pointer, wrong.pointer)

    cuda.synchronize(device)
    mpi_world.barrier()
    shared = len(set(comm.all_gather_bytes(cuda.visible_devices()[device].uuid.encode()))) < comm.size
    total = TOTAL // 50 if shared else TOTAL
    replays = 4 if shared else 40
    while done < total:
        kinds, rounds = [], rounds + 1
        for captured in (False, True):  # at once first, which also loads the kernels
            rng = np.random.default_rng([seed, rounds])
            with cuda.capture(stream) if captured else contextlib.nullcontext() as graph:
                kernel("advance", DTYPES["float32"])(stream, 1, 1, turn.pointer)
                kinds = [plan(comm, rng, places, step) for _ in range(IN_A_GRAPH)]
            comm.synchronize(stream=stream)
            mpi_world.barrier()
        for _ in range(replays):
            graph.replay(stream)
        comm.synchronize(stream=stream)
        done += (replays + 1) * IN_A_GRAPH
        bad = int(wrong.numpy(stream)[0])
        everybody = [int(data) for data in mpi_world.rendezvous.allgather(str(bad).encode())]
        assert everybody == [0] * comm.size, f"wrong elements by rank: {everybody} among {kinds}"
        graph.close()
    print(f"{done} operations, no mismatch")
