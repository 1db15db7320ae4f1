"""The tables of all_reduce and of the other collectives on GPUs, and of torch.distributed over kos."""

from __future__ import annotations

from benchmarks.plots import measured
from benchmarks.plots.measured import Series
from benchmarks.plots.results import gpus, load, newest, one, ratio, select, table, us
from kos.bench.report import size

AUTO_WITHIN = 1.03
ALL_REDUCE_SIZES = (1 << 10, 128 << 10, 1 << 20, 256 << 20)
OUTSIDE_SIZES = (1 << 10, 128 << 10, 1 << 20)
GRAPH_SIZES = (1 << 10, 128 << 10, 1 << 20, 256 << 20)
EAGER_SIZES = (8 << 10, 1 << 20)
"""Sizes in bytes that the tables show: the files hold more."""


def all_reduce_gpus() -> str:
    """Times by size in a CUDA graph."""
    names = ("kos, symmetric buffers", "kos, any buffers", "NCCL", "NCCL, symmetric windows")
    rows = []
    for ranks in (2, 4, 8):
        lines = [measured.on_gpus(ranks, name) for name in names]
        torch = [measured.on_gpus(ranks, name) for name in ("torch one-shot", "torch two-shot")]
        limits, theirs = measured.gpu_limits(ranks), measured.faster_nccl(ranks)
        for nbytes in ALL_REDUCE_SIZES:
            bound, ours, others = limits[nbytes], lines[0][nbytes], lines[1][nbytes]
            rows.append([
                measured.on(ranks), size(nbytes), *(us(line[nbytes]) for line in lines),
                us(min(each[nbytes] for each in torch)), us(bound), ratio(theirs[nbytes] / ours),
                ratio(theirs[nbytes] / others),
            ])  # fmt: skip
    return table(
        ["GPUs", "size", "kos, symmetric", "kos, any", "NCCL", "NCCL windows", "torch symm_mem", "limit",
         "faster NCCL / kos symmetric", "faster NCCL / kos any"],
        rows,
    )  # fmt: skip


def outside_graphs() -> str:
    """Calls back to back and single calls, by size: the faster buffers of kos and of NCCL."""
    rows = []
    for ranks in (2, 4, 8):
        lines = {mode: [measured.on_gpus(ranks, name, mode=mode) for name in measured.COMPARED[:2]]
                 for mode in ("eager", "single_shot")}  # fmt: skip
        for nbytes in OUTSIDE_SIZES:
            row = [measured.on(ranks), size(nbytes)]
            for mode, both in lines.items():
                ours, theirs = min(line[nbytes] for line in both), measured.faster_nccl(ranks, mode)[nbytes]
                row += [us(ours), us(theirs), ratio(theirs / ours)]
            rows.append(row)
    head = ["kos", "NCCL", "NCCL / kos"]
    return table(["GPUs", "size", *(f"{mode}: {head[0]}" if name == head[0] else name
                                    for mode in ("eager", "single") for name in head)], rows)  # fmt: skip


def auto_routes() -> str:
    """How near ``auto`` comes to the faster of the two backends that it chooses from."""
    rows = []
    for ranks in (2, 4, 8):
        excess: list[float] = []
        file = newest("collectives", ranks)
        for row in select(file, op="all_reduce", backend="auto", mode="graph"):
            if row["algorithm"] == "deterministic":
                continue
            alike = {key: row[key] for key in ("op", "bytes", "algorithm", "call", "in_place", "mode")}
            parts = [one(file, backend=name, **alike)["time_us"] for name in ("peer", "kos-nccl")]
            excess.append(row["time_us"] / min(parts))
        near = sum(each <= AUTO_WITHIN for each in excess)
        rows.append([measured.on(ranks), str(len(excess)), str(near), f"{max(excess) - 1:.1%}"])
    return table(["GPUs", "rows", "within 3% of the faster backend", "furthest"], rows)


def every_operation(ranks: int, mode: str, sizes: tuple[int, ...]) -> str:
    """Operations by size: the time of kos with its faster buffers, and NCCL's time divided by it; of each NCCL.

    In graphs also the SMs of both at the largest size.
    """
    other = measured.other_nccl(ranks) if mode == "graph" else None  # CPUs differ from run to run
    rows, taken = [], {}
    for op in ("all_reduce", *measured.others(ranks)):
        lines = {name: measured.on_gpus(ranks, name, op, mode) for name in measured.COMPARED}
        if op == "routing" or not lines["kos, any buffers"] or (mode == "eager" and op.endswith(("_v", "scan"))):
            continue
        kos, *peers = (fastest(lines, who) for who in ("kos", "NCCL"))
        if other:
            again = {name: measured.on_gpus(ranks, name, op, mode, file=other) for name in lines if name[:4] == "NCCL"}
            peers.append(fastest(again, "NCCL"))
        cells = (
            (us(kos[nbytes]), "; ".join(ratio(peer[nbytes] / kos[nbytes]) for peer in peers if nbytes in peer))
            if nbytes in kos
            else ("", "")
            for nbytes in sizes
        )
        rows.append([op, *(time + f" ({ratios})" * bool(ratios) for time, ratios in cells)])
        taken[op] = sms(ranks, op, sizes[-1]) if mode == "graph" else ""
    head = [f"SMs at {size(sizes[-1])}, kos/NCCL"] if any(taken.values()) else []
    return table(["operation", *map(size, sizes), *head], [[*row, taken[row[0]]] if head else row for row in rows])


