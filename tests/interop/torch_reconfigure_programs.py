"""What ranks do in the tests of process groups whose membership changes; they end the group that they began with."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import kos.interop.torch
from kos.errors import InvalidArgument

LIMIT = timedelta(seconds=30)


def exchange_handles(store: Any, uuid: int, place: int, size: int, handle: str) -> list[str]:
    """The handles of all ranks of the next group, in order: what a program's own rendezvous does."""
    store.set(f"{uuid}/{place}", handle)
    store.wait([f"{uuid}/{other}" for other in range(size)], LIMIT)
    return [store.get(f"{uuid}/{other}").decode() for other in range(size)]


def reconfigure(uuid: int, handles: Any, timeout: timedelta | None = None) -> None:
    """By torch's function, or as it does where torch has none."""
    if hasattr(dist, "_reconfigure"):
        dist._reconfigure(uuid, handles, timeout=timeout).wait()
    else:
        group: Any = dist.group.WORLD
        group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})).wait()


def handle_of() -> str:
    return dist._get_reconfigure_handle() if hasattr(dist, "_reconfigure") else dist.group.WORLD.get_reconfigure_handle()


def show() -> list[Any]:
    """The rank, the size, a sum of ranks, and DDP's average of the ranks, which torch's C++ makes."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[float(dist.get_rank())]])).sum().backward()
    return [dist.get_rank(), dist.get_world_size(), x.item(), next(model.parameters()).grad.item()]


def wait_for_failure() -> None:
    x, began = torch.ones(10), time.monotonic()
    try:
        while time.monotonic() - began < 30:
            dist.all_reduce(x)
    except dist.DistBackendError as error:
        assert "rank 1 is gone" in str(error), error
        assert "rank 1 is gone" in str(dist.group.WORLD.errored())


def refused(uuid: int, handles: list[str]) -> str:
    try:
        reconfigure(uuid, handles)
    except InvalidArgument as error:
        return str(error)
    raise AssertionError(handles)


def member(store: Any, rank: int) -> list[Any]:
    """One of three ranks, of which the second dies; the others go on in another order, then with a newcomer."""
    dist.init_process_group("kos", store=dist.PrefixStore("job", store), rank=rank, world_size=3, timeout=LIMIT)
    found = [show()]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_failure()
    place = {0: 1, 2: 0}[rank]
    handles = exchange_handles(store, 7, place, 2, handle_of())
    for wrong in ([handles[1 - place]], [*handles, handles[0]]):
        assert "which this rank has" in refused(7, wrong)
    reconfigure(7, handles)
    found.append(show())
    assert "uuid: expected another one than in the last call, got 7" in refused(7, handles)
    handles = exchange_handles(store, 8, place, 3, handle_of())
    reconfigure(8, {*handles})  # the order of a set is that of the ranks' first numbers
    return [*found, show()]


def newcomer(store: Any) -> list[Any]:
    """A process that begins as a group of one, or in torch 2.14 as a rank that is not connected."""
    late = {"enable_reconfigure": True} if hasattr(dist, "_reconfigure") else {}
    rank, size = (1, 3) if late else (0, 1)
    dist.init_process_group("kos", store=dist.PrefixStore("job", store), rank=rank, world_size=size, **late)
    if late:
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            assert "expected a call of torch.distributed._reconfigure first" in str(error), error
        else:
            raise AssertionError("an operation without connections")
    reconfigure(8, {*exchange_handles(store, 8, 2, 3, handle_of())})
    return [show()]


def changes(folder: str) -> list[Any]:
    """What each of four processes shows at each membership; the last one is the newcomer."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/changes", -1)
    return newcomer(store) if rank == 3 else member(store, rank)
