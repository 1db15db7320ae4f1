"""What ranks of torch.distributed do in the tests; each function runs on all ranks, whatever their backend."""

import contextlib
import inspect
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode

from kos.comm.recorder import recorders


def error_of(call: Callable[[], Any], kinds: Any = dist.DistBackendError, named: bool = False) -> str:
    """The text of the error that a call raises, empty if it raises none.  ``named``: the class is in front of it."""
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}" if named else str(error)
    return ""


def _all_to_all(outputs: list[Any], inputs: list[Any]) -> None:
    """As torch's, also on the gloo of torch 2.11, which has none."""
    try:
        dist.all_to_all(outputs, inputs)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        sent: list[Any] = [None] * len(inputs)
        dist.all_gather_object(sent, [part.tolist() for part in inputs])
        for output, parts in zip(outputs, sent, strict=True):
            output.copy_(torch.tensor(parts[dist.get_rank()]))


def collectives() -> dict[str, Any]:
    """Every collective on small tensors, contiguous and not, as lists."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64):
        x = (mine % 7).to(dtype)
        dist.all_reduce(x)
        found[f"all_reduce {dtype}"] = x.tolist()
    x = mine.t()  # not contiguous
    dist.all_reduce(x, dist.ReduceOp.MAX)
    found["max"] = x.tolist()
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    x = mine.clone()
    dist.broadcast(x, 1)
    found["broadcast"] = x.tolist()
    x = mine.clone()
    dist.reduce(x, 1)
    found["reduce"] = x.tolist() if rank == 1 else None
    rows = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(rows, mine)
    found["all_gather"] = [row.tolist() for row in rows]
    whole = torch.empty(size * 2, 3)
    dist.all_gather_into_tensor(whole, mine)
    found["all_gather_into_tensor"] = whole.tolist()
    rows = [torch.empty(2, 3) for _ in range(size)] if rank == 0 else []
    dist.gather(mine, rows or None, dst=0)
    found["gather"] = [row.tolist() for row in rows]
    x = torch.empty(2, 3)
    dist.scatter(x, [mine + other for other in range(size)] if rank == 0 else None, src=0)
    found["scatter"] = x.tolist()
    x = torch.empty(2, 3)
    dist.reduce_scatter(x, [mine + other for other in range(size)])
    found["reduce_scatter"] = x.tolist()
    x = torch.empty(2)
    dist.reduce_scatter_tensor(x, torch.arange(2.0 * size) + rank)
    found["reduce_scatter_tensor"] = x.tolist()
    parts = [torch.empty(3) for _ in range(size)]
    _all_to_all(parts, [torch.full((3,), 10.0 * rank + other) for other in range(size)])
    found["all_to_all"] = [part.tolist() for part in parts]
    splits = [other + 1 for other in range(size)]
    x = torch.empty(size * (rank + 1), 2)
    y = torch.arange(2.0 * sum(splits)).reshape(-1, 2) + 100 * rank
    dist.all_to_all_single(x, y, [rank + 1] * size, splits)
    found["all_to_all_single"] = x.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        a, b = torch.full((3,), float(rank)), torch.full((2, 2), 1.0)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    found["coalesced"] = [a.tolist(), b.tolist()]
    return found


def booleans() -> dict[str, list[int]]:
    """The bytes of reductions of booleans whose bytes are not 0 or 1: true on all ranks, on rank 0, on none."""
    rank, found = dist.get_rank(), {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        x = torch.tensor([1 << rank + 1, 2 * (rank == 0), 0], dtype=torch.uint8).view(torch.bool)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        found[op] = x.view(torch.uint8).tolist()
    return found


def gather_single() -> list[float]:
    """The operation of ``dist.gather_single``, which torch has from 2.15 on, to rank 1."""
    rank, opts, group = dist.get_rank(), dist.GatherOptions(), dist.group.WORLD
    opts.rootRank = 1
    output = torch.zeros(4 if rank == 1 else 0)
    for turn in range(3):  # the last one is cached
        group.gather_single(output, torch.full((2,), 10.0 * rank + turn), opts).wait()
    return output.tolist()


def messages() -> dict[str, Any]:
    """Messages with tags, out of order, by batch_isend_irecv, and futures."""
    rank = dist.get_rank()
    other, found = 1 - rank, dict[str, Any]()
    a, b = torch.empty(2), torch.empty(3)
    works = [dist.isend(torch.full((2,), rank + 0.5), other, tag=1)]
    works += [dist.isend(torch.full((3,), rank + 0.25), other, tag=2)]
    works += [dist.irecv(b, other, tag=2), dist.irecv(a, other, tag=1)]
    for work in works:
        work.wait()
    found["tags"] = [a.tolist(), b.tolist()]
    x, y = torch.full((4,), float(rank)), torch.empty(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
        work.wait()
    found["batch"] = y.tolist()
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    found["future"] = future.wait().tolist()
    return found


def any_source() -> list[Any]:
    """A parameter server, and then other sizes and dtypes with the same tag, from named ranks and from any."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), list[Any]()
    for width in (1, 3):
        if rank == 0:
            x = torch.zeros(width)
            found.append(sorted((dist.recv(x), x.tolist()) for _ in range(size - 1)))
        else:
            dist.send(torch.full((width,), float(rank)), 0)
        dist.barrier()
    if rank == 0:
        for source in range(1, size):
            dist.recv(y := torch.zeros(4, dtype=torch.int64), source)
            found.append(y.tolist())
        for kind in (torch.float64, torch.int32):
            waiting = [(dist.irecv(z, tag=5), z) for z in (torch.zeros(2, dtype=kind) for _ in range(size - 1))]
            dist.barrier()
            for work, _ in waiting:
                work.wait()
            found.append(sorted((work.source_rank(), z.tolist()) for work, z in waiting))
            dist.barrier()
    else:
        dist.send(torch.full((4,), rank), 0)
        for kind in (torch.float64, torch.int32):
            dist.barrier()
            dist.send(torch.full((2,), rank, dtype=kind), 0, tag=5)
            dist.barrier()
    return found


