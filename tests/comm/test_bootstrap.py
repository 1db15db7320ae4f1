"""``kos.init(rendezvous=...)`` in jobs that something else has started: mpi4py, addresses, any exchange, a store."""

from __future__ import annotations

import platform
import re
import socket
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control import bootstrap, place
from kos.comm.control.bootstrap import store_rendezvous
from kos.comm.control.network import Network
from kos.errors import InvalidArgument, RendezvousError
from tests.comm.tcp_ranks import SECRET, TIMEOUT, free_port, run_threads
from tests.comm.test_jobs import mpirun, program
from tests.launcher import needs_mpirun

BESIDE_MPI = """
import ctypes
from mpi4py import MPI
def hooks():
    death = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    return sys.excepthook, threading.excepthook, death.value, dict(os.environ), sys.modules["mpi4py"].rc.finalize
world, before = MPI.COMM_WORLD, hooks()
half = world.Split(world.rank // 2, -world.rank)
with kos.init(rendezvous=half, timeout=60) as comm, kos.init(rendezvous=world, timeout=60) as every:
    assert (comm.rank, comm.size, comm.backend_name) == (half.rank, 2, "mpi"), comm
    assert (every.rank, every.size) == (world.rank, 4)
    for step in range(3):
        x = np.full(5, world.rank + step, np.float32)
        theirs, mine = np.empty_like(x), x.copy()
        half.Allreduce(x, theirs)  # plain MPI between calls of kos, on the communicator that kos was given
        work = comm.all_reduce(mine, async_op=True)
        total = world.allreduce(world.rank)
        assert every.all_reduce(np.array([world.rank])) == total == 6
        work.wait()
        assert (mine == theirs).all() and hooks() == before
    part = comm.split(0)
    assert part.all_gather(np.array([world.rank])).ravel().tolist() == [world.rank | 1, world.rank & ~1]
    part.close()
assert half.allreduce(1) == 2  # what kos was given is still the program's
half.Free()
try:
    kos.init(rendezvous=MPI.COMM_NULL)
except kos.errors.InvalidArgument as error:
    assert str(error) == "rendezvous: expected an intracommunicator of MPI, got COMM_NULL"
assert hooks() == before and not kos.comm.control.mpi_job._guarded
print("same", flush=True)
"""


@needs_mpirun
def test_a_split_of_mpi_beside_plain_calls_of_mpi(tmp_path):
    done = mpirun(4, program(tmp_path, BESIDE_MPI), fresh=True)
    assert (done.returncode, done.stdout) == (0, "same\n" * 4), done.stderr


def test_addresses_twice_and_a_local_rank():
    """Two communicators at the same time, of the same ranks, at two ports."""
    first, second = free_port(), free_port()

    def body(rank):
        place = {"rank": rank, "size": 2, "secret": SECRET, "local_rank": 1 - rank}
        with (
            kos.init(rendezvous=place | {"address": f"localhost:{first}"}, timeout=TIMEOUT) as one,
            kos.init(rendezvous=place | {"address": f"localhost:{second}"}, timeout=TIMEOUT) as two,
        ):
            return [one.local_rank, *(int(each.all_reduce(np.array([rank + 1]))[0]) for each in (one, two))]

    assert run_threads(lambda: body(0), lambda: body(1)) == [[1, 3, 3], [0, 3, 3]]


class Threads:
    """Another framework's group: threads that exchange bytes."""

    def __init__(self, size: int) -> None:
        self.slots: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size)

    def of(self, rank: int) -> Member:
        return Member(self, rank)


class Member:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank, self.size, self.exchanges = group, rank, len(group.slots), 0

    def allgather(self, data: bytes) -> list[bytes]:
        self.exchanges += 1
        self.group.slots[self.rank] = data
        self.group.barrier.wait(TIMEOUT)
        found = list(self.group.slots)
        self.group.barrier.wait(TIMEOUT)
        return found


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_an_exchange_of_another_framework(monkeypatch, hosts):
    group, named = Threads(3), threading.local()
    monkeypatch.setenv("KOS_SECRET", "")  # none is needed
    if hosts == "several":  # so that the ranks do not stay on loopback
        try:
            socket.gethostbyname(platform.node())
        except OSError as error:
            pytest.skip(f"this host does not resolve its own name: {error}")
        monkeypatch.setattr(place, "loopback_id", lambda: f"host {named.rank}")

    def body(rank):
        named.rank, member = rank, group.of(rank)
        with kos.init(rendezvous=member, timeout=TIMEOUT) as comm:
            assert member.exchanges == 2
            return int(comm.all_reduce(np.array([rank]))[0]), comm.backend_name, comm.rendezvous.network.loopback

    results = run_threads(*(lambda rank=rank: body(rank) for rank in range(3)))
    assert results == [(3, "tcp", hosts == "one")] * 3


