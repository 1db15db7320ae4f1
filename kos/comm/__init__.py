"""Collective communication: ``init``, or ``join``, makes the Communicator of this process."""

from __future__ import annotations

import sys
import time
from typing import Any

from kos.comm.arguments import NCCLOptions, check_bool, check_nccl, check_timeout, number_in
from kos.comm.batch import Batch
from kos.comm.communicator import Communicator
from kos.comm.control.bootstrap import default_rendezvous, join_rendezvous, rendezvous_of
from kos.comm.control.store import KeyValueStore
from kos.comm.create import BACKENDS, communicator, register_backend, register_installed, sees_gpu, versions
from kos.comm.grid import Grid
from kos.comm.matching import Envelope
from kos.comm.operation import ANY, NOBODY
from kos.comm.progress import as_completed, wait_any
from kos.comm.recorder.on_signal import dump_on_env_signal
from kos.comm.reduction import PremulSum, ReduceOp
from kos.comm.work import Work
from kos.environment import KOS_JOIN
from kos.errors import InvalidArgument, RankLost, RendezvousError, without_own_frames

__all__ = [
    "ANY", "BACKENDS", "NOBODY", "Batch", "Communicator", "Envelope", "Grid", "KeyValueStore", "NCCLOptions",
    "PremulSum", "ReduceOp", "Work", "as_completed", "init", "join", "register_backend", "wait_any",
]  # fmt: skip

if not getattr(sys, "_is_gil_enabled", lambda: True)():  # not in kos itself, which torch imports if it is installed
    raise ImportError("kos: expected the GIL, got a free-threaded Python without it: set PYTHON_GIL=1")


@without_own_frames
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
    communicator.  If MPI_Init, which nothing can interrupt, takes longer, the process ends with the error and exit code
    69.  ``device`` is the GPU of this rank (default: by its local rank).  The ranks of NCCL connect on a thread: the
    first call on a GPU waits for the connection and raises its error, also with ``backend="nccl"``.

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
    - a ``kos.comm.control.base.ControlPlane``

    ``process_hooks=False`` is for a framework that ends and reports its jobs itself.  kos then sets no exception hooks,
    no exit handler that ends the MPI job, no signal for the death of mpirun, and no variable or setting of Open MPI
    and mpi4py.  Without MPI, it sets exception hooks only, which leave the frames within kos out of their reports.

    ``progress_thread=True`` advances operations with ``async_op=True`` on host memory while the program computes.
    Without it they advance only inside calls of kos (``Work.wait``, ``done``, another call).  Only computation that
    releases Python's lock overlaps, such as NumPy's on large arrays.  The thread helps where ranks wait for a network
    or have idle cores, not where the ranks of one host keep all cores busy.  It sleeps while nothing is in flight, and
    ends with the communicator that ``init`` returns.  Raises BackendUnavailable for an MPI without THREAD_MULTIPLE.

    ``nccl`` are options of NCCL by name, such as ``{"max_ctas": 8}``: see ``kos.comm.NCCLOptions``.  They are the
    same on all ranks, and groups that are split from the communicator inherit them.

    Raises BackendUnavailable, with the reason, where the named backend, or every backend for the ``device``, cannot
    run; InvalidArgument for a ``device`` with a backend for host memory, or ``nccl`` where NCCL is not used;
    RendezvousError where the ranks do not find each other, or request different things, and in a program that a rank
    has started with its launcher's variables.  Under mpirun, with ``process_hooks``, an uncaught exception on one rank
    ends the whole job.

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
    rendezvous.call, rendezvous.nccl = "init", options
    return communicator(
        Communicator, backend, rendezvous, timeout, device, progress_thread, owned=rendezvous is not given
    )


@without_own_frames
def join(
    address: str | None = None,
    *,
    secret: str | bytes | None = None,
    backend: str | None = None,
    timeout: float = 120.0,
    device: int | None = None,
    progress_thread: bool = False,
) -> Communicator:
    """Join the group whose members call ``grow`` or ``replace``; returns the communicator that these return there.

    ``address`` is ``Communicator.address`` of a member: "host:port", several with commas.  With a "/" in it, it is the
    path of a file that holds the address, and that may be written later.  The default is the variable KOS_JOIN.  If
    KOS_JOIN is a path on the members too, their leader writes the address there, and again after each change.
    ``secret`` is that of the group (default: KOS_SECRET, else the user's own, as for ranks of the environment).
    ``backend`` is that of the group; another one is refused.  ``timeout`` in seconds bounds the wait for the members;
    later waits have the group's.  ``device`` and ``progress_thread`` are as in ``kos.init``.

    The process has no launcher: it is the rank that the members give it, after theirs.  Sets no hook of the process.
    Raises InvalidArgument for a wrong argument; RendezvousError if the members refuse this process, with the reason, or
    if none admits it within the timeout; BackendUnavailable as in ``kos.init``.

        comm = kos.join("10.0.0.1:29400", timeout=600)
    """
    address = KOS_JOIN.get() if address is None else address
    if not isinstance(address, str) or not address:
        raise InvalidArgument(f"address: expected that of a member, or KOS_JOIN, got {address!r}")
    if secret is not None and (not secret or not isinstance(secret, str | bytes)):
        raise InvalidArgument(f"secret: expected a text or bytes, not empty, got {type(secret).__name__}")
    if backend is not None and not isinstance(backend, str):
        raise InvalidArgument(f"backend: expected the name of a backend, got {backend!r}")
    left = check_timeout(timeout)
    deadline = time.monotonic() + left
    device = None if device is None else number_in("device", device, 0, 1 << 16)
    progress_thread = check_bool("progress_thread", progress_thread)
    register_installed()
    dump_on_env_signal()
    hello = {"kos": versions()["kos"], "backend": backend, "device": device, "GPU": sees_gpu()}
    while True:
        rendezvous, terms = join_rendezvous(address, secret, hello, left)
        rendezvous.nccl = terms["nccl"]
        try:
            return communicator(
                Communicator, terms["backend"], rendezvous, terms["timeout"], device, progress_thread, agreed=True
            )
        except (RankLost, RendezvousError) as error:  # the members begin again without the ranks that it names
            begins_again = isinstance(error, RankLost) or (error.ranks and not error.on_every_rank)
            left = max(deadline - time.monotonic(), 0.001)
            if not begins_again or time.monotonic() > deadline:
                raise
