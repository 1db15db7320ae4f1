"""The tables of all_reduce, of the other collectives, of hosts, and of torch.distributed over kos."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.plots import measured
from benchmarks.plots.measured import Series
from benchmarks.plots.results import Row, load, one, ratio, select, table, us
from kos.bench.report import size

AUTO_WITHIN = 1.03
MODES_ON_HOSTS = ("eager", "single_shot")


def cell(series: Series, nbytes: int) -> str:
    return us(series[nbytes]) if nbytes in series else ""


def all_reduce_gpus(ranks: int) -> str:
    """Times by size in a CUDA graph."""
    names = list(measured.GPU_LINES)
    lines = {name: measured.on_gpus(ranks, name) for name in names}
    p99 = measured.on_gpus(ranks, names[0], value="p99_us")
    limits = measured.gpu_limits(ranks)
    theirs = measured.faster_nccl(ranks)
    rows = []
    for nbytes, bound in sorted(limits.items()):
        ours, nccl = lines["kos, symmetric buffers"][nbytes], theirs[nbytes]
        rows.append([
            size(nbytes), us(ours), us(p99[nbytes]), *(cell(lines[name], nbytes) for name in names[1:]), us(bound),
            f"{bound / ours:.0%}", ratio(nccl / ours), ratio(nccl / lines["kos, any buffers"][nbytes]),
        ])  # fmt: skip
    return table(
        ["size", "kos, symmetric", "p99 of 5 batches", "kos, any buffers", "NCCL", "NCCL windows", "torch one-shot",
         "torch two-shot", "torch.distributed", "limit", "kos of limit", "faster NCCL / kos symmetric",
         "faster NCCL / kos any"],
        rows,
    )  # fmt: skip


def bandwidth_gpus() -> str:
    """Bus bandwidth of large messages in a CUDA graph."""
    names = ("kos, symmetric buffers", "kos, any buffers", "NCCL", "NCCL, symmetric windows", "torch two-shot",
             "torch.distributed")  # fmt: skip
    rows = []
    for ranks in (2, 4, 8):
        lines = {name: measured.on_gpus(ranks, name, value="busbw_gbps") for name in names}
        pair = load(f"collectives-h200-{ranks}")["limits"]["pair_gbps"]
        for nbytes in (16 << 20, 64 << 20, 256 << 20, 1 << 30):
            rows.append([str(ranks), size(nbytes), *(f"{lines[name][nbytes]:.0f}" for name in names), f"{pair:.0f}"])
    return table(["GPUs", "size", *names, "limit: one copy engine, one pair"], rows)


MODES = {
    "kos `auto`": {"backend": "auto", "algorithm": "auto", "call": "function"},
    "kos `auto`, persistent": {"backend": "auto", "algorithm": "auto", "call": "persistent"},
    "kos `auto`, symmetric": {"backend": "auto", "algorithm": "window", "call": "function"},
    "kos `peer`": {"backend": "peer", "algorithm": "auto", "call": "function"},
    "kos `peer`, persistent": {"backend": "peer", "algorithm": "auto", "call": "persistent"},
    "kos `peer`, symmetric": {"backend": "peer", "algorithm": "window", "call": "function"},
    "kos `nccl`": {"backend": "kos-nccl", "algorithm": "auto", "call": "function"},
    "kos `nccl`, persistent": {"backend": "kos-nccl", "algorithm": "auto", "call": "persistent"},
    "NCCL": {"backend": "nccl"},
    "NCCL windows": {"backend": "nccl-window"},
    "torch one-shot": {"backend": "torch-symm", "algorithm": "one_shot"},
    "torch two-shot, in place": {"backend": "torch-symm", "algorithm": "two_shot"},
    "torch.distributed, in place": {"backend": "torch-nccl"},
}


def outside_graphs(ranks: int) -> str:
    """Calls back to back and single calls, by size."""
    names = ("kos, symmetric buffers", "kos, any buffers", "NCCL", "NCCL, symmetric windows", "torch one-shot",
             "torch two-shot")  # fmt: skip
    modes = {mode: {name: measured.on_gpus(ranks, name, mode=mode) for name in names}
             for mode in ("eager", "single_shot")}  # fmt: skip
    rows = []
    for nbytes in sorted(modes["eager"]["NCCL"]):
        line = [size(nbytes)]
        for mode, lines in modes.items():
            ours = min(lines[name][nbytes] for name in names[:2])
            nccl = measured.faster_nccl(ranks, mode)[nbytes]
            line += [*(us(lines[name][nbytes]) for name in names), ratio(nccl / ours)]
        rows.append(line)
    short = ["kos, symmetric", "kos, any", "NCCL", "NCCL windows", "torch one-shot", "torch two-shot",
             "faster NCCL / faster kos"]  # fmt: skip
    return table([f"{ranks} GPUs", f"eager: {short[0]}", *short[1:], f"single: {short[0]}", *short[1:]], rows)


def modes_gpus() -> str:
    """Graph, eager, single call and the CPU's part, on 8 GPUs."""
    rows = []
    for name, wanted in MODES.items():
        line = [name]
        for nbytes in (1 << 10, 1 << 20, 64 << 20):
            place = {"bytes": nbytes, "in_place": "in place" in name}
            modes = {mode: one("collectives-h200-8", op="all_reduce", **wanted, **place, mode=mode)
                     for mode in ("graph", "eager", "single_shot")}  # fmt: skip
            line += [us(row["time_us"]) for row in modes.values()] + [us(modes["eager"]["cpu_us"])]
        rows.append(line)
    head = [f"{nbytes}: {what}" if what == "graph" else what
            for nbytes in ("1 KB", "1 MB", "64 MB") for what in ("graph", "eager", "single", "CPU")]  # fmt: skip
    return table(["8 GPUs", *head], rows)