def test_a_group_of_an_exchange_shrinks_where_its_user_has_no_secret(monkeypatch, tmp_path):
    """The home may be read-only.  Only newcomers need a secret that is known outside: all members get the error."""
    monkeypatch.delenv("KOS_SECRET", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    group, missing = Threads(3), "secret: expected .* or KOS_SECRET to be set, got: "

    def body(rank):
        with kos.init(rendezvous=group.of(rank), timeout=TIMEOUT).shrink() as comm:
            with pytest.raises(RendezvousError, match=missing):
                comm.grow(1)
            with pytest.raises(RendezvousError, match=missing):
                comm.newcomers()
            return int(comm.all_reduce(np.array([rank]))[0])

    assert run_threads(*(lambda rank=rank: body(rank) for rank in range(3))) == [3] * 3


def test_an_exchange_of_one_rank():
    with kos.init(rendezvous=Threads(1).of(0)) as comm:
        assert (comm.size, comm.backend_name) == (1, "tcp")


class Short(Member):
    def allgather(self, data: bytes) -> Any:
        return data


GIVEN = {
    "nothing known": (object(), "expected a communicator of mpi4py, a ProcessGroup of torch, a dict of rank, size "),
    "a class": (Member, "expected a communicator of mpi4py"),
    "unknown key": ({"rank": 0, "size": 1, "address": "h:1", "port": 1}, r"got \['port'\]"),
    "no address": ({"rank": 0, "size": 1}, "expected the keys rank, size, address, got none of address"),
    "no store": ({"rank": 0, "size": 1, "store": {}}, "store: expected the methods set, get, add and wait, got {}"),
    "keys of a store": ({"rank": 0, "store": 0, "secret": ""}, r"keys of rank, size, store, got \['secret'\]"),
    "rank": ({"rank": 2, "size": 2, "address": "h:1"}, "rendezvous: rank: expected a number from 0 to 1, got 2"),
    "size": ({"rank": 0, "size": 0, "address": "h:1"}, "rendezvous: size: expected a number from 1"),
    "local rank": ({"rank": 0, "size": 1, "address": "h:1", "local_rank": 3}, "rendezvous: local_rank: expected"),
    "port": ({"rank": 0, "size": 1, "address": "host"}, 'address: expected "host:port" of rank 0, got \'host\''),
    "url": ({"rank": 0, "size": 1, "address": "tcp://h:1"}, "expected \"host:port\" of rank 0, got 'tcp://h:1'"),
    "rank of an object": (Member(Threads(2), 5), "rendezvous: rank: expected a number from 0 to 1, got 5"),
    "large port": ({"rank": 0, "size": 1, "address": "host:70000"}, "expected \"host:port\""),
    "secret": ({"rank": 0, "size": 1, "address": "h:1", "secret": 5}, "secret: expected a text or bytes, not empty"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_is_no_rendezvous(case):
    given, expected = GIVEN[case]
    with pytest.raises(InvalidArgument, match=expected):
        kos.init(rendezvous=given)


def test_an_exchange_that_returns_something_else():
    with pytest.raises(RendezvousError, match="allgather: expected a list of 2 bytes, got bytes$"):
        kos.init(rendezvous=Short(Threads(2), 0))


@pytest.mark.parametrize(
    "change", [lambda parts: parts[::-1], lambda parts: [b"other"] * len(parts)], ids=["order", "data"]
)
def test_an_exchange_in_another_order(change):
    """Also where the ranks of one host have sent equal bytes before."""

    class Changed(Member):
        def allgather(self, data):
            return list(change(super().allgather(data)))

    group = Threads(2)
    for error in run_threads(*(lambda r=r: kos.init(rendezvous=Changed(group, r), timeout=TIMEOUT) for r in range(2))):
        assert isinstance(error, RendezvousError), error
        assert re.search("allgather: expected the bytes of rank . at place ., got other bytes$", str(error)), error


def test_a_rank_0_that_cannot_listen(monkeypatch):
    """All ranks raise."""
    group = Threads(2)

    def refuse(network, port=0):
        raise OSError("no sockets left")

    monkeypatch.setattr(Network, "listen", refuse)
    errors = run_threads(*(lambda rank=rank: kos.init(rendezvous=group.of(rank), timeout=5) for rank in range(2)))
    assert [str(error) for error in errors] == ["rendezvous: rank 0 cannot listen: no sockets left"] * 2


def test_errors_name_the_address():
    """Not the variables of the environment, which this program did not set."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"rank": 0, "size": 2, "address": f"127.0.0.1:{taken.getsockname()[1]}", "secret": SECRET}
        with pytest.raises(RendezvousError, match="rendezvous: address: expected port") as caught:
            kos.init(rendezvous=place, timeout=1)
    assert "MASTER" not in str(caught.value)


class DictStore:
    """A store within the process."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()
        self.waits_for_hub = threading.Event()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def add(self, key, value):
        with self._changed:
            self._values[key] = self._values.get(key, 0) + value
            return self._values[key]

    def wait(self, keys, timeout):
        if keys[0].endswith("/hub"):
            self.waits_for_hub.set()
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError("not set in time")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_a_store_are_a_group(size):
    hook, store = sys.excepthook, DictStore()

    def rank(number):
        with kos.init(rendezvous={"rank": number, "size": size, "store": store}, timeout=TIMEOUT) as comm:
            return comm.all_reduce(np.arange(3.0) + comm.rank).tolist()

    totals = run_threads(*[lambda number=number: rank(number) for number in range(size)])
    assert totals == [[size * i + size * (size - 1) / 2 for i in range(3)]] * size
    assert sys.excepthook is hook


def test_a_second_group_does_not_read_what_the_first_left_in_the_store():
    store = DictStore()

    def rank(number, late):
        if late and number == 0:
            assert store.waits_for_hub.wait(TIMEOUT)
        with kos.init("tcp", rendezvous=store_rendezvous(store, number, 2, TIMEOUT), timeout=TIMEOUT) as comm:
            return comm.all_reduce(np.array([comm.rank])).item()

    for late in (False, True):
        store.waits_for_hub.clear()
        assert run_threads(lambda: rank(0, late), lambda: rank(1, late)) == [1, 1]  # noqa: B023


def test_every_rank_names_those_that_are_missing():
    store = DictStore()

    def rank(number):
        return store_rendezvous(store, number, 3, 1.0, world_ranks=[4, 5, 9])

    for error in run_threads(lambda: rank(0), lambda: rank(1)):
        assert isinstance(error, RendezvousError) and error.ranks == (9,)
        assert "ranks [9] of world did not join the store within 1 s" in str(error)


def test_a_store_that_has_no_keys_of_rank_0_is_waited_for():
    with pytest.raises(RendezvousError, match="did not join the store within 0.3 s"):
        store_rendezvous(DictStore(), 1, 2, 0.3)


class Echo:
    """Returns for all ranks what this one gives, as a stand-in for a group might."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def allgather(self, data: bytes) -> list[bytes]:
        return [data] * self.size


def test_ranks_of_other_network_namespaces_do_not_meet_at_a_loopback_address(monkeypatch):
    """Whether they share a store or an exchange."""
    here, given = threading.local(), list[Any]()
    monkeypatch.setattr(place.os, "readlink", lambda path: f"net:{here.rank}")
    monkeypatch.setattr(bootstrap, "listen_for", lambda hosts: given.append(hosts) or (None, {"error": "seen"}))
    monkeypatch.setattr(place, "listen_for", bootstrap.listen_for)

    def body(rank, rendezvous):
        here.rank = rank
        with pytest.raises(RendezvousError, match="rank 0 cannot listen: seen"):
            kos.init(rendezvous=rendezvous(rank), timeout=TIMEOUT)

    group, shared = Threads(2), DictStore()
    for rendezvous in (group.of, lambda rank: {"rank": rank, "size": 2, "store": shared}):
        run_threads(*(partial(body, rank, rendezvous) for rank in range(2)))
    assert [len(set(hosts)) for hosts in given] == [2, 2]


def test_an_exchange_without_the_offer_of_rank_0():
    with pytest.raises(RendezvousError, match="rendezvous: allgather: expected what rank 0 has set, got another bytes"):
        kos.init(rendezvous=Echo(1), timeout=TIMEOUT)


@pytest.mark.parametrize("value", ["no JSON", "[1]", "{}", 5])
def test_a_store_that_returns_something_else(value):
    class Wrong(DictStore):
        def wait(self, keys, timeout):
            pass

        def get(self, key):
            return value

    with pytest.raises(RendezvousError, match="rendezvous: store: expected what rank 0 has set, got another "):
        store_rendezvous(Wrong(), 1, 2, 0.3)
