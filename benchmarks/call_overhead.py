"""What a call of the communicator costs on the CPU above NCCL's binding.

    mpirun -n 1 python -m benchmarks.call_overhead

One rank: NCCL itself then does next to nothing, so that what is seen is Python.  Microseconds, the best of
several rounds; the GPU is waited for between rounds only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import kos
from kos import cuda
from kos.comm.backends.nccl import NCCLBackend
from kos.memory.array import Array

CALLS, ROUNDS = 2000, 7


def cost(call: Callable[[], object], comm: kos.Communicator) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begun)
        comm.synchronize()
    return best / CALLS * 1e6


def main() -> None:
    comm = kos.init("nccl")
    backend = comm.backend
    assert isinstance(backend, NCCLBackend) and comm.device is not None
    cuda.set_device(comm.device)
    stream = cuda.create_stream(comm.device)
    x = Array.zeros(1024, "float32", comm.device, stream=stream)
    handle = int(stream.handle)
    raw, nccl = backend._nccl.all_reduce, backend._comm
    comm.all_reduce(x)
    operation = comm.all_reduce_init(x)
    operation.start()
    calls: dict[str, Callable[[], object]] = {
        "binding": lambda: raw(x.pointer, x.pointer, 1024, 7, 0, nccl, handle),
        "persistent": operation.start,
        "eager": lambda: comm.all_reduce(x),
        "eager, stream given": lambda: comm.all_reduce(x, stream=stream),
        "eager, async_op": lambda: comm.all_reduce(x, async_op=True).wait(),
    }
    times = {name: cost(call, comm) for name, call in calls.items()}
    for name, microseconds in times.items():
        print(f"{name:22} {microseconds:6.2f} us, {microseconds - times['binding']:6.2f} above the binding")
    comm.close()


if __name__ == "__main__":
    main()
