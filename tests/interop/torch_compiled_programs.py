"""What torch.compile makes of torch.distributed: each case compiled by one backend of torch, and its results.

A case gives the same result over every process group.  ``compiler`` "none" does not compile.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from tests.interop.torch_model_programs import device_of_rank, train

Function = Callable[..., Any]
SEVERAL_BUCKETS = 600
"""The width of a model with more than one of DDP's buckets, of which torch.compile wants 1 MB at least."""


def _compiled(what: Any, compiler: str, **options: Any) -> Any:
    return what if compiler == "none" else torch.compile(what, backend=compiler, **options)


def _exchange(x: Any, left: int, right: int) -> Any:
    """In a function of its own: torch 2.11 compiles no function with a P2POp that lives across a graph break."""
    y = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]):
        work.wait()
    return y


def collectives() -> list[Function]:
    """Functions of a tensor of 4 elements: an operation of torch.distributed between other operations."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size

    def all_reduce(x: Any) -> Any:
        dist.all_reduce(x)
        return x + 1

    def all_reduce_max(x: Any) -> Any:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x + 1

    def all_reduce_async(x: Any) -> Any:
        y = x * 2
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + y

    def all_reduce_future(x: Any) -> Any:
        return dist.all_reduce(x, async_op=True).get_future().wait()[0] + 1

    def broadcast(x: Any) -> Any:
        dist.broadcast(x, 1)
        return x + 1

    def reduce(x: Any) -> Any:
        dist.reduce(x, 1)
        return x + 1 if rank == 1 else x * 0

    def all_gather(x: Any) -> Any:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x * 2)
        return torch.cat(parts) + 1

    def all_gather_into_tensor(x: Any) -> Any:
        whole = x.new_empty(4 * size)
        dist.all_gather_into_tensor(whole, x * 2)
        return whole + 1

    def gather(x: Any) -> Any:
        parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x * 2, parts, dst=0)
        return torch.cat(parts) + 1 if parts else x

    def scatter(x: Any) -> Any:
        y = torch.empty_like(x)
        dist.scatter(y, [x + each for each in range(size)] if rank == 0 else None, src=0)
        return y + 1

    def reduce_scatter(x: Any) -> Any:
        y = torch.empty_like(x)
        dist.reduce_scatter(y, [x + each for each in range(size)])
        return y + 1

    def reduce_scatter_tensor(x: Any) -> Any:
        y = torch.empty_like(x)
        dist.reduce_scatter_tensor(y, torch.cat([x + each for each in range(size)]))
        return y + 1

    def all_to_all_single(x: Any) -> Any:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x * 2)
        return y + 1

    def all_to_all_splits(x: Any) -> Any:
        splits = [1] * (size - 1)
        y = x.new_empty((4 - len(splits) if rank == size - 1 else 1) * size)
        dist.all_to_all_single(y, x * 2, [len(y) // size] * size, [*splits, 4 - len(splits)])
        return y + 1

    def all_to_all(x: Any) -> Any:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_to_all(parts, [x + each for each in range(size)])
        return torch.cat(parts) + 1

    def send_and_recv(x: Any) -> Any:
        y = torch.empty_like(x)
        if rank == 0:
            dist.send(x * 2, right)
            dist.recv(y, left)
        else:
            dist.recv(y, left)
            dist.send(x * 2 + y, right)
        return y + 1

    def isend_and_irecv(x: Any) -> Any:
        y = torch.empty_like(x)
        first, second = (dist.isend, x * 2, right), (dist.irecv, y, left)
        works = [call(tensor, peer) for call, tensor, peer in ((first, second) if rank == 0 else (second, first))]
        for work in works:
            work.wait()
        return y + 1

    def batch_isend_irecv(x: Any) -> Any:
        return _exchange(x * 2, left, right) + 1

    def coalesced(x: Any) -> Any:
        y = x * 2
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(x)
            dist.all_reduce(y)
        manager.wait()
        return x + y

    def barrier(x: Any) -> Any:
        dist.barrier()
        return x + 1

    return [call for call in locals().values() if callable(call)]


def functional() -> list[Function]:
    """Functional collectives, which stay in the graph."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def funcol_all_reduce(x: Any) -> Any:
        return funcol.all_reduce(x * 2, "avg" if x.is_cuda else "sum", group) + 1

    def funcol_all_gather(x: Any) -> Any:
        return funcol.all_gather_tensor(x * 2, 0, group) + 1

    def funcol_reduce_scatter(x: Any) -> Any:
        return funcol.reduce_scatter_tensor(torch.cat([x] * size), "sum", 0, group) + 1

    def funcol_all_to_all(x: Any) -> Any:
        return funcol.all_to_all_single(x * 2, None, None, group) + 1

    def funcol_broadcast(x: Any) -> Any:
        return funcol.broadcast(x * 2, 1, group) + 1

    def funcol_coalesced(x: Any) -> Any:
        first, second = funcol.all_reduce_coalesced([x, x * 2], "sum", group)
        third, fourth = funcol.all_gather_into_tensor_coalesced([first, second], group)
        return third + fourth

    return [call for call in locals().values() if callable(call)]


