"""Which rendezvous this process takes, by how it was started; and its rank before that."""

from __future__ import annotations

import os

from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.env import EnvRendezvous, Place
from kos.comm.rendezvous.mpi import MPIRendezvous
from kos.comm.rendezvous.threads import SingleRendezvous

_RANK_AND_SIZE = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def default_rendezvous(timeout: float, *, by_mpi: bool = False, process_hooks: bool = True) -> Rendezvous:
    """MPI under mpirun; else by the environment where it says which rank this is; else a group of one (of MPI's)."""
    if not mpi_job.under_mpirun():
        if Place.is_given():
            return EnvRendezvous(timeout)
        if not by_mpi:
            return SingleRendezvous(timeout)
    return MPIRendezvous(timeout=timeout, process_hooks=process_hooks)


def launched_rank() -> int:
    """This process's rank as its launcher's environment says it, before MPI starts; 0 where it is alone."""
    return launched_place()[0]


def launched_place() -> tuple[int, int]:
    """That, and how many ranks there are.

    By the rule of ``default_rendezvous``: a shell of an allocation has a number too, but no ranks beside it.
    """
    if not mpi_job.under_mpirun() and not Place.is_given():
        return 0, 1
    for names in mpi_job.RANK_AND_SIZE if mpi_job.under_mpirun() else _RANK_AND_SIZE:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return 0, 1
