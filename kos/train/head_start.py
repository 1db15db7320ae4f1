"""What a rank that trains on a GPU can begin before it knows the others: CUDA, cuBLASLt, its share of the weights.

The driver lets processes of a machine start one after another, for seconds where they are eight; what needs no GPU goes
on beside that.  What fails here fails again where it is needed, and is said there.  Imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from kos.train.config import TrainConfig
    from kos.train.llama_config import LlamaConfig

DRIVER = Path("/proc/driver/nvidia")  # is there where NVIDIA's kernel driver is
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def begin_cuda(arguments: Sequence[str]) -> None:
    """Initialise the driver and this rank's GPU on a thread, unless a command line may ask for CPUs or for help."""
    other = any(word in ("-h", "--help") or "cpu" in word or word.startswith("--config") for word in arguments)
    if DRIVER.exists() and not other:
        ThreadPoolExecutor(1).submit(_initialise)


def _initialise() -> None:
    ctypes.CDLL("libcuda.so.1").cuInit(0)  # before the CUDA packages are imported, which takes as long
    from kos.cuda import devices, driver

    place = next(os.environ[name] for name in _LOCAL_RANKS if name in os.environ)
    found = devices.visible_devices()
    if devices.process_numa_node() is None or len({device.numa_node for device in found}) == 1:
        driver.primary_context(int(place) % len(found))  # else it depends on where the other ranks are bound


def begin(config: TrainConfig, model: LlamaConfig | None) -> None:
    """Load cuBLASLt and draw the weights of ``model``, if it is known yet, on threads; nothing where CPUs may train."""
    if config.device == "cpu" or not DRIVER.exists():
        return
    from kos.comm.mpi_job import launched_place
    from kos.cuda import unavailable
    from kos.train.ops import cublaslt

    ThreadPoolExecutor(1).submit(lambda: unavailable() or cublaslt._library())
    rank, ranks = launched_place()
    if model is not None and config.resume is None and config.init_from is None and rank < ranks:
        weights(model, config.seed, rank, ranks)


@lru_cache(maxsize=1)
def weights(model: LlamaConfig, seed: int, rank: int, ranks: int) -> Future[np.ndarray]:
    """The rank's share of the initial weights, which is being drawn from the first call on; ``cache_clear`` lets go."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks - 1)
    return ThreadPoolExecutor(1).submit(model.draw_share, model.shares(ranks)[rank], seed, threads)
