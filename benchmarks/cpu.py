"""Training on CPUs, kos beside PyTorch in turns: ``python -m benchmarks.cpu --json FILE [ROW ...]``.

PyTorch is a plain loop: LLaMA of transformers, scaled_dot_product_attention, fused AdamW, not compiled unless a row
says so. Both have the same shapes, batches and number of threads. Each is a process (or ranks) of its own. They work in
turns, a few steps each, so that other programs on the machine slow down both. A figure is the median over the turns of
PyTorch's time divided by kos's in the turn before, with the lowest and the highest: once of the wall clock, and once of
CPU time (user and system, of all ranks), which other programs disturb less.

``--kernels avx2`` holds both to AVX2: the kernels of kos, OpenBLAS, PyTorch's own kernels and oneDNN.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kos.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}  # fmt: skip


class Shape(NamedTuple):
    """A model, the sequences of a step, and their tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequences: int
    tokens: int


SMALL, TINY = Shape(256, 4, 8, 4, 768, 256, 8, 256), Shape(128, 4, 4, 2, 384, 256, 16, 128)
LARGE = Shape(768, 12, 12, 12, 2048, 50_304, 8, 256)


class Row(NamedTuple):
    """What is measured: ``other`` is a kind of ``WORKERS``; ``busy`` processes compute beside it."""

    about: str
    shape: Shape
    threads: int = 1
    ranks: int = 1
    pinned: bool = False
    busy: int = 0
    other: str = "torch"
    steps: int = 3


ROWS = {
    "one-core": Row("4 x 256, pinned to one core", SMALL, pinned=True),
    "two-threads": Row("4 x 256, two threads", SMALL, threads=2),
    "busy": Row("4 x 256, two threads, beside two busy processes", SMALL, threads=2, busy=2),
    "two-ranks": Row("`make train`'s model, two ranks; PyTorch: DDP over gloo", TINY, ranks=2, steps=10),
    "compiled": Row("4 x 256, one thread; PyTorch: torch.compile", SMALL, pinned=True, other="compiled"),
    "124m": Row("124m, two threads", LARGE, threads=2, steps=1),
    "124m-one-core": Row("124m, pinned to one core", LARGE, pinned=True, steps=1),
    "generate": Row("124m, 200 tokens generated, pinned to one core", LARGE, pinned=True, steps=1),
}


# --- a worker, which makes steps when it is asked --------------------------------------------------------------


def kos_steps(shape: Shape, options: argparse.Namespace) -> Callable[[int], float]:
    import kos
    from benchmarks.train import KosTraining, random_tokens
    from kos.train.config.options import TrainConfig
    from kos.train.device.choose import layout_of

    model = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate, "tie_word_embeddings": True,
    }  # fmt: skip
    config = TrainConfig.from_preset(
        "tiny", device="cpu", batch_size=shape.sequences, seq_len=shape.tokens, lr=1e-3, steps=100_000, model=model
    )
    comm = kos.init()
    config = config.for_world(layout_of(config, comm.size).dp, "cpu")
    of_model = config.model_config_for(shape.vocabulary)
    training, done = KosTraining(comm, config, of_model, random_tokens(config, of_model), options.threads), [0]

    def steps(count: int) -> float:
        losses = training.run(done[0], count)[1]
        done[0] += count
        return losses[-1]

    return steps


