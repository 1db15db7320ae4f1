"""Generation with a KV cache: the prefill of prompts, and the time of a step: ``python -m benchmarks.generate``.

A step computes one token of each prompt.  On a GPU, it is one CUDA graph.  A step cannot be faster than reading the
weights once.  The table has this bound, at the rate at which a copy within the GPU's memory reads and writes.  Flags of
the trainer choose the model and the device; the weights are random.  With ``--tp N`` on N ranks, each rank holds a part
of the model, and the bound is that of its part.

    python -m benchmarks.generate --json FILE --preset 1b --device cuda --peers transformers
    mpirun -n 2 python -m benchmarks.generate --json FILE --preset 8b --device cuda --tp 2
    python -m benchmarks.generate --prompt 801 --tokens 100 --device cpu --seq-len 1024 --peers uncached

``uncached`` computes the whole text again for each token.  ``transformers`` has its static cache and ``torch.compile``.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

import kos
from kos.bench import report
from kos.commands import program
from kos.errors import ConfigError
from kos.launcher import launched_place
from kos.train.config.flags import parse
from kos.train.generate import Decoder, Uncached
from kos.train.machine import limit_threads
from kos.train.model import huggingface
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import make_whole
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import ALONE, Axis

COPIED = 1 << 30  # bytes that are copied to measure the rate
VOCABULARY = 256  # of the tokenizer bytes, which the model may enlarge
DRAWN = 999_983  # random elements, repeated to fill the weights: their number is a prime, so that no rows are equal


def measure(source: Decoder | Uncached, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Seconds of the second prefill, and milliseconds of a step: the median, without the first, which compiles."""
    found = list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        for index, prompt in enumerate(prompts):
            source.prefill(index, prompt)
        prefill = time.perf_counter() - begin
    for number in range(tokens):
        begin = time.perf_counter()
        source.step(dict.fromkeys(range(len(prompts)), number % VOCABULARY))
        found.append(time.perf_counter() - begin)
    return {"prefill_s": prefill, "step_ms": 1e3 * median(found[1:] or found)}


def make_weights(config: LlamaConfig, ops: Any, dtype: Any, tp: Axis) -> Parameters:
    """This rank's part of random weights."""
    part = config.local(tp.rank, tp.size)
    weights = Parameters(config.parameter_shapes(part), dtype, config.fused_groups(part), ops.zeros)
    drawn = np.random.default_rng(0).normal(0, 0.02, DRAWN).astype(dtype)
    for start in range(0, weights.flat.size, DRAWN):
        piece = weights.flat[start : start + DRAWN]
        ops.copy(drawn[: piece.size], piece)
    return weights


def copy_rate(ops: Any) -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes."""
    from kos.cuda import streams

    source, out = (ops.zeros((COPIED,), np.uint8) for _ in range(2))
    times = []
    for _ in range(10):
        streams.synchronize(ops.stream, ops.device)
        begin = time.perf_counter()
        ops.copy(source, out)
        streams.synchronize(ops.stream, ops.device)
        times.append(time.perf_counter() - begin)
    return 2 * COPIED / median(times)


def transformers_step(config: LlamaConfig, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """As ``measure``, of transformers on the GPU: generating all tokens and generating one differ by the steps.

    With a static cache, ``generate`` of transformers 5 compiles the steps by itself, with CUDA graphs.
    """
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**json.loads(json.dumps(huggingface.to_huggingface(config))))
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    ids = torch.tensor([*prompts], device="cuda")

    def seconds(count: int) -> float:
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False,
                cache_implementation="static", eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    first, whole = seconds(1), seconds(tokens)
    return {"prefill_s": first, "step_ms": 1e3 * (whole - first) / (tokens - 1)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'source':<14}{'batch':>6}{'prefill s':>11}{'step ms':>10}{'tokens/s':>11}{'x the bound':>13}"]
    for row in rows:
        bound = f"{row['step_ms'] / row['bound_ms']:>13.2f}" if row["bound_ms"] else f"{'':>13}"
        times = f"{row['prefill_s']:>11.3f}{row['step_ms']:>10.3f}{1e3 * row['batch'] / row['step_ms']:>11.1f}{bound}"
        lines.append(f"{row['source']:<14}{row['batch']:>6}{times}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.generate"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], metavar="N", help="prompts (default: 1)")
    parser.add_argument("--peers", nargs="+", default=[], choices=["uncached", "transformers"], help="also measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments, flags = parser.parse_known_args(argv)
    config, ranks = parse(flags), launched_place()[1]
    if config.tp != ranks or (ranks > 1 and arguments.peers):
        got = f"--tp {config.tp}, --peers {' '.join(arguments.peers)}, {ranks} ranks"
        raise ConfigError(f"expected as many ranks as --tp, and --peers on one rank, got {got}")
    comm = kos.init() if ranks > 1 else None
    tp = ALONE if comm is None else Axis(comm.rank, comm.size, comm)
    shape, ops, dtype, rate = config.model_config_for(VOCABULARY), numpy_ops, np.dtype(np.float32), 0.0
    if config.device == "cuda":
        from kos.train.ops.cuda import CudaOps

        device = 0 if comm is None else comm.device or 0
        ops, dtype = CudaOps(device), np.dtype(ml_dtypes.bfloat16)  # type: ignore[assignment]
        rate = copy_rate(ops)
    elif comm is not None:
        limit_threads(comm)
    weights, rows = make_weights(shape, ops, dtype, tp), list[dict[str, Any]]()
    bound = 1e3 * weights.flat.nbytes / rate if rate else 0.0

    def add(source: str, batch: int, found: dict[str, float]) -> None:
        """Show a row at once: the next one may take minutes to compile."""
        rows.append({"source": source, "batch": batch, **found, "bound_ms": bound})
        if tp.rank > 0:
            return
        print(*table(rows).splitlines()[-1 if rows[1:] else 0 :], sep="\n", flush=True)
        if arguments.json:
            about = report.provenance("benchmarks.generate", 0 if rate else None, ranks)
            arguments.json.write_text(report.to_json({**about, "copy_bytes_per_s": rate, "rows": rows}))

    for batch in arguments.batches:
        prompts = [[(at + number) % VOCABULARY for at in range(arguments.prompt)] for number in range(batch)]
        sources: dict[str, Any] = {
            "kos": Decoder(shape, ops, weights, batch, arguments.prompt + arguments.tokens, tp),
            "uncached": Uncached(partial(make_whole(shape, ops, tp).next_logits, weights)),
        }
        for name in ("kos", *(peer for peer in arguments.peers if peer in sources)):
            add(name, batch, measure(sources[name], prompts, arguments.tokens))
        sources.clear()
        gc.collect()
        if "transformers" in arguments.peers:
            add("transformers", batch, transformers_step(shape, prompts, arguments.tokens))
    if comm is not None:
        comm.close()


if __name__ == "__main__":
    main()
