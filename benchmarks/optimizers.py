"""The part of a step that norm and update take, by AdamW and by Muon: ``python -m benchmarks.optimizers``.

Flags of the trainer say which model, layout and device; of several ranks, started by mpirun, the slowest counts.  The
times are medians of steps, between timestamps that ``benchmarks.idle`` records, on a GPU within the CUDA graph.

    python -m benchmarks.optimizers --json FILE --preset 124m
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import kos
from benchmarks.idle import Stamps
from kos.bench import report
from kos.comm.communicator import Communicator
from kos.commands import program
from kos.memory.pool import pool_of
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.batches import load_data
from kos.train.device.choose import choose_device, layout_of, make_device
from kos.train.machine import limit_threads, thread_pools
from kos.train.parallel.mesh import Mesh

OPTIMIZERS = ("adamw", "muon")
WARM_UP = 3


def measure(config: TrainConfig, comm: Communicator, steps: int) -> dict[str, Any]:
    """A row of the table: milliseconds of a step, and of norm and update in it. Collective."""
    layout = layout_of(config, comm.size)
    config = config.for_world(layout.dp, choose_device(config.device, comm))
    limit_threads(comm)
    data, mesh = load_data(config), Mesh(comm, layout)
    device = make_device(config, config.model_config_for(data.tokenizer.vocab_size), data, mesh)
    device.draw_weights()
    stamps, found = Stamps(device), []
    for step in range(WARM_UP + steps):
        device.start_step(step, False)
        device.finish_step(step)
        ranks = stamps.facts()["ranks"]
        found.append([max(rank[key] for rank in ranks) for key in ("step_ms", "update_ms")])
    whole, update = (median(column) for column in zip(*found[WARM_UP:], strict=True))
    state = sum(kept.flat.nbytes for kept in device.step.optimizer.state.values())
    device.close()
    mesh.close()
    return {
        "optimizer": config.optimizer, "layout": layout.describe(), "zero": config.zero, "device": device.place,
        "step_ms": whole, "update_ms": update, "share": update / whole, "state_bytes": state,
    }  # fmt: skip


def gpu_of(config: TrainConfig, comm: Communicator) -> int | None:
    """The GPU of this rank, if the trainer uses GPUs. Collective."""
    return (comm.device or 0) if choose_device(config.device, comm) == "cuda" else None


def release(gpu: int | None) -> None:
    """Give back the memory of a device that is closed: the next one needs it."""
    gc.collect()
    if gpu is not None:
        pool_of(gpu).trim()


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'optimizer':<10}{'step ms':>10}{'norm and update ms':>20}{'share':>8}{'state MiB':>11}"]
    for row in rows:
        times = f"{row['step_ms']:>10.2f}{row['update_ms']:>20.3f}{row['share']:>8.1%}"
        lines.append(f"{row['optimizer']:<10}{times}{row['state_bytes'] / 2**20:>11.1f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.optimizers"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="steps that are timed (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments, flags = parser.parse_known_args(argv)
    configs = [parse([*flags, "--optimizer", name]) for name in OPTIMIZERS]
    rows = []
    thread_pools()  # before other threads import
    with kos.init() as comm:
        gpu = gpu_of(configs[0], comm)
        for config in configs:
            rows.append(measure(config, comm, arguments.repeats))
            release(gpu)
        if comm.rank == 0:
            print(table(rows))
            if arguments.json:
                about = report.provenance("benchmarks.optimizers", gpu, comm.size)
                arguments.json.write_text(report.to_json({**about, "rows": rows}))


if __name__ == "__main__":
    main()
