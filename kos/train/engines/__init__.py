"""Engines: what computes a training step.  The loop gives them steps and gets back losses, on any hardware."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kos.comm.communicator import Communicator
from kos.cuda import device_info, require, unavailable
from kos.cuda.kernels import nvrtc_version
from kos.errors import ConfigError, KosError
from kos.train import head_start
from kos.train.config import TrainConfig
from kos.train.data import Dataset
from kos.train.failures import same_on_all
from kos.train.llama_config import LlamaConfig
from kos.train.model import Llama, Weights
from kos.train.optimizer import AdamW

LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores

_log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What a step came to, the same on every rank but for ``seconds``."""

    loss: float
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float
    stop: bool  # whether any rank was asked to stop


class Engine(Protocol):
    """A model in training: its weights and moments live where the engine computes.  All calls are collective."""

    lag: int
    """How many steps may be started before the first of them is finished, so that the device never waits."""

    chosen: dict[str, str]
    """Settings that it chose itself, and their values."""

    place: str
    """What it computes on, for errors."""

    def describe(self) -> str:
        """Lines for the log: where it computes, and with how much memory."""

    def new_state(self) -> AdamW:
        """Weights and moments of zeros in host memory, to be filled and given to ``load``."""

    def draw_weights(self) -> None:
        """Draw this rank's part of the initial weights; waits for no other.  ``load(None)`` gives it to all."""

    def load(self, state: AdamW | None) -> None:
        """Take over rank 0's ``state``, which the other ranks have not; or what all have drawn."""

    def state(self) -> AdamW | None:
        """Weights and moments in host memory; on rank 0."""

    def start_step(self, step: int, stop: bool) -> None:
        """Begin the step (counted from 0); ``stop``: this rank was asked to stop."""

    def finish_step(self, step: int) -> StepResult:
        """Wait for a step that was begun, the oldest first."""

    def not_finite(self, step: int) -> str | None:
        """The first tensor whose gradient was not finite in this step, which no later step followed."""

    def evaluate(self) -> float:
        """The mean loss over the validation windows, for any number of ranks."""

    def sampler(self) -> tuple[Llama, Weights]:
        """Model and weights to draw text from."""

    def close(self) -> None:
        """Let go of what would keep the communicator from ending; waits for nothing."""

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        """What else is worth a column: per GPU, model flops utilisation by both conventions, memory in bytes."""


Between = Callable[[str, float], None]
"""Called on all ranks between the parts of what takes long, with what it is and the share that is done; may raise."""


def make_engine(
    config: TrainConfig, model: LlamaConfig, data: Dataset, comm: Communicator,
    between: Between = lambda what, share: None,
) -> Engine:  # fmt: skip
    """The engine of ``config.device``, which ``choose_device`` has chosen."""
    if config.device == "cuda":
        from kos.train.engines.cuda import CudaEngine

        return CudaEngine(config, model, data, comm)
    from kos.train.engines.cpu import CpuEngine

    return CpuEngine(config, model, data, comm, between)


def choose_device(asked: str, comm: Communicator) -> str:
    """``cpu`` or ``cuda``, for all ranks.  ConfigError where GPUs are asked for and a rank cannot have one."""
    same_on_all(comm, {"device": asked})
    if asked == "cpu":
        return asked
    answers = [answer.decode().partition("\n") for answer in comm.all_gather_bytes(_usable_gpu(comm).encode())]
    reasons = [(rank, reason) for rank, (uuid, _, reason) in enumerate(answers) if not uuid]
    if not reasons and (asked == "cuda" or len({uuid for uuid, _, _ in answers}) == comm.size):
        return "cuda"
    rank, reason = reasons[0] if reasons else (0, "ranks share a GPU")
    if asked == "cuda":
        raise ConfigError(f"--device cuda: expected a GPU for every rank, got none for rank {rank}: {reason}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # on purpose
    if comm.rank == 0 and (unavailable() is None or (head_start.DRIVER.exists() and not hidden)):
        _log.warning("training on the CPU, not on this machine's GPUs: %s", reason)
    return "cpu"


def _usable_gpu(comm: Communicator) -> str:
    """The UUID of this rank's GPU; or nothing, a newline and why it has none."""
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
        from kos.train.ops import cublaslt

        nvrtc_version()
        cublaslt._library()
        importlib.import_module("cuda.core")
    except ImportError as error:
        return f"\nexpected the packages of 'pip install kos[cuda]', got: {error}"
    except KosError as error:
        return f"\n{str(error).removeprefix('CUDA: ')}"
    return device.uuid
