"""What ranks do in the tests of cached calls; each function runs on all ranks of a process group of kos."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kos
from tests.comm.fake_nccl import no_gpu
from tests.interop.torch_on_host import Processes, connect_gpu, tensors_of_a_gpu
from tests.interop.torch_programs import collectives, error_of

TURNS = 4


def on_stand_ins() -> list[Any]:
    """Every collective, ``TURNS`` times, on stand-ins for tensors of a GPU; then two calls in turn on one tensor."""
    group: Any = dist.group.WORLD
    host = kos.init("tcp", rendezvous=group, progress_thread=True)
    with (
        pytest.MonkeyPatch.context() as patch, no_gpu(patch), tensors_of_a_gpu(patch),
        host, connect_gpu(group, Processes(host)),
    ):  # fmt: skip
        found: list[Any] = [collectives() for _ in range(TURNS)]
        x, apart = torch.empty(6), torch.empty(3, 6)
        for turn in range(TURNS):
            x.fill_(turn + dist.get_rank())
            dist.all_reduce(x)
            dist.all_reduce(x, dist.ReduceOp.MAX)
            apart.zero_()
            dist.all_gather([apart[0], apart[2]], x)  # through a temporary tensor
            found.append([x.tolist(), apart[:, 0].tolist()])
        return found


def on_the_host() -> list[Any]:
    """Every collective ``TURNS`` times, and calls on memory that tensors of several dtypes use, one after another."""
    found: list[Any] = [collectives() for _ in range(TURNS)]
    memory = torch.zeros(64, dtype=torch.uint8)
    for turn in range(2 * TURNS):
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
            for x in (memory.view(dtype), memory[:32].view(dtype), memory.view(dtype).view(2, -1)):
                x.copy_(torch.full(x.shape, turn + dist.get_rank()))
                dist.all_reduce(x)
                dist.broadcast(x, turn % 2)
                found.append(x.tolist())
    return found


def signs() -> list[float]:
    """An all-reduce in place of the values, and of their negatives, of the same memory."""
    x, found = torch.zeros(3), list[float]()
    for turn in range(TURNS):
        for view in (x, torch._neg_view(x)):
            x.fill_(turn)
            dist.all_reduce(view)
            found.append(x[0].item())
    return found


def cached_errors() -> list[str]:
    """A call that is cached on both ranks: a mismatch, a late rank, another timeout, and a group that was destroyed."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    x = torch.ones(4)
    for group in groups:
        for _ in range(TURNS):
            dist.all_reduce(x, group=group)
    mismatched, late, destroyed = groups
    late.set_timeout(timedelta(seconds=0.5))
    dist.destroy_process_group(destroyed)
    wrong: list[Any] = [lambda: dist.all_reduce(x if rank else x[:3], group=mismatched)]
    wrong += [lambda: dist.all_reduce(x, group=mismatched), lambda: destroyed.allreduce([x], _waits())]
    wrong += [lambda: dist.all_reduce(x, group=late)] * (1 - rank)
    texts = [error_of(call) for call in wrong]
    dist.barrier()
    return texts


def _waits() -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    return opts