def auto_routes() -> str:
    """How near ``auto`` comes to the faster of the two backends that it chooses from."""
    rows = []
    for ranks in (2, 4, 8):
        excess: list[float] = []
        file = f"collectives-h200-{ranks}"
        for row in select(file, op="all_reduce", backend="auto", mode="graph"):
            if row["algorithm"] == "deterministic":
                continue
            alike = {key: row[key] for key in ("op", "bytes", "algorithm", "call", "in_place", "mode")}
            parts = [one(file, backend=name, **alike)["time_us"] for name in ("peer", "kos-nccl")]
            excess.append(row["time_us"] / min(parts))
        near = sum(each <= AUTO_WITHIN for each in excess)
        rows.append([str(ranks), str(len(excess)), str(near), f"{max(excess) - 1:.1%}"])
    return table(["GPUs", "rows", "within 3% of the faster backend", "furthest"], rows)


def call_cost() -> str:
    """Microseconds until a call returns, in a loop."""
    calls = ("NCCL's function", "kos nccl", "kos nccl persistent", "kos nccl 8 arrays", "kos auto",
             "kos auto persistent", "kos auto 8 arrays", "torch.distributed")  # fmt: skip
    rows = []
    for call in calls:
        line = [call]
        for process in ("without torch", "with torch in the process"):
            for nbytes in (1 << 10, 16 << 20):
                found = select("call-cost-h200-8", call=call, process=process, bytes=nbytes)
                line.append(us(found[0]["cpu_us"]) if found else "")
        rows.append(line)
    return table(["call", "1 KB", "16 MB", "1 KB, torch in the process", "16 MB, torch in the process"], rows)


def others() -> str:
    """Operations besides all_reduce in a CUDA graph."""
    rows = []
    for ranks, op, nbytes, lines in _others("graph"):
        best, peer = _best(lines, nbytes)
        bound = measured.gpu_limits(ranks, op)[nbytes]
        rows.append([str(ranks), op, size(nbytes), *(cell(line, nbytes) for line in lines.values()), us(bound),
                     f"{bound / best:.0%}", ratio(peer / best) if peer else ""])  # fmt: skip
    head = ["GPUs", "operation", "size", *measured.COMPARED, "limit", "kos of limit", "best of NCCL / best of kos"]
    return table(head, rows)


def others_eager() -> str:
    """Operations besides all_reduce without a graph."""
    rows = []
    for ranks, op, nbytes, lines in _others("eager"):
        best, peer = _best(lines, nbytes)
        cpu = (measured.on_gpus(ranks, name, op, "eager", "cpu_us") for name in ("kos, any buffers", "NCCL"))
        rows.append([str(ranks), op, size(nbytes), *(cell(line, nbytes) for line in lines.values()),
                     ratio(peer / best) if peer else "", *(cell(each, nbytes) for each in cpu)])  # fmt: skip
    head = ["GPUs", "operation", "size", *measured.COMPARED, "best of NCCL / best of kos", "CPU, kos", "CPU, NCCL"]
    return table(head, rows)


def every_operation(gpu: str, ranks: int) -> str:
    """Operations by size in a CUDA graph: the time of kos with its faster buffers, and NCCL's time divided by it."""
    sizes = dict.fromkeys(row["bytes"] for row in select(f"collectives-{gpu}-{ranks}", mode="graph", op="broadcast"))
    shown = sorted(sizes.keys() & set(measured.SHOWN_SIZES))
    rows = []
    for op in ("all_reduce", *measured.others(ranks, gpu)):
        lines = {name: measured.on_gpus(ranks, name, op, gpu=gpu) for name in measured.COMPARED}
        if op == "routing" or not lines["kos, any buffers"]:
            continue
        line = [op]
        for nbytes in shown:
            if nbytes not in lines["kos, any buffers"]:
                line.append("")
                continue
            best, peer = _best(lines, nbytes)
            line.append(us(best) + (f" ({ratio(peer / best)})" if peer else ""))
        rows.append(line)
    return table(["operation", *map(size, shown)], rows)


def _others(mode: str) -> Iterator[tuple[int, str, int, dict[str, Series]]]:
    """GPUs, operation, size, and the times by implementation."""
    for ranks in measured.OTHERS_ON:
        for op in measured.others(ranks):
            lines = {name: measured.on_gpus(ranks, name, op, mode) for name in measured.COMPARED}
            for nbytes in sorted(lines["kos, any buffers"]):
                if nbytes in measured.SHOWN_SIZES or op == "routing":
                    yield ranks, op, nbytes, lines


