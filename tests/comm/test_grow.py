"""Groups that grow: newcomers join, lost ranks are replaced; ranks are threads of the test, with sockets or without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.env import env_rendezvous
from kos.errors import CollectiveError
from tests.comm.tcp_ranks import SECRET, TIMEOUT, environment, free_port, run_threads

Body = Callable[[kos.Communicator], Any]


def run(backend: str, members: int, body: Body, *newcomers: Callable[[str], Any], timeout: float = 20.0) -> list[Any]:
    """What ``body(comm)`` returned on the members, then what each newcomer returned, which gets the address."""
    found, address = threading.Event(), list[str]()
    port, group = free_port(), None
    if backend == "mock":
        from kos.comm.control.threads import ThreadGroup, ThreadRendezvous

        group = ThreadGroup(members)

    def member(rank: int) -> Any:
        place: Any
        if group is not None:
            place = ThreadRendezvous(group, rank, timeout)
        else:
            place = env_rendezvous(TIMEOUT, environment(rank, members, port))
        try:
            comm = kos.init(backend, rendezvous=place, timeout=timeout)
            if rank == 0:
                address.append(comm.address)
                found.set()
            return body(comm)
        finally:
            place.close()

    def newcomer(function: Callable[[str], Any]) -> Any:
        assert found.wait(20)
        return function(address[0])

    bodies = [lambda rank=rank: member(rank) for rank in range(members)]
    results = run_threads(*bodies, *[lambda function=function: newcomer(function) for function in newcomers])
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def join(address: str, **options: Any) -> kos.Communicator:
    options = {"secret": SECRET, "timeout": 20.0, **options}
    if address.startswith("threads:"):
        del options["secret"]
    return kos.join(address, **options)


def check(comm: kos.Communicator) -> tuple[int, int]:
    """Use the group as a program does; the rank and the size."""
    assert comm.all_gather(np.array(comm.rank)).tolist() == list(range(comm.size))
    assert (comm.all_reduce(np.full(70_000, comm.rank)) == comm.size * (comm.size - 1) // 2).all()
    half = comm.split(comm.rank % 2)
    assert half.all_reduce(np.ones(1))[0] == half.size
    half.close()
    found = comm.rank, comm.size
    comm.close()
    return found


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret of newcomers, also where a group of one needs none to begin with."""
    monkeypatch.setenv("KOS_SECRET", SECRET)
    monkeypatch.delenv("KOS_JOIN", raising=False)


both = pytest.mark.parametrize("backend", ["mock", "tcp"])


@both
@pytest.mark.parametrize("members", [1, 3])
def test_a_group_grows(backend: str, members: int) -> None:
    """Members keep their order, newcomers come after them; the old communicator is closed."""

    def body(comm: kos.Communicator) -> Any:
        comm.barrier()
        half = comm.split(0)
        new = comm.grow(2)
        assert type(new) is type(comm) and new.name == "world" and new.timeout == comm.timeout
        assert new.world_ranks == list(range(members + 2))
        for old in (comm, half):
            with pytest.raises(CollectiveError, match="is closed"):
                old.barrier()
        return comm.rank, check(new)

    newcomer = lambda address: check(join(address))  # noqa: E731
    results = run(backend, members, body, newcomer, newcomer)
    size = members + 2
    assert results[:members] == [(rank, (rank, size)) for rank in range(members)]
    assert sorted(results[members:]) == [(members, size), (members + 1, size)]


@both
def test_it_grows_again(backend: str) -> None:
    def body(comm: kos.Communicator) -> Any:
        for _ in range(2):
            comm = comm.grow(1)
            comm.barrier()
        return check(comm)

    def newcomer(address: str) -> Any:
        comm = join(address)
        if comm.size == 3:
            comm.barrier()
            addresses.append(comm.address)
            comm = comm.grow(1)
        comm.barrier()
        return check(comm)

    addresses = list[str]()
    second = lambda address: newcomer(address)  # noqa: E731
    if backend == "mock":

        def second(address: str) -> Any:
            while not addresses:
                time.sleep(0.01)
            return newcomer(addresses[0])

    assert sorted(run(backend, 2, body, newcomer, second)) == [(rank, 4) for rank in range(4)]
