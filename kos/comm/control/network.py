"""Where the ranks of a group listen and how they reach each other; connections between every two of them, for ``tcp``.

The environment may say where kos listens: ``KOS_PORTS`` the ports, and ``KOS_BIND`` the address.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from kos.comm import timeouts
from kos.comm.control.wire import Acceptor, Connection, adopt, authenticate, connect, drive, mac, receive_greeting
from kos.comm.failures import FailureLog
from kos.comm.waits import wait
from kos.environment import KOS_BIND, KOS_PORTS
from kos.errors import KosError, RendezvousError
from kos.files import lacks_files

_REPORT_SECONDS = 5.0
"""How long to wait for a failure report of a rank that was not reached.  The report may name the reason."""


@dataclass(slots=True)
class Network:
    """The addresses and the secret by which the ranks of a job reach each other."""

    secret: bytes
    hub: str  # the host of the job's rank 0, as this rank knows it
    host: str  # this rank's host as all others know it; empty: the host of rank 0
    loopback: bool  # all ranks are on one host, and only they connect
    epoch: int = 0  # the number of times that the membership has changed
    name: str = ""  # the host of the job's rank 0, as other hosts know it

    def listen(self, port: int = 0) -> socket.socket:
        """A listening socket; on all interfaces unless the job stays on one host.  Raises OSError, RendezvousError."""
        listener = _listen(self.hub if self.loopback else "", port)
        adopt(listener)
        return listener

    def key(self, purpose: bytes) -> bytes:
        """The key of one group's connections, so that a proof for one group is invalid for another."""
        return mac(self.secret, b"kos key ", purpose)

    def call(
        self, host: str, port: int, purpose: bytes, rank: int, size: int, deadline: float, greeting_seconds: float = 1e9
    ) -> Connection:
        """Connect to the rank that listens at ``port`` of ``host`` (empty: the host of rank 0).

        The listener has ``greeting_seconds`` seconds to send its greeting.  Raises OSError, HandshakeError.
        """
        first = min(deadline, time.monotonic() + greeting_seconds)
        sock = connect(host or self.hub, port, first)
        try:
            greeting = drive(receive_greeting(sock), sock, first)
            # No retry from here on: the listener may have accepted this rank.
            return drive(authenticate(sock, greeting, self.key(purpose), rank, size, self.epoch), sock, deadline)
        except BaseException:
            sock.close()
            raise


def check_variables() -> None:
    """Raise RendezvousError if ``KOS_PORTS`` or ``KOS_BIND`` is wrong."""
    _ports()
    _bind()


def _ports() -> range:
    """The ports at which this process may listen; empty: those that the kernel chooses."""
    text = KOS_PORTS.get()
    found = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    first, last = map(int, found.groups()) if found else (1, 0)
    if text and not 0 < first <= last < 1 << 16:
        raise RendezvousError(f'KOS_PORTS: expected a range such as "20000-20100", from 1 to 65535, got {text!r:.80}')
    return range(first, last + 1)


def bound() -> str:
    """The address at which other processes reach this one; "" if it listens at several."""
    address = _bind()
    return "" if address is None or address.is_unspecified else str(address)


def _bind() -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    text = KOS_BIND.get()
    try:
        return ipaddress.ip_address(text.strip("[]")) if text else None
    except ValueError:
        raise RendezvousError(f"KOS_BIND: expected an IP address of this host, got {text!r:.80}") from None


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket at the address of ``KOS_BIND``, else at ``host``; "": on all interfaces.

    ``port`` 0: the first one of ``KOS_PORTS`` that is free, else one that the kernel chooses.  Raises RendezvousError
    if these variables allow none, OSError for another problem.
    """
    address, allowed = _bind(), _ports()
    host = host if address is None else "" if str(address) == "::" else str(address)
    for each in (port,) if port or not allowed else allowed:
        try:
            return _server(host, each)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and address is not None:
                raise RendezvousError(f"KOS_BIND: expected an IP address of this host, got {address}") from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or not each or each == port:
                raise
    wanted = f"a free port from {allowed[0]} to {allowed[-1]}"
    got = f"{len(allowed)} that are in use or not allowed"
    needs = "a host needs one for each of its ranks in each open group, the world included, and one more"
    raise RendezvousError(f"KOS_PORTS: expected {wanted}, got {got}; {needs}")


def _server(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    family, _, _, _, place = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=1024)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect_all(
    group: Any, addresses: Sequence[tuple[str, int]], listener: socket.socket, purpose: bytes
) -> dict[int, Connection]:
    """The connections to all other ranks of a ``TCPControlPlane``, which listen at ``addresses``.

    Raises OSError if this rank lacks file descriptors; RendezvousError, and RankLost if a rank has ended.
    """
    found, deadline = dict[int, Connection](), time.monotonic() + group.timeout
    try:
        for peer in range(group.rank):
            try:
                found[peer] = group.network.call(*addresses[peer], purpose, group.rank, group.size, deadline)
            except (OSError, RendezvousError) as error:
                if lacks_files(error):
                    raise
                if isinstance(error, TimeoutError):
                    raise group.absent([peer], "tcp", timeouts.ANSWER, several=False) from error
                _await_report(group, peer)
                raise unreached(group.failures, peer, error) from error
        key, above = group.network.key(purpose), set(range(group.rank + 1, group.size))
        look = group.look_for_failure
        others, missing = admit_all(listener.dup(), key, above, group.size, deadline, look=look, epoch=group.epoch)
        found |= others
        if missing:
            me = group.failures.names([group.rank], False)
            raise group.absent(missing, f"tcp: {me} waited for ranks with higher numbers", timeouts.CONNECT)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def _await_report(group: Any, peer: int) -> None:
    """Raise the failure that a rank reports within ``_REPORT_SECONDS``: it may be why that rank was not reached."""
    ended = partial(group.failures.status.ended, group.failures.world[peer])
    wait(ended, time.monotonic() + _REPORT_SECONDS, group.look_for_failure)


def unreached(failures: FailureLog, peer: int, error: Exception) -> KosError:
    """The error of a rank that this one did not reach.  A refused connection alone does not show that it has ended."""
    if failures.status.ended(failures.world[peer]):
        return failures.ended(peer)
    me, other = (failures.names([rank], False) for rank in (failures.rank, peer))
    return RendezvousError(f"rendezvous: {me} did not reach {other}: {error}", ranks=failures.in_world([peer]))


def admit_all(
    listener: socket.socket, key: bytes, expected: set[int], size: int, deadline: float,
    look: Callable[[], None] = lambda: None, epoch: int = 0,
) -> tuple[dict[int, Connection], list[int]]:  # fmt: skip
    """The connections of the ``expected`` ranks, and the ranks that are missing at the deadline.

    ``look`` is called every second and may raise.  Closes the listener.  Raises the OSError of ``Acceptor.admit``.
    """
    admitted: dict[int, Connection] = {}
    with listener, closing(Acceptor(listener, key, epoch, reserved=len(expected))) as acceptor:
        while (missing := expected - admitted.keys()) and (remaining := deadline - time.monotonic()) > 0:
            caller = acceptor.admit(min(remaining, 1.0))
            if caller is None:
                look()
                continue
            rank, its_size, connection = caller
            if rank in admitted or rank not in expected or its_size != size:
                connection.close()
            else:
                admitted[rank] = connection
    return admitted, sorted(missing)
