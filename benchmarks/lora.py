"""Tokens per second of training adapters: kos, and peft with torch.compile: ``python -m benchmarks.lora``.

Both train the same shape with the same rank, the same targets (all matrices of layers), sequences of the same length
and AdamW. The weights are random. Each row runs in a process of its own, one after another on one GPU. It is the median
of ``--steps`` steps after ``--warm-up``. ``peft-compile`` compiles the whole model, ``peft-compile-layers`` each layer
(PyTorch's regional compilation, which starts sooner). Peak memory is that of the device. ``--only`` chooses rows,
``--json`` writes them to a file, and ``--ranks N`` gives kos N GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kos.commands import mpirun
from kos.cuda import unavailable
from kos.files import replace_file

ROWS = ("kos", "kos-fp8", "peft-compile", "peft-compile-layers")


def flags_of(arguments: argparse.Namespace) -> list[str]:
    return [
        "--preset", arguments.preset, "--lora", str(arguments.rank), "--batch-size", str(arguments.ranks),
        "--micro-batch-size", "1",
        "--seq-len", str(arguments.seq_len), "--steps", "1000", "--lr", "1e-4", "--eval-batches", "0",
        "--sample-tokens", "0", "--device", arguments.device, *arguments.flags.split(),
    ]  # fmt: skip


def of_kos(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """A row: seconds of each step, bytes of the device."""
    import kos
    from kos.train.config.flags import parse
    from kos.train.data.batches import Dataset, Tokens
    from kos.train.data.tokenizers import NumberTokenizer
    from kos.train.device.choose import make_device
    from kos.train.parallel.mesh import Mesh

    config = parse([*flags_of(arguments), "--dtype", dtype]).for_world(arguments.ranks, arguments.device)
    vocabulary = config.model.vocab_size or 256
    numbers = np.random.default_rng(0).integers(vocabulary, size=50 * config.seq_len + 1).astype(np.int32)
    parts = [Tokens([numbers], np.array([0])) for _ in range(2)]
    tokenizer, sizes = NumberTokenizer(vocabulary), (config.seed, arguments.ranks, config.seq_len, 0)
    data = Dataset("numbers", parts[0], parts[1], tokenizer, *sizes, "", packs=False)
    with kos.init() as comm:
        device = make_device(config, config.model_config_for(vocabulary), data, Mesh(comm))
        device.draw_weights()
        seconds, measured = list[float](), dict[str, float]()
        for step in range(arguments.warm_up + arguments.steps):
            began = time.perf_counter()
            device.start_step(step, 0)
            device.finish_step(step)
            seconds.append(time.perf_counter() - began)
        measured = device.measures(1.0)
        device.close()
    return {"seconds": seconds, "bytes": measured.get("memory_bytes", 0)}


def of_peft(arguments: argparse.Namespace, by_layer: bool) -> dict[str, Any]:
    """The same of peft over transformers, compiled, with scaled_dot_product_attention."""
    import peft
    import torch
    import transformers

    from kos.train.config.flags import parse
    from kos.train.model.huggingface import to_huggingface

    config = parse(flags_of(arguments))
    shape = config.model_config_for(config.model.vocab_size or 256)
    assert shape.lora is not None
    settings = transformers.LlamaConfig(**to_huggingface(shape))
    settings._attn_implementation = "sdpa"
    on_gpu = arguments.device == "cuda"
    with torch.device(arguments.device):
        torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
        model = transformers.LlamaForCausalLM(settings)
        torch.set_default_dtype(torch.float32)
    targets = [*shape.lora.targets]
    of_lora = peft.LoraConfig(r=shape.lora.rank, lora_alpha=shape.lora.alpha, target_modules=targets)
    adapted = peft.get_peft_model(model, of_lora)
    if by_layer:
        for layer in model.model.layers:
            layer.compile()
    model = adapted if by_layer else torch.compile(adapted)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu)
    tokens = torch.randint(shape.vocab_size, (1, config.seq_len), device=arguments.device)
    seconds = list[float]()
    for _ in range(arguments.warm_up + arguments.steps):
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_reserved() if on_gpu else 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="of kos: each has a sequence of its own (data parallel)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu" if unavailable() else "cuda")
    parser.add_argument("--flags", default="", help="more flags of kos, such as those of a shape")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        wide = "bfloat16" if arguments.device == "cuda" else "float32"
        dtype = {"kos": wide, "kos-fp8": "fp8"}.get(arguments.row)
        print(json.dumps(of_kos(arguments, dtype) if dtype else of_peft(arguments, arguments.row.endswith("layers"))))
        return 0
    found = dict[str, Any]()
    for row in arguments.only.split(","):
        ranks = 1 if row.startswith("peft") else arguments.ranks
        launcher = mpirun(ranks) if ranks > 1 else []
        command = [*launcher, sys.executable, "-m", "benchmarks.lora", *sys.argv[1:], "--row", row]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit)
        except subprocess.TimeoutExpired:
            print(f"{row:<20}did not end within {arguments.limit:.0f} s", flush=True)
            continue
        if done.returncode:
            print(f"{row:<20}failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        step = median(result["seconds"][arguments.warm_up :])
        rate = ranks * arguments.seq_len / step
        found[row] = {"ranks": ranks, "tokens_per_second": rate, **result}
        print(f"{row:<20}{rate:>10,.0f} tokens/s{result['bytes'] / 1e9:>8.1f} GB on {ranks} GPUs", flush=True)
    if arguments.json is not None:
        replace_file(arguments.json, json.dumps(found, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