def sms(ranks: int, op: str, nbytes: int) -> str:
    """What a call in a graph takes of a GPU with the faster buffers of kos, and of NCCL."""
    found = []
    for who in ("kos", "NCCL"):
        names = [name for name in measured.COMPARED if name.startswith(who)]
        times = {name: line[nbytes] for name in names if nbytes in (line := measured.on_gpus(ranks, name, op))}
        taken = [measured.on_gpus(ranks, name, op, value="sms").get(nbytes) for name in sorted(times, key=times.get)]
        found.append(str(taken[0]) if taken and taken[0] is not None else "")
    return "/".join(filter(None, found))  # NCCL has no scan


def routing() -> str:
    """Tokens to experts on 2 GPUs: microseconds, and what the busiest rank sends or receives."""
    names = ("kos, any buffers", "NCCL", "NCCL, symmetric windows")
    lines = [
        [measured.on_gpus(2, name, "routing", value=value) for value in ("time_us", "busbw_gbps")] for name in names
    ]
    rows = [
        [f"{nbytes // 14336:,}", *(f"{us(times[nbytes])} µs, {rates[nbytes]:.0f} GB/s" for times, rates in lines)]
        for nbytes in sorted(lines[0][0], reverse=True)
    ]
    return table([f"tokens per rank, {measured.on(2)}", *names], rows)


def compressed() -> str:
    """Times of operations with ``compress=`` over those of the exact call, by size."""
    rows = load(newest("compressed", 2))["rows"]
    sizes = sorted({row["bytes"] for row in rows})
    lines = []
    for op in dict.fromkeys(row["operation"] for row in rows):
        found = {row["bytes"]: row for row in rows if row["operation"] == op}
        cells = ("/".join(ratio(found[n][f"{kind} / exact"]) for kind in ("fp8", "int4")) for n in sizes)
        lines.append([op, *cells])
    return table(["operation, fp8/int4", *map(size, sizes)], lines)


def cpu_of_calls() -> str:
    """CPU time of eager calls of 1 KB by the core, else by Python, and of the launch alone from C."""
    rows = [row for row in load(newest("gpu-calls", 2))["rows"] if row["bytes"] == 1024]
    kinds = ("kos", "torch")
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        line = [op]
        for backend in ("peer", "nccl"):
            found = {row["arrays"]: row for row in rows if row["op"] == op and row["backend"] == backend}
            for kind in kinds:
                row = found.get(kind, {})
                by_core = f"{row['core_us']:.1f}/{row['c_us']:.1f}" if "core_us" in row else ""
                line.append(by_core or (f"{row['python_us']:.1f}" if row else ""))
        lines.append(line)
    head = (f"{backend}, {kind} arrays" for backend in ("peer", "nccl") for kind in kinds)
    return table(["kos/C, µs", *head], lines)


def fastest(lines: dict[str, Series], who: str) -> Series:
    """By size the shortest time of the lines whose names begin so."""
    found = [line for name, line in lines.items() if name.startswith(who)]
    sizes = sorted({nbytes for line in found for nbytes in line})
    return {nbytes: min(line[nbytes] for line in found if nbytes in line) for nbytes in sizes}


TORCH_SIZES = (8 << 10, 16 << 20)
TORCH_MODES = ("graph", "eager")
TORCH_CALLS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


def torch_backend() -> str:
    """torch.distributed over kos and over ProcessGroupNCCL."""
    rows = []
    for call in TORCH_CALLS:
        for row in load(measured.torch_file())[call]:
            if row["bytes"] not in TORCH_SIZES:
                continue
            line = [call, size(row["bytes"])]
            for mode in TORCH_MODES:
                line += [us(row[f"kos {mode}"]["us"]), us(row[f"nccl {mode}"]["us"])]
            rows.append([*line, us(row["kos eager"]["cpu_us"]), us(row["nccl eager"]["cpu_us"])])
    head = [f"{name} {mode}" for mode in TORCH_MODES for name in ("kos", "NCCL")]
    return table([f"call, {gpus(measured.torch_file())}", "size", *head, "CPU, kos eager", "CPU, NCCL eager"], rows)


def torch_steps() -> str:
    """A step of what is built on torch.distributed."""
    rows = []
    labels = {
        "ddp_ms": "DDP, 24 layers of 256", "ddp_wide_ms": "DDP, 8 layers of 1,024", "fsdp_ms": "FSDP2, 1b",
        "fsdp_by_nccl_ms": 'FSDP2, 1b, `Options(gpu="nccl")`', "fsdp_wide_ms": "FSDP2, 8 layers of 1,024",
        "tp_ms": "tensor parallel, MLPs",
    }  # fmt: skip
    for key, label in labels.items():
        if steps := load(measured.torch_file()).get(key):
            interval = "{:.3f} to {:.3f}".format(*steps["interval"]) if "interval" in steps else ""
            rows.append([label, f"{steps['kos']:.2f}", f"{steps['nccl']:.2f}", f"{steps.get('ratio', '')}", interval])
    return table(["ms per step", "over kos", "over NCCL", "kos / NCCL", "95% interval"], rows)
