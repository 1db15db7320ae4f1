"""How the ranks of a job find each other: by their launcher, or by the argument of ``kos.init(rendezvous=...)``.

With that argument no process-wide hook is set: the program that started the ranks ends them and reports their errors.
Ranks may share a store of keys, such as torch.distributed's, or a function of the program may connect them.  The store,
or the all-gather of the function, carries the address and the secret of the hub.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from kos.comm import timeouts
from kos.comm.arguments import number_in
from kos.comm.control import mpi_job
from kos.comm.control.base import ControlPlane
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.grow import GRACE_SECONDS
from kos.comm.control.identity import claimed, hold, load_secret
from kos.comm.control.mpi import rendezvous_of_mpi
from kos.comm.control.network import check_variables
from kos.comm.control.newcomers import call_members
from kos.comm.control.place import (
    Place,
    checked_offer,
    env_rendezvous,
    exchange_offer,
    job_rendezvous,
    listen_for,
    loopback_id,
    place_by,
)
from kos.comm.control.threads import RANK_THREAD, THREADS, join_threads, single_rendezvous
from kos.comm.failures import FailureLog, PendingRanks
from kos.errors import InvalidArgument, RendezvousError, ignored, report_without_own_frames
from kos.launcher import by_variables, launched_place, under_mpirun
from kos.memory.symmetric import Exchange

METHODS = ("set", "get", "add", "wait")
"""What kos calls of a store, with the meaning of torch.distributed's; values are bytes."""


def store_rendezvous(
    store: Any, rank: int, size: int, timeout: float = 120.0, world_ranks: Sequence[int] | None = None
) -> TCPControlPlane:
    """The ranks that share ``store``, such as a ``Store`` of torch.distributed.  Collective.

    ``store`` is this group's own: its keys have a prefix that no other group uses.  It carries the address of rank 0
    and the secret of the group, nothing else: whoever can read it can join the group.  ``world_ranks`` are the ranks by
    which errors name the members; the default is 0 to ``size - 1``.  ``timeout`` in seconds bounds the start and every
    later wait.  Raises RendezvousError, which names missing ranks.

    On several hosts rank 0 must be reachable at the address by which it reaches ``MASTER_ADDR``, else at that of its
    host name.
    """
    failures = FailureLog(range(size) if world_ranks is None else world_ranks, rank, timeout=timeout)
    place, listener = Place(rank, size), None
    if size > 1:
        listener, offer = _by_store(store, rank, size, timeout)
        if missing := offer.get("missing"):
            text = timeouts.late(failures.names(missing), timeouts.JOIN, timeout)
            raise failures.timeout_error(PendingRanks(missing, text, absent=True), "rendezvous", None, RendezvousError)
        place = place_by(rank, size, "the store", offer)
    return job_rendezvous(place, timeout, listener, failures)


def of_process_group(dist: Any, group: Any, timeout: float) -> TCPControlPlane:
    """The ranks of a process group of ``dist``, the module torch.distributed.  Collective in the group.

    Raises InvalidArgument on a rank outside the group.
    """
    if (rank := dist.get_rank(group)) < 0:
        raise InvalidArgument("group: expected one that has this rank, got one without it")
    store = dist.PrefixStore("kos/", dist.distributed_c10d._get_process_group_store(group))
    ranks = dist.get_process_group_ranks(group)
    return store_rendezvous(store, rank, len(ranks), timeout, ranks)


def _by_store(store: Any, rank: int, size: int, timeout: float) -> tuple[socket.socket | None, dict[str, Any]]:
    """The listener (rank 0 only) and rank 0's offer, or the ranks that are missing."""
    deadline = time.monotonic() + timeout
    # A new group in the same store, after an earlier one was closed, must not read its keys.
    prefix = f"kos/{store.add(f'kos/joined/{rank}', 1)}"
    store.set(f"{prefix}/host/{rank}", loopback_id())

    def get(key: str, more: float = 0.0) -> bytes | None:
        """The value of the key; None if it is not set at the deadline."""
        with ignored(Exception):  # each store has its own
            store.wait([f"{prefix}/{key}"], timedelta(seconds=max(deadline + more - time.monotonic(), 0.001)))
            found: bytes = store.get(f"{prefix}/{key}")
            return found
        return None

    if rank:
        found = get("hub", GRACE_SECONDS)
        return None, {"missing": [0]} if found is None else checked_offer("store", found)
    listener, hosts = None, [get(f"host/{other}") for other in range(size)]
    offer: dict[str, Any] = {"missing": [other for other, host in enumerate(hosts) if host is None]}
    if not offer["missing"]:
        listener, offer = listen_for(hosts)
    store.set(f"{prefix}/hub", json.dumps(offer))
    return listener, offer


def rendezvous_by_function(given: Exchange, timeout: float) -> ControlPlane:
    """Rank 0 listens at a free port, and sends its address and a secret through ``given``."""
    size = number_in("rendezvous: size", given.size, 1, 1 << 20)
    rank = number_in("rendezvous: rank", given.rank, 0, size - 1)
    if size == 1:
        return job_rendezvous(Place(0, 1), timeout)
    listener, offer, _ = exchange_offer(rank, partial(_allgather, given))
    return job_rendezvous(place_by(rank, size, "rendezvous: rank 0", offer), timeout, listener)


def _allgather(given: Exchange, data: bytes) -> list[bytes]:
    """Every rank's bytes through ``given``, checked.  Errors do not show them: one has the secret."""
    parts: Any = given.allgather(data)
    kinds = [type(each).__name__ for each in parts] if isinstance(parts, list) else type(parts).__name__
    if kinds != ["bytes"] * given.size:
        raise RendezvousError(f"rendezvous: allgather: expected a list of {given.size} bytes, got {kinds!s:.80}")
    if parts[given.rank] != data:
        at = f"expected the bytes of rank {given.rank} at place {given.rank}, got other bytes"
        raise RendezvousError(f"rendezvous: allgather: {at}")
    return list(parts)


