"""Programs of torch.distributed on GPUs, run by the tests: operations, streams, graphs, a rank that dies."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kos.cuda.driver import call, cu
from tests.interop.torch_model_programs import device_of_rank
from tests.interop.torch_programs import collectives


class Gate:
    """In its context, work on the current stream waits; after ``SECONDS`` it goes on, for a host that waits for it."""

    SECONDS = 30.0

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._timer = threading.Timer(self.SECONDS, self.open)

    def __enter__(self) -> "Gate":
        self._timer.start()
        stream, at_least = torch.cuda.current_stream().cuda_stream, cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        call(cu.cuStreamWaitValue32, stream, self._word.data_ptr(), 1, at_least)
        return self

    def is_open(self) -> bool:
        return bool(self._word.item())

    def open(self) -> None:
        self._word.fill_(1)

    def __exit__(self, *failed: Any) -> None:
        self.open()
        self._timer.cancel()


def gpu_collectives() -> dict[str, Any]:
    """``collectives`` on the GPU of the rank."""
    torch.set_default_device(device_of_rank("cuda"))
    found = collectives()
    torch.set_default_device("cpu")
    return found


def gpu_messages() -> dict[str, Any]:
    """Messages of rank 0 to itself, then messages in which all ranks send first."""
    device, rank, size = device_of_rank("cuda"), dist.get_rank(), dist.get_world_size()
    left, right, found = (rank - 1) % size, (rank + 1) % size, dict[str, Any]()
    if rank == 0:
        x, y = torch.ones(3, device=device), torch.zeros(3, device=device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 0), dist.P2POp(dist.isend, x, 0)]):
            work.wait(timedelta(seconds=5))
        assert y.tolist() == [1.0, 1.0, 1.0]
    for count in (3, 1 << 20):
        x, y = torch.full((count,), rank + 0.5, device=device), torch.empty(count, device=device)
        sent, received = dist.isend(x, right), dist.irecv(y, left)
        received.wait()
        sent.wait()
        found[f"isend {count}"] = [y.min().item(), y.max().item()]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x + 1, right), dist.P2POp(dist.irecv, y, left)]):
            work.wait()
        found[f"batch {count}"] = [y.min().item(), y.max().item()]
    return found


def gpu_streams() -> dict[str, Any]:
    """Results follow a slow kernel before the operation, and readers on another stream follow the operation."""
    device, rank, size = device_of_rank("cuda"), dist.get_rank(), dist.get_world_size()
    expected, found = size * (size + 1) / 2, dict[str, Any]()
    x, side = torch.empty(1 << 20, device=device).fill_(0), torch.cuda.Stream()  # loads the kernel that fills
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    torch.cuda.synchronize()
    for name in ("on the current stream", "aside"):
        with Gate() as gate:
            x.fill_(rank + 1)
            work = dist.all_reduce(x, async_op=name == "aside")
            returned = not gate.is_open()
        if work is None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if work is not None:
                work.wait()
            total = x.clone()
        side.synchronize()
        found[name] = [total.min().item() == total.max().item() == expected, returned]
        torch.cuda.synchronize()
        dist.barrier()
    first = dist.all_reduce(x.fill_(rank + 1), async_op=True)
    with Gate():  # the second operation waits for the gate, the first one does not
        second = dist.all_reduce(torch.zeros_like(x), async_op=True)
        with torch.cuda.stream(side):
            first.wait()
            total = x.clone()
        side.synchronize()
        found["an earlier one"] = [not second.is_completed(), True]
    found["an earlier one"][1] = total.max().item() == expected
    second.wait()
    del x, total
    future = dist.all_reduce(torch.full((1 << 20,), rank + 1.0, device=device), async_op=True).get_future()
    torch.full((1 << 20,), -1.0, device=device)  # might reuse the memory of the operand
    found["future"] = [future.wait()[0].max().item() == expected, True]
    x = torch.ones(1 << 22, device=device)
    place = x.data_ptr()
    torch.cuda._sleep(400_000_000)  # clock cycles
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    del work, x
    found["memory is free after the wait"] = [torch.empty(1 << 22, device=device).data_ptr() == place, True]
    return found


def gpu_graph() -> list[list[float]]:
    """Operations captured in a CUDA graph, on the current stream and another one, replayed with other inputs."""
    device, rank, size = device_of_rank("cuda"), dist.get_rank(), dist.get_world_size()
    x, y, whole = (torch.zeros(count, device=device) for count in (1024, 1 << 18, size * 1024))

    def step() -> None:
        dist.all_reduce(x)
        work = dist.all_reduce(y, async_op=True)
        x.mul_(2)
        work.wait()
        dist.all_gather_into_tensor(whole, x)

    step()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        step()
    for turn in range(3):
        x.fill_(rank + turn)
        y.fill_(rank * turn)
        graph.replay()
        found.append([whole.min().item(), whole.max().item(), y.min().item(), y.max().item()])
    torch.cuda.synchronize()
    return found


def gpu_killed() -> Any:
    """Rank 1 dies.  Rank 0 waits for a stream, which completes, and the next call raises."""
    device = device_of_rank("cuda")
    x = torch.ones(1 << 20, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - began
    return None
