"""The rank that a launcher assigned to this process, from environment variables alone, before MPI is loaded."""

from __future__ import annotations

import os

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),  # PMIx has no size
)
"""The variables with the rank and with the number of ranks, for each kind of launcher."""
OF_OTHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


def under_mpirun() -> bool:
    """Whether an MPI launcher started this process.  Does not import mpi4py."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def by_variables() -> bool:
    """Whether the environment sets the rank of this process without MPI, completely or in part.

    A shell of a Slurm allocation has a rank number too.  Slurm's variables therefore count only in a step of srun with
    several tasks.
    """
    return not os.environ.keys().isdisjoint(VARIABLES) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def launched_rank() -> int:
    """The rank of this process, from the launcher's environment variables, before MPI starts; 0 for a group of one."""
    return launched_place()[0]


def launched_place() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as ``kos.init`` determines them before MPI starts.

    A shell of a Slurm allocation has a rank number too, but is a group of one.
    """
    if not under_mpirun() and not by_variables():
        return 0, 1
    for names in OF_MPI if under_mpirun() else OF_OTHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return 0, 1