def default_rendezvous(
    timeout: float, *, by_mpi: bool = False, process_hooks: bool = True, watched: bool = True
) -> ControlPlane:
    """MPI under mpirun; else the environment if it sets the rank; else a group of one (of MPI if ``by_mpi``).

    ``watched``: end the process if MPI_Init takes longer than ``timeout`` seconds.
    Raises InvalidArgument in a thread of ``kos.testing.spawn``, where each rank would become a group of one.
    """
    check_variables()
    if threading.current_thread().name.startswith(RANK_THREAD):
        raise InvalidArgument(
            "init: expected the function to use the comm that kos.testing.spawn passes, got kos.init() in its thread"
        )
    by_launcher = under_mpirun()
    if process_hooks and not by_launcher and not by_mpi:
        report_without_own_frames()
    if not by_launcher and by_variables():
        if launched_place()[1] == 1:
            return env_rendezvous(timeout)
        with claimed(False):
            return hold(env_rendezvous(timeout))
    if not by_launcher and not by_mpi:
        return single_rendezvous(timeout)
    with claimed(True) if by_launcher else nullcontext():
        return rendezvous_of_mpi(timeout=timeout, process_hooks=process_hooks, watched=watched)


def join_rendezvous(
    address: str, secret: str | bytes | None, hello: dict[str, Any], timeout: float
) -> tuple[ControlPlane, dict[str, Any]]:
    """The group that admits this process at ``address``, and the terms that its leader sends.  ``hello`` is sent first.

    Raises RendezvousError.
    """
    check_variables()
    if address.startswith(THREADS):
        return join_threads(address, dict(hello), timeout)
    known = secret.encode(errors="surrogateescape") if isinstance(secret, str) else secret or load_secret(os.environ)
    return call_members(address, known, hello, timeout, partial(TCPControlPlane.joined, known))


_OPTIONAL: dict[str, tuple[str, ...]] = {"address": ("local_rank", "secret"), "store": ()}
"""The keys allowed beside ``rank``, ``size`` and this one."""


def rendezvous_of(given: Any, timeout: float) -> ControlPlane:
    """The rendezvous of the ranks of ``given``, whose kinds ``kos.init`` lists.  Collective.

    Raises InvalidArgument for anything else, RendezvousError if the ranks do not find each other.
    """
    if isinstance(given, ControlPlane):
        return given
    check_variables()
    if isinstance(given, Mapping):
        return _by_place(given, timeout)
    dist = sys.modules.get("torch.distributed")
    if (
        dist is not None and dist.is_available()
        and (isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER)
    ):  # fmt: skip
        return of_process_group(dist, given, timeout)
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(given, MPI.Comm):
        mpi_job.check_running(MPI)
        if not given or given.is_inter:  # COMM_NULL is false
            got = "an intercommunicator" if given else "COMM_NULL"
            raise InvalidArgument(f"rendezvous: expected an intracommunicator of MPI, got {got}")
        return rendezvous_of_mpi(given, timeout, process_hooks=False)
    numbers = getattr(given, "rank", None), getattr(given, "size", None)
    if all(isinstance(each, int) for each in numbers) and callable(getattr(given, "allgather", None)):
        return rendezvous_by_function(given, timeout)
    kinds = "a communicator of mpi4py, a ProcessGroup of torch, a dict of rank, size and address or store"
    kinds += ", or an object with rank, size and allgather"
    raise InvalidArgument(f"rendezvous: expected {kinds}, got {given!r:.80}")


def _by_place(given: Mapping[str, Any], timeout: float) -> ControlPlane:
    """By ``rank``, ``size``, and a ``store`` or the ``address`` of rank 0 as "host:port"."""
    meeting = "store" if "store" in given else "address"
    keys = ("rank", "size", meeting)
    allowed = keys + _OPTIONAL[meeting]
    if unknown := given.keys() - set(allowed):
        raise InvalidArgument(f"rendezvous: expected keys of {', '.join(allowed)}, got {sorted(unknown)}")
    if missing := [key for key in keys if key not in given]:
        raise InvalidArgument(f"rendezvous: expected the keys {', '.join(keys)}, got none of {', '.join(missing)}")
    size = number_in("rendezvous: size", given["size"], 1, 1 << 20)
    rank = number_in("rendezvous: rank", given["rank"], 0, size - 1)
    if meeting == "store":
        if not all(hasattr(store := given["store"], method) for method in METHODS):
            raise InvalidArgument(f"rendezvous: store: expected the methods set, get, add and wait, got {store!r:.80}")
        return store_rendezvous(store, rank, size, timeout)
    local_rank = given.get("local_rank")
    if local_rank is not None:
        local_rank = number_in("rendezvous: local_rank", local_rank, 0, size - 1)
    address, secret = given["address"], given.get("secret")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(f'rendezvous: address: expected "host:port" of rank 0, got {address!r}')
    if secret is not None and (not secret or not isinstance(secret, str | bytes)):
        raise InvalidArgument(f"rendezvous: secret: expected a text or bytes, not empty, got {type(secret).__name__}")
    known = secret.encode(errors="surrogateescape") if isinstance(secret, str) else secret
    if size > 1:
        known = known or load_secret(os.environ)
    names = "rendezvous: address", "rendezvous: address"
    purpose = f"address {port}".encode()
    place = Place(rank, size, local_rank, host.strip("[]"), [int(port)], purpose, known or b"", names)
    return job_rendezvous(place, timeout)
