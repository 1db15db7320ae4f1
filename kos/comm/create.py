"""Makes the communicator of a group: compares what its ranks can use, chooses a backend, and makes it.

The backends are those of kos, those that a program registers, and those of installed packages.

``kos.init`` makes the communicator of a job in this way; ``grow``, ``replace`` and ``kos.join`` that of a new
membership.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import numpy as np

from kos.comm.contract import REQUIRED, UNMADE, Backend, Probe, lacking
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.devices import device_of
from kos.comm.gpu.hierarchical import HierarchicalBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.routes import PHASES
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.mpi import MPITransport
from kos.comm.host.tcp import TCPTransport
from kos.comm.host.threads import ThreadTransport
from kos.comm.progress import ProgressThread
from kos.comm.tuning import for_group, preferred_on_hosts
from kos.comm.work import Engine
from kos.cuda.devices import visible_devices
from kos.errors import BackendUnavailable, CudaError, InvalidArgument, KosError, RendezvousError

log = logging.getLogger("kos.comm")
Error = TypeVar("Error", bound=KosError)


def communicator(
    kind: Any, backend: str, rendezvous: ControlPlane, timeout: float, device: int | None, progress_thread: bool,
    owned: bool = True, agreed: bool = False,
) -> Any:  # fmt: skip
    """The communicator, of class ``kind``, of the group of ``rendezvous``.  Collective; ``timeout`` is its own.

    An error frees the parts that were made, and the rendezvous if it is ``owned``.  With ``agreed``, it returns only
    when all ranks have made the communicator.  A group that grows needs this: newcomers must not take the GPUs of its
    members.
    """
    with ExitStack() as undo:
        if owned:
            undo.push(partial(_end, rendezvous.close, partial(rendezvous.abort, None)))
        if device is not None:
            rendezvous.device = device
        if agreed:  # members have GPUs, of which newcomers take others
            rendezvous.requested_gpus = [each.decode() for each in rendezvous.allgather(requested_gpu(device).encode())]
        probes, made, host = _make_backends(backend, rendezvous, device, progress_thread, undo)
        comm = kind(made, rendezvous, probes, timeout, host=host)
        comm._requested = backend, progress_thread
        if progress_thread:
            comm._progress = ProgressThread(made.engine)
        if agreed:
            undo.callback(comm._end, UNMADE)
            rendezvous.barrier()
            comm.timeout = timeout  # in the rendezvous and the backend, which had that of the call
        undo.pop_all()
    return comm


def _end(
    close: Callable[[], None], abort: Callable[[], None], kind: object, error: BaseException | None, trace: object
) -> None:
    """Free a part of an ``init`` that failed: together with the other ranks if all of them raise ``error``."""
    if isinstance(error, KosError) and error.on_every_rank:
        with suppress(KosError):  # ``error`` is the one to raise
            return close()
    abort()


def _on_every_rank(error: Error) -> Error:
    error.on_every_rank = True
    return error


def _make_backends(
    backend: str, rendezvous: ControlPlane, device: int | None, progress_thread: bool, undo: ExitStack
) -> tuple[dict[str, Probe], Any, HostBackend | None]:
    """The probes, and the backends of the communicator of ``init``, which ``undo`` ends."""
    probes, requested, sees, preferred = _agree(backend, device, rendezvous)
    chosen = backend
    if backend == "auto":
        usable = [name for name, probe in probes.items() if probe.usable and BACKENDS[name].on_host]
        chosen = preferred if preferred in usable else next(iter(usable), "")
        if not chosen:
            raise _on_every_rank(BackendUnavailable(f"auto: no backend can run here: {_reasons(probes)}"))
    elif requested is not None and not BACKENDS[backend].on_gpu:
        text = f"device: expected None with backend {backend!r}, which uses no GPU, got {requested}"
        raise _on_every_rank(InvalidArgument(text))
    elif not probes[backend].usable:
        raise _on_every_rank(BackendUnavailable(f"{backend}: {probes[backend].reason}"))
    log.info("backend %s: %s", chosen, probes[chosen].reason)
    rendezvous.name_hosts()
    kind = BACKENDS[chosen]
    host: HostBackend | None = None
    if kind.on_host:
        with rendezvous.reporting():
            host = HostBackend(rendezvous, kind)
        undo.push(partial(_end, host.close, partial(host.abort, UNMADE)))
        if progress_thread:
            host.transport.check_threads()
    with rendezvous.reporting(), ExitStack() as unmade:
        routes: list[Backend] = []
        engine = Engine() if host is None else host.engine
        if backend == "auto":
            routes = _for_gpus(rendezvous, probes, engine, unmade, all(sees))
        elif kind.on_gpu and (host is None or all(sees)):
            routes.append(kind(rendezvous, engine, device_of(rendezvous).index))
            unmade.callback(routes[0].abort, UNMADE)
        made: Any = GPUBackend(rendezvous, routes, host) if routes else host
        unmade.pop_all()
    if routes:
        undo.push(partial(_end, made.close, partial(made.abort, UNMADE)))
    if backend == "auto" and made.device is None:
        why = _reasons({name: probes[name] for name, kind in BACKENDS.items() if kind.on_gpu})
        if requested is not None:
            text = f"auto: expected a backend for GPU {requested}, got none: {why}"
            raise _on_every_rank(BackendUnavailable(text))
        made.gpu_array_hint = f"auto found no backend for GPUs: {why}"
        if any(sees) and rendezvous.rank == 0:
            log.warning("auto: rank %d sees a GPU, but no backend can use GPUs: %s", sees.index(True), why)
    if rendezvous.nccl and "nccl" not in made.name.split("+"):
        text = f"nccl: expected None without the backend nccl, got {rendezvous.nccl} on {made.name}"
        raise _on_every_rank(InvalidArgument(text))
    return probes, made, host


def _reasons(probes: dict[str, Probe]) -> str:
    return "; ".join(f"{name}: {probe.reason}" for name, probe in probes.items())


def _for_gpus(
    rendezvous: ControlPlane, probes: dict[str, Probe], engine: Engine, undo: ExitStack, seen: bool = True
) -> list[Backend]:
    """The routes that ``auto`` uses for GPUs.  ``seen`` is True if every rank sees a GPU.

    Of the backends that can run, ``auto`` always uses ``nccl``, and uses ``peer`` if there is a measured tuning table.
    It uses another backend if the table routes calls to it, or if no earlier backend can run.
    """
    usable = [name for name, kind in BACKENDS.items() if kind.on_gpu and probes[name].usable]
    if not seen:  # the probe of a backend for both kinds of memory may be about host memory alone
        usable = [name for name in usable if not BACKENDS[name].on_host]
    table = for_group(rendezvous, device_of(rendezvous).index) if set(usable) - {"nccl"} else None
    measured = set() if table is None else table.backends()
    if table is not None and (unknown := measured - {*BACKENDS, PHASES}) and rendezvous.rank == 0:
        log.warning("the tuning table %s names backends that are not registered: %s", table.source, ", ".join(unknown))
    made: list[Backend] = []
    for name in usable:
        if not {"nccl": True, "peer": bool(measured)}.get(name, name in measured or not made):
            more = "" if name == "peer" else f" --with {name}"
            reason = f"{probes[name].reason}; auto uses it once it was measured here: kos bench --write-table{more}"
            probes[name] = Probe(True, reason)
            continue
        between_hosts = name == "nccl" and rendezvous.local_size < rendezvous.size
        try:
            for kind in (BACKENDS[name], HierarchicalBackend)[: 1 + between_hosts]:
                made.append(kind(rendezvous, engine, device_of(rendezvous).index))
                undo.callback(made[-1].abort, UNMADE)
                made[-1].table = made[-1].table or table
        except BackendUnavailable as error:  # on all ranks: bytes did not move as the driver promised
            probes[name] = Probe(False, str(error))
        log.info("backend %s for arrays on a GPU: %s", name, probes[name].reason)
    return made


def _agree(
    wanted: str, device: int | None, rendezvous: ControlPlane
) -> tuple[dict[str, Probe], str | None, list[bool], str]:
    """Exchange the probes of all ranks.  If one rank cannot use a backend, it is unusable on all ranks.

    Returns the probes, the first device that a rank requested, which ranks see a GPU, and the backend that ``auto``
    prefers for host memory.  The device is a text that names its rank.  The preferred backend is the one in the tuning
    table of rank 0, or "" without a table.
    """
    if wrong := rendezvous.wrong_hosts():
        raise _on_every_rank(RendezvousError(wrong))
    mine = probe_all(BACKENDS, rendezvous)
    ballots = [json.loads(each) for each in rendezvous.allgather(json.dumps({
        "versions": versions(),
        "backend": wanted,
        "nccl": dict(rendezvous.nccl),
        "device": device,
        "probes": {name: (probe.usable, probe.reason, probe.claim) for name, probe in mine.items()},
        "sees a GPU": sees_gpu(),
        "preferred": preferred_on_hosts(rendezvous) if rendezvous.rank == 0 else "",
        # The time comes first, so that folders sort by it.
        "job": f"{datetime.now():%Y%m%d-%H%M%S-%f}-{os.urandom(4).hex()}",
    }).encode())]  # fmt: skip
    try:
        known = (each.get("versions", {}) if isinstance(each, dict) else {} for each in ballots)  # not by older ones
        check_versions([*known], warns=rendezvous.rank == 0)
    except RendezvousError as error:
        raise _on_every_rank(error) from None
    rendezvous.job = ballots[0]["job"]
    for rank, theirs in enumerate(ballots):
        for what in ("backend", "nccl"):
            ours = ballots[rendezvous.rank][what]
            if theirs[what] != ours:
                text = f"init: rank {rendezvous.rank} requested {what} {ours!r}, rank {rank} {theirs[what]!r}"
                raise _on_every_rank(RendezvousError(text))
    # The same order on all ranks; a backend that rank 0 has not registered comes last and is unusable.
    agreed = {name: mine[name] for name in (*ballots[0]["probes"], *mine) if name in mine}
    for name in agreed:
        holders: dict[str, int] = {}  # of each claim, the first rank
        for rank, theirs in enumerate(ballots):
            usable, reason, claim = theirs["probes"].get(name, (False, "not registered there", ""))
            if not usable:
                agreed[name] = mine[name] if not mine[name].usable else Probe(False, f"rank {rank}: {reason}")
                break
            if agreed[name].usable and claim and holders.setdefault(claim, rank) != rank:
                agreed[name] = Probe(False, f"ranks {holders[claim]} and {rank} share {claim}")
    requested = (f"{each['device']} of rank {rank}" for rank, each in enumerate(ballots) if each["device"] is not None)
    sees = [each["sees a GPU"] for each in ballots]
    return agreed, next(requested, None), sees, ballots[0]["preferred"]


def requested_gpu(device: int | None) -> str:
    """The UUID of the GPU with this index; "" if there is none."""
    devices = visible_devices() if device is not None and sees_gpu() else ()
    return devices[device].uuid if device is not None and 0 <= device < len(devices) else ""


def sees_gpu() -> bool:
    """Whether this process can use a GPU."""
    try:
        return bool(visible_devices())
    except CudaError:
        return False



_SHOWN = 8  # ranks in a message


def versions() -> dict[str, str]:
    """The versions in this process, by name."""
    kos: str = sys.modules["kos"].__version__  # an import would be a circle: ``kos`` imports names of this package
    return {"kos": kos, "Python": platform.python_version(), "NumPy": np.__version__}


def check_versions(ranks: Sequence[Mapping[str, str]], warns: bool) -> None:
    """Compare the versions of all ranks; ``{}`` stands for unknown ones.

    The protocol between ranks may change in any version of kos.  Different versions of Python or NumPy work together,
    but may give different bits or lack a dtype.
    Raises RendezvousError if those of kos differ; logs others if ``warns``.
    """
    for name in dict.fromkeys(name for found in ranks for name in found):
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(ranks):
            holders.setdefault(found.get(name, "an unknown version"), []).append(rank)
        if len(holders) == 1:
            continue
        text = ", ".join(f"{version} on {_names(each)}" for version, each in holders.items())
        if name == "kos":
            raise RendezvousError(f"init: expected one version of kos on all ranks, got {text}")
        if warns:
            log.warning("the ranks have different versions of %s: %s", name, text)


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {ranks[:_SHOWN]}{more}"


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
