"""Rendezvous by a key-value store that another framework runs, such as a ``Store`` of torch.distributed.

The store carries the address of rank 0 and the secret of the group, nothing else.  From then on the ranks use their
own authenticated connections, as ranks that the environment names do.  Whoever can read the store can join the group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from kos.comm.failures import Ledger
from kos.comm.rendezvous.base import host_id
from kos.comm.rendezvous.env import GRACE_SECONDS, World
from kos.comm.rendezvous.wire import Network, is_loopback
from kos.errors import RendezvousError


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


class StoreRendezvous(World):
    """The ranks that share ``store``.  Collective.

    ``store`` is this group's own: its keys have a prefix that no other group uses.  ``world_ranks`` are the ranks by
    which errors name the members; the default is 0 to ``size - 1``.  ``timeout`` in seconds bounds the start and every
    later wait.  Raises RendezvousError, which names missing ranks.

    On several hosts rank 0 must be reachable at the address by which it reaches ``MASTER_ADDR``, else at that of its
    host name.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float = 120.0, world_ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(rank, size, timeout, Network(b"", "127.0.0.1", "", True), None)
        self._ledger = Ledger(range(size) if world_ranks is None else world_ranks, rank, timeout=timeout)
        if size == 1:
            return
        deadline = time.monotonic() + timeout
        # A group that is made again in the same store, after it was closed, must not read the former keys.
        prefix = f"kos/{store.add(f'kos/joined/{rank}', 1)}"
        store.set(f"{prefix}/host/{rank}", host_id())
        if rank == 0:
            self._publish(store, prefix, deadline)
        else:
            self._find(store, prefix, deadline)

    def _publish(self, store: Store, prefix: str, deadline: float) -> None:
        hosts, missing = [host_id()], []
        for rank in range(1, self.size):
            try:
                hosts.append(_get(store, f"{prefix}/host/{rank}", deadline).decode())
            except Exception:
                missing.append(rank)
        if missing:
            text = f"{self.ledger.names(missing)} did not join the store within {self.timeout:g} s"
            store.set(f"{prefix}/hub", json.dumps({"missing": missing}))
            raise self.ledger.overdue(missing, "rendezvous", None, text, RendezvousError)
        loopback = len(set(hosts)) == 1
        self.network = Network(secrets.token_bytes(32), "127.0.0.1", "", loopback)
        address = "127.0.0.1" if loopback else _own_address()
        listener, purpose = self.network.listen(), os.urandom(16).hex()
        port, secret = listener.getsockname()[1], self.network.secret.hex()
        hub = {"address": address, "port": port, "secret": secret, "purpose": purpose, "loopback": loopback}
        store.set(f"{prefix}/hub", json.dumps(hub))
        self._address = f"the store (rank 0 is at {address})"
        self._join("", [port], purpose.encode(), listener)

    def _find(self, store: Store, prefix: str, deadline: float) -> None:
        try:
            found = json.loads(_get(store, f"{prefix}/hub", deadline + GRACE_SECONDS))
            leader = _get(store, f"{prefix}/host/0", deadline).decode()
        except Exception as error:
            text = f"{self.ledger.names([0])} did not join the store within {self.timeout:g} s"
            raise self.ledger.overdue([0], "rendezvous", None, text, RendezvousError) from error
        if missing := found.get("missing"):
            text = f"{self.ledger.names(missing)} did not join the store within {self.timeout:g} s"
            raise self.ledger.overdue(missing, "rendezvous", None, text, RendezvousError)
        hub = "127.0.0.1" if leader == host_id() else found["address"]
        self.network = Network(bytes.fromhex(found["secret"]), hub, "", found["loopback"])
        self._join("", [found["port"]], found["purpose"].encode(), None)


def _get(store: Store, key: str, deadline: float) -> bytes:
    """The value of ``key`` once it is set; any exception at the deadline."""
    store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return store.get(key)


def _own_address() -> str:
    """The address by which other hosts reach this one: that of the route to MASTER_ADDR, else of the host's name."""
    for host in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(place)  # of a datagram socket: chooses the route and sends nothing
                address = sock.getsockname()[0]
        except OSError:
            continue
        if not is_loopback(address):
            return str(address)
    expected = "an address that other hosts reach, by MASTER_ADDR or its host name"
    raise RendezvousError(f"rendezvous: rank 0 expected {expected}, got a loopback address")
