"""Helpers for tests of groups that grow: members and newcomers are threads."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.place import env_rendezvous
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from tests.comm.tcp_ranks import SECRET, TIMEOUT, environment, free_port, run_threads

Body = Callable[[kos.Communicator], Any]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The secret of newcomers, also where a group of one needs none to begin with."""
    monkeypatch.setenv("KOS_SECRET", SECRET)
    monkeypatch.delenv("KOS_JOIN", raising=False)


def run(
    backend: str, members: int, body: Body, *newcomers: Callable[[str], Any], timeout: float = 20.0, **options: Any
) -> list[Any]:
    """What ``body(comm)`` returned on the members, then what each newcomer returned, which gets the address.

    The ranks are threads, which meet by sockets if the backend is ``tcp``.  ``options`` are of ``kos.init``.
    """
    found, address = threading.Event(), list[str]()
    port, group = free_port(), ThreadGroup(members)

    def member(rank: int) -> Any:
        place: Any = ThreadControlPlane(group, rank, timeout)
        if backend == "tcp":
            place = env_rendezvous(TIMEOUT, environment(rank, members, port))
        try:
            comm = kos.init(backend, rendezvous=place, timeout=timeout, **options)
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
    return kos.join(address, **{"timeout": 20.0, **options})


def check(comm: kos.Communicator) -> tuple[int, int]:
    """Use the group as a program does; the rank and the size."""
    assert comm.all_gather(np.array(comm.rank)).tolist() == list(range(comm.size))
    assert (comm.all_reduce(np.full(70_000, comm.rank)) == comm.size * (comm.size - 1) // 2).all()
    half = comm.group(range(comm.size))
    assert half is not None and half.all_reduce(np.ones(1))[0] == half.size
    half.close()
    found = comm.rank, comm.size
    comm.close()
    return found


both = pytest.mark.parametrize("backend", ["mock", "tcp"])
