"""What the files hold, by subject: the rows that both a picture and a table show."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.plots.results import RESULTS, Row, exists, gpus, load, newest, one, result_files, select

GPU_LINES = {
    "kos, symmetric buffers": {"backend": "auto", "algorithm": "window", "call": "function"},
    "kos, any buffers": {"backend": "auto", "algorithm": "auto", "call": "function"},
    "NCCL": {"backend": "nccl"},
    "NCCL, symmetric windows": {"backend": "nccl-window"},
    "torch one-shot": {"backend": "torch-symm", "algorithm": "one_shot"},
    "torch two-shot": {"backend": "torch-symm", "algorithm": "two_shot"},
    "torch.distributed": {"backend": "torch-nccl"},
}
IN_PLACE_ONLY = ("torch two-shot", "torch.distributed")

HOST_LINES = {
    "kos": {"backend": "mpi", "call": "function"},
    "Open MPI": {"backend": "mpi-native"},
    "Open MPI from C": {"backend": "mpi-c"},
}
HOST_RANKS = (2, 4)
"""Numbers of ranks on 2 cores of which there is a file, written by ``kos bench --arrays``."""

Series = dict[int, float]
"""A value by the size in bytes."""


def on_gpus(
    ranks: int, name: str, op: str = "all_reduce", mode: str = "graph", value: str = "time_us", file: str = ""
) -> Series:
    """Values of an operation by size, out of place if the implementation can do that; of the rows that have them."""
    wanted: dict[str, Any] = {**GPU_LINES[name], "op": op, "mode": mode, "in_place": name in IN_PLACE_ONLY}
    file = file or newest("collectives", ranks)
    rows = select(file, **wanted)
    if not rows and name == "NCCL" and op in ("gather", "scatter", "send_recv"):  # grouped by kos' backend ``nccl``
        rows = select(file, **{**wanted, "backend": "kos-nccl", "algorithm": "auto"})
    return {row["bytes"]: row[value] for row in rows if row.get(value) is not None}


def cores(ranks: int) -> str:
    """What calls of so many ranks on a host were measured on: 2 EPYC cores."""
    count, _, _, *names = load(f"host-calls-{ranks}")["hardware"].replace("(R)", "").split()  # 2 cores of AMD EPYC
    return " ".join([count, *(name for name in names if name not in ("AMD", "Intel", "Processor")), "cores"])


def on(ranks: int) -> str:
    """The GPUs of the file of collectives: 2 H100."""
    return gpus(newest("collectives", ranks))


def other_nccl(ranks: int) -> str | None:
    """The file of another NCCL on the GPUs of the file of collectives, if that was measured."""
    name = newest("collectives", ranks).replace("collectives", "other-nccl")
    return name if exists(name) else None


def torch_file() -> str:
    """The newest file of torch.distributed over kos on 2 GPUs."""
    return newest("torch-backend", 2)


def faster_nccl(ranks: int, mode: str = "graph") -> Series:
    """all_reduce of NCCL with ordinary buffers or with symmetric windows, by size whichever is faster."""
    kinds = [on_gpus(ranks, name, mode=mode) for name in ("NCCL", "NCCL, symmetric windows")]
    return {nbytes: min(each[nbytes] for each in kinds) for nbytes in kinds[0]}


def gpu_limits(ranks: int, op: str = "all_reduce") -> Series:
    return limits(newest("collectives", ranks), "graph", False, op=op)


def others(ranks: int) -> list[str]:
    """The operations besides all_reduce that were measured on ``ranks`` GPUs."""
    rows = load(newest("collectives", ranks))["rows"]
    found = {row["op"]: None for row in rows}
    return [op for op in dict.fromkeys((*SHOWN_OPERATIONS, *found)) if op in found and op != "all_reduce"]


def on_host(ranks: int, name: str, op: str = "all_reduce") -> Series:
    """Microseconds of calls back to back on the same array, by size."""
    wanted: dict[str, Any] = {**HOST_LINES[name], "op": op, "mode": "eager", "arrays": 1}
    return {row["bytes"]: row["time_us"] for row in select(f"host-calls-{ranks}", **wanted)}


def limits(file: str, mode: str, in_place: bool, **wanted: Any) -> Series:
    return {row["bytes"]: row["limit_us"] for row in select(file, mode=mode, in_place=in_place, **wanted)}


class Trained(NamedTuple):
    """A model on some GPUs: the row of kos and that of the fastest PyTorch of the same run."""

    ranks: int
    label: str
    kos: Row
    torch: Row

    @property
    def ratio(self) -> float:
        speed: float = self.kos["tokens_per_second"] / self.torch["tokens_per_second"]
        return speed


MODELS = [  # preset, sequences of a GPU, tokens of a sequence, label
    ("124m", 4, 1024, "124m, 4 x 1,024"),
    ("124m", 32, 1024, "124m, 32 x 1,024"),
    ("1b", 2, 4096, "1b, 2 x 4,096"),
    ("8b-4-layers", 2, 4096, "4 layers of 8b, 2 x 4,096"),
    ("8b", 2, 8192, "8b, 2 x 8,192"),
]


TRAINED_ON = tuple(ranks for ranks in (1, 2, 4, 8) if any(RESULTS.glob(f"train-h*-{ranks}.json")))
"""Numbers of GPUs of which there is a file."""


def trained(ranks: int) -> list[Trained]:
    """Every model that was measured with kos and PyTorch on this number of GPUs."""
    found = []
    for preset, batch, tokens, label in MODELS:
        rows = select(newest("train", ranks), preset=preset, batch_size=batch, seq_len=tokens)
        theirs = [row for row in rows if row["implementation"] == "torch"]
        if not theirs:
            continue
        torch = max(theirs, key=lambda row: row["tokens_per_second"])
        ours = [row for row in rows if row["implementation"] == "kos" and row.get("commit") == torch.get("commit")]
        found.append(Trained(ranks, label, ours[0], torch))
    return found


def eight_bits() -> dict[str, dict[str, Row]]:
    """Rows of the newest training in 8 bits, by preset and then "bfloat16", "fp8" and "torchao", which is its fastest.

    Of several measurements of kos the last counts.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in load(newest("train-fp8", 1))["rows"]:
        rows = found.setdefault(row["preset"], {})
        name = row["variant"] if row["implementation"] == "kos" else "torchao"
        if name != "torchao" or name not in rows or row["step_ms"] < rows[name]["step_ms"]:
            rows[name] = row
    return found


