"""Collective communication: ``init`` makes the Communicator of this process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from kos.comm.arguments import check_bool, check_timeout, number_in
from kos.comm.backend import UNMADE, Backend, Probe
from kos.comm.communicator import Communicator
from kos.comm.control.base import Rendezvous
from kos.comm.control.bootstrap import default_rendezvous, rendezvous_of
from kos.comm.gpu.auto import AutoBackend
from kos.comm.gpu.backend import DeviceBackend
from kos.comm.gpu.devices import device_of
from kos.comm.gpu.hierarchical import HierarchicalBackend
from kos.comm.gpu.nccl_options import NCCLOptions, check_nccl
from kos.comm.persistent import Batch, Persistent
from kos.comm.recorder.on_signal import dump_on_env_signal
from kos.comm.reduction import PremulSum, ReduceOp
from kos.comm.registry import BACKENDS, make, probe_all, register_backend, register_installed
from kos.comm.tuning import for_group
from kos.comm.versions import check as check_versions
from kos.comm.versions import versions
from kos.comm.work import ProgressThread, Work
from kos.cuda.devices import visible_devices
from kos.errors import BackendUnavailable, CudaError, InvalidArgument, KosError, RendezvousError

__all__ = [
    "BACKENDS", "Batch", "Communicator", "NCCLOptions", "Persistent", "PremulSum", "ReduceOp", "Work", "init",
    "register_backend",
]  # fmt: skip

log = logging.getLogger(__name__)
Error = TypeVar("Error", bound=KosError)


def init(
    backend: str = "auto",
    *,
    rendezvous: Any = None,
    timeout: float = 120.0,
    device: int | None = None,
    process_hooks: bool = True,
    progress_thread: bool = False,
    nccl: NCCLOptions | None = None,
) -> Communicator:
    """Create the communicator of all ranks of this program.  Collective.

    ``backend`` is the name of a backend of kos, of ``kos.register_backend``, or of an installed package.  For host
    memory, "auto" uses the first backend that every rank can use.  For GPUs it uses nccl, and peer where a measurement
    shows that peer is faster (``Communicator.explain`` lists both).  ``timeout`` in seconds bounds every wait of the
    communicator.  ``device`` is the GPU of this rank (default: by its local rank).  The ranks of NCCL connect on a
    thread: the first call waits for the connection and raises its error, also with ``backend="nccl"``.

    ``rendezvous`` is how the ranks find each other.  The default is MPI under mpirun or with ``backend="mpi"``, else
    the environment of torchrun, srun or a shell, else a group of one.  In a job that another framework has started it
    is one of these, and kos then sets no hook of the process:

    - a communicator of mpi4py, whose ranks the group has
    - ``{"rank": 0, "size": 4, "address": "host:port"}``: rank 0 listens there; optional keys are ``local_rank`` and
      ``secret`` (default: as for ranks of the environment)
    - a ProcessGroup of torch.distributed, such as ``dist.group.WORLD``, over any backend
    - ``{"rank": 0, "size": 4, "store": store}``: a ``Store`` of torch, or an object with its methods ``set``, ``get``,
      ``add`` and ``wait``; this group alone uses it
    - an object with ``rank``, ``size`` and ``allgather(data: bytes) -> list[bytes]``: kos calls it twice and then
      connects the ranks by TCP
    - a ``kos.comm.control.base.Rendezvous``

    ``process_hooks=False`` is for a framework that ends and reports its jobs itself.  kos then sets no exception hooks,
    no exit handler that ends the MPI job, no signal for the death of mpirun, and no variable or setting of Open MPI
    and mpi4py.

    ``progress_thread=True`` advances operations with ``async_op=True`` on host memory while the program computes.
    Without it they advance only inside calls of kos (``Work.wait``, ``done``, another call).  Only computation that
    releases Python's lock overlaps, such as NumPy's on large arrays.  The thread helps where ranks wait for a network
    or have idle cores, not where the ranks of one host keep all cores busy.  It sleeps while nothing is in flight, and
    ends with the communicator that ``init`` returns.  Raises BackendUnavailable for an MPI without THREAD_MULTIPLE.

    ``nccl`` are options of NCCL by name, such as ``{"max_ctas": 8}``: see ``kos.comm.NCCLOptions``.  They are the
    same on all ranks, and groups that are split from the communicator inherit them.

    Raises BackendUnavailable, with the reason, where the named backend, or every backend for the ``device``, cannot
    run; InvalidArgument for a ``device`` with a backend for host memory, or ``nccl`` where NCCL is not used;
    RendezvousError where the ranks do not find each other, or request different things.  Under mpirun, with
    ``process_hooks``, an uncaught exception on one rank ends the whole job.

        with kos.init(timeout=30) as comm:
            comm.all_reduce(x)
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        register_installed()
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        raise InvalidArgument(f"backend: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}")
    timeout = check_timeout(timeout)
    device = None if device is None else number_in("device", device, 0, 1 << 16)
    process_hooks = check_bool("process_hooks", process_hooks)
    progress_thread = check_bool("progress_thread", progress_thread)
    options = check_nccl(nccl)
    dump_on_env_signal()
    given = rendezvous
    if rendezvous is None:
        rendezvous = default_rendezvous(timeout, by_mpi=backend == "mpi", process_hooks=process_hooks)
    else:
        rendezvous = rendezvous_of(rendezvous, timeout)
    with ExitStack() as undo:  # frees what was made if this fails
        if rendezvous is not given:
            undo.push(partial(_end, rendezvous.close, partial(rendezvous.abort, None)))
        if device is not None:
            rendezvous.device = device
        rendezvous.call, rendezvous.nccl = "init", options
        probes, made = _make(backend, rendezvous, device, progress_thread, undo)
        comm = Communicator(made, rendezvous, probes, timeout)
        if progress_thread:
            comm._progress = ProgressThread(made.engine)
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


