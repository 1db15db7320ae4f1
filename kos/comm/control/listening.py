"""The address and the ports at which kos listens: those of ``KOS_BIND`` and ``KOS_PORTS``."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from kos.environment import KOS_BIND, KOS_PORTS
from kos.errors import RendezvousError


def check() -> None:
    """Raise RendezvousError if ``KOS_PORTS`` or ``KOS_BIND`` is wrong."""
    ports()
    _bind()


def ports() -> range:
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


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket at the address of ``KOS_BIND``, else at ``host``; "": on all interfaces.

    ``port`` 0: the first one of ``KOS_PORTS`` that is free, else one that the kernel chooses.  Raises RendezvousError
    if these variables allow none, OSError for another problem.
    """
    address, allowed = _bind(), ports()
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