class Block(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.gelu(self.linear(x))


class Net(torch.nn.Module):
    """Two blocks and a layer; dynamo would not trace into torch's own modules, such as Sequential, under DDP."""

    def __init__(self, device: str, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = Block(16, width), Block(width, width), torch.nn.Linear(width, 4)
        self.to(device)

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.first(x)))


def _ddp(model: torch.nn.Module, device: str) -> torch.nn.Module:
    ids = None if device == "cpu" else [torch.cuda.current_device()]
    return torch.nn.parallel.DistributedDataParallel(model, ids, bucket_cap_mb=1)


def _fsdp(net: Net, device: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def ddp_inside(device: str, compiler: str) -> list[float]:
    """``torch.compile(DDP(net))``, which torch splits at DDP's buckets."""
    return train(_compiled(_ddp(Net(device, SEVERAL_BUCKETS), device), compiler), device)


def ddp_outside(device: str, compiler: str) -> list[float]:
    """``DDP(torch.compile(net))``."""
    return train(_ddp(_compiled(Net(device, SEVERAL_BUCKETS), compiler), device), device)


def fsdp_inside(device: str, compiler: str) -> list[float]:
    """``torch.compile(fully_shard(net))``."""
    return train(_compiled(_fsdp(Net(device), device), compiler), device)


def fsdp_outside(device: str, compiler: str) -> list[float]:
    """FSDP2 of blocks that are compiled one by one, as torchtitan does."""
    net = Net(device)
    if compiler != "none":
        net.first.compile(backend=compiler)
        net.second.compile(backend=compiler)
    return train(_fsdp(net, device), device)


def tensor_parallel(device: str, compiler: str) -> list[float]:
    """DTensor: a layer split by columns, the next by rows; then compiled."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    plan = {"first.linear": ColwiseParallel(), "second.linear": RowwiseParallel()}
    return train(_compiled(parallelize_module(Net(device), mesh, plan), compiler), device, rank=0)


def gradients_of_functional(device: str, compiler: str) -> list[list[float]]:
    """The functional collectives that have gradients, and the gradient of one rank's tensor."""
    rank, group, x = dist.get_rank(), dist.group.WORLD, _mine(device).requires_grad_()

    def call(x: Any) -> Any:
        whole = funcol.all_gather_tensor_autograd(x * 2, 0, group)
        part = funcol.reduce_scatter_tensor_autograd(whole * (rank + 1), "sum", 0, group)
        return part * part

    result = _compiled(call, compiler, fullgraph=True)(x)
    result.sum().backward()
    return [result.tolist(), x.grad.tolist()]


MODELS = gradients_of_functional, ddp_inside, ddp_outside, fsdp_inside, fsdp_outside, tensor_parallel


def _mine(device: str) -> torch.Tensor:
    return torch.arange(4.0, device=device) + 10 * dist.get_rank()


def matrix(parts: Sequence[str], compiler: str, kind: str, cache: str) -> dict[str, Any]:
    """The result of each case of "collectives", "functional" and "models", or of models by name.

    The result of a case that fails is the error, a string.  The case "together" runs all of "functional" in one graph.
    ``cache`` is a folder for what inductor compiles.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    device, found = device_of_rank(kind), dict[str, Any]()

    def case(name: str, call: Function) -> None:
        torch._dynamo.reset()
        counters.clear()
        try:
            found[name] = call()
            assert compiler == "none" or counters["stats"]["unique_graphs"], "nothing was compiled"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"

    if "collectives" in parts:
        for call in collectives():
            case(call.__name__, lambda call=call: _compiled(call, compiler)(_mine(device)).tolist())
    if "functional" in parts:
        for call in functional():
            case(call.__name__, lambda call=call: _compiled(call, compiler, fullgraph=True)(_mine(device)).tolist())
    if "together" in parts:
        whole = _compiled(lambda x: torch.cat([call(x) for call in functional()]), compiler, fullgraph=True)
        case("together", lambda: whole(_mine(device)).tolist())
    for program in MODELS:
        if {"models", program.__name__} & {*parts}:
            case(program.__name__, lambda program=program: program(device, compiler))
    return found
