"""The backends by name: kos's own, those that a program registers, and those of installed packages."""

from __future__ import annotations

import logging
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kos.comm.backend import Backend, Probe
from kos.comm.control.base import Rendezvous
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.backend import HostBackend
from kos.comm.host.mpi import MPITransport
from kos.comm.host.tcp import TCPTransport
from kos.comm.host.threads import ThreadTransport
from kos.comm.transport import Transport
from kos.errors import InvalidArgument

log = logging.getLogger(__name__)

GROUP = "kos.backends"
"""The entry-point group in which installed packages register backends: ``name = "package.module:Class"``."""

Kind = type[Backend] | type[Transport]
"""A backend, or a transport of which HostBackend makes one."""

BACKENDS: dict[str, Kind] = {
    "mpi": MPITransport, "tcp": TCPTransport, "nccl": NCCLBackend, "peer": PeerBackend, "mock": ThreadTransport,
}  # fmt: skip
"""All backends by name, in the order in which ``auto`` prefers them for host memory."""

_installed: bool = False  # whether the backends of installed packages are registered
_installing = threading.RLock()  # reentrant: the import of a package may call ``kos.init``


def register_backend(name: str, backend: Kind) -> None:
    """Let ``kos.init(name)`` make a communicator of ``backend``.

    It is a subclass of ``kos.comm.transport.Transport``, or of ``kos.comm.backend.Backend``.

    Every rank registers it before ``kos.init``.  ``auto`` uses a registered backend for host memory only if no backend
    of kos can run, and never one for GPUs (``on_gpu``).  An installed package needs no call: it names the class as an
    entry point of the group ``kos.backends``.

    Raises InvalidArgument for a ``name`` that is no identifier or is taken, and for any other class, such as one that
    lacks a method of these.

        kos.register_backend("ring", Ring)
        comm = kos.init("ring")
    """
    if not isinstance(name, str) or not name.isidentifier() or name == "auto":
        raise InvalidArgument(f"name: expected an identifier other than 'auto', got {name!r}")
    if not isinstance(backend, type) or not issubclass(backend, Backend | Transport):
        kinds = "kos.comm.transport.Transport or kos.comm.backend.Backend"
        raise InvalidArgument(f"backend {name}: expected a subclass of {kinds}, got {backend!r}")
    if missing := sorted(backend.__abstractmethods__):
        raise InvalidArgument(f"backend {name}: expected a class that defines {', '.join(missing)}, got {backend!r}")
    if BACKENDS.get(name, backend) is not backend:
        raise InvalidArgument(f"name: expected one that is free, got {name!r}, which is {BACKENDS[name].__name__}")
    BACKENDS[name] = backend


def make(kind: Kind, rendezvous: Rendezvous) -> Backend:
    """The backend of the group of ``rendezvous``.  Collective."""
    return HostBackend(rendezvous, kind) if issubclass(kind, Transport) else kind(rendezvous)


def register_installed() -> None:
    """Register the backends of installed packages, once; a failed import makes a backend unusable, with its reason."""
    global _installed
    with _installing:  # ranks may be threads
        if _installed:
            return
        _installed = True
        for entry in entry_points(group=GROUP):
            try:
                register_backend(entry.name, _load(entry))
            except InvalidArgument as error:
                log.warning("entry point %s of %s: %s", entry.name, GROUP, error)


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        probe = Probe(False, f"its entry point {entry.value} failed: {type(error).__name__}: {error}")
        unused = dict.fromkeys(Backend.__abstractmethods__)  # the class is never instantiated
        return type("Unusable", (Backend,), {**unused, "probe": classmethod(lambda kind, rendezvous: probe)})


def probe_all(backends: dict[str, Kind], rendezvous: Rendezvous) -> dict[str, Probe]:
    """The probe of each backend for this group on this rank."""
    probes = {}
    for name, kind in backends.items():
        try:
            probe: Any = kind.probe(rendezvous)
            if not isinstance(probe, Probe):
                raise TypeError(f"expected a Probe, got {probe!r}")
            probes[name] = probe
        except Exception as error:  # in a backend of another package
            probes[name] = Probe(False, f"its probe failed: {type(error).__name__}: {error}")
    return probes
