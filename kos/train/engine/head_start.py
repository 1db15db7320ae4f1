"""What a rank that trains on a GPU can begin before it knows the others: CUDA, libraries, its share of the weights.

The driver lets processes of a machine start one after another, for seconds where they are eight; what needs no GPU goes
on beside that.  What fails here fails again where it is needed, and is said there.  Imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kos.errors import ConfigError, KosError

if TYPE_CHECKING:
    import numpy as np
    from threadpoolctl import ThreadpoolController

    from kos.train.config.options import TrainConfig
    from kos.train.model.llama_config import LlamaConfig
    from kos.train.model.shapes import Stages
    from kos.train.parallel.mesh import Layout

DRIVER = Path("/proc/driver/nvidia")  # is there where NVIDIA's kernel driver is
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

unwanted = threading.Event()
"""Set where nobody will ask for the weights that are being drawn: the end of a process waits for those threads."""


@lru_cache(maxsize=1)
def thread_pools() -> ThreadpoolController:
    """Those of BLAS, looked up before any thread imports and never again: the loader holds its lock while it calls
    Python back for them, and a thread that imports an extension holds Python's while it waits for the loader's."""
    import numpy  # noqa: F401 - which loads it
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def begin_cuda(arguments: Sequence[str]) -> None:
    """Initialise the driver and this rank's GPU on a thread, unless a command line may ask for CPUs, help or a plan."""
    alone = ("-h", "--help", "--plan")
    other = any(word in alone or "cpu" in word or word.startswith("--config") for word in arguments)
    if other or not DRIVER.exists():
        return
    with suppress(OSError):  # by ctypes: the CUDA packages take as long to import
        cuda, thread = ctypes.CDLL("libcuda.so.1"), ThreadPoolExecutor(1)
        thread.submit(cuda.cuInit, 0)  # which imports nothing: it need not wait for BLAS
        with suppress(ImportError):  # main says it, with what to install
            thread_pools()
        thread.submit(_make_context, cuda)


def _make_context(cuda: ctypes.CDLL) -> None:
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return
    # In this order: the main thread imports the first of them first, too, and neither then waits for the other.
    from kos.comm.rendezvous.choose import launched_place
    from kos.cuda.devices import SYSFS, process_numa_node

    nodes = list((SYSFS / "devices/system/node").glob("node[0-9]*"))
    places = [os.environ[name] for name in _LOCAL_RANKS if name in os.environ] or ["0"] * (launched_place()[1] == 1)
    if places and (len(nodes) == 1 or process_numa_node() is None):  # else the GPU depends on where all ranks are bound
        cuda.cuDeviceGet(ctypes.byref(device), int(places[0]) % count.value)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def begin(config: TrainConfig, model: LlamaConfig | None, load_engine: Callable[[], object]) -> None:
    """Load libraries and draw the weights of ``model``, if it is known yet, on threads; nothing on ``--device cpu``."""
    if config.device == "cpu" or not DRIVER.exists():
        return
    load_engine()  # now, and not when the driver is there
    from kos.comm.rendezvous.choose import launched_place

    thread_pools()
    loading = threading.Event()
    ThreadPoolExecutor(1).submit(_load, loading)
    loading.wait()
    rank, ranks = launched_place()
    if model is not None and config.resume is None and config.init_from is None and rank < ranks:
        from kos.train.parallel.mesh import Layout

        with suppress(ConfigError):
            layout = Layout.of(ranks, dp=config.dp, tp=config.tp, pp=config.pp, cp=config.cp)
            if layout.pp == 1:
                weights(model, config.seed, layout, rank)


def _load(loading: threading.Event) -> None:
    """What the engine needs of packages and libraries: they need no driver, for which the rank waits meanwhile.

    Sets ``loading`` when it alone may import them: whoever asks ``kos.cuda.unavailable()`` from then on waits.
    """
    try:
        from kos.comm.gpu import nccl_binding
        from kos.cuda import driver, kernels
        from kos.train.ops.cuda import cublaslt

        with driver.starting:
            loading.set()
            for load in (kernels.nvrtc_version, cublaslt._library, nccl_binding.library):
                with suppress(KosError):
                    load()
            import_module("cuda.core")
    finally:
        loading.set()


@lru_cache(maxsize=1)
def weights(
    model: LlamaConfig, seed: int, layout: Layout, rank: int, stages: Stages = ((0,),)
) -> Future[np.ndarray]:
    """What ``draw_weights`` gives, drawn beside from the first call on; ``cache_clear`` frees it."""
    unwanted.clear()
    return ThreadPoolExecutor(1).submit(draw_weights, model, seed, layout, rank, stages, unwanted)


def draw_weights(
    model: LlamaConfig, seed: int, layout: Layout, rank: int, stages: Stages, unwanted: threading.Event | None = None
) -> np.ndarray:
    """The rank's share of the initial weights of its stages; not all of it once it is ``unwanted``."""
    at, ranks = layout.coordinates(rank), layout.ranks // layout.pp
    parts = model.parts(at["tp"], layout.tp, at["pp"], stages)
    threads = max(1, len(os.sched_getaffinity(0)) // layout.ranks - 1)
    share = model.shares(ranks, *parts)[rank % ranks]  # pp is the outermost axis
    return model.draw_share(share, seed, threads, unwanted, parts)
