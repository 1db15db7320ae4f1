"""Rendezvous of a job that another program has started: the arguments of ``kos.init(rendezvous=...)``, and stores.

No process-wide hook is set: the program that started the ranks ends them and reports their errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from kos.comm import timeouts
from kos.comm.arguments import number_in
from kos.comm.failures import Ledger
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous, host_id
from kos.comm.rendezvous.env import GRACE_SECONDS, JobRendezvous, Place
from kos.comm.rendezvous.mpi import MPIRendezvous
from kos.comm.rendezvous.secret import load_secret
from kos.comm.rendezvous.wire import Network, is_loopback
from kos.errors import InvalidArgument, RendezvousError
from kos.memory.symmetric import Exchange

_OPTIONAL: dict[str, tuple[str, ...]] = {"address": ("local_rank", "secret"), "store": ()}
"""The keys allowed beside ``rank``, ``size`` and this one."""


def rendezvous_of(given: Any, timeout: float) -> Rendezvous:
    """The rendezvous of the ranks of ``given``, whose kinds ``kos.init`` lists.  Collective.

    Raises InvalidArgument for anything else, RendezvousError if the ranks do not find each other.
    """
    if isinstance(given, Rendezvous):
        return given
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
        return MPIRendezvous(given, timeout, process_hooks=False)
    numbers = getattr(given, "rank", None), getattr(given, "size", None)
    if all(isinstance(each, int) for each in numbers) and callable(getattr(given, "allgather", None)):
        return _by_exchange(given, timeout)
    kinds = "a communicator of mpi4py, a ProcessGroup of torch, a dict of rank, size and address or store"
    kinds += ", or an object with rank, size and allgather"
    raise InvalidArgument(f"rendezvous: expected {kinds}, got {given!r:.80}")


def _by_place(given: Mapping[str, Any], timeout: float) -> Rendezvous:
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
        if not isinstance(store := given["store"], Store):
            raise InvalidArgument(f"rendezvous: store: expected the methods set, get, add and wait, got {store!r:.80}")
        return StoreRendezvous(store, rank, size, timeout)
    local_rank = given.get("local_rank")
    if local_rank is not None:
        local_rank = number_in("rendezvous: local_rank", local_rank, 0, size - 1)
    address, secret = given["address"], given.get("secret")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(f'rendezvous: address: expected "host:port" of rank 0, got {address!r}')
    if secret is not None and (not secret or not isinstance(secret, str | bytes)):
        raise InvalidArgument(f"rendezvous: secret: expected a text or bytes, got {type(secret).__name__}")
    known = secret.encode() if isinstance(secret, str) else secret
    if size > 1:
        known = known or load_secret(os.environ)
    names = "rendezvous: address", "rendezvous: address"
    purpose = f"address {port}".encode()
    place = Place(rank, size, local_rank, host.strip("[]"), [int(port)], purpose, known or b"", names)
    return JobRendezvous(place, timeout)


def _by_exchange(given: Exchange, timeout: float) -> Rendezvous:
    """Rank 0 listens at a free port, and sends its address and a secret through ``given``."""
    size, listener, offer = number_in("rendezvous: size", given.size, 1, 1 << 20), None, dict[str, Any]()
    rank = number_in("rendezvous: rank", given.rank, 0, size - 1)
    if size == 1:
        return JobRendezvous(Place(0, 1), timeout)
    hosts = _allgather(given, host_id().encode())
    if rank == 0:
        listener, offer = _listen(hosts)
    try:
        offer = _offer("allgather", _allgather(given, json.dumps(offer).encode())[0])
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    return JobRendezvous(_place(rank, size, "rendezvous: rank 0", offer), timeout, listener)


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


@runtime_checkable
class Store(Protocol):
    """The methods of a store that kos uses, with the meaning of torch.distributed's.  Values are bytes."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that was set."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter, which begins at 0, and return the sum."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return once all keys are set; raises any exception after ``timeout``."""


