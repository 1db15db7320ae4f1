"""Tokens per second of training with kos and PyTorch: ``python -m benchmarks.train --preset tiny --compare torch``.

The same model, weights, tokens and work in every row: forward, backward, clipping by global norm and AdamW.  kos is
the device that ``python -m kos.train`` runs, whose flags are taken here too (``--tp 2`` is a layout); torch are the
``--torch`` variants of ``benchmarks.torch_llama``.  With ``--compare fp8`` the other is kos with ``--dtype fp8``;
``--torch fp8,cudnn-master-tensorwise,cudnn-master-rowwise`` adds torchao's float8.
Each is a group of processes of its own, one a rank, which begins with the same weights and has a time limit: what fails
loses its row only, and ``--json`` is written after each.  kos is measured between the variants of torch, each
``--repeats`` times, the median step of ``--steps``; a row's figure is the median.  Losses are compared step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import numpy as np

from benchmarks import idle
from kos.bench import report
from kos.commands import program
from kos.cuda import device_info, unavailable
from kos.errors import ConfigError, InvalidArgument, KosError
from kos.files import check_writable, replace_file
from kos.launcher import launched_rank
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, Tokens
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.device.choose import layout_of
from kos.train.model.llama import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # steps before the first measurement
VARIANTS = {
    "cpu": "eager,eager-whole",
    "cuda": "flash-autocast,cudnn-autocast,flash-master,cudnn-master",
    "picotron": "flash,flash-fused",
    "fp8": "fp8",
}
HEADER = ("hardware", "driver", "versions", "commit")  # what rows of one file have in common
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3, "fp8": 1e-2}  # relative difference of losses
WORDS = {
    "flash", "cudnn", "autocast", "master", "fsdp", "graphs", "eager", "compile", "whole", "checkpoint", "async",
    "alltoall", "fused", "fp8", "tensorwise", "rowwise",
}  # fmt: skip
EIGHT_BITS = {"fp8", "tensorwise", "rowwise"}  # of WORDS: whose flops have no peak here
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")  # what begins variables that the ranks must not see
ROW_KEYS = (
    "preset", "batch_size", "seq_len", "ranks", "layout", "implementation", "variant", "tokens_per_second", "step_ms",
    "mfu_causal", "mfu_noncausal", "peak_memory_bytes", "first_step_seconds", "threads", "loss", "loss_difference",
    "measurements",
)  # fmt: skip
"""The keys of a row: ``batch_size`` is a data-parallel rank's, memory a rank's, tokens a second those of all ranks;
``loss`` is that of the last step that all rows have, ``loss_difference`` the largest of any step, relative to kos.
For picotron in bfloat16 it is that of the first step: see ``first_step_only``.
With ``--idle`` a row also has ``stages``: see ``benchmarks.idle``."""


# --- one rank of one implementation, a process of its own -------------------------------------------------


def model_of(config: TrainConfig) -> LlamaConfig:
    """For bytes, unless the preset says for how many tokens."""
    return config.model_config_for(config.model.vocab_size or 256)


def random_tokens(config: TrainConfig, model: LlamaConfig) -> Dataset:
    """Tokens of which low ones are more frequent, so that there is something to learn."""
    draws = np.random.default_rng(config.seed).random(max(1 << 21, 2 * config.seq_len))
    tokens = Tokens([(model.vocab_size * draws**4).astype(np.int32)])
    tokenizer = NumberTokenizer(model.vocab_size)
    return Dataset("random", tokens, tokens, tokenizer, config.seed, config.batch_size, config.seq_len, 1, "")


class KosTraining:
    """The device of ``python -m kos.train``, driven as its loop drives it."""

    def __init__(self, comm: Any, config: TrainConfig, model: LlamaConfig, data: Dataset, threads: int) -> None:
        from kos.memory.pool import pool_of
        from kos.train.device.choose import make_device
        from kos.train.machine import limit_threads
        from kos.train.parallel.mesh import Mesh

        self.comm = comm
        limit_threads(comm, threads)
        layout = layout_of(config, comm.size)
        self.device = make_device(config, model, data, Mesh(comm, layout))
        ops = getattr(self.device, "ops", None)
        self.pool = None if ops is None else pool_of(ops.device)
        self.peak_before = self.pool.reset_peak() if self.pool else 0
        self.device.draw_weights()
        axes = [f"{axis}{getattr(layout, axis)}" for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1]
        schedule = [config.pp_schedule] * (layout.pp > 1)
        self.layout = " ".join([*(axes or ["dp1"]), *schedule, *["zero1"] * bool(config.zero)])

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """The seconds and losses of steps ``first`` …, ``count`` of them."""
        self.comm.all_gather_bytes(b"")
        started, end, results = first, first + count, []
        for step in range(first, end):
            while started < min(step + 1 + self.device.steps_in_flight, end):
                self.device.start_step(started, False)
                started += 1
            results.append(self.device.finish_step(step))
        return [result.seconds for result in results], [result.loss for result in results]

    def peak_memory(self) -> int | None:
        """Most bytes of device memory in use at once, with memory that other ranks can access; None on CPUs.

        The search for matrix products comes before that memory is allocated, and takes as much for activations.
        """
        device: Any = self.device
        return max(self.peak_before, self.pool.statistics().peak + device.reachable_bytes) if self.pool else None


def work(options: argparse.Namespace, config: TrainConfig) -> None:
    """One rank: warm up, say what that took, then measure once for each line that comes."""
    rank = int(os.environ["RANK"])
    if options.worker == "fp8":
        config = config.model_copy(update={"dtype": "fp8"})
    config = config.for_world(layout_of(config, int(os.environ["WORLD_SIZE"])).dp, options.device)
    model = model_of(config)
    training: Any
    stamps = None
    if options.worker in ("kos", "fp8"):
        import kos

        comm = kos.init(config.backend, timeout=config.timeout)
        training = KosTraining(comm, config, model, random_tokens(config, model), options.threads)
        stamps = idle.Stamps(training.device) if options.idle else None
    elif options.compare == "picotron":
        from benchmarks.picotron_llama import PicotronTraining

        training = PicotronTraining(config, model, random_tokens(config, model), options.worker, options.picotron)
    else:
        from benchmarks.torch_parallel import make_training

        training = make_training(config, model, random_tokens(config, model), options.worker)

    def say(**facts: Any) -> None:
        if rank == 0:
            print(json.dumps(facts), flush=True)

    _, losses = training.run(0, 1)
    first_step = time.time() - float(os.environ["LAUNCHED"])
    losses += training.run(1, WARM_UP)[1]
    say(first_step_seconds=first_step, losses=losses, layout=training.layout)
    for line in sys.stdin:
        seconds, losses = training.run(int(line), options.steps)
        memory = training.peak_memory() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        stages = {"stages": stamps.facts()} if stamps else {}
        say(seconds=median(seconds), losses=losses, peak_memory_bytes=memory, **stages)
    if isinstance(training, KosTraining):
        training.device.close()  # before the communicator ends


# --- the processes of all ranks ---------------------------------------------------------------------------


class Lost(Exception):
    """A group of processes that ended, or took too long."""


class Stopped(Lost):
    """The whole benchmark was asked to end: what is measured by then counts."""


def stop(number: int, frame: Any) -> NoReturn:
    raise Stopped("stopped by a signal")


class Group:
    """The ranks of one implementation, each a process of ``program``."""

    program = (sys.executable, "-m", "benchmarks.train")

    def __init__(self, name: str, options: argparse.Namespace, arguments: list[str], logs: Path) -> None:
        self.name, self.limit, self.log = name, options.limit, logs / name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.lost = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
        environment |= {f"{library}_NUM_THREADS": str(options.threads) for library in ("OMP", "OPENBLAS", "MKL")}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LAUNCHED": str(time.time())}
        command = [*self.program, *arguments, "--worker", name]
        self.processes = []
        for rank in range(options.ranks):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
            with open(f"{self.log}-{rank}", "w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "bufsize": 0}
                self.processes.append(subprocess.Popen(command, env=environment | told, cwd=ROOT, **pipes))  # type: ignore[call-overload]

    def warm_up(self) -> None:
        """Wait until the first steps are over."""
        self.facts = self._answer()
        self.losses += self.facts.pop("losses")

    def measure(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # who died is found below
                process.stdin.write(f"{len(self.losses)}\n".encode())
        answer = self._answer()
        self.seconds.append(answer.pop("seconds"))
        self.losses += answer.pop("losses")
        self.facts |= answer

    def _answer(self) -> dict[str, Any]:
        """The next JSON object that rank 0 prints."""
        stdout: Any = self.processes[0].stdout
        deadline = time.monotonic() + self.limit
        while time.monotonic() < deadline:
            if select.select([stdout], [], [], 0.2)[0]:
                line = stdout.readline()
                if line.startswith(b"{"):
                    return dict(json.loads(line))
            dead = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            if dead:
                said = [line for line in Path(f"{self.log}-{dead[0]}").read_text().splitlines() if line.strip()]
                word = said[-1] if said else "without a word"
                self.lost = True
                if self.name == "kos" and self.processes[dead[0]].returncode == 2:
                    raise ConfigError(word.removeprefix("kos: error: "))
                raise Lost(f"rank {dead[0]} ended: {word[:300]}")
        self.lost = True
        raise Lost(f"no answer for {self.limit:g} s")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one whose driver is stuck must not hold up the rest
                process.wait(30)


Keep = Callable[[list[Group], dict[str, str]], object]


def measure(
    options: argparse.Namespace, arguments: list[str], logs: Path, keep: Keep = lambda groups, skipped: None,
    make_group: Callable[..., Any] = Group,
) -> tuple[list[Group], dict[str, str]]:  # fmt: skip
    """Measure kos and every variant of torch: those that succeeded, and why others failed; ``keep`` gets each."""
    variants = options.torch.split(",") if options.compare else []
    kos = make_group("kos", options, arguments, logs)
    groups, skipped, enough = [kos], {}, options.repeats
    try:
        kos.warm_up()
        if options.apart or not variants:
            for _ in range(options.repeats):
                kos.measure()
            kos.end()
        for number, variant in enumerate(variants):
            torch = make_group(variant, options, arguments, logs)
            try:
                torch.warm_up()
                for turn in range(number * options.repeats, (number + 1) * options.repeats):
                    if not options.apart and len(kos.seconds) * len(variants) <= turn:  # its own, spread over all
                        kos.measure()
                    torch.measure()
                groups.append(torch)
            except Lost as error:
                if kos.lost:
                    raise
                skipped[variant] = str(error)
                if isinstance(error, Stopped):
                    enough = 1
                    groups += [torch] * bool(torch.seconds)
                    break
            finally:
                torch.end()
            if kos.seconds:
                keep(groups, skipped)
        while len(kos.seconds) < enough:  # of torch not all came as far
            kos.measure()
    except Lost as error:
        if not kos.seconds:
            raise
        skipped["kos"] = str(error)
    finally:
        kos.end()
    keep(groups, skipped)
    return groups, skipped


def first_step_only(options: argparse.Namespace, dtype: str) -> bool:
    """Whether only the first step's losses can be compared.

    picotron's AdamW updates bfloat16 weights. Updates of less than half a unit in the last place are lost. While the
    learning rate warms up, nearly all updates are that small.
    """
    return options.compare == "picotron" and dtype.startswith("bfloat16")


def make_rows(
    groups: list[Group], options: argparse.Namespace, config: TrainConfig, gpu: str = ""
) -> list[dict[str, Any]]:
    """The row of each group.  ``gpu``: the name of the GPU, by which its peak is known."""
    layout = layout_of(config, options.ranks)
    config = config.for_world(layout.dp, options.device)
    model = model_of(config)
    peak = None
    if options.device == "cuda" and config.dtype == "bfloat16":
        from kos.train.machine import peak_flops

        peak = peak_flops(gpu)
    flops, rows = model.flops_per_token(config.seq_len), []
    variant = config.dtype + "-grads" * (config.grad_dtype == "bfloat16") + "-deterministic" * config.deterministic
    steps = min(len(group.losses) for group in groups)
    other = options.compare
    for group in groups:
        pairs = list(zip(groups[0].losses, group.losses, strict=False))
        if first_step_only(options, config.dtype):
            pairs = [pair for step, pair in enumerate(pairs) if step == 0 or not np.isfinite(pair[1])]
        seconds = median(group.seconds)
        speed = config.batch_size * config.seq_len / seconds
        each = speed / options.ranks / peak if peak and not EIGHT_BITS & set(group.name.split("-")) else None
        row = {
            "preset": options.name or config.preset,
            "batch_size": config.batch_size // layout.dp,
            "seq_len": config.seq_len,
            "ranks": options.ranks,
            "implementation": "kos" if group.name in ("kos", "fp8") else {"fp8": "torch"}.get(other, other),
            "variant": variant if group.name == "kos" else group.name,
            "tokens_per_second": speed,
            "step_ms": 1e3 * seconds,
            "mfu_causal": each and each * flops.causal,
            "mfu_noncausal": each and each * flops.noncausal,
            "threads": options.threads if options.device == "cpu" else None,
            "loss": group.losses[steps - 1],
            "loss_difference": float(np.max([abs(ours - theirs) / ours for ours, theirs in pairs])),
            "measurements": [1e3 * seconds for seconds in group.seconds],
            **group.facts,
        }
        rows.append({key: _rounded(row[key]) for key in (*ROW_KEYS, *row.keys() & {"stages"})})
    return rows


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def print_rows(rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    first = rows[0]
    ranks = f"{first['ranks']} rank{'s' * (first['ranks'] > 1)}"
    print(f"{first['preset']}, {first['batch_size']} x {first['seq_len']} tokens a rank, {ranks}")
    heads = ("tokens/s", "step ms", "MFU", "GiB", "first s", "kos is x", "losses within")
    print(f"{'':24}" + "".join(f"{head:>14}" for head in heads))
    for row in rows:
        mfu = f"{row['mfu_causal']:.1%}" if row["mfu_causal"] else "-"
        print(
            f"{row['implementation'] + ' ' + row['variant']:24}{row['tokens_per_second']:14,.0f}{row['step_ms']:14.2f}"
            f"{mfu:>14}{row['peak_memory_bytes'] / 2**30:14.2f}{row['first_step_seconds']:14.1f}"
            f"{first['tokens_per_second'] / row['tokens_per_second']:14.2f}{row['loss_difference']:14.1e}"
        )
    if "stages" in first:
        idle.print_facts(first["stages"])
    for variant, why in skipped.items():
        print(f"{variant} left out: {why}" if variant != "kos" else f"kos ended early: {why}")


def print_scaling(rows: list[dict[str, Any]], path: Path) -> None:
    """Against the rows of one rank that the neighbour of ``path``, train-X-8.json, has: train-X-1.json."""
    alone = path.with_name(path.name.replace(f"-{rows[0]['ranks']}.json", "-1.json"))
    if rows[0]["ranks"] == 1 or alone == path or not alone.exists():
        return
    same = ("preset", "batch_size", "seq_len", "implementation", "variant")
    known = {tuple(row[key] for key in same): row["tokens_per_second"] for row in report.read(alone, "rows")["rows"]}
    for row in rows:
        if one := known.get(tuple(row[key] for key in same)):
            share = row["tokens_per_second"] / row["ranks"] / one
            print(
                f"{row['implementation']} {row['variant']}: {share:.1%} of {row['ranks']} times the {one:,.0f} of one"
            )


def read_before(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """What is in the file, empty if it is none; refused where it is of another machine, software or commit."""
    before = report.read(path, *HEADER, "command", "skipped", "rows") if path.exists() else {}
    for key in HEADER:
        if before and before[key] != header[key]:
            raise ConfigError(f"--json {path}: expected results of {key} {header[key]}, got {before[key]}")
    return before


def write(
    path: Path, header: dict[str, Any], before: dict[str, Any], rows: list[dict[str, Any]], skipped: dict[str, str]
) -> None:
    """Rows are added to those that were there ``before``."""
    result = {**header, "skipped": skipped, "rows": rows}
    if before:
        result["command"] = f"{before['command']} && {header['command']}"
        result |= {"skipped": before["skipped"] | skipped, "rows": before["rows"] + rows}
    replace_file(path, report.to_json(result).encode())


def read_arguments(arguments: list[str]) -> tuple[argparse.Namespace, TrainConfig]:
    parser = argparse.ArgumentParser(
        prog=f"[mpirun -n N] {program('benchmarks.train')}", description=__doc__,
        epilog="All other flags are those of python -m kos.train.",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    about = "library to compare with kos, or kos itself with --dtype fp8"
    parser.add_argument("--compare", choices=("torch", "picotron", "fp8"), help=about)
    parser.add_argument("--picotron", metavar="PATH", help="the clone of huggingface/picotron for --compare picotron")
    parser.add_argument("--torch", metavar="VARIANT,…", help=f"on CPUs {VARIANTS['cpu']}, on GPUs {VARIANTS['cuda']}")
    parser.add_argument("--ranks", type=int, help="processes of each; default: mpirun's, or 1")
    parser.add_argument("--per-rank", type=int, help="sequences a rank and step; default: the preset's over all ranks")
    parser.add_argument("--threads", type=int, help="of a rank; default: its share of the cores")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of one measurement [12]")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each [3]")
    parser.add_argument("--apart", action="store_true", help="one after the other, where memory does not hold two")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for a measurement [120]")
    parser.add_argument("--idle", action="store_true", help="measure how long each rank of a pipeline waits (kos only)")
    parser.add_argument("--name", help="what the rows call the preset, where flags change it")
    parser.add_argument("--json", type=Path, help="where to write the rows; of the same commit, they are added")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)
    if options.ranks is None:
        sizes = (os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"))
        options.ranks = int(next((size for size in sizes if size), 1))
    for name in ("ranks", "per_rank", "threads", "steps", "repeats"):
        if (got := getattr(options, name)) is not None and got < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {got}")
    if options.per_rank:
        rest += ["--batch-size", str(options.per_rank * options.ranks)]
    config = parse(rest)
    options.device = config.device
    if config.device == "auto" or not any(word.startswith("--device") for word in rest):
        options.device = "cpu" if unavailable() else "cuda"
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    options.torch = options.torch or VARIANTS.get(options.compare, VARIANTS[options.device])
    if unknown := set(options.torch.replace(",", "-").split("-")) - WORDS:
        raise ConfigError(f"--torch: expected words of {', '.join(sorted(WORDS))}, got {', '.join(sorted(unknown))}")
    if options.compare in ("torch", "picotron") and config.model.model_type != "llama":
        raise ConfigError(f"--compare {options.compare}: expected a llama, got {config.model.model_type}")
    if options.compare == "picotron" and not options.picotron:
        raise ConfigError("--compare picotron: expected --picotron PATH, got none")
    return options, config


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 2 for wrong settings, 1 for what else went wrong or gave other losses."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if launched_rank() and "--worker" not in arguments:  # rank 0 starts the processes of all
        return 0
    try:
        return run(arguments)
    except (KosError, Lost, OSError) as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidArgument) else 1


def run(arguments: list[str]) -> int:
    options, config = read_arguments(arguments)
    if options.json:
        check_writable(options.json)
    config.for_world(layout_of(config, options.ranks).dp, options.device)
    if options.device == "cuda" and not options.worker and (why := unavailable()):
        raise ConfigError(f"--device cuda: expected a GPU, got none: {why}")
    if options.compare in ("torch", "picotron") and importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--compare {options.compare}: expected PyTorch (pip install torch), got none")
    if options.worker:
        work(options, config)
        return 0
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # and they may run where mpirun put any
    header = report.provenance("benchmarks.train", 0 if options.device == "cuda" else None, options.ranks)
    before = read_before(options.json, header) if options.json else {}

    gpu = device_info(0).name if options.device == "cuda" else ""

    def keep(groups: list[Group], skipped: dict[str, str]) -> None:
        if options.json:
            write(options.json, header, before, make_rows(groups, options, config, gpu), skipped)

    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as logs:
        settled = ["--ranks", str(options.ranks), "--device", options.device]
        groups, skipped = measure(options, [*arguments, *settled], Path(logs), keep)
    return conclude(groups, skipped, options, config, gpu)


def conclude(
    groups: list[Group], skipped: dict[str, str], options: argparse.Namespace, config: TrainConfig, gpu: str = ""
) -> int:
    """Print the rows; the exit code, which is 1 where losses differ."""
    rows = make_rows(groups, options, config, gpu)
    print_rows(rows, skipped)
    if options.json:
        print_scaling(rows, options.json)
    if first_step_only(options, rows[0]["variant"]):
        print("picotron has no fp32 copy of its bfloat16 weights: its losses are compared at the first step only")
    of_device = "float32" if options.device == "cpu" else "bfloat16"
    allowed = TOLERANCE["fp8" if options.compare == "fp8" else of_device]
    apart = [row["variant"] for row in rows if not row["loss_difference"] <= allowed]
    if apart:
        print(f"expected losses within {allowed:g} of kos, relative; beyond it: {', '.join(apart)}")
    return int(bool(apart) or "kos" in skipped or (bool(skipped) and len(groups) == 1))


if __name__ == "__main__":
    raise SystemExit(main())
