"""The place of a rank: its number, and the address of rank 0, by the environment or by an offer of rank 0.

*By environment*: ranks that torchrun, Slurm's srun or plain shells started.  Each rank has ``RANK WORLD_SIZE
MASTER_ADDR MASTER_PORT``, and may have ``LOCAL_RANK``, as in torch.distributed.  Under srun ``SLURM_PROCID SLURM_NTASKS
SLURM_LOCALID`` replace the ranks and the size.  Rank 0 listens at MASTER_PORT.  Under torchrun an agent uses that port:
rank 0 then takes the first free one of the ``AGENT_PORTS`` ports after it, and the other ranks find it by the
handshake.

The ranks prove to each other that they know the job's secret: see ``kos.comm.control.identity``.

*By an offer*: rank 0 makes an offer, the address of its hub and a secret.  MPI, a store or a function brings it to the
other ranks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kos.comm.control.base import machine_id
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.grow import publish
from kos.comm.control.identity import load_secret
from kos.comm.control.network import Network, bound, is_loopback
from kos.comm.failures import FailureLog
from kos.comm.waits import wait
from kos.environment import KOS_HOST
from kos.errors import RendezvousError
from kos.launcher import OF_OTHERS, VARIABLES
from kos.memory.ipc import namespace

AGENT_PORTS = 16
OFFER = b"offer"  # the purpose of a group whose secret rank 0 has made
_OFFERS = {"host", "port", "secret"}, {"error"}, {"missing"}
_REACH_SECONDS = 8.0  # limit for a connection to rank 0; Linux asks again after 1, 3 and 7 s
BUSY_SECONDS = 1.0  # limit for a port that the kernel gave to a connection to become free


def job_rendezvous(
    place: Place, timeout: float, listener: socket.socket | None = None, failures: FailureLog | None = None,
    host: str | None = None,
) -> TCPControlPlane:  # fmt: skip
    """All ranks of a job, which find rank 0 at the address of their ``place``.  Collective.

    ``timeout`` in seconds bounds the start and every later wait.  ``listener``: on rank 0, the socket where it listens
    already.  Raises RendezvousError for a port in use, a wrong secret, a rank that joins twice or with another world
    size, and missing ranks, which it names.
    """
    loopback = is_loopback(place.host)
    hub = place.host if loopback or place.rank else "127.0.0.1"
    network = Network(place.secret, hub, bound(), loopback, name=place.host)
    group = TCPControlPlane(place.rank, place.size, timeout, network, place.local_rank)
    group.is_job, group._failures, group.host = True, failures, host
    if place.size > 1:
        _check_bound(place)
        group.found_by = f"{place.names[0]}={place.host}"
        if place.rank == 0 and listener is None:
            listener = _listen(network, place)
        group.join(place.ports, place.purpose, listener)
    if place.rank == 0:
        publish(group)
    group.join_secret = b"" if place.purpose == OFFER else place.secret  # that of an offer is not known outside
    group.failures.status.connect(group)
    return group


def env_rendezvous(timeout: float = 120.0, environ: Mapping[str, str] = os.environ) -> TCPControlPlane:
    """The ranks named by the environment.  Also raises RendezvousError for variables that are missing or wrong."""
    return job_rendezvous(Place.read(environ), timeout, host=KOS_HOST.get(environ))


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process, and the address of rank 0."""

    rank: int
    size: int
    local_rank: int | None = None
    host: str = "127.0.0.1"
    ports: Sequence[int] = ()  # one, or the candidates of rank 0
    purpose: bytes = b""  # different in each job that shares a secret
    secret: bytes = b""
    names: tuple[str, str] = ("MASTER_ADDR", "MASTER_PORT")
    """The user's names of host and port, for errors."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place:
        """The place that the environment names.  Raises RendezvousError for missing or wrong variables."""
        by_slurm = "SLURM_PROCID" in environ and environ.keys().isdisjoint(("RANK", "WORLD_SIZE"))
        of_rank, of_size = needed = [*OF_OTHERS[by_slurm]]
        of_local_rank = "SLURM_LOCALID" if by_slurm else "LOCAL_RANK"
        if environ.get(of_size) != "1":
            needed += ["MASTER_ADDR", "MASTER_PORT"]
        if missing := [name for name in needed if not environ.get(name)]:
            found = dict.fromkeys(name for name in (*needed, *VARIABLES) if environ.get(name))
            beside = f" beside those of {', '.join(found)}" if found else ""
            hint = f"a process without any of {', '.join(VARIABLES)} is a group of one"
            if by_slurm:
                hint = f"under srun, set them in the job script: the host of {of_rank}=0, and a free port there"
            elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # a task, which is no group of one
                hint = "under srun, set all of them; without RANK and WORLD_SIZE, kos reads the variables of Slurm"
            raise RendezvousError(f"{', '.join(missing)}: expected values{beside}, got none ({hint})")
        size = _number(environ, of_size, 1, 1 << 20)
        rank = _number(environ, of_rank, 0, size - 1)
        local_rank = _number(environ, of_local_rank, 0, size - 1) if of_local_rank in environ else None
        if size == 1:
            return cls(rank, size, local_rank)
        port = _number(environ, "MASTER_PORT", 1, 65535)
        purpose = f"world {port} {environ.get('TORCHELASTIC_RUN_ID', '')}".encode(errors="surrogateescape")
        ports = [port]
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            ports = [(port + step - 1) % 65535 + 1 for step in range(1, AGENT_PORTS + 1)]
        return cls(rank, size, local_rank, environ["MASTER_ADDR"], ports, purpose, load_secret(environ))


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise RendezvousError(f"{name}: expected a whole number from {low} to {high}, got {text!r}")
    return int(text)


def _check_bound(place: Place) -> None:
    """Raise RendezvousError if a job on a loopback address cannot listen there because of ``KOS_BIND``."""
    found = {where[0] for *_, where in socket.getaddrinfo(place.host, None)} if is_loopback(place.host) else set()
    if (address := bound()) and found and address not in found:
        wanted = f"the address of {place.names[0]}={place.host}, or another {place.names[0]}"
        raise RendezvousError(f"KOS_BIND: expected {wanted}, got {address}")


def _listen(network: Network, place: Place) -> socket.socket:
    """A listener at the first port that is free."""
    ports, name = place.ports, place.names[1]
    problem: OSError | None = None

    def listen() -> socket.socket | None:
        nonlocal problem
        for port in ports:
            try:
                return network.listen(port)
            except OSError as error:
                problem = error
                if error.errno != errno.EADDRINUSE:
                    raise RendezvousError(f"{name}: rank 0 cannot listen at {port}: {error}") from error
        return None

    if (listener := wait(listen, time.monotonic() + BUSY_SECONDS, waiter=0.05)) is None:
        tried = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
        raise RendezvousError(
            f"{name}: expected {tried} to be free for rank 0, got one in use (by another job or rank 0? "
            "Beside torch.distributed: kos.init(rendezvous=torch.distributed.group.WORLD))"
        ) from problem
    return listener




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