def any_source_left_over() -> str:
    """A receive that nobody answers, on every rank; the group is shut down."""
    group: Any = dist.group.WORLD
    work = dist.irecv(torch.zeros(1))
    dist.barrier()
    group.shutdown()
    return error_of(work.wait)


def split() -> list[Any]:
    """A group of ranks 0 and 2 of three, which they alone make: a sum, a wrong timeout, and one that passes."""
    world: Any = dist.group.WORLD
    group, found = world.split_group([0, 2], timeout=timedelta(seconds=30), group_name="pair"), list[Any]()
    if group is not None:
        x = torch.full((1,), 1.0 + dist.get_rank())
        group.allreduce(tensor=x).wait()
        found.append([x.tolist(), group.group_name, group.size()])
        for seconds in (0, 0.3):
            try:
                group.set_timeout(timedelta(seconds=seconds))
                if group.rank() == 0:
                    group.allreduce(x).wait()
            except (dist.DistBackendError, ValueError) as error:
                found.append(f"{error.__class__.__name__}: {error}")
    dist.barrier()
    return found


def call_sites() -> tuple[list[tuple[str, int]], int, int]:
    """The call sites in the flight recorder, and the lines between which the calls are made, also those of DDP."""
    group: Any = dist.group.WORLD
    x, parts = torch.ones(2), [torch.ones(2) for _ in range(dist.get_world_size())]
    strided, peer = torch.ones(2, 3).t(), 1 - dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    known = next(iter(recorders))
    since = known.count
    first = inspect.currentframe().f_lineno
    made = [
        dist.all_reduce(x),
        dist.all_reduce(x, async_op=True),
        dist.all_gather(parts, x),
        dist.broadcast(strided, 0),
        dist.barrier(),
        group.allreduce([x]),
        functional.all_reduce(x, "sum", group),
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, parts[0], peer)]),
        dist.isend(x, peer),
        dist.recv(parts[1]),
        model(x).sum().backward(),
    ]
    last = inspect.currentframe().f_lineno
    for work in [made[1], made[5], *made[7], made[8]]:
        work.wait()
    sites = [entry["frames"][0] for entry in known.entries() if entry["record_id"] >= since]
    return [(Path(site["filename"]).name, site["line"]) for site in sites], first, last


