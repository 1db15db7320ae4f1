"""The offer of rank 0 to the other ranks, by MPI, a store or a function: the address of its hub and a secret."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kos.comm.control.base import machine_id
from kos.comm.control.env import OFFER, Place
from kos.comm.control.listening import bound
from kos.comm.control.wire import Network, is_loopback
from kos.errors import RendezvousError
from kos.memory.ipc import namespace

_OFFERS = {"host", "port", "secret"}, {"error"}, {"missing"}
_REACH_SECONDS = 8.0  # limit for a connection to rank 0; Linux asks again after 1, 3 and 7 s


def exchange_offer(
    rank: int, allgather: Callable[[bytes], list[bytes]]
) -> tuple[socket.socket | None, dict[str, Any], bool]:
    """Rank 0's listener, its offer, and whether all ranks reach each other at a loopback address.  Collective."""
    listener, offer, hosts = None, dict[str, Any](), allgather(loopback_id().encode())
    if rank == 0:
        listener, offer = listen_for(hosts)
    try:
        return listener, checked_offer("allgather", allgather(json.dumps(offer).encode())[0]), len(set(hosts)) == 1
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def loopback_id() -> str:
    """An identity that is equal on ranks that reach each other at a loopback address."""
    return machine_id() + namespace("net")


def unreachable(rank: int, offer: Mapping[str, Any]) -> str:
    """Why a rank cannot reach rank 0, or "".  The kernel accepts the call before the hub runs."""
    if "error" in offer:
        return f"rank 0 cannot listen: {offer['error']}"
    host = offer["host"] if rank else bound() or "127.0.0.1"
    try:
        socket.create_connection((host, offer["port"]), _REACH_SECONDS).close()
    except OSError as error:
        return f"rank {rank} did not reach rank 0 at {offer['host']}:{offer['port']}: {error}"
    return ""


def listen_for(hosts: Sequence[bytes | None]) -> tuple[socket.socket | None, dict[str, Any]]:
    """Rank 0's listener for the ranks on ``hosts``, and its offer: the data needed to connect, or the error."""
    try:
        host = bound() or ("127.0.0.1" if len(set(hosts)) == 1 else own_address(os.environ.get("MASTER_ADDR")))
        listener = Network(b"", host, "", is_loopback(host)).listen()
    except (OSError, RendezvousError) as error:
        return None, {"error": str(error)}
    return listener, {"host": host, "port": listener.getsockname()[1], "secret": secrets.token_hex(32)}


def checked_offer(carrier: str, data: Any) -> dict[str, Any]:
    """The offer of rank 0, as ``carrier`` returned it.  If it is no offer: RendezvousError, which omits the data."""
    with contextlib.suppress(TypeError, ValueError):
        offer = json.loads(data)
        if isinstance(offer, dict) and any(offer.keys() == keys for keys in _OFFERS):
            return offer
    raise RendezvousError(f"rendezvous: {carrier}: expected what rank 0 has set, got another {type(data).__name__}")


def place_by(rank: int, size: int, name: str, offer: Mapping[str, Any]) -> Place:
    """The place of a rank by the offer of rank 0.  Raises RendezvousError if rank 0 cannot listen."""
    if "error" in offer:
        raise RendezvousError(f"rendezvous: rank 0 cannot listen: {offer['error']}")
    return Place(rank, size, None, offer["host"], [offer["port"]], OFFER, offer["secret"].encode(), (name, name))


def own_address(peer: str | None) -> str:
    """The address by which other hosts reach this one: of the route to ``peer``, else of its name, else its name."""
    for host in (peer, platform.node()):
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