def hugging_face(shape: Shape) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate,
        max_position_embeddings=1024, tie_word_embeddings=True, attn_implementation="sdpa", bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def torch_steps(shape: Shape, options: argparse.Namespace) -> Callable[[int], float]:
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: Any = hugging_face(shape).train()
    model.config.use_cache = False
    run, size, rng = model, int(os.environ["WORLD_SIZE"]), np.random.default_rng(int(os.environ["RANK"]))
    if size > 1:
        torch.distributed.init_process_group("gloo")
        run = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.worker == "compiled":
        run = torch.compile(model)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    data = (shape.vocabulary * rng.random(1 << 21) ** 4).astype(np.int64)

    def steps(count: int) -> float:
        for _ in range(count):
            starts = rng.integers(0, len(data) - shape.tokens - 1, shape.sequences // size)
            rows = torch.from_numpy(np.stack([data[at : at + shape.tokens + 1] for at in starts]))
            optimizer.zero_grad(set_to_none=True)
            logits = run(input_ids=rows[:, :-1]).logits
            loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return float(loss.item())

    return steps


def generate(shape: Shape, options: argparse.Namespace) -> Callable[[int], float]:
    """Greedily, one sequence after a prompt of 8 tokens, with random weights and a cache."""
    import numpy as np

    length, prompt = 200, [11, 22, 33, 44, 55, 66, 77, 88]
    if options.worker == "torch":
        import torch

        torch.set_num_threads(options.threads)
        model = hugging_face(shape).eval()
        ids = torch.tensor([prompt])

        def steps(count: int) -> float:
            with torch.no_grad():
                for _ in range(count):
                    got = model.generate(
                        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=length,
                        max_new_tokens=length, pad_token_id=0,
                    )
            return float(got[0, -1])

        return steps
    import kos
    from benchmarks.generate import make_weights
    from kos.train.config.options import TrainConfig
    from kos.train.generate import Decoder, Sampling
    from kos.train.generate import generate as generate_tokens
    from kos.train.machine import limit_threads
    from kos.train.ops import numpy as ops
    from kos.train.parallel.mesh import ALONE

    limit_threads(kos.init(backend="mock"), options.threads)
    config = TrainConfig.from_preset("124m").model_config_for(shape.vocabulary)
    weights = make_weights(config, ops, np.dtype(np.float32), ALONE)
    decoder = Decoder(config, ops, weights, 1, len(prompt) + length + 1)

    def of_kos(count: int) -> float:
        for _ in range(count):
            got = [*generate_tokens(decoder, 1024, [prompt], length, Sampling(temperature=0))]
            assert len(got) == length
        return float(got[-1][1])

    return of_kos


WORKERS = {"kos": kos_steps, "torch": torch_steps, "compiled": torch_steps}


def work(options: argparse.Namespace) -> None:
    row = ROWS[options.rows[0]]
    if options.worker == "kos" and options.kernels:
        from kos.train.ops import compiled

        compiled.native.kernels(options.kernels)
    steps = (generate if options.rows[0] == "generate" else WORKERS[options.worker])(row.shape, options)
    steps(1 if row.shape is LARGE else 3)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        began, used = time.perf_counter(), cpu_seconds()
        loss = steps(int(line))
        print(json.dumps([time.perf_counter() - began, cpu_seconds() - used, loss]), flush=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- turns -----------------------------------------------------------------------------------------------------


class Group:
    """The ranks of one implementation."""

    def __init__(self, name: str, row: Row, worker: str, options: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS_")}
        env |= AVX2 if options.kernels == "avx2" else {}
        env |= {f"{library}_NUM_THREADS": str(row.threads) for library in ("OMP", "OPENBLAS", "MKL")}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(row.ranks)}
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] * row.pinned
        command += [sys.executable, "-m", "benchmarks.cpu", name, "--worker", worker, "--threads", str(row.threads)]
        command += ["--kernels", options.kernels] * bool(options.kernels)
        self.ranks = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            ) for rank in range(row.ranks)
        ]  # fmt: skip
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def answers(self) -> list[Any]:
        found = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            while line and line[0] not in "[\"":
                line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"a worker ended with status {rank.wait()}")
            found.append(json.loads(line))
        return found

    def turn(self, steps: int) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        answers = self.answers()
        self.wall.append(max(wall for wall, _, _ in answers) / steps)
        self.cpu.append(sum(cpu for _, cpu, _ in answers) / steps)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def interval(ratios: Sequence[float]) -> list[float]:
    """Median, lowest and highest."""
    return [round(float(x), 3) for x in (median(ratios), min(ratios), max(ratios))]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    row, groups = ROWS[name], list[Group]()
    load = os.getloadavg()[0]
    try:
        for worker in ("kos", row.other):
            groups.append(Group(name, row, worker, options))
            assert groups[-1].answers()
        with busy(row.busy):
            for _ in range(options.turns):
                for group in groups:
                    group.turn(row.steps)
    finally:
        for group in groups:
            group.end()
    ours, theirs = groups
    units = row.steps and (200 if name == "generate" else row.shape.sequences * row.shape.tokens)
    return {
        "row": name, "about": row.about, "kernels": options.kernels or "all", "turns": options.turns,
        "steps": row.steps,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "ratio_wall": interval([b / a for a, b in zip(ours.wall, theirs.wall, strict=True)]),
        "ratio_cpu": interval([b / a for a, b in zip(ours.cpu, theirs.cpu, strict=True)]),
        "kos": figures(ours, units), "torch": figures(theirs, units),
    }  # fmt: skip


def figures(group: Group, units: int) -> dict[str, float]:
    wall, cpu = median(group.wall), median(group.cpu)
    return {
        "wall_ms": round(1e3 * wall, 1), "cpu_ms": round(1e3 * cpu, 1), "tokens_per_second": round(units / wall, 1),
        "tokens_per_cpu_second": round(units / cpu, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"by default all: {', '.join(ROWS)}")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kernels", default="", help="avx2: no AVX-512; plain: neither")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--worker", choices=[*WORKERS], help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    for name in options.rows or ROWS:
        found = measure(name, options)
        print(
            f"{found['about']}: kos / PyTorch {found['ratio_wall']} of the wall clock, {found['ratio_cpu']} of CPU "
            f"time; {found['kos']['tokens_per_second']:,} tokens/s, load {found['load']}", flush=True,
        )  # fmt: skip
        if options.json:
            add(options.json, found)


def add(path: Path, row: dict[str, Any]) -> None:
    """The row, in the file; one of the same name and kernels is replaced."""
    from kos.bench import report
    from kos.train.machine import versions_of

    before = json.loads(path.read_text())["rows"] if path.exists() else []
    same = ("row", "kernels")
    facts = report.provenance("benchmarks.cpu", None, 1)
    row["commit"] = facts["commit"]
    rows = [each for each in before if any(each[key] != row[key] for key in same)] + [row]
    facts["versions"] |= versions_of(("transformers",))
    facts["command"] = "python -m benchmarks.cpu --json FILE, and the same with --kernels avx2"
    replace_file(path, report.to_json({**facts, "rows": rows}).encode())


if __name__ == "__main__":
    main()
