"""Ranks that share a store of keys, such as torch.distributed's, or that a function of the program connects.

The store, or the all-gather of the function, carries the address and the secret of the hub.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from kos.comm import timeouts
from kos.comm.arguments import number_in
from kos.comm.control.base import Rendezvous
from kos.comm.control.env import Place, job_rendezvous
from kos.comm.control.group import TCPRendezvous
from kos.comm.control.grow import GRACE_SECONDS
from kos.comm.control.offers import checked_offer, exchange_offer, listen_for, loopback_id, place_by
from kos.comm.failures import FailureLog, Late
from kos.errors import InvalidArgument, RendezvousError, ignored
from kos.memory.symmetric import Exchange

METHODS = ("set", "get", "add", "wait")
"""What kos calls of a store, with the meaning of torch.distributed's; values are bytes."""


def store_rendezvous(
    store: Any, rank: int, size: int, timeout: float = 120.0, world_ranks: Sequence[int] | None = None
) -> TCPRendezvous:
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
            raise failures.overdue(Late(missing, text, absent=True), "rendezvous", None, RendezvousError)
        place = place_by(rank, size, "the store", offer)
    return job_rendezvous(place, timeout, listener, failures)


def of_process_group(dist: Any, group: Any, timeout: float) -> TCPRendezvous:
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


def rendezvous_by_function(given: Exchange, timeout: float) -> Rendezvous:
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