def _best(lines: dict[str, Series], nbytes: int) -> tuple[float, float | None]:
    """The shortest time of kos, and of NCCL where it has the operation."""
    kos, nccl = (
        [line[nbytes] for name, line in lines.items() if name.startswith(who) and nbytes in line]
        for who in ("kos", "NCCL")
    )
    return min(kos), min(nccl, default=None)


def hosts(machine: str, ranks: int) -> str:
    """all_reduce beside Open MPI and Gloo."""
    lines = {name: measured.all_reduce_host(machine, ranks, name) for name in measured.HOST_LINES}
    alone = {name: measured.all_reduce_host(machine, ranks, name, "single_shot") for name in ("kos", "Open MPI")}
    out = {name: measured.all_reduce_host(machine, ranks, name, in_place=False) for name in ("kos", "Open MPI")}
    bounds = measured.host_limits(machine, ranks)
    rows = []
    for nbytes in sorted(lines["kos"]):
        kos, persistent, mpi = (lines[name][nbytes] for name in ("kos", "kos, persistent", "Open MPI"))
        rows.append([
            size(nbytes), *(cell(lines[name], nbytes) for name in measured.HOST_LINES), cell(bounds, nbytes),
            ratio(mpi / kos), ratio(mpi / persistent), ratio(alone["Open MPI"][nbytes] / alone["kos"][nbytes]),
            ratio(out["Open MPI"][nbytes] / out["kos"][nbytes]), f"{lines['Gloo'][nbytes] / kos:.1f}",
        ])  # fmt: skip
    return table(
        ["size", *measured.HOST_LINES, "limit", "Open MPI / kos", "Open MPI / persistent", "the same, single calls",
         "the same, out of place", "Gloo / kos"],
        rows,
    )  # fmt: skip


def hosts_others() -> str:
    """Operations other than all_reduce, beside Open MPI."""
    file = "collectives-others-epyc-2"
    rows = []
    for op in dict.fromkeys(row["op"] for row in select(file)):
        for nbytes in sorted({row["bytes"] for row in select(file, op=op)}):
            place = {"op": op, "bytes": nbytes, "in_place": op == "broadcast"}
            kos, single = (one(file, **place, backend="mpi", call="function", mode=mode) for mode in MODES_ON_HOSTS)
            persistent = one(file, **place, backend="mpi", call="persistent", mode="eager")["time_us"]
            mpi, mpi_single = (one(file, **place, backend="mpi-native", mode=mode) for mode in MODES_ON_HOSTS)
            theirs = mpi["time_us"]
            rows.append([
                op + ", in place" * (op == "broadcast"), size(nbytes), us(kos["time_us"]), us(persistent), us(theirs),
                ratio(theirs / kos["time_us"]), ratio(theirs / persistent),
                ratio(mpi_single["time_us"] / single["time_us"]),
            ])  # fmt: skip
    return table(
        ["µs", "size", "kos", "kos, persistent", "Open MPI", "Open MPI / kos", "Open MPI / persistent",
         "the same, single calls"],
        rows,
    )  # fmt: skip


def one_rank() -> str:
    """A call in a group of one rank, which moves nothing."""
    lines = {
        "kos": ("mpi", "function"),
        "kos, persistent": ("mpi", "persistent"),
        "Open MPI": ("mpi-native", "function"),
    }
    rows = []
    for machine, title in (("xeon-1", "Xeon, 8 bytes"), ("epyc-1", "EPYC, 8 bytes")):
        row = {"ranks": 1, "mode": "eager", "in_place": True, "bytes": 8}
        found = (one(f"collectives-{machine}", **row, backend=name, call=call) for name, call in lines.values())
        rows.append([title, *(us(each["time_us"]) for each in found)])
    return table(["µs a call of one rank", *lines], rows)


TORCH = "torch-backend-h200-4"
TORCH_MODES = ("graph", "eager", "async")
TORCH_CALLS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


def torch_backend() -> str:
    """torch.distributed over kos and over ProcessGroupNCCL."""
    rows = []
    for call in TORCH_CALLS:
        for row in load(TORCH)[call]:
            line = [call, size(row["bytes"])]
            for mode in TORCH_MODES:
                line += [us(row[f"kos {mode}"]["us"]), us(row[f"nccl {mode}"]["us"])]
            rows.append([*line, us(row["kos eager"]["cpu_us"]), us(row["nccl eager"]["cpu_us"])])
    head = [f"{name} {mode}" for mode in TORCH_MODES for name in ("kos", "NCCL")]
    return table(["call", "size", *head, "CPU, kos eager", "CPU, NCCL eager"], rows)


def torch_steps() -> str:
    """A step of what is built on torch.distributed."""
    rows = []
    for key, label in (("ddp_ms", "DDP, small model"), ("fsdp_ms", "FSDP2, 1b")):
        steps: Row = load(TORCH)[key]
        rows.append([label, f"{steps['kos']:.1f}", f"{steps['nccl']:.1f}"])
    return table(["ms a step", "over kos", "over NCCL"], rows)
