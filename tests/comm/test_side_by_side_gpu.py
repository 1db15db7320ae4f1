"""Communicators that run side by side on one GPU: threads with a group each, and more blocks than fit.

mpirun -n 2 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_side_by_side_gpu.py
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

import kos
from kos import cuda
from kos.errors import KosError
from kos.memory.array import Array
from tests.comm.gpu_ranks import engine_of

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

ROUNDS = 20
SECONDS = 60.0


def on_threads(world: kos.Communicator, bodies: list[Callable[[], None]]) -> None:
    """Run each body on a thread; odd ranks start them the other way round.  Raises the first error."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            cuda.set_device(world.device)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for each in reversed(threads) if world.rank % 2 else threads:
        each.start()
    for each in threads:
        each.join(SECONDS)
        assert not each.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture
def groups(world):
    """Four groups of all ranks."""
    with ExitStack() as stack:
        groups = [world.split(0, world.rank) for _ in range(4)]
        for each in groups:
            assert each is not None
            stack.callback(lambda each=each: each.close() if each.failure is None else each.abort())
        yield groups


@pytest.mark.parametrize("library", ["kos", "torch"])
@pytest.mark.parametrize("count", [1000, 100_000, 3_000_000])
def test_threads_with_a_group_each(world, groups, library, count):
    """Each thread uses its own stream, in any order.  There are four threads, two of them with large sums."""
    torch = pytest.importorskip("torch") if library == "torch" else None
    several = groups if count <= 100_000 else groups[:2]
    expected = world.size * (world.size + 1) / 2

    def body(group):
        if torch is not None:
            torch.cuda.set_device(world.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(ROUNDS):
                    x = torch.full((count,), float(world.rank + 1), device="cuda")
                    group.all_reduce(x)
                    assert x.eq(expected).all().item(), turn
            return
        stream = cuda.create_stream(world.device)
        for turn in range(ROUNDS):
            x = Array.from_numpy(np.full(count, world.rank + 1, np.float32), world.device, stream=stream)
            group.all_reduce(x, stream=stream)
            group.synchronize()
            assert (x.numpy() == expected).all(), turn

    on_threads(world, [lambda group=each: body(group) for each in several])


def test_first_calls_of_different_kernels(world, groups):
    """CUDA loads a kernel only when running kernels have ended.  These may wait for a rank that also loads a kernel."""

    def body(group, dtype, op):
        stream = cuda.create_stream(world.device)
        x = Array.from_numpy(np.full(1000, world.rank + 1, dtype), world.device, stream=stream)
        group.all_reduce(x, op, stream=stream)
        group.synchronize()
        assert (x.numpy() == (world.size if op is kos.ReduceOp.MAX else 1)).all()

    kinds = [(np.float64, kos.ReduceOp.MAX), (np.int32, kos.ReduceOp.MIN), (np.uint8, kos.ReduceOp.MAX)]
    several = zip(groups, kinds, strict=False)
    on_threads(world, [lambda each=each, kind=kind: body(each, *kind) for each, kind in several])


def test_a_cycle_of_communicators_is_named(mpi_world, world):
    """Kernels that do not fit run one after another; ranks that start them in different orders wait in a cycle."""
    if world.backend_name != "peer":
        pytest.skip("kernels of peer alone are ordered")
    groups = [world.split(0, world.rank) for _ in range(2)]
    for each in groups:
        assert each is not None
        engine_of(each).multiprocessors = 0
        each.timeout = 3.0
    stream = [cuda.create_stream(world.device) for _ in groups]
    x = [Array.from_numpy(np.ones(1000, np.float32), world.device, stream=each) for each in stream]
    for group, each, on in zip(groups, x, stream, strict=True):  # ranks meet at the first call
        group.all_reduce(each, stream=on)
        group.synchronize()
    mpi_world.barrier()
    texts = []
    for index in (0, 1) if world.rank % 2 == 0 else (1, 0):
        groups[index].all_reduce(x[index], stream=stream[index])
    for index in (0, 1):
        try:
            groups[index].synchronize(20.0)
        except KosError as error:
            texts.append(str(error))
    # When the first kernel ends at its timeout, the other rank may still finish both of its calls.
    texts = [said.decode() for said in mpi_world.all_gather_bytes("; ".join(texts).encode())]
    assert any("wait for one another" in text for text in texts), texts
    assert any("other communicators of this GPU" in text for text in texts), texts
    for each in groups:
        each.abort()
