"""Programs of torch.distributed with one mistake each, which kos.testing.torch must name with the right line.

The lines that it must name end with the comment ``# here``.  ``MISTAKES`` has the error, and texts that it must have.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {}
"""By the name of the program: the class of the error, and texts in it or in its notes."""


def mistake(error: str, *texts: str) -> Any:
    def decorate(program: Any) -> Any:
        MISTAKES[program.__name__] = error, texts
        return program

    return decorate


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def ddp(rank: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(4, 4))


# Calls that differ.


@mistake("DistBackendError", "all_reduce", "broadcast")
def other_operation(rank):
    if rank == 0:
        dist.all_reduce(ones())  # here
    else:
        dist.broadcast(ones(), 0)  # here


@mistake("DistBackendError", "4", "5")
def other_shape(rank):
    dist.all_reduce(ones(4 + rank))  # here


@mistake("DistBackendError", "float32", "float64")
def other_type(rank):
    x = ones().double() if rank else ones()
    dist.all_reduce(x)  # here


@mistake("DistBackendError", "SUM", "MAX")
def other_reduction(rank):
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    dist.all_reduce(ones(), op)  # here


@mistake("Mistake", "calls differ", "float32[4], 0", "float32[4], 1")
def other_root(rank):  # pytorch/pytorch: broadcast_object_list with src=rank
    dist.broadcast(ones(), src=rank)  # here


@mistake("DistBackendError", "recv")
def message_of_another_size(rank):
    if rank == 0:
        dist.send(ones(4), 1)  # here
    else:
        dist.recv(ones(6), 0)  # here


@mistake("DistBackendError")
def a_metric_on_rank_0_only(rank):
    loss = ones(1)
    if rank == 0:
        dist.all_reduce(loss)  # here
    dist.all_reduce(ones(8))  # here


@mistake("DistBackendError")
def an_unused_parameter_by_rank(rank):
    """DDP of models that differ: the buckets differ."""
    model = ddp(rank)
    model(ones()).sum().backward()
    if rank:
        dist.all_reduce(ones(3))  # here
    else:
        dist.all_gather([ones(3), ones(3)], ones(3))  # here


# Deadlocks.


@mistake("Deadlock", "cycle: rank 0 -> rank 1 -> rank 0")
def both_send_first(rank):
    dist.send(ones(), 1 - rank)  # here
    dist.recv(ones(), 1 - rank)


@mistake("Deadlock", "cycle")
def both_receive_first(rank):
    dist.recv(ones(), 1 - rank)  # here
    dist.send(ones(), 1 - rank)


@mistake("Deadlock", "cycle")
def another_tag(rank):
    if rank == 0:
        dist.send(ones(), 1, tag=1)  # here
    else:
        dist.recv(ones(), 0, tag=2)  # here


@mistake("Deadlock", "cycle")
def a_receive_beside_a_collective(rank):
    if rank == 0:
        dist.recv(ones(), 1)  # here
    else:
        dist.barrier()  # here


@mistake("Deadlock", "cycle")
def two_groups_in_different_orders(rank):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (second, first) if rank else (first, second):
        dist.all_reduce(ones(), group=group)  # here


@mistake("Deadlock", "making a process group")
def a_group_that_only_some_ranks_make(rank):
    if rank == 0:
        dist.new_group([0, 1])  # here
    else:
        dist.barrier()  # here


@mistake("RuntimeError", "barrier", "all_reduce")
def a_checkpoint_on_rank_0_only(rank):
    model = ddp(rank)
    if rank == 0:
        dist.barrier()  # here
    model(ones()).sum().backward()  # here


@mistake("Deadlock", "cycle")
def a_pipeline_in_the_wrong_order(rank):
    if rank == 0:
        dist.send(ones(), 1)
        dist.recv(ones(), 1)  # here
    else:
        x = ones()
        dist.recv(x, 0)
        dist.recv(x, 0)  # here


@mistake("Deadlock", "cycle")
def a_gather_of_objects_by_half_of_the_ranks(rank):
    if rank == 0:
        dist.all_gather_object([None, None], rank)  # here
    else:
        dist.recv(ones(), 0)  # here


@mistake("Deadlock", "cycle")
def a_wait_for_a_receive_that_follows(rank):
    x = ones()
    work = dist.irecv(x, 1 - rank)  # here
    work.wait()
    dist.send(x, 1 - rank)


@mistake("Deadlock", "cycle")
def a_mesh_with_crossed_dimensions(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    order = ("dp", "tp") if rank in (0, 3) else ("tp", "dp")
    for name in order:
        dist.all_reduce(ones(), group=mesh[name].get_group())  # here


# Ranks that return, and uneven numbers of batches.


@mistake("Deadlock", "rank 1 has ended: its function returned")
def an_early_return(rank):
    if rank == 1:
        return
    dist.all_reduce(ones())  # here


@mistake("Deadlock", "uneven numbers of batches")
def uneven_batches_of_ddp(rank):
    model = ddp(rank)
    for _ in range(3 + rank):
        model(ones()).sum().backward()  # here


@mistake("Deadlock", "uneven numbers of batches")
def uneven_numbers_of_reductions(rank):
    for _ in range(5 - rank):
        dist.all_reduce(ones())  # here


@mistake("Deadlock", "has ended")
def a_receive_of_nothing(rank):
    if rank == 1:
        dist.recv(ones(), 0)  # here


@mistake("Deadlock", "has ended")
def a_send_to_nobody(rank):
    if rank == 0:
        dist.send(ones(), 1)  # here


# What is wrong although the run has ended.


@mistake("Mistake", "no rank received")
def a_message_that_is_not_received(rank):
    if rank == 0:
        dist.isend(ones(), 1)  # here


@mistake("Mistake", "never waited for")
def a_work_that_is_dropped(rank):
    dist.all_reduce(ones(), async_op=True)  # here


@mistake("Mistake", "was changed while")
def a_tensor_that_is_changed(rank):
    x = ones()
    work = dist.all_reduce(x, async_op=True)  # here
    x.mul_(2)
    work.wait()


@mistake("Mistake", "was changed while")
def an_input_that_is_reused(rank):
    x, out = ones(2), ones(4)
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # here
    x.zero_()
    work.wait()


@mistake("Mistake", "was changed while")
def a_buffer_that_is_sent_and_refilled(rank):
    x = ones()
    work = dist.isend(x, 1 - rank)  # here
    x.fill_(7)
    dist.recv(ones(), 1 - rank)
    work.wait()


@mistake("Mistake", "different orders")
def two_groups_in_flight_in_different_orders(rank):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = (second, first) if rank else (first, second)
    works = [dist.all_reduce(ones(), group=group, async_op=True) for group in groups]  # here
    for work in works:
        work.wait()


@mistake("Mistake", "was changed while")
def an_output_that_is_cleared(rank):
    out = ones(4)
    work = dist.all_gather_into_tensor(out, ones(2), async_op=True)  # here
    out.zero_()
    work.wait()


@mistake("Deadlock", "has ended")
def an_exit_of_one_rank(rank):
    if rank == 1:
        raise SystemExit(0)
    functional.all_reduce(ones(), "sum", dist.group.WORLD).sum()  # here
