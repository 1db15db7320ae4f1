"""Calls of NCCL that the compiled core makes in groups, and with kernels and copies between them.

The driver, NCCL, kernels and memory are stand-ins.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import KosError
from kos.memory.array import Array
from kos.testing.conformance.model import Step, call, contributions, lengths, result
from tests.comm.fake_gpu import at, captures
from tests.comm.fake_nccl import FakeNCCL, FakeRanks
from tests.comm.gpu_eager import by, hits, on_gpu
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]
COUNTS = (1, 3, 2)


def send_recv(comm: Any, x: Any, out: Any) -> Any:
    return comm.send_recv(x, out[:6], (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


def ring(comm: Any, x: Any, out: Any) -> None:
    """One message from each rank to the next one."""
    for rank in range(comm.size):
        if comm.rank == rank:
            comm.send(x, (rank + 1) % comm.size)
        elif comm.rank == (rank + 1) % comm.size:
            comm.recv(out[:6], rank)


NAMES = (
    "send_recv", "send, recv", "all_gather_v", "all_to_all_v", "gather_v", "scatter_v", "reduce_scatter_v",
    "reduce_scatter_v of integers", "scan", "reduce", "all_reduce",
)  # fmt: skip


def step_of(name: str) -> Step:
    """The call of three ranks.  Sums of floats depend on their order, which is that of the ranks."""
    dtype, values = (np.int32, "any") if "integers" in name else (np.float32, "apart")
    name = {"send, recv": "send_recv", "reduce_scatter_v of integers": "reduce_scatter_v"}.get(name, name)
    counts = (COUNTS,) * 3 if name == "all_to_all_v" else COUNTS
    in_order = name in ("reduce", "all_reduce")
    return Step(name, 6, dtype, root=1, deterministic=in_order, counts=counts, values=values)


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, where) for name in NAMES for where in ("memory", "windows", "x in a window") if name != "all_reduce"),
     ("all_reduce", "memory")],
)  # fmt: skip
def test_the_core_makes_them(fake, name, where):
    """Messages of registered memory pass through staging memory.  In a capture, Python makes the call."""
    step = step_of(name)

    def body(gpu):
        comm, stream = gpu.comm, Stream(40)
        x = comm.allocate(6, step.dtype) if where != "memory" else Array.zeros(6, step.dtype, 0)
        out = comm.allocate(9, step.dtype) if where == "windows" else Array.zeros(9, step.dtype, 0)
        x.stream = out.stream = stream

        def check(turn):
            xs = contributions(turn, step, 3)
            expected, given = result(step, xs, comm.rank), x[: lengths(step, 3)[comm.rank]]
            given.copy_from(xs[comm.rank])
            out.fill_bytes(0x7F)
            if name == "send, recv":
                ring(comm, given, out)
            else:
                call(comm, step, given, None if expected is None else out[: expected.size])
            if expected is not None:
                got = out.numpy()[: expected.size]
                assert got.tobytes() == expected.tobytes(), f"call {turn} on rank {comm.rank}"

        calls = 2 if name == "send, recv" else 1
        for turn in range(3):
            check(turn)
        with by(comm, calls):
            check(3)
        with captures() as graph, by(comm, 0):
            check(4)
        graph.destroy()
        with by(comm, calls):
            check(5)

    FakeRanks(3).run(body)


def counted(fake: FakeNCCL, *names: str) -> dict[str, int]:
    """How often the core calls these functions of NCCL; each still does what it did."""
    counts = dict.fromkeys(names, 0)

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    for name in names:
        setattr(fake, name, count(name, getattr(fake, name)))
    return counts


SUM, PROD, MAX, AVG = kos.ReduceOp.SUM, kos.ReduceOp.PROD, kos.ReduceOp.MAX, kos.ReduceOp.AVG


@pytest.mark.parametrize(
    ("size", "dtype", "op", "alike"),
    [(2, np.float32, SUM, True), (2, np.float16, PROD, True), (2, np.float32, AVG, False),
     (2, np.float32, kos.PremulSum(2.0), False), (2, np.float32, MAX, False), (3, np.float32, SUM, False),
     (3, np.complex64, SUM, False), (3, np.int32, SUM, True), (3, np.bool_, MAX, False)],
)  # fmt: skip
def test_sums_that_have_one_order(fake, size, dtype, op, alike):
    """A reduce_scatter_v then is a group of NCCL's own reduce calls, which need no kernel of kos."""
    counts = counted(fake, "reduce", "send")

    def body(gpu):
        comm, x = gpu.comm, on_gpu(np.ones(2 * size, dtype))
        comm.reduce_scatter_v(x, [2] * size, on_gpu(np.zeros(2, dtype)), op)

    FakeRanks(size).run(body)
    assert counts == {"reduce": size**2 * alike, "send": size**2 * (not alike)}


