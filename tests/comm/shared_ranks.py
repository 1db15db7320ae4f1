"""Ranks that are threads of this process and share a memory segment as processes do.

Their backend uses nothing else.
"""

from collections.abc import Callable
from typing import Any

import pytest

import kos
from kos import _core
from kos.comm.communicator import Communicator
from kos.comm.contract import Backend, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadControlPlane
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.shared.segment import STARTED
from tests.comm.ranks import on_threads

TIMEOUT = 30.0  # seconds
needs_core = pytest.mark.skipif(_core.native is None, reason=str(_core.unavailable))


def skip_without_core() -> None:
    if _core.native is None:
        pytest.skip(str(_core.unavailable))


def through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rank of a host copy from the memory of another one: large parts take several stages in slots."""
    monkeypatch.setattr("kos.comm.host.shared.transport.read_memory", lambda *_: None)


class SharedOnly(Backend):
    """Moves no messages: what does not go through shared memory fails."""

    name = "shared-only"
    processes = True

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        return Probe(True, "a test")

    def isend(self, array: Any, peer: int, tag: int) -> Any:
        raise NotImplementedError

    def irecv(self, array: Any, peer: int, tag: int) -> Any:
        raise NotImplementedError

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        pass


def shared_only(rendezvous: ThreadControlPlane) -> kos.Communicator:
    """The communicator of this rank.  Collective."""
    return Communicator(HostBackend(rendezvous, SharedOnly), rendezvous, {}, TIMEOUT)


def run(fn: Callable[[kos.Communicator], Any], size: int, close: bool = True) -> list[Any]:
    """The result of ``fn(comm)`` on each rank.  Skips the test where the core cannot be used."""
    skip_without_core()

    def body(rendezvous: ThreadControlPlane) -> Any:
        comm = shared_only(rendezvous)
        result = fn(comm)
        if close:
            comm.close()
        return result

    return on_threads(size, body, TIMEOUT)


def end_process(comm: kos.Communicator) -> None:
    """Make other ranks see that this rank's process has ended, and that its process ID was reused."""
    calls: Any = comm.backend.calls
    calls.words[calls._line + STARTED] += 1