def group_errors() -> list[str]:
    """A mismatch, a timeout and wrong arguments, each as the text of what is raised; groups of their own."""
    rank, texts = dist.get_rank(), []
    sparse, short = torch.ones(2).to_sparse(), [torch.ones(2)]
    meta, expanded = torch.ones(2, device="meta"), torch.ones(1).expand(4)
    with FakeTensorMode():
        fake = torch.ones(2)
    group: Any = dist.group.WORLD
    for wrong in (
        lambda: dist.all_reduce(sparse), lambda: dist.all_gather(short, torch.ones(2)),
        lambda: group.broadcast(root=1), lambda: group.reduce(torch.ones(2), 0, rank=1),
        lambda: dist.all_reduce(meta), lambda: dist.all_reduce(fake), lambda: dist.all_reduce(expanded),
        lambda: dist.new_group(timeout=timedelta(seconds=-1)),
    ):  # fmt: skip
        texts.append(error_of(wrong, Exception, named=True))
    mismatched = dist.new_group([0, 1])
    texts.append(error_of(lambda: dist.all_reduce(torch.ones(3 + rank), group=mismatched)))
    late = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        texts.append(error_of(lambda: dist.all_reduce(torch.ones(3), group=late)))
    dist.barrier()
    return texts


class Unwritable(torch.Tensor):
    """A tensor to which torch cannot copy."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            raise RuntimeError("it cannot be written to")
        return super().__torch_function__(function, types, args, kwargs or {})


def failed_copy() -> list[str]:
    """The futures of a result that torch cannot copy to its tensor, and of a later operation.  Rank 1 is late."""
    torn, texts = torch.ones(4, 4).t().as_subclass(Unwritable), []
    for x in (torn, torch.ones(3)):
        dist.barrier()
        time.sleep(0.2 * dist.get_rank())  # the thread of the futures sees the result
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value())
        try:
            texts.append(str(future.wait()[0].tolist()))
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def monitored() -> list[str]:
    """The errors of ``monitored_barrier`` on rank 0, which the others do not call; each on a group of its own."""
    texts = []
    for seconds, wait_all_ranks in ((0, False), (0.3, False), (0.3, True)):
        group = dist.new_group()
        if dist.get_rank() == 0:
            wait = partial(group.monitored_barrier, timedelta(seconds=seconds), wait_all_ranks)
            texts.append(error_of(wait))
        dist.barrier()
    return texts


def killed() -> Any:
    """Rank 1 dies before the second collective.  Returns rank 0's error, its time in seconds, and later errors."""
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    first, seconds = error_of(lambda: dist.all_reduce(x)), time.monotonic() - began
    later = (lambda: dist.recv(x), lambda: dist.recv(x, 1), lambda: dist.irecv(x).get_future().wait())
    return [first, seconds, *(error_of(call, RuntimeError, named=True) for call in later)]


def use_after_destroy() -> list[str]:
    """A group used after it was destroyed, one that this rank has aborted, and one that the other rank has."""
    rank, texts = dist.get_rank(), []
    destroyed, aborted = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.destroy_process_group(destroyed)
    if rank == 0:
        aborted.abort()
    for group in (destroyed, aborted):
        texts.append(error_of(lambda group=group: group.allreduce([torch.ones(2)]).wait()))
    dist.barrier()
    return texts


def communicator() -> list[Any]:
    """A communicator of kos among the ranks of a process group, and whether kos set hooks of the process."""
    import kos

    dist.barrier()  # a rank that ends while gloo still connects the others' pairs would break these
    hook, environment = sys.excepthook, dict(os.environ)
    group = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        try:
            return [kos.init(rendezvous=group)]
        except kos.errors.InvalidArgument as error:
            return [str(error)]
    with kos.init(rendezvous=group) as comm:
        total = comm.all_reduce(torch.full((3,), float(dist.get_rank())))
        unchanged = sys.excepthook is hook and dict(os.environ) == environment
        return [comm.backend_name, comm.rank, total.tolist(), unchanged]


