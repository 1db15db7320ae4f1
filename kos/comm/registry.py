"""The backends by name: kos's own, those that a program registers, and those of installed packages."""

from __future__ import annotations

import logging
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kos.comm.contract import REQUIRED, Backend, Probe, lacking
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.mpi import MPITransport
from kos.comm.host.tcp import TCPTransport
from kos.comm.host.threads import ThreadTransport
from kos.errors import InvalidArgument

log = logging.getLogger(__name__)

GROUP = "kos.backends"
"""The entry-point group in which installed packages register backends: ``name = "package.module:Class"``."""

BACKENDS: dict[str, type[Backend]] = {
    "mpi": MPITransport, "tcp": TCPTransport, "nccl": NCCLBackend, "peer": PeerBackend, "mock": ThreadTransport,
}  # fmt: skip
"""All backends by name, in the order in which ``auto`` prefers them for host memory."""

installed: bool = False
"""Whether the backends of installed packages are registered."""
_installing = threading.RLock()  # reentrant: the import of a package may call ``kos.init``


def register_backend(name: str, backend: type[Backend]) -> None:
    """Let ``kos.init(name)`` make a communicator of ``backend``, a subclass of ``kos.comm.contract.Backend``.

    Every rank must register it before ``kos.init``.  ``auto`` uses it where a tuning table prefers it, or where no
    backend of kos can run.  Host memory and GPU memory have separate tables.  An installed package need not call this
    function, and can declare the class as an entry point of the group ``kos.backends`` instead.

    Raises InvalidArgument if ``name`` is not an identifier or is taken, or if ``backend`` is not a subclass that
    defines all methods that the contract requires.

        kos.register_backend("ring", Ring)
        comm = kos.init("ring")
    """
    if not isinstance(name, str) or not name.isidentifier() or name == "auto":
        raise InvalidArgument(f"name: expected an identifier other than 'auto', got {name!r}")
    if not isinstance(backend, type) or not issubclass(backend, Backend):
        raise InvalidArgument(f"backend {name}: expected a subclass of kos.comm.contract.Backend, got {backend!r}")
    if not (backend.on_host or backend.on_gpu):
        raise InvalidArgument(f"backend {name}: expected on_host or on_gpu to be True, got neither in {backend!r}")
    if missing := lacking(backend):
        raise InvalidArgument(f"backend {name}: expected a class that defines {', '.join(missing)}, got {backend!r}")
    if BACKENDS.get(name, backend) is not backend:
        raise InvalidArgument(f"name: expected one that is free, got {name!r}, which is {BACKENDS[name].__name__}")
    BACKENDS[name] = backend


def register_installed() -> None:
    """Register the backends of installed packages, once; a failed import makes a backend unusable, with its reason."""
    global installed
    with _installing:  # ranks may be threads
        if installed:
            return
        installed = True
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
        methods = {name: None for names in REQUIRED.values() for name in names}  # the class is never instantiated
        return type("Unusable", (Backend,), {**methods, "probe": classmethod(lambda kind, rendezvous: probe)})


def probe_all(backends: dict[str, type[Backend]], rendezvous: ControlPlane) -> dict[str, Probe]:
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
