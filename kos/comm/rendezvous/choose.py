"""Chooses the rendezvous of this process by its launcher, and finds its rank before MPI starts."""

from __future__ import annotations

import os
import threading

from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.env import EnvRendezvous, Place
from kos.comm.rendezvous.mpi import MPIRendezvous
from kos.comm.rendezvous.threads import RankThread, SingleRendezvous
from kos.errors import InvalidArgument

_RANK_AND_SIZE = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def default_rendezvous(timeout: float, *, by_mpi: bool = False, process_hooks: bool = True) -> Rendezvous:
    """MPI under mpirun; else the environment if it sets the rank; else a group of one (of MPI if ``by_mpi``).

    Raises InvalidArgument in a thread of ``kos.testing.spawn``, where each rank would become a group of one.
    """
    if isinstance(threading.current_thread(), RankThread):
        raise InvalidArgument(
            "init: expected a function of the comm of kos.testing.spawn, got kos.init() in its thread"
        )
    if not mpi_job.under_mpirun():
        if Place.is_given():
            return EnvRendezvous(timeout)
        if not by_mpi:
            return SingleRendezvous(timeout)
    return MPIRendezvous(timeout=timeout, process_hooks=process_hooks)


def launched_rank() -> int:
    """This process's rank from its launcher's environment, before MPI starts; 0 for a group of one."""
    return launched_place()[0]


def launched_place() -> tuple[int, int]:
    """The launched rank and the number of ranks.

    Follows ``default_rendezvous``: a shell of a Slurm allocation has a rank number too, but is a group of one.
    """
    if not mpi_job.under_mpirun() and not Place.is_given():
        return 0, 1
    for names in mpi_job.RANK_AND_SIZE if mpi_job.under_mpirun() else _RANK_AND_SIZE:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return 0, 1
