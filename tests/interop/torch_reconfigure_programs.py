"""What ranks do in the tests of process groups whose membership changes, beside the group that they begin with."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kos.errors import InvalidArgument

c10d: Any = dist.distributed_c10d  # has the classes of options
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
    group: Any = dist.group.WORLD
    return dist._get_reconfigure_handle() if hasattr(dist, "_reconfigure") else group.get_reconfigure_handle()


def show() -> list[Any]:
    """The rank, the size, a sum of ranks, and DDP's average of the ranks, which torch's C++ makes."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[float(dist.get_rank())]])).sum().backward()
    return [dist.get_rank(), dist.get_world_size(), x.item(), next(model.parameters()).grad.item()]


def reduce_for_long(all_reduce: Any) -> None:
    began = time.monotonic()
    while time.monotonic() - began < LIMIT.total_seconds():
        all_reduce(torch.ones(10))


def wait_for_failure() -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(dist.DistBackendError, match="rank 1 is gone"):
        reduce_for_long(dist.all_reduce)
    assert "rank 1 is gone" in str(group.errored())


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
        with pytest.raises(InvalidArgument, match="handles: expected kos:.*, which this rank has"):
            reconfigure(7, wrong)
    reconfigure(7, handles)
    found.append(show())
    with pytest.raises(InvalidArgument, match="uuid: expected another one than in the last call, got 7"):
        reconfigure(7, handles)
    handles = exchange_handles(store, 8, place, 3, handle_of())
    reconfigure(8, {*handles})  # the order of a set is that of the ranks' first numbers
    return [*found, show()]


def newcomer(store: Any) -> list[Any]:
    """A process that begins as a group of one, or in torch 2.14 as a rank that is not connected."""
    late = {"enable_reconfigure": True} if hasattr(dist, "_reconfigure") else {}
    rank, size = (1, 3) if late else (0, 1)
    dist.init_process_group("kos", store=dist.PrefixStore("job", store), rank=rank, world_size=size, **late)
    if late:
        with pytest.raises(dist.DistBackendError, match=r"expected a call of torch.distributed._reconfigure first"):
            dist.all_reduce(torch.ones(1))
    reconfigure(8, {*exchange_handles(store, 8, 2, 3, handle_of())})
    return [show()]


def changes(folder: str) -> list[Any]:
    """What each of four processes shows at each membership; the last one is the newcomer."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/changes", -1)
    return newcomer(store) if rank == 3 else member(store, rank)


def operations_of_torchft(group: Any, rank: int, size: int) -> None:
    """Every operation of torchft's ProcessGroup, with its result compared."""
    ones, ranks = torch.ones(2), [torch.full((2,), float(each)) for each in range(size)]
    total, mine = sum(range(size)), torch.full((2,), float(rank))
    x = mine.clone()
    group.allreduce([x], c10d.AllreduceOptions()).wait()
    assert torch.equal(x, total * ones)
    x = mine.clone()
    assert torch.equal(group.allreduce([x], dist.ReduceOp.SUM).get_future().wait()[0], total * ones)
    x, y = mine.clone(), mine.clone()
    group.allreduce_coalesced([x, y], c10d.AllreduceCoalescedOptions()).wait()
    assert torch.equal(x, total * ones) and torch.equal(y, x)
    parts = [[torch.empty(2) for _ in range(size)]]
    group.allgather(parts, [mine], c10d.AllgatherOptions()).wait()
    assert all(map(torch.equal, parts[0], ranks))
    out = torch.empty(2 * size)
    group.allgather_into_tensor_coalesced([out], [mine], c10d.AllgatherOptions()).wait()
    assert torch.equal(out, torch.cat(ranks))
    out, shard = torch.empty(size), torch.empty(2)
    group.alltoall_base(out, torch.arange(float(size)), [], [], c10d.AllToAllOptions()).wait()
    assert torch.equal(out, torch.full((size,), float(rank)))
    group.reduce_scatter([shard], [ranks], c10d.ReduceScatterOptions()).wait()
    assert torch.equal(shard, size * mine)
    group.reduce_scatter_tensor_coalesced([shard], [torch.cat(ranks)], c10d.ReduceScatterOptions()).wait()
    assert torch.equal(shard, size * mine)
    x = mine.clone()
    group.broadcast_one(x, size - 1).wait()
    assert torch.equal(x, ranks[-1])
    group.barrier(c10d.BarrierOptions()).wait()
    if rank == 0:
        group.send([mine + 5], 1, 3).wait()
    elif rank == 1:
        group.recv([x], 0, 3).wait()
        assert torch.equal(x, 5 * ones)


def server_of(folder: str, rank: int, start: Any) -> tuple[Any, str]:
    """What rank 0 starts, which returns an object and its address; other ranks learn the address by a file."""
    store = dist.FileStore(f"{folder}/server", -1)
    server, address = start() if rank == 0 else (None, "")
    if rank == 0:
        store.set("address", address)
    store.wait(["address"], LIMIT)
    return server, store.get("address").decode()


def _tcp_store() -> tuple[Any, str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


def torchft_group(folder: str) -> list[Any]:
    """Three replicas, of which the second dies; the others configure their group anew."""
    from kos.interop.torchft import TorchftProcessGroup

    rank = dist.get_rank()
    _server, address = server_of(folder, rank, _tcp_store)
    group = TorchftProcessGroup(timeout=LIMIT)
    group.configure(f"{address}/ft/1", f"replica {rank}", rank, 3)
    operations_of_torchft(group, rank, 3)
    assert group.errored() is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        reduce_for_long(lambda x: group.allreduce([x], c10d.AllreduceOptions()).wait())
    texts = [str(caught.value), str(group.errored())]
    group.abort()
    texts.append(str(group.errored()))
    place = {0: 0, 2: 1}[rank]
    group.configure(f"{address}/ft/2", f"replica {rank}", place, 2)
    assert group.errored() is None
    operations_of_torchft(group, place, 2)
    found = [group.size(), group.getBackendName(), all("rank 1 is gone" in text for text in texts)]
    dist.FileStore(f"{folder}/server", -1).add("done", 1)
    while rank == 0 and dist.FileStore(f"{folder}/server", -1).add("done", 0) < 2:
        time.sleep(0.01)  # the store lives as long as it is used
    group.shutdown()
    return found


def _lighthouse() -> tuple[Any, str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    return server, server.address()


def torchft_manager(folder: str) -> list[Any]:
    """Three replicas train a number by torchft's Manager; one dies, the others go on with the same number."""
    from torchft.manager import Manager

    from kos.interop.torchft import TorchftProcessGroup

    rank = dist.get_rank()
    _server, lighthouse = server_of(folder, rank, _lighthouse)
    store, weight = _tcp_store()[0], torch.zeros(1)
    manager = Manager(
        pg=TorchftProcessGroup(timeout=timedelta(seconds=10)), min_replica_size=2, use_async_quorum=False,
        state_dict=lambda: {"weight": weight}, load_state_dict=lambda state: weight.copy_(state["weight"]),
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"replica-{rank}", hostname="127.0.0.1", timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=20), connect_timeout=timedelta(seconds=20),
    )  # fmt: skip
    sizes = []
    while manager.current_step() < 6:
        if rank == 1 and manager.current_step() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        manager.start_quorum()
        gradient = torch.ones(1)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weight += gradient
            sizes.append(manager.num_participants())
    dist.FileStore(f"{folder}/server", -1).add("done", 1)
    while rank == 0 and dist.FileStore(f"{folder}/server", -1).add("done", 0) < 2:
        time.sleep(0.01)
    manager.shutdown(wait=False)
    return [weight.item(), sizes[-1]]
