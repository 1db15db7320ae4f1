"""Ranks of a job that something else has started: what ``kos.init(rendezvous=...)`` accepts.

No process-wide hook is set: the program that started the ranks ends and reports them.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from kos.comm.arguments import number_in
from kos.comm.rendezvous.base import Rendezvous, host_id
from kos.comm.rendezvous.env import Place, PlacedRendezvous
from kos.comm.rendezvous.mpi import MPIRendezvous
from kos.comm.rendezvous.secret import load_secret
from kos.comm.rendezvous.wire import Network
from kos.errors import InvalidArgument, RendezvousError

_KEYS = ("rank", "size", "address")
_OPTIONAL = ("local_rank", "secret")


class Exchange(Protocol):
    """What kos needs of another framework's group: its ranks, and one exchange of bytes between them.

    kos calls ``allgather`` twice, in ``kos.init``, and then connects the ranks by TCP.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def allgather(self, data: bytes, /) -> list[bytes]:
        """Every rank's bytes, in rank order; returns once all ranks have called it."""


def rendezvous_of(given: Any, timeout: float) -> Rendezvous:
    """The rendezvous of the ranks of ``given``, whose kinds ``kos.init`` lists.  Collective.

    Raises InvalidArgument for anything else, RendezvousError where the ranks do not find each other.
    """
    if isinstance(given, Rendezvous):
        return given
    if isinstance(given, Mapping):
        return _by_address(given, timeout)
    if _is_mpi(given):
        return _by_mpi(given, timeout)
    if _has_exchange(given):
        return _by_exchange(given, timeout)
    kinds = "a communicator of mpi4py, a dict of rank, size and address, or an object with rank, size and allgather"
    raise InvalidArgument(f"rendezvous: expected {kinds}, got {given!r:.80}")


def _is_mpi(given: Any) -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and isinstance(given, MPI.Comm)


def _has_exchange(given: Any) -> bool:
    numbers = getattr(given, "rank", None), getattr(given, "size", None)
    return all(isinstance(each, int) for each in numbers) and callable(getattr(given, "allgather", None))


def _by_mpi(comm: Any, timeout: float) -> Rendezvous:
    if not comm or comm.is_inter:  # COMM_NULL is false
        got = "an intercommunicator" if comm else "COMM_NULL"
        raise InvalidArgument(f"rendezvous: expected an intracommunicator of MPI, got {got}")
    return MPIRendezvous(comm, timeout, process_hooks=False)


def _by_address(given: Mapping[str, Any], timeout: float) -> Rendezvous:
    """By ``rank``, ``size`` and the ``address`` of rank 0 as "host:port"."""
    if unknown := given.keys() - {*_KEYS, *_OPTIONAL}:
        raise InvalidArgument(f"rendezvous: expected keys of {', '.join(_KEYS + _OPTIONAL)}, got {sorted(unknown)}")
    if missing := [key for key in _KEYS if key not in given]:
        raise InvalidArgument(f"rendezvous: expected the keys {', '.join(_KEYS)}, got none of {', '.join(missing)}")
    size = number_in("rendezvous: size", given["size"], 1, 1 << 20)
    rank = number_in("rendezvous: rank", given["rank"], 0, size - 1)
    local_rank = given.get("local_rank")
    if local_rank is not None:
        local_rank = number_in("rendezvous: local_rank", local_rank, 0, size - 1)
    address, secret = given["address"], given.get("secret")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(f'rendezvous: address: expected "host:port" of rank 0, got {address!r}')
    if secret is not None and (not secret or not isinstance(secret, str | bytes)):
        raise InvalidArgument(f"rendezvous: secret: expected a text or bytes, got {type(secret).__name__}")
    names = "rendezvous: address", "rendezvous: address"
    place = Place(rank, size, local_rank, host.strip("[]"), [int(port)], f"address {port}".encode(), names)
    known = secret.encode() if isinstance(secret, str) else secret
    return PlacedRendezvous(place, timeout, lambda: known or load_secret(os.environ))


def _by_exchange(given: Exchange, timeout: float) -> Rendezvous:
    """Rank 0 listens at a free port, and sends its address and a secret through ``given``."""
    rank, size, names = given.rank, given.size, ("rendezvous: rank 0", "rendezvous: rank 0")
    if size == 1:
        return PlacedRendezvous(Place(0, 1, None, "127.0.0.1", [0], b""), timeout, bytes)
    ours = [each.decode() for each in _allgather(given, host_id().encode())]
    host = "127.0.0.1" if len(set(ours)) == 1 else platform.node()
    listener, card = None, ["", 0, ""]
    if rank == 0:
        try:
            listener = Network(b"", host, "", host == "127.0.0.1").listen()
            card = [host, listener.getsockname()[1], secrets.token_hex(32)]
        except OSError as error:
            card = [str(error), 0, ""]
    host, port, secret = json.loads(_allgather(given, json.dumps(card).encode())[0])
    if port == 0:
        raise RendezvousError(f"rendezvous: rank 0 cannot listen: {host}")
    place = Place(rank, size, None, host, [port], f"exchange {port}".encode(), names)
    return PlacedRendezvous(place, timeout, secret.encode, listener)


def _allgather(given: Exchange, data: bytes) -> list[bytes]:
    """Every rank's bytes through ``given``, checked."""
    parts = given.allgather(data)
    if not isinstance(parts, list) or len(parts) != given.size or not all(isinstance(each, bytes) for each in parts):
        raise RendezvousError(f"rendezvous: allgather: expected a list of {given.size} bytes, got {parts!r:.80}")
    return parts
