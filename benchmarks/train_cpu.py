"""Tokens per second of training on the CPU, kos beside eager PyTorch: ``python -m benchmarks.train_cpu``.

The same model, batch and work in every row: forward, backward, clipping by global norm and AdamW.  A
measurement is a process (or job of processes) of its own that warms up, then takes the median step of
several; measurements of all rows alternate, and a row's figure is the median of its measurements.
Prints a table, writes a JSON object with ``--out``; ``--profile`` prints where kos' time goes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BETAS, WEIGHT_DECAY, MAX_NORM, LR = (0.9, 0.95), 0.1, 1.0, 1e-3
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
}

WORKERS = ("kos", "torch", "torch-whole")  # torch in kos' micro-batches, and with its whole batch at once


# --- one measurement, in a process of its own --------------------------------------------------------


class Setting(NamedTuple):
    """A preset on bytes, as ``size`` ranks work on it."""

    model: Any
    batch_size: int
    micro_batch_size: int
    seq_len: int

    @classmethod
    def of(cls, preset: str, size: int) -> Setting:
        from kos.train.config import TrainConfig

        config = TrainConfig.from_preset(preset).for_world(size)
        return cls(config.model_config_for(256), config.batch_size, config.micro_batch_size, config.seq_len)

    def batch(self, rows: int) -> Any:
        """Random tokens and targets, (2, rows, seq_len)."""
        import numpy as np

        return np.random.default_rng(0).integers(0, 256, (2, rows, self.seq_len), dtype=np.int32)


def kos_step(preset: str, seconds: dict[str, list[float]] | None = None) -> tuple[Callable[[], None], int]:
    """A training step of kos on this rank, and the tokens that all ranks see in it."""
    import kos
    from kos.train.model import Llama
    from kos.train.ops import numpy as numpy_ops
    from kos.train.optimizer import AdamW, clip_coefficient, global_norm
    from kos.train.parallel.data import DataParallel, deal
    from kos.train.parameters import Parameters

    comm = kos.init()
    setting = Setting.of(preset, comm.size)
    config = setting.model
    model = Llama(config, numpy_ops if seconds is None else Timed(numpy_ops, seconds))
    weights = Parameters(config.parameter_shapes(), groups=config.fused_groups())
    gradients = weights.like()
    config.init_weights(weights, 0)
    optimizer = AdamW(weights, betas=BETAS, weight_decay=WEIGHT_DECAY)
    parallel = DataParallel(comm, gradients)
    rounds = deal(setting.batch_size, setting.micro_batch_size, comm.rank, comm.size)
    parts = [setting.batch(len(rows)) for rows in rounds]

    def step() -> None:
        for i, (tokens, targets) in enumerate(parts):
            ready = parallel.gradient_ready if i + 1 == len(parts) else None
            model.loss_and_gradients(
                weights, tokens, targets, gradients, accumulate=parallel.accumulates(i), on_gradient=ready
            )
            parallel.finish_round(i, len(parts))
        scale = 1 / (len(parts) * comm.size)
        norm = global_norm(gradients.flat) * scale
        optimizer.step(gradients, LR, scale * clip_coefficient(norm, MAX_NORM))

    return step, setting.batch_size * setting.seq_len


def torch_step(preset: str, whole: bool) -> tuple[Callable[[], None], int]:
    """As ``kos_step``, in eager PyTorch, in kos' micro-batches or with the ``whole`` batch at once.

    Ranks are joined by DDP over gloo.
    """
    import torch

    from benchmarks.torch_llama import TorchLlama

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    setting = Setting.of(preset, size)
    model: Any = TorchLlama(setting.model, setting.seq_len)
    if size > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    rows = setting.batch_size // size
    tokens, targets = (torch.from_numpy(a).long() for a in setting.batch(rows))
    rows_at_once = rows if whole else setting.micro_batch_size
    parts = [slice(start, start + rows_at_once) for start in range(0, rows, rows_at_once)]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in parts:
            if size > 1:
                model.require_backward_grad_sync = part is parts[-1]
            (model(tokens[part], targets[part]) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()

    return step, setting.batch_size * setting.seq_len


def work(arguments: argparse.Namespace) -> None:
    """One rank of one measurement: the median step after a warm-up.  Rank 0 prints tokens per second."""
    if arguments.worker == "kos":
        step, tokens = kos_step(arguments.preset)
    else:
        step, tokens = torch_step(arguments.preset, arguments.worker == "torch-whole")
    for _ in range(3):
        step()
    times = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")) == "0":
        print(json.dumps(tokens / median(times)), flush=True)


# --- where kos' time goes ----------------------------------------------------------------------------


class Timed:
    """A dialect that keeps the seconds of each call."""

    def __init__(self, ops: Any, seconds: dict[str, list[float]]) -> None:
        self._ops, self._seconds = ops, seconds

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if name in ("step", "make_arena"):
            return function

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self._seconds.setdefault(name, []).append(time.perf_counter() - began)
            return result

        return timed


def print_profile(arguments: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {}
    step, tokens = kos_step(arguments.preset, seconds)
    for _ in range(2):
        step()
    seconds.clear()
    began = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    total = time.perf_counter() - began
    rest = total - sum(map(sum, seconds.values()))
    table = [(name, sum(times), len(times)) for name, times in seconds.items()]
    table.append(("AdamW, clipping and the rest", rest, arguments.steps))
    for name, spent, calls in sorted(table, key=lambda row: -row[1]):
        each = 1e3 * spent / arguments.steps
        print(f"{name:30} {spent / total:6.1%} {each:8.2f} ms a step in {calls // arguments.steps} calls")
    print(f"{tokens * arguments.steps / total:,.0f} tokens/s")


# --- all measurements --------------------------------------------------------------------------------


class Row(NamedTuple):
    """One way to use the machine."""

    label: str
    worker: str
    ranks: int
    threads: int


def rows_for(cores: int, ranks: int) -> list[Row]:
    rows = []
    for threads in sorted({1, cores}):
        rows += [Row(f"1 process x {threads}", worker, 1, threads) for worker in WORKERS]
    label = f"{ranks} ranks x 1 (torch: DDP over gloo)"
    return rows + [Row(label, worker, ranks, 1) for worker in WORKERS]


def run(row: Row, arguments: argparse.Namespace) -> float:
    """Tokens per second of one measurement."""
    command = [sys.executable, "-m", "benchmarks.train_cpu", "--worker", row.worker]
    command += ["--preset", arguments.preset, "--steps", str(arguments.steps)]
    environment = MPI_ENVIRONMENT | os.environ
    environment |= {name: str(row.threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    jobs = [(command, environment)]
    if row.ranks > 1 and row.worker == "kos":
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        jobs = [([mpirun or "mpirun", "-n", str(row.ranks), *command], environment)]
    elif row.ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(row.ranks)}
        jobs = [(command, environment | meet | {"RANK": str(rank)}) for rank in range(row.ranks)]
    processes = [
        subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) for argv, env in jobs
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{row}: exit codes {[process.returncode for process in processes]}")
    return float(outputs[0])


def machine() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    import numpy as np  # noqa: F401  (so that its BLAS is among those listed)

    blas = [f"{lib['internal_api']} {lib['version']} {lib.get('architecture')}" for lib in threadpool_info()]
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "blas": blas}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each row")
    parser.add_argument("--out", type=Path, help="where to write the JSON object")
    parser.add_argument("--profile", action="store_true", help="print where kos' time goes, and end")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    if arguments.profile:
        return print_profile(arguments)

    from kos.train.machine import git_commit

    hardware = machine()
    rows = rows_for(hardware["cores"], arguments.ranks)
    figures: dict[Row, list[float]] = {row: [] for row in rows}
    for _ in range(arguments.repeats):
        for row in rows:
            figures[row].append(run(row, arguments))
    result = {
        "hardware": hardware,
        "versions": {name: metadata.version(name) for name in ("numpy", "torch", "mpi4py")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": " ".join(["python -m benchmarks.train_cpu", *sys.argv[1:]]),
        "preset": arguments.preset,
        "rows": [
            row._asdict() | {"tokens_per_second": median(values), "measurements": values}
            for row, values in figures.items()
        ],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"tokens/s of the {arguments.preset} preset on {hardware['cores']} cores of {hardware['cpu']}")
    for label in dict.fromkeys(row.label for row in rows):
        best = {
            kind: max(
                median(figures[row]) for row in rows if row.label == label and row.worker.startswith(kind)
            )
            for kind in ("kos", "torch")
        }
        print(
            f"{label:40} kos {best['kos']:9,.0f}   torch {best['torch']:9,.0f}   kos/torch "
            f"{best['kos'] / best['torch']:.2f}"
        )


if __name__ == "__main__":
    main()