EIGHT_BIT_LOSSES = {"124m": "fp8-losses-h100-1", "baby": "fp8-losses-baby-h100-1"}


def losses(name: str, compared: str) -> dict[int, dict[str, Row]]:
    """The runs of a file of paired losses, by seed and then by ``compared``, a setting; those of tuning have seed 0."""
    found: dict[int, dict[str, Row]] = {}
    for row in sorted((row for row in load(name)["rows"] if row["seed"]), key=lambda row: row["seed"]):
        found.setdefault(row["seed"], {})[row[compared]] = row
    return found


def variant(row: Row) -> str:
    """How PyTorch was set up, in words."""
    words = {
        "flash": "flash", "cudnn": "cuDNN", "master": "masters", "autocast": "autocast",
        "graphs": "CUDA graphs", "fsdp": "FSDP2", "eager": "eager", "whole": "one batch",
    }  # fmt: skip
    said = ", ".join(words[word] for word in row["variant"].split("-"))
    return said + ", DDP" * row["layout"].startswith("dp") * (row["ranks"] > 1)


OTHERS_ON = (2, 4)
"""Numbers of GPUs whose files may hold operations besides all_reduce."""
SHOWN_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                    "scatter", "send_recv")  # fmt: skip
COMPARED = ("kos, any buffers", "kos, symmetric buffers", "NCCL", "NCCL, symmetric windows")
SHOWN_SIZES = (1 << 10, 8 << 10, 128 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
"""Sizes in the tables of operations besides all_reduce."""


ATTENTION = [  # preset of the file, label
    ("8b", "8b: 1 x 8,192, head size 128"),
    ("1b", "1b: 2 x 4,096, head size 64"),
    ("124m", "124m: 32 x 1,024, head size 64"),
]


def attention_file() -> str:
    """The newest file that has every shape of ``ATTENTION``."""
    names = [path.stem for path in RESULTS.glob("attention-h*-1.json")]
    whole = [
        name for name in names if {row.get("preset") for row in load(name)["rows"]} >= {key for key, _ in ATTENTION}
    ]
    return max(whole, key=lambda name: str(load(name)["date"]))


def attention(preset: str, way: str) -> dict[str, float]:
    """TFLOP/s by implementation, ``way`` being "" (forward) or "_backward"."""
    row = one(attention_file(), op=f"attention{way}", preset=preset)
    times = {"kos": row["fast_us"], "PyTorch's choice": row["torch_us"]}
    return {name: row["flops"] / time * 1e-6 for name, time in times.items()}


def layout_rows() -> dict[tuple[str, str], tuple[str, Row]]:
    """The GPUs and newest row of each layout on 2 GPUs, by preset and layout."""
    found: dict[tuple[str, str], tuple[str, Row]] = {}
    for name in result_files("layouts", 2):
        for row in load(name)["rows"]:
            found.setdefault((row["preset"], row["layout"]), (gpus(name), row))
    return found


def layout_peers() -> list[tuple[str, list[Row]]]:
    """Runs, newest first: the GPUs, then the row of kos and those of peers that no newer run has."""
    seen, found = set[tuple[str, ...]](), list[tuple[str, list[Row]]]()
    for name in result_files("layouts-peers", 2):
        for row in load(name)["rows"]:
            if row["implementation"] == "kos":
                found.append((gpus(name), [row]))
            elif (key := (row["preset"], row["layout"].split()[0], row["variant"])) not in seen:
                seen.add(key)
                found[-1][1].append(row)
    return [group for group in found if len(group[1]) > 1]