def _make(
    backend: str, rendezvous: Rendezvous, device: int | None, progress_thread: bool, undo: ExitStack
) -> tuple[dict[str, Probe], Backend]:
    """The probes, and the backend of the communicator of ``init``, whose parts ``undo`` aborts."""
    probes, requested, gpu_rank = _agree(backend, device, rendezvous)
    chosen = backend
    if backend == "auto":
        usable = [name for name, probe in probes.items() if probe.usable]
        chosen = next((name for name in usable if not BACKENDS[name].on_gpu), "")
        if not chosen:
            raise _on_every_rank(BackendUnavailable(f"auto: no backend can run here: {_reasons(probes)}"))
    elif requested is not None and not BACKENDS[backend].on_gpu:
        text = f"device: expected None with backend {backend!r}, which uses no GPU, got {requested}"
        raise _on_every_rank(InvalidArgument(text))
    elif not probes[backend].usable:
        raise _on_every_rank(BackendUnavailable(f"{backend}: {probes[backend].reason}"))
    log.info("backend %s: %s", chosen, probes[chosen].reason)
    with rendezvous.reporting():
        made = make(BACKENDS[chosen], rendezvous)
    undo.push(partial(_end, made.close, partial(made.abort, UNMADE)))
    if progress_thread:
        made.check_threads()
    if backend == "auto":
        with rendezvous.reporting():
            gpus = _for_gpus(rendezvous, probes, made, undo)
            made = AutoBackend(rendezvous, made, gpus) if gpus else made
        if not gpus:
            why = _reasons({name: probes[name] for name, kind in BACKENDS.items() if kind.on_gpu})
            if requested is not None:
                text = f"auto: expected a backend for GPU {requested}, got none: {why}"
                raise _on_every_rank(BackendUnavailable(text))
            made.gpu_array_hint = f"auto found no backend for GPUs: {why}"
            if gpu_rank is not None and rendezvous.rank == 0:
                log.warning("auto: rank %d sees a GPU, but no backend can use GPUs: %s", gpu_rank, why)
    if rendezvous.nccl and "nccl" not in made.name.split("+"):
        text = f"nccl: expected None without the backend nccl, got {rendezvous.nccl} on {made.name}"
        raise _on_every_rank(InvalidArgument(text))
    return probes, made


def _reasons(probes: dict[str, Probe]) -> str:
    return "; ".join(f"{name}: {probe.reason}" for name, probe in probes.items())


def _for_gpus(
    rendezvous: Rendezvous, probes: dict[str, Probe], host: Backend, undo: ExitStack
) -> list[DeviceBackend]:
    """The backends for GPUs that all ranks can use beside ``host``; peer only where a table has routes for it."""
    made: list[DeviceBackend] = []
    for name, kind in BACKENDS.items():
        probe = probes[name]
        if not probe.usable or not issubclass(kind, DeviceBackend):
            continue
        if name == "peer" and not for_group(rendezvous, device_of(rendezvous).index).routes:
            reason = f"{probe.reason}; auto uses it once it was measured here: python -m kos.tune"
            probes[name] = Probe(True, reason)
            continue
        between_hosts = name == "nccl" and rendezvous.local_size < rendezvous.size
        try:
            made.append((HierarchicalBackend if between_hosts else kind)(rendezvous, host=host))
            undo.callback(made[-1].abort, UNMADE)
        except BackendUnavailable as error:  # on all ranks: bytes did not move as the driver promised
            probes[name] = Probe(False, str(error))
        log.info("backend %s for arrays on a GPU: %s", name, probes[name].reason)
    return made


def _agree(
    wanted: str, device: int | None, rendezvous: Rendezvous
) -> tuple[dict[str, Probe], str | None, int | None]:
    """The probes agreed on by all ranks, the first device requested, and the first rank that sees a GPU.

    The requested device is text that names its rank.  A backend that one rank cannot use is unusable on all ranks.
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
        "sees a GPU": _sees_gpu(),
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
                agreed[name] = Probe(False, reason if not mine[name].usable else f"rank {rank}: {reason}")
                break
            if agreed[name].usable and claim and holders.setdefault(claim, rank) != rank:
                agreed[name] = Probe(False, f"ranks {holders[claim]} and {rank} share {claim}")
    requested = (f"{each['device']} of rank {rank}" for rank, each in enumerate(ballots) if each["device"] is not None)
    gpu_ranks = (rank for rank, each in enumerate(ballots) if each["sees a GPU"])
    return agreed, next(requested, None), next(gpu_ranks, None)


def _sees_gpu() -> bool:
    try:
        return bool(visible_devices())
    except CudaError:
        return False