class StoreRendezvous(JobRendezvous):
    """The ranks that share ``store``, such as a ``Store`` of torch.distributed.  Collective.

    ``store`` is this group's own: its keys have a prefix that no other group uses.  It carries the address of rank 0
    and the secret of the group, nothing else: whoever can read it can join the group.  ``world_ranks`` are the ranks by
    which errors name the members; the default is 0 to ``size - 1``.  ``timeout`` in seconds bounds the start and every
    later wait.  Raises RendezvousError, which names missing ranks.

    On several hosts rank 0 must be reachable at the address by which it reaches ``MASTER_ADDR``, else at that of its
    host name.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float = 120.0, world_ranks: Sequence[int] | None = None
    ) -> None:
        ledger = Ledger(range(size) if world_ranks is None else world_ranks, rank, timeout=timeout)
        place, listener = Place(rank, size), None
        if size > 1:
            listener, offer = _by_store(store, rank, size, timeout)
            if missing := offer.get("missing"):
                text = timeouts.late(ledger.names(missing), timeouts.JOIN, timeout)
                raise ledger.overdue(missing, "rendezvous", None, text, RendezvousError)
            place = _place(rank, size, "the store", offer)
        super().__init__(place, timeout, listener, ledger)


def of_process_group(dist: Any, group: Any, timeout: float) -> StoreRendezvous:
    """The ranks of a process group of ``dist``, the module torch.distributed.  Collective in the group.

    Raises InvalidArgument on a rank outside the group.
    """
    if (rank := dist.get_rank(group)) < 0:
        raise InvalidArgument("group: this rank is not in it")
    store = dist.PrefixStore("kos/", dist.distributed_c10d._get_process_group_store(group))
    ranks = dist.get_process_group_ranks(group)
    return StoreRendezvous(store, rank, len(ranks), timeout, ranks)


def _by_store(store: Store, rank: int, size: int, timeout: float) -> tuple[socket.socket | None, dict[str, Any]]:
    """The listener (rank 0 only) and rank 0's offer, or the ranks that are missing."""
    deadline = time.monotonic() + timeout
    # A new group in the same store, after an earlier one was closed, must not read its keys.
    prefix = f"kos/{store.add(f'kos/joined/{rank}', 1)}"
    store.set(f"{prefix}/host/{rank}", host_id())

    def get(key: str, more: float = 0.0) -> bytes | None:
        """The value of the key; None if it is not set at the deadline."""
        try:
            store.wait([f"{prefix}/{key}"], timedelta(seconds=max(deadline + more - time.monotonic(), 0.001)))
            return store.get(f"{prefix}/{key}")
        except Exception:  # each store has its own
            return None

    if rank:
        found = get("hub", GRACE_SECONDS)
        return None, {"missing": [0]} if found is None else _offer("store", found)
    listener, hosts = None, [get(f"host/{other}") for other in range(size)]
    offer: dict[str, Any] = {"missing": [other for other, host in enumerate(hosts) if host is None]}
    if not offer["missing"]:
        listener, offer = _listen(hosts)
    store.set(f"{prefix}/hub", json.dumps(offer))
    return listener, offer


_OFFERS = {"host", "port", "secret"}, {"error"}, {"missing"}


def _listen(hosts: Sequence[bytes | None]) -> tuple[socket.socket | None, dict[str, Any]]:
    """Rank 0's listener for the ranks on ``hosts``, and its offer: the data needed to connect, or the error."""
    host = "127.0.0.1" if len(set(hosts)) == 1 else _own_address()
    try:
        listener = Network(b"", host, "", is_loopback(host)).listen()
    except OSError as error:
        return None, {"error": str(error)}
    return listener, {"host": host, "port": listener.getsockname()[1], "secret": secrets.token_hex(32)}


def _offer(carrier: str, data: Any) -> dict[str, Any]:
    """The offer of rank 0, as ``carrier`` returned it.  If it is no offer: RendezvousError, which omits the data."""
    with contextlib.suppress(TypeError, ValueError):
        offer = json.loads(data)
        if isinstance(offer, dict) and any(offer.keys() == keys for keys in _OFFERS):
            return offer
    raise RendezvousError(f"rendezvous: {carrier}: expected what rank 0 has set, got another {type(data).__name__}")


def _place(rank: int, size: int, name: str, offer: Mapping[str, Any]) -> Place:
    """The place of a rank by the offer of rank 0.  Raises RendezvousError if rank 0 cannot listen."""
    if "error" in offer:
        raise RendezvousError(f"rendezvous: rank 0 cannot listen: {offer['error']}")
    return Place(rank, size, None, offer["host"], [offer["port"]], b"offer", offer["secret"].encode(), (name, name))


def _own_address() -> str:
    """The address by which other hosts reach this one: of the route to MASTER_ADDR, else of its name, else its name."""
    for host in (os.environ.get("MASTER_ADDR"), platform.node()):
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(place)  # of a datagram socket: chooses the route and sends nothing
                address = str(sock.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return platform.node()
