"""Groups: by host, of chosen ranks, of the axes of a grid; options of NCCL that a group has."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu import nccl_binding
from kos.errors import CollectiveMismatch, InvalidArgument, RendezvousError
from kos.memory import Array
from kos.testing import spawn
from tests.comm.fake_nccl import usable
from tests.comm.ranks import MockRanks
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks, run_threads
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import job


def members(comm: kos.Communicator) -> list[int]:
    """The world ranks of the communicator, by a collective of it."""
    return comm.all_gather(np.array([comm.world_ranks[comm.rank]])).ravel().tolist()


def test_ranks_of_several_hosts():
    group = ThreadGroup(5)

    def body(rank):
        with kos.init("mock", rendezvous=ThreadControlPlane(group, rank, 20, host=f"host {rank % 2}")) as comm:
            host = comm.split("host")
            assert host.local_size == host.size and host.local_ranks == list(range(host.size))
            with pytest.warns(FutureWarning, match="local_ranks"):
                assert comm.node == comm.local_ranks
            return comm.local_ranks, members(host), host.name

    even, odd = ([0, 2, 4], [0, 2, 4], "world.0:host0"), ([1, 3], [1, 3], "world.0:host1")
    assert run_threads(*(lambda rank=rank: body(rank) for rank in range(5))) == [even, odd, even, odd, even]


def test_chosen_ranks_in_their_order():
    def body(comm):
        part = comm.group([3, 0, 2])
        assert (part is None) == (comm.rank == 1)
        whole = comm.group(range(comm.size))
        assert whole is not None and members(whole) == [0, 1, 2, 3]
        return None if part is None else members(part)

    assert spawn(body, 4) == [[3, 0, 2], None, [3, 0, 2], [3, 0, 2]]


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_groups_stay_open_after_the_communicator_that_they_were_split_from(on):
    def body(comm):
        part = comm.group([0, 1])
        comm.close()
        if part is not None:
            assert part.all_reduce(np.ones(1)) == 2
            half = part.split(part.rank)
            assert half.all_gather(np.ones(1)).shape == (1, 1)
            half.close()
            part.close()

    on(3).run(body)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 1, 2), 6])
def test_axes_of_a_grid(shape):
    sizes = (shape,) if isinstance(shape, int) else shape

    def body(comm):
        axes, numbers = comm.grid(shape), np.arange(6).reshape(sizes)
        place = np.unravel_index(comm.rank, sizes)
        assert [axis.size for axis in axes] == list(sizes) and tuple(axis.rank for axis in axes) == place
        for number, axis in enumerate(axes):
            index = tuple(slice(None) if a == number else at for a, at in enumerate(place))
            assert members(axis) == numbers[index].tolist()

    spawn(body, 6)


@pytest.mark.parametrize(("shape", "sizes"), [((-1, 2), (3, 2)), ((3, -1, 1), (3, 2, 1)), (-1, (6,))])
def test_a_size_of_minus_one_is_inferred(shape, sizes):
    assert spawn(lambda comm: [axis.size for axis in comm.grid(shape)], 6) == [list(sizes)] * 6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda comm: comm.group([0, 1]), lambda comm: comm.group([1, 0])),
        (lambda comm: comm.group([0, 1]), lambda comm: comm.split(0)),
        (lambda comm: comm.split("host"), lambda comm: comm.split(0)),
        (lambda comm: comm.grid((2, 1)), lambda comm: comm.grid((1, 2))),
    ],
    ids=["group group", "group split", "split split", "grid grid"],
)
def test_groups_that_differ_raise_on_all_ranks(one, other, request):
    """The error names the calls as the program wrote them."""

    def body(comm):
        with pytest.raises(CollectiveMismatch) as caught:
            (other if comm.rank else one)(comm)
        return str(caught.value)

    first, second = request.node.callspec.id.split()
    for text in spawn(body, 2):
        assert f"rank 0 called {first} #0" in text and f"but rank 1 called {second} #0" in text, text
        assert "for of" not in text and "purpose of" not in text and "  " not in text, text


# Options of NCCL.


def on_nccl(size: int, fn: Callable[[int, Callable[..., kos.Communicator]], Any]) -> list[Any]:
    """What ``fn(rank, init)`` returned or raised on each rank; ``init`` is kos.init on ranks that are threads."""
    group = ThreadGroup(size)

    def body(rank: int) -> Any:
        rendezvous = ThreadControlPlane(group, rank, 20)
        return fn(rank, lambda **options: kos.init("nccl", rendezvous=rendezvous, device=0, **options))

    return run_threads(*(lambda rank=rank: body(rank) for rank in range(size)))


@pytest.fixture
def gpus(fake, monkeypatch):
    """Each thread is a rank with a GPU of its own, all of which are stand-ins."""
    usable(monkeypatch)


def test_options_reach_nccl_and_its_groups(gpus):
    def body(rank, init):
        with init(nccl={"min_ctas": 2, "max_ctas": 8, "net_name": "Socket"}) as comm:
            same = comm.split(0)
            fewer = comm.split(0, nccl={"max_ctas": 4, "split_share": np.True_})
            part = comm.group([1], nccl={"cta_policy": 2})
            with same, fewer:
                comms = [comm, same, fewer, *([part] if part is not None else [])]
                options = [each.backend.routes[0]._comm.options for each in comms]
                if part is not None:
                    part.close()
        return options

    whole = {"max_ctas": 8, "min_ctas": 2, "net_name": "Socket"}
    fewer = {**whole, "max_ctas": 4, "split_share": True}
    assert on_nccl(2, body) == [[whole, whole, fewer], [whole, whole, fewer, {**whole, "cta_policy": 2}]]


def test_nccl_splits_no_communicator_with_messages_that_are_queued(gpus, fake, before_call):
    """On one rank: all ranks then join a new communicator, and wait for no stream that carries messages."""
    splits = list[int]()
    before_call(fake, "comm_split", lambda comm, *_: splits.append(comm.rank))

    def body(rank, init):
        with init() as comm:
            x, y = (Array.zeros(3, np.float32, 0) for _ in range(2))
            comm.send_recv(x, y, 1 - rank, 1 - rank, stream=1 if rank == 0 else 5)
            comm.all_reduce(x, stream=7)
            fake.cu.cuStreamQuery = lambda stream: (600 if stream == 1 else 0,)
            with comm.split(0):
                before = len(splits)
            comm.barrier()
            fake.cu.cuStreamQuery = lambda stream: (0,)
            with comm.split(0) as part:
                part.all_reduce(x)
            return before

    assert on_nccl(2, body) == [0, 0] and sorted(splits) == [0, 1]


def test_options_that_differ_raise_on_all_ranks(gpus):
    errors = on_nccl(2, lambda rank, init: init(nccl={"max_ctas": 8 + rank}))
    assert [type(error) for error in errors] == [RendezvousError] * 2
    for me, error in enumerate(errors):
        assert str(error) == (
            f"init: rank {me} requested nccl {{'max_ctas': {8 + me}}}, rank {1 - me} {{'max_ctas': {9 - me}}}"
        )

    def body(rank, init):
        comm = init()
        with pytest.raises(CollectiveMismatch) as caught:
            comm.split(0, nccl={"max_ctas": 8 + rank})
        return str(caught.value)

    for text in on_nccl(2, body):
        assert "split for nccl {'max_ctas': 8}" in text and "split for nccl {'max_ctas': 9}" in text, text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_ctas": 0}, "nccl: max_ctas: expected a number from 1 to 64, got 0"),
        ({"max_ctas": "8"}, "nccl: max_ctas: expected a whole number, got '8'"),
        ({"split_share": 2}, "nccl: split_share: expected True or False, got 2"),
        ({"net_name": 1}, "nccl: net_name: expected the name of a network, got 1"),
        ({"min_ctas": 9, "max_ctas": 8}, "nccl: expected min_ctas of at most max_ctas, got 9 and 8"),
    ],
)
def test_wrong_options_are_refused(options, expected):
    with pytest.raises(InvalidArgument, match=expected):
        kos.init(nccl=options)


def test_options_are_set_in_the_config_of_nccl(fake):
    configs = []

    class Config(SimpleNamespace):
        ptr = 7

    def comm_init_rank_scalable(size, rank, count, identity, config):
        assert config == 7
        return "a communicator"

    def config():
        configs.append(Config())
        return configs[-1]

    fake.Config, fake.comm_init_rank_scalable = config, comm_init_rank_scalable
    assert nccl_binding.join(2, b"id", 0, "kos", {"max_ctas": 8, "net_name": "IB"}) == "a communicator"
    assert vars(configs[0]) == {"max_ctas": 8, "net_name": "IB", "blocking": 1, "comm_name": "kos"}


@needs_core
@needs_mpirun
def test_groups_of_one_host_make_no_communicator_of_mpi(tmp_path):
    """In Open MPI 5.0.11 a rank may crash if another one dies while a communicator is created."""
    text = """
