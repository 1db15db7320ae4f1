"""Process groups of torch whose membership changes, by ``torch.distributed._reconfigure`` and by torchft."""

import threading
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.comm.tcp_ranks import run_threads
from tests.interop.ranks import run

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
PROGRAMS = "tests.interop.torch_reconfigure_programs"
needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")


def test_a_group_goes_on_without_a_rank_and_with_a_newcomer(tmp_path):
    first, killed, last, newcomer = run(f"{PROGRAMS}:changes", 4, "kos", str(tmp_path))
    assert killed is None
    assert first[:2] == [[0, 3, 3.0, 1.0], [1, 2, 1.0, 0.5]]
    assert last[:2] == [[2, 3, 3.0, 1.0], [0, 2, 1.0, 0.5]]
    assert sorted([first[2], last[2], *newcomer]) == [[rank, 3, 3.0, 1.0] for rank in range(3)]


@needs_torchft
def test_a_group_of_torchft_goes_on_without_a_replica(tmp_path):
    first, killed, last = run(f"{PROGRAMS}:torchft_group", 3, "kos", str(tmp_path))
    assert killed is None
    assert first == last == [2, "torchft-kos", True]


@needs_torchft
def test_a_manager_of_torchft_goes_on_without_a_replica(tmp_path):
    first, killed, last = run(f"{PROGRAMS}:torchft_manager", 3, "kos", str(tmp_path))
    assert killed is None
    assert first == last == [6.0, 2]


def test_a_split_of_a_new_membership_reads_no_keys_of_an_earlier_one():
    """Under the same name: a rank that is new has made no such split before."""
    import torch.distributed as dist

    from kos.interop.torch.group import Options, ProcessGroupKos

    store, limit, ready = dist.HashStore(), timedelta(seconds=10), threading.Barrier(3)
    handles = dict[int, str]()

    def body(rank):
        member, options = rank < 2, Options()
        group = ProcessGroupKos(store, rank, 2 if member else 3, limit, range(3), options, connects=member)
        if member:
            group.split_group([0, 1], group_name="part").shutdown()
        handles[rank] = group.get_reconfigure_handle()
        ready.wait(20)
        group.reconfigure(SimpleNamespace(uuid=1, handles=[handles[each] for each in range(3)], timeout=None))
        part = group.split_group([0, 1, 2], group_name="part")
        assert part is not None
        size = part.size()
        part.shutdown()
        group.shutdown()
        return size

    assert run_threads(*[lambda rank=rank: body(rank) for rank in range(3)]) == [3, 3, 3]


@pytest.mark.parametrize("users", [1, 2])
def test_gpus_are_connected_if_all_ranks_have_used_theirs(users):
    """A newcomer may use host memory first, for which members that wait for its GPU would not come."""
    import torch
    import torch.distributed as dist

    from kos.interop.torch.group import Options, ProcessGroupKos

    class Group(ProcessGroupKos):
        """Its GPUs are connected over host memory."""

        def _connect(self, backend, purpose, seconds=None, **options):
            connected.append((purpose, seconds))
            options.pop("device", None)
            return super()._connect("tcp", purpose, seconds, **options)

        def _use_gpu(self, device):
            pass

    store, limit, ready = dist.HashStore(), timedelta(seconds=10), threading.Barrier(2)
    handles, connected = dict[int, str](), list[tuple[str, float | None]]()

    def body(rank):
        group = Group(store, rank, 2, limit, range(2), Options())
        group.device = SimpleNamespace(index=0) if rank < users else None
        handles[rank] = group.get_reconfigure_handle()
        ready.wait(20)
        both = [handles[each] for each in range(2)]
        group.reconfigure(SimpleNamespace(uuid=1, handles=both, timeout=timedelta(seconds=8)))
        group.allreduce([total := torch.ones(1)]).wait()
        group.shutdown()
        return total.item()

    assert run_threads(*[lambda rank=rank: body(rank) for rank in range(2)]) == [2.0, 2.0]
    assert [each for each in connected if each[0] == "gpu"] == [("gpu", 8.0)] * (2 if users == 2 else 0)
