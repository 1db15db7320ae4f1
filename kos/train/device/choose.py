"""The choice of the device that computes the training steps of a run."""

from __future__ import annotations

import logging
import os
from typing import Any

from kos.comm.communicator import Communicator
from kos.cuda import device_info, require, unavailable
from kos.cuda.kernels import nvrtc_version
from kos.errors import KosError, SettingError, install
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.data.corpus import Show
from kos.train.device import Device
from kos.train.machine import DRIVER
from kos.train.model.families import FAMILIES
from kos.train.model.llama import LlamaConfig
from kos.train.parallel.mesh import AXES, NAMED, Layout, Mesh

LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores

_log = logging.getLogger(__name__)


def make_device(
    config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh,
    show: Show = lambda what, share: None, **program: Any,
) -> Device:  # fmt: skip
    """The device of ``config.device``, which ``choose_device`` has chosen; ``program`` is as for ``Device``."""
    if config.device == "cuda":
        from kos.train.device.cuda import CudaDevice

        return CudaDevice(config, model, data, mesh, show, **program)
    from kos.train.device.cpu import CpuDevice

    return CpuDevice(config, model, data, mesh, show, **program)


def layout_of(config: TrainConfig, ranks: int) -> Layout:
    """The requested layout.  ConfigError if it does not fit the ranks, the family of the model or the sequences."""
    family, layout = config.model.model_type, Layout.of(ranks, **{axis: getattr(config, axis) for axis in NAMED})
    for axis in AXES:
        if (size := getattr(layout, axis)) > 1 and axis not in (known := FAMILIES[family].axes):
            expected = f"1 in a model of type {family}, which supports {', '.join(known)} only"
            raise SettingError(f"--{axis} {size}", expected, size, also=["model_type"])
    parts = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if config.seq_len % parts:
        of = " × ".join(["--tp"] * (layout.tp > 1) + ["2", "--cp"] * (layout.cp > 1))
        raise SettingError("--seq-len", f"a multiple of {parts}", config.seq_len, of, also=["tp", "cp"])
    return layout


def choose_device(kind: str, comm: Communicator) -> str:
    """``cpu`` or ``cuda``, for all ranks.  ConfigError if GPUs are requested and a rank cannot have one."""
    if kind == "cpu":
        return kind
    answers = [answer.decode().partition("\n") for answer in comm.all_gather_bytes(_usable_gpu(comm).encode())]
    reasons = [(rank, reason) for rank, (uuid, _, reason) in enumerate(answers) if not uuid]
    if not reasons and (kind == "cuda" or len({uuid for uuid, _, _ in answers}) == comm.size):
        return "cuda"
    rank, reason = reasons[0] if reasons else (0, "ranks share a GPU")
    if kind == "cuda":
        raise SettingError("--device cuda", "a GPU for every rank", f"none for rank {rank}: {reason}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # on purpose
    if comm.rank == 0 and (unavailable() is None or (DRIVER.exists() and not hidden)):
        _log.warning("training on the CPU, not on this machine's GPUs: %s", reason)
    return "cpu"


def _usable_gpu(comm: Communicator) -> str:
    """The UUID of this rank's GPU; or nothing, a newline and the reason why it has none."""
    try:
        require()
        if comm.size > 1 and comm.device is None:
            why = comm.probes["nccl"].reason if "nccl" in comm.probes else f"backend {comm.backend_name}"
            return f"\nno backend carries its memory ({why})"
        device = device_info(comm.device or 0)
        if device.compute_capability < LEAST_CAPABILITY:
            got = ".".join(map(str, device.compute_capability))
            least = ".".join(map(str, LEAST_CAPABILITY))
            return f"\nexpected compute capability {least}, got {got} ({device.name})"
        from kos.train.ops.cuda import cublaslt

        nvrtc_version()
        cublaslt.library()
    except ImportError as error:
        return f"\nexpected its packages ({install('cuda')}), got: {error}"
    except KosError as error:
        return f"\n{str(error).removeprefix('CUDA: ')}"
    return device.uuid
