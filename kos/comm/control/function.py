"""Ranks that a function of the program connects: its all-gather carries the address and the secret of the hub."""

from __future__ import annotations

from functools import partial
from typing import Any

from kos.comm.arguments import number_in
from kos.comm.control.base import Rendezvous
from kos.comm.control.env import Place, job_rendezvous
from kos.comm.control.offers import exchange_offer, place_by
from kos.errors import RendezvousError
from kos.memory.symmetric import Exchange


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
