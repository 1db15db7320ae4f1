"""``python -m benchmarks.kernels``: arguments, the table, the file."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

try:
    import torch
except ImportError:  # reported after the arguments have been checked
    torch = None

from benchmarks import kernels
from kos import cuda
from kos.bench import report
from kos.commands import program
from kos.files import check_writable
from kos.train.config import PRESETS
from kos.train.machine import peak_flops
from kos.train.model.shape import ModelShape


def main() -> None:
    names = [*itertools.chain(*kernels.OPERATIONS.values())]
    parser = argparse.ArgumentParser(
        prog=program("benchmarks.kernels"),
        description=kernels.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="1b", choices=PRESETS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, help="of attention, at most --tokens (default: the preset's)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="+", default=names, choices=[*names, *kernels.ON_REQUEST])
    parser.add_argument("--compile", action="store_true", help="time torch compiled, too")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    if torch is None:
        raise SystemExit("kos: error: benchmarks.kernels: expected PyTorch (pip install torch), got none")
    if why := cuda.unavailable():
        raise SystemExit(f"kos: error: benchmarks.kernels: expected a GPU, got none: {why}")
    if arguments.json:
        check_writable(arguments.json)
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    from benchmarks.kernels import runner  # which needs torch
    from benchmarks.kernels.zoo import Zoo

    torch.manual_seed(0)
    preset = PRESETS[arguments.preset].values
    seq_len = arguments.seq_len or preset["seq_len"]
    zoo = Zoo(ModelShape(**preset["model"]), seq_len, getattr(torch, arguments.dtype))
    speed = runner.copy_speed(zoo)
    peak = peak_flops(torch.cuda.get_device_name()) if arguments.dtype == "bfloat16" else None
    print(f"{torch.cuda.get_device_name()}, {arguments.preset}, {arguments.tokens} tokens, {arguments.dtype}; "
          f"copy {speed / 1e12:.2f} TB/s; errors in rounding units")  # fmt: skip
    print(f"{'operation':<26}" + "".join(f"{title:>12}" for title in (
        "naive us", "fast us", "limit us", "of limit", "torch us", "compiled us", "error fast", "naive")))  # fmt: skip
    rows = []
    for name in arguments.only:
        errors = runner.check(zoo, name)
        row = runner.measure(zoo, name, arguments.tokens, arguments.compile)
        limit = row["limit_us"] = max(row["bytes"] / speed, row["flops"] / peak if peak else 0) * 1e6
        if "fast_us" in row:
            row["of_limit"] = limit / row["fast_us"]
        rows.append({**row, "errors": errors, "preset": arguments.preset, "tokens": arguments.tokens})
        percent = 100 * row["of_limit"] if "of_limit" in row else None
        numbers = (row.get("naive_us"), row.get("fast_us"), limit, percent, row["torch_us"],
                   row.get("torch_compiled_us"), errors.get("fast"), errors.get("naive"))  # fmt: skip
        print(f"{name:<26}" + "".join(f"{'-':>12}" if x is None else f"{x:>12.2f}" for x in numbers), flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(report.to_json({
            **report.provenance("benchmarks.kernels", 0, 1), "preset": arguments.preset, "tokens": arguments.tokens,
            "dtype": arguments.dtype, "limits": {"copy_bytes_per_second": speed, "flops_per_second": peak},
            "rows": rows,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