def overloads() -> list[Any]:
    """The methods of a process group in the forms of torch: by position and by name, with options and one by one."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    mine, found = torch.arange(4.0) + 10 * rank, list[Any]()
    outputs, shards = [torch.zeros(4) for _ in range(size)], [mine + r for r in range(size)]
    whole, (message, peer) = torch.zeros(4 * size), ((group.send, {"dstRank": 1}), (group.recv, {"srcRank": 0}))[rank]
    for call, x in (
        (lambda x: group.allreduce(x), mine.clone()),
        (lambda x: group.allreduce(x, dist.ReduceOp.MAX), mine.clone()),
        (lambda x: group.allreduce([x], op=dist.ReduceOp.MAX, timeout=timedelta(seconds=30)), mine.clone()),
        (lambda x: group.broadcast(x, 1), mine.clone()),
        (lambda x: group.broadcast(x, root=1), mine.clone()),
        (lambda x: group.reduce(x if rank == 0 else x.clone(), 0, dist.ReduceOp.MIN), mine.clone()),
        (lambda x: group.allgather(outputs, x), mine),
        (lambda x: group.gather(outputs if rank == 1 else [], x, 1), mine),
        (lambda x: group.scatter(x, shards if rank == 1 else [], 1), torch.zeros(4)),
        (lambda x: group.reduce_scatter(x, shards, dist.ReduceOp.MAX), torch.zeros(4)),
        (lambda x: group.barrier(timedelta(seconds=30)), mine),
        (lambda x: group.barrier(timeout=timedelta(seconds=30)), mine),
        (lambda x: group.barrier(opts=dist.BarrierOptions()), mine),
        (lambda x: group.allreduce(tensor=x, op=dist.ReduceOp.MAX), mine.clone()),
        (lambda x: group.allreduce(tensors=[x], opts=dist.AllreduceOptions()), mine.clone()),
        (lambda x: group.allreduce_coalesced(tensors=[x]), mine.clone()),
        (lambda x: group.broadcast(tensor=x, root=1), mine.clone()),
        (lambda x: group.broadcast(tensors=[x]), mine.clone()),
        (lambda x: group.reduce(tensor=x if rank == 0 else x.clone(), root=0, op=dist.ReduceOp.MIN), mine.clone()),
        (lambda x: group.allgather(output_tensors=outputs, input_tensor=x), mine + 1),
        (lambda x: group.allgather(output_tensors=[outputs], input_tensors=[x]), mine + 2),
        (lambda x: group.allgather_coalesced(output_lists=[[each] for each in outputs], input_list=[x]), mine + 3),
        (lambda x: group.gather(output_tensors=outputs if rank == 1 else [], input_tensor=x, root=1), mine),
        (lambda x: group.scatter(output_tensor=x, input_tensors=shards if rank == 1 else [], root=1), torch.zeros(4)),
        (lambda x: group.reduce_scatter(output=x, input=shards, op=dist.ReduceOp.MAX), torch.zeros(4)),
        (lambda x: group.reduce_scatter(output_tensors=[x], input_tensors=[shards]), torch.zeros(4)),
        (lambda x: group._allgather_base(output=whole, input=x), mine),
        (lambda x: group._reduce_scatter_base(outputTensor=x, inputTensor=whole), torch.zeros(4)),
        (lambda x: group.alltoall_base(output=x, input=mine, output_split_sizes=[], input_split_sizes=[]), mine + 9),
        (lambda x: group.alltoall_base(x, mine, [], [], timeout=timedelta(seconds=30)), mine + 9),
        (lambda x: message(tensors=[x], tag=3, **peer), mine.clone()),
    ):
        call(x).wait()
        found.append([x.tolist(), [output.tolist() for output in outputs], whole.tolist()])
    return found


def resized() -> list[int]:
    """The sizes of storages that are resized after an operation, as FSDP1 does."""
    size, found = dist.get_world_size(), []
    x, y, whole = torch.ones(4), torch.zeros(4), torch.zeros(4 * size)
    dist.all_reduce(x)
    dist.broadcast(y, 0)
    dist.all_gather(list(whole.chunk(size)), x)
    dist.all_reduce(empty := torch.ones(0))
    for tensor in (x, y, whole, empty):
        tensor.untyped_storage().resize_(64)
        found.append(tensor.untyped_storage().size())
    return found


def profiled() -> list[str]:
    """What torch's profiler shows of two operations."""
    x = torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(x)
        dist.broadcast(x, 0, async_op=True).wait()
    return sorted(event.key for event in profile.key_averages() if event.key.startswith("kos:"))


def example(path: str, backend: str, port: int) -> list[str]:
    """The lines that a program of examples/ prints as under torchrun, with ``backend`` for its process group."""
    rank, size, text = dist.get_rank(), dist.get_world_size(), Path(path).read_text()
    dist.destroy_process_group()
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in env.items()})
    over_kos, end = 'init_process_group("kos")', "dist.destroy_process_group()"
    assert text.count(over_kos) == text.count(end) == 1
    if backend == "gloo":  # it sometimes hangs there: see ranks.py
        text = text.replace(end, "pass")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(text.replace(over_kos, f"init_process_group({backend!r})"), {"__name__": "__main__"})
    return printed.getvalue().splitlines()