@pytest.mark.parametrize("failing", ["send", "recv", "group_start", "group_end", "cuLaunchKernelEx"])
def test_a_launch_that_is_refused_ends_its_group(fake, failing):
    """No function except ncclGroupEnd is called after it.  The error names the function that failed."""
    failed = threading.Event()
    counts = counted(fake, "group_start", "send", "recv", "group_end")

    def body(gpu):
        comm, x, out = gpu.comm, on_gpu(np.ones(4, np.int16)), on_gpu(np.zeros(2, np.int16))
        for _ in range(3):
            comm.reduce_scatter_v(x, [2, 2], out)
        comm.rendezvous.barrier()
        if comm.rank == 1:
            assert failed.wait(10.0)
            with pytest.raises(KosError):
                comm.all_reduce(out)  # waits for no message
            return
        before, counts_before = hits(comm), dict(counts)
        fake.driver.instead[failing] = lambda *words: 3
        if failing == "cuLaunchKernelEx":  # the messages of the other rank never come
            fake.driver.instead |= dict.fromkeys(("send", "recv", "group_end"), lambda *words: 0)
        error = "cuLaunchKernelEx failed: status 3" if failing == "cuLaunchKernelEx" else "NCCL .*: status 3"
        with pytest.raises(KosError, match=error):
            comm.reduce_scatter_v(x, [2, 2], out)
        failed.set()
        made = {name: counts[name] - counts_before[name] for name in counts}
        expected = {
            "send": {"group_start": 1, "send": 0, "recv": 0, "group_end": 1},
            "recv": {"group_start": 1, "send": 2, "recv": 0, "group_end": 1},
            "group_start": {"group_start": 0, "send": 0, "recv": 0, "group_end": 0},
        }  # fmt: skip
        assert made == expected.get(failing, made)
        assert hits(comm) == before + 1

    FakeRanks(2).run(body)


def scans_on_two_streams(comm: Any) -> list[Any]:
    """Arrays on two streams, whose scans the core knows."""
    arrays = x, y = [on_gpu(np.ones(4, np.float32), Stream(handle)) for handle in (40, 41)]
    for each in (x, y, x):
        for _ in range(3):
            comm.scan(each)
    return arrays


def on_free(fake: FakeNCCL, act: Callable[[np.ndarray], Any]) -> None:
    """Call ``act`` with memory that is freed; other memory does not take its place."""
    allocate, sizes = fake.cu.cuMemAlloc, dict[int, int]()

    def sized(nbytes: int) -> tuple[int, int]:
        status, address = allocate(nbytes)
        sizes[address] = nbytes
        return status, address

    def free(address: int) -> tuple[int]:
        act(at(address, sizes[address], np.dtype(np.uint8)))
        return (0,)

    fake.cu.cuMemAlloc, fake.cu.cuMemFree = sized, free


def test_scratch_memory_that_is_freed(fake):
    """A cached call uses scratch memory of its stream.  ``synchronize`` frees it if another stream was used since."""
    freed = list[np.ndarray]()

    def body(gpu):
        comm = gpu.comm
        x, y = scans_on_two_streams(comm)
        with by(comm, 1):
            comm.scan(x)
        comm.all_reduce(y, deterministic=True)  # by Python, which notes the stream
        comm.synchronize()
        comm.rendezvous.barrier()
        assert len(freed) == 2
        before = list(freed)
        for memory in before:
            memory[:] = 0x55
        comm.rendezvous.barrier()
        comm.scan(x)
        with by(comm, 1):
            comm.scan(x)
        comm.rendezvous.barrier()
        assert all((memory == 0x55).all() for memory in before)

    on_free(fake, freed.append)
    FakeRanks(2).run(body)


def test_a_call_of_another_thread_while_scratch_memory_is_freed(fake):
    """It must not use that memory, although the core has cached the call."""

    def note(memory):
        memory[:] = 0x55
        if (call := calls.get(threading.get_ident())) is not None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            unused.append(bool((memory == 0x55).all()))

    def body(gpu):
        comm = gpu.comm
        x, y = scans_on_two_streams(comm)
        comm.all_reduce(y, deterministic=True)  # by Python, which notes the stream: the memory of x may be freed
        comm.rendezvous.barrier()
        calls[threading.get_ident()] = lambda: comm.scan(x)
        comm.synchronize()
        del calls[threading.get_ident()]
        comm.rendezvous.barrier()
        assert unused and all(unused)

    calls, unused = dict[int, Any](), list[bool]()
    on_free(fake, note)
    FakeRanks(2).run(body)


def test_registered_memory_that_ends_within_a_page(fake, monkeypatch):
    """The rest of that page counts as registered too: Python looks where each array is."""
    monkeypatch.setattr("kos.comm.gpu.nccl_binding.WINDOW_ALIGNMENT", 1)
    fake.cu.cuMemRetainAllocationHandle = lambda address: (0, None)

    def body(gpu):
        comm, x, out = gpu.comm, on_gpu(np.ones(4, np.float32)), on_gpu(np.zeros(4, np.float32))
        for _ in range(3):
            send_recv(comm, x, out)
        with by(comm, 1):
            send_recv(comm, x, out)
        own = Array.zeros(1 << 12, np.float32, 0)
        registered = comm.register(own[:1000])
        with by(comm, 0):
            for _ in range(4):
                send_recv(comm, x, out)
        del registered

    FakeRanks(2).run(body)