from mpi4py import MPI
with kos.init("mpi", timeout=60) as comm:
    first = MPI.COMM_WORLD.Dup().py2f()
    groups = [comm.split(0), comm.duplicate(), comm.group([1, 0])]
    print(sum(group.all_reduce(np.ones(1))[0] for group in groups), MPI.COMM_WORLD.Dup().py2f() - first, flush=True)
"""
    assert job(tmp_path, 2, text) == ["6.0 1"] * 2


@needs_mpirun
@pytest.mark.parametrize("hosts", ["one", "several"])
def test_threads_split_their_communicators_at_a_time(tmp_path, hosts):
    """Communicators are independent: no two groups get the same tags, or the same communicator of MPI."""
    text = f"""
import threading
if {hosts!r} == "several":
    os.environ["KOS_HOST"] = os.environ["OMPI_COMM_WORLD_RANK"]
with kos.init("mpi", timeout=20) as comm:
    at_once = threading.Barrier(3, timeout=20)
    def splits(own, number):
        for turn in range(12):
            at_once.wait()
            with own.duplicate() if turn % 2 else own.split(0) as part:
                assert set(part.all_gather_bytes(bytes([number]))) == {{bytes([number])}}
        ended.append(number)
    ended = []
    threads = [threading.Thread(target=splits, args=(comm.duplicate(), number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted(ended), flush=True)
"""
    assert job(tmp_path, 2, text) == ["[0, 1, 2]"] * 2
