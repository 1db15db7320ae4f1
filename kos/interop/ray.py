"""Ray: ``ray.util.collective`` on kos, between actors.

Every process of the job registers the backend, as Ray requires:

    ray.init(runtime_env={"worker_process_setup_hook": "kos.interop.ray.register"})
    kos.interop.ray.register()                                          # the driver
    collective.create_collective_group(actors, world_size=4, ranks=[0, 1, 2, 3], backend="kos")

Tensors are NumPy arrays, torch tensors on the CPU or a GPU, and CuPy arrays.  Calls on a GPU are ordered on the current
stream of the tensor's library.  Actors that do without ``ray.util.collective`` pass ``rendezvous`` to ``kos.init``.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from typing import Any

import kos
from kos.comm.arguments import check_timeout
from kos.comm.control.base import ControlPlane
from kos.comm.control.bootstrap import rendezvous_of
from kos.errors import InvalidArgument, RendezvousError

_POLL_SECONDS, _PROBE_SECONDS = 0.05, 1.0


class Collectives:
    """The operations of Ray's ``BaseGroup`` on the communicator ``comm``.

    Ray passes each tensor in a list, with one tensor for each GPU of the process.  A process of kos uses one GPU.
    Raises InvalidArgument for more tensors, and the other classes of KosError as ``kos.Communicator`` does, such as
    RankLost when another actor has died.
    """

    comm: kos.Communicator

    def allreduce(self, tensors: list[Any], options: Any = None) -> None:
        """Reduce the tensor over all ranks, in place.  Raises KosError."""
        self.comm.all_reduce(_single(tensors), _op(options), timeout=_seconds(options))

    def reduce(self, tensors: list[Any], options: Any = None) -> None:
        """Reduce the tensor to ``options.root_rank``, in place; the other ranks keep theirs.  Raises KosError."""
        self.comm.reduce(_single(tensors), options.root_rank, _op(options), timeout=_seconds(options))

    def broadcast(self, tensors: list[Any], options: Any = None) -> None:
        """Send the tensor of ``options.root_rank`` to all ranks, in place.  Raises KosError."""
        self.comm.broadcast(_single(tensors), options.root_rank, timeout=_seconds(options))

    def allgather(self, outs: list[list[Any]], tensors: list[Any], options: Any = None) -> None:
        """Copy the tensor of rank r to ``outs[0][r]``.  Raises KosError."""
        gathered = self.comm.all_gather(_single(tensors), timeout=_seconds(options))
        for rank, out in enumerate(_single(outs)):
            out[...] = gathered[rank]

    def reducescatter(self, outs: list[Any], tensors: list[list[Any]], options: Any = None) -> None:
        """Reduce ``tensors[0][r]`` over all ranks to rank r, which gets it in ``outs[0]``.  Raises KosError."""
        shards = _single(tensors)
        library: Any = sys.modules[type(shards[0]).__module__.partition(".")[0]]  # numpy, torch or cupy
        self.comm.reduce_scatter(library.stack(shards), _single(outs), _op(options), timeout=_seconds(options))

    def barrier(self, options: Any = None) -> None:
        """Return once every rank has called it.  Raises KosError."""
        self.comm.barrier(timeout=_seconds(options))

    def send(self, tensors: list[Any], options: Any) -> None:
        """Send the tensor to ``options.dst_rank``.  Raises KosError."""
        self.comm.send(_single(tensors), options.dst_rank)

    def recv(self, tensors: list[Any], options: Any) -> None:
        """Receive the tensor from ``options.src_rank``, in place.  Raises KosError."""
        self.comm.recv(_single(tensors), options.src_rank)

    def destroy_group(self) -> None:
        """Close the communicator.  Raises KosError if operations in flight fail."""
        self.comm.close()


_terms: dict[str, tuple[str, float]] = {}
"""The backend and the timeout of the groups of each registered name."""


def register(name: str = "kos", backend: str = "auto", timeout: float = 120.0) -> None:
    """Register kos as the backend ``name`` of ``ray.util.collective`` in this process.

    ``backend`` and ``timeout`` (seconds) are those of ``kos.init`` for each group that is created later; a further call
    replaces them.  Raises InvalidArgument for a timeout that is not positive; ValueError if another backend has that
    name; ImportError for a Ray without ``register_collective_backend``.

    A hook that Ray finds by its name is called without arguments: to set them there, name a function of your own.
    """
    from ray.util.collective.backend_registry import register_collective_backend
    from ray.util.collective.collective_group.base_collective_group import BaseGroup

    terms, key = (backend, check_timeout(timeout)), name.upper()  # Ray compares names so

    class KosGroup(Collectives, BaseGroup):
        def __init__(self, world_size: int, rank: int, group_name: str) -> None:
            super().__init__(world_size, rank, group_name)
            backend, timeout = _terms[key]
            met = rendezvous(group_name, rank, world_size, timeout)
            self.comm = kos.init(backend, rendezvous=met, timeout=timeout, process_hooks=False)

        @classmethod
        def check_backend_availability(cls) -> bool:
            return True

    if key not in _terms:
        register_collective_backend(name, KosGroup)
    _terms[key] = terms


def rendezvous(group: str, rank: int, size: int, timeout: float = 120.0) -> ControlPlane:
    """How ``size`` actors or tasks of one Ray job find each other, for ``kos.init(rendezvous=…)``.  Collective.

    ``group`` is a name that no other group uses at the time.  Rank 0 publishes its address and a secret in Ray's
    internal key-value store.  Raises RendezvousError if a rank is missing after ``timeout`` seconds.
    """
    from ray.experimental import internal_kv
    from ray.util.collective.collective import get_address_and_port

    key, deadline = f"kos_group_{group}".encode(), time.monotonic() + timeout
    if rank == 0:
        host, port = get_address_and_port()
        place = {"address": f"{host}:{port}", "secret": secrets.token_hex(32)}
        internal_kv._internal_kv_put(key, json.dumps(place).encode(), overwrite=True)
    else:
        place = {}
        while not _listens(place):  # not yet, or the address of an earlier group whose rank 0 died
            if time.monotonic() > deadline:
                got = f"nothing listens at {place['address']}" if place else "nothing was published"
                raise RendezvousError(f"ray: expected rank 0 of group {group!r} within {timeout:g} s, got none: {got}")
            time.sleep(_POLL_SECONDS)
            place = json.loads(internal_kv._internal_kv_get(key) or "{}")
    met = rendezvous_of({**place, "rank": rank, "size": size}, timeout)
    if rank == 0:
        internal_kv._internal_kv_del(key)
    return met


def _listens(place: dict[str, str]) -> bool:
    host, _, port = place.get("address", "").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except (ValueError, OSError):
        return False
    return True


def _single(tensors: list[Any]) -> Any:
    if len(tensors) != 1:
        raise InvalidArgument(f"tensors: expected one, because a process of kos uses one GPU, got {len(tensors)}")
    return tensors[0]


def _op(options: Any) -> kos.ReduceOp:
    return kos.ReduceOp[options.reduceOp.name] if options is not None else kos.ReduceOp.SUM


def _seconds(options: Any) -> float | None:
    """The timeout of Ray's options, a timedelta; None where it is not set, which Ray writes as -1 ms."""
    limit = getattr(options, "timeout_ms", None)
    return limit.total_seconds() if limit is not None and limit.total_seconds() > 0 else None
