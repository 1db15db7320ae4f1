"""Connections between all ranks of a group, for ``tcp``: each rank connects to lower ranks and accepts higher ones."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kos.comm import timeouts
from kos.comm.control.wire import Connection, admit_all
from kos.comm.failures import FailureLog
from kos.comm.waits import wait
from kos.errors import KosError, RendezvousError
from kos.files import lacks_files

_REPORT_SECONDS = 5.0
"""How long to wait for a failure report of a rank that was not reached.  The report may name the reason."""


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
