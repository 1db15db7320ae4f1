"""The tables of training, layouts and kernels."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.paired_losses import mean_and_error
from benchmarks.plots import measured
from benchmarks.plots.results import GIB, RESULTS, Row, gpus, load, newest, one, ratio, select, table
from kos.train.tools.profile import OPTIMIZER


def tokens(row: Row) -> str:
    return f"{row['tokens_per_second']:,.0f}"


def gib(row: Row) -> str:
    return f"{row['peak_memory_bytes'] / GIB:.1f}"


def training() -> str:
    """Every model beside the fastest PyTorch."""
    rows = []
    for ranks in measured.TRAINED_ON:
        where = gpus(newest("train", ranks))
        for row in measured.trained(ranks):
            rows.append([
                where, row.label, tokens(row.kos), f"{row.kos['mfu_causal']:.1%}", gib(row.kos), tokens(row.torch),
                gib(row.torch), measured.variant(row.torch), ratio(row.ratio),
            ])  # fmt: skip
    return table(
        ["GPUs", "model, sequences x tokens per GPU", "kos, tokens/s", "MFU", "GiB", "PyTorch, tokens/s", "GiB",
         "PyTorch's variant", "kos / PyTorch"],
        rows,
    )  # fmt: skip


def training_types() -> str:
    """In 8 bits beside bfloat16; beside torchao if the newest run has it."""
    rows, measurements = [], measured.eight_bits()
    peers = any("torchao" in found for found in measurements.values())
    for preset, found in measurements.items():
        sixteen, eight, peer = found["bfloat16"], found["fp8"], found.get("torchao")
        model = f"{preset}, {eight['batch_size']} x {eight['seq_len']:,}"
        speed = ratio(sixteen["step_ms"] / eight["step_ms"])
        of_peer = [tokens(peer) if peer else ""] * peers
        rows.append([model, tokens(sixteen), tokens(eight), *of_peer, gib(sixteen), gib(eight), speed])
    head = ["bfloat16, tokens/s", "fp8, tokens/s", *["torchao float8"] * peers, "bfloat16, GiB", "fp8, GiB"]
    return table([f"{gpus(newest('train-fp8', 1))}, sequences x tokens", *head, "fp8 / bfloat16"], rows)


def loss(row: Row) -> str:
    return f"{row['val_loss']:.4f}"


def optimizer_rates() -> str:
    """The losses of tuning, which has the fewest tokens: of AdamW by its rate, of Muon by its matrices'."""
    rows = load("optimizer-losses-h100-1")["rows"]
    tokens_seen = min(row["tokens"] for row in rows)
    found = {(row["optimizer"], row["muon_lr"] or row["lr"]): loss(row) for row in rows if row["tokens"] == tokens_seen}
    rates = sorted({rate for _, rate in found})
    lines = [[name, *(found[name, rate] for rate in rates)] for name in ("adamw", "muon")]
    return table([f"{tokens_seen / 1e6:.0f} million tokens, by rate", *map(str, rates)], lines)


def optimizer_losses() -> str:
    """AdamW and Muon on equal text: the runs of each seed after the tuning."""
    lines = []
    runs = measured.losses("optimizer-losses-h100-1", "optimizer")
    for seed, found in runs.items():
        change = found["muon"]["val_loss"] / found["adamw"]["val_loss"] - 1
        lines.append([str(seed), loss(found["adamw"]), loss(found["muon"]), f"{change:+.2%}"])
    sizes = {name: f"{name}, {row['tokens'] / 1e6:.0f} million tokens" for name, row in runs[1].items()}
    return table(["seed", sizes["adamw"], sizes["muon"], "differs"], lines)


def fp8_losses() -> str:
    """The last losses in 8 bits beside bfloat16's, by seed, and the mean of the differences with its standard error."""
    lines = []
    for label, name in measured.EIGHT_BIT_LOSSES.items():
        pairs = measured.losses(name, "dtype").values()
        changes = [100 * (found["fp8"]["val_loss"] / found["bfloat16"]["val_loss"] - 1) for found in pairs]
        mean, error = mean_and_error(changes)
        cells = [", ".join(loss(found[dtype]) for found in pairs) for dtype in ("bfloat16", "fp8")]
        each = ", ".join(f"{change:+.2f}%" for change in changes)
        lines.append([f"[{label}](benchmarks/results/{name}.json)", *cells, each, f"{mean:+.2f}% ± {error:.2f}%"])
    return table(["three seeds", "bfloat16", "fp8", "fp8 differs", "mean"], lines)


def training_cpu() -> str:
    """Each row of ``benchmarks.cpu``, with all instruction sets and with AVX2 alone."""
    rows: dict[str, dict[str, Any]] = {}
    for row in load("cpu-epyc-zen5")["rows"]:
        rows.setdefault(row["about"], {})[row["kernels"]] = row
    head = ["2 cores of EPYC, Zen 5", "kos, tokens/s", "PyTorch, tokens/s", "kos / PyTorch", "by CPU time", "AVX2"]
    return table(head, [
        [about, *(f"{found['all'][name]['tokens_per_second']:,.0f}" for name in ("kos", "torch")),
         *(f"{middle:.2f} ({low:.2f} to {high:.2f})"
           for middle, low, high in (found["all"]["ratio_wall"], found["all"]["ratio_cpu"])),
         f"{found['avx2']['ratio_cpu'][0]:.2f}" if "avx2" in found else ""]
        for about, found in rows.items()
    ])  # fmt: skip



def power() -> str:
    """Every sixth row of the file."""
    rows = []
    for row in select("power-h200-1")[::6]:
        if "product" in row:
            what = "matmul " + " x ".join(str(each) for each in row["product"])
            speeds = [f"{row['tflops_first_50ms']:.0f}", f"{row['tflops_last_second']:.0f}"]
        else:
            words = re.search(r"--preset (\S+)(?: --num-hidden-layers (\d))?.* --batch-size (\d+)", row["command"])
            assert words
            layers = f"{words[2]} layers of " * bool(words[2])
            what, speeds = f"training {layers}{words[1]}, {words[3]} sequences per step", ["", ""]
        rows.append([what, *speeds, f"{row['sm_mhz'][1]:,.0f}", f"{row['at_power_limit']:.0%}"])
    return table(["what runs", "TFLOP/s, first 50 ms", "last second", "median MHz", "at 700 W"], rows)


GROUPS = [
    ("matmuls", "linear"),
    ("attention, forward", "attention(_to)?$"),
    ("attention, backward", "attention(_to)?_backward"),
    ("optimizer and norm", f"{OPTIMIZER}|adamw|squares|finish_norm"),  # in older files, kernels
    ("collectives, beside other work", ".*, collective"),
]


PROFILES = {
    "1b, 2 x 4,096": "profile-1b-h200-1", "124m, 32 x 1,024": "profile-124m-h200-1",
    "8b, 2 x 8,192, 8 GPUs": "profile-8b-h200-8",
}  # fmt: skip


def profiles() -> str:
    """Each group of operations of a step, in percent of it."""
    sums = {title: profile(name) for title, name in PROFILES.items()}
    rows = [[group, *(f"{each[group] / each['the step']:.1%}" if each[group] else "" for each in sums.values())]
            for group in [group for group, _ in GROUPS] + ["everything else"]]  # fmt: skip
    rows.append(["the step, ms", *(f"{each['the step']:,.1f}" for each in sums.values())])
    files = [f"[file](benchmarks/results/{name}.txt)" for name in PROFILES.values()]
    return table(["operations", *PROFILES], [*rows, ["", *files]])


def profile(name: str) -> dict[str, float]:
    """Milliseconds of the step and of its groups of operations, from the file that ``--profile`` wrote."""
    lines = (RESULTS / f"{name}.txt").read_text().splitlines()
    step = float(next(line for line in lines if line.startswith("a step")).split()[2].strip(","))
    sums: dict[str, float] = {group: 0.0 for group, _ in GROUPS} | {"everything else": 0.0, "the step": step}
    for line in lines[lines.index(next(line for line in lines if line.startswith("operation "))) + 1 :]:
        words = re.split(r"\s{2,}", line)
        if words[0] and len(words) > 3:  # what is indented is a part of the operation above it
            group = next((group for group, which in GROUPS if re.match(which, words[0])), "everything else")
            sums[group] += float(words[2])
    return sums


def layouts() -> str:
    rows = []
    for on, row in measured.layout_rows().values():
        mfu = f"{row['mfu_causal']:.1%}" if row.get("mfu_causal") else ""
        memory = gib(row) if row.get("peak_memory_bytes") else ""
        predicted = f"{row['predicted_ms']:,.0f}" if "predicted_ms" in row else ""
        rows.append([row["preset"], row["layout"], on, tokens(row), f"{row['step_ms']:,.0f}", mfu, memory, predicted])
    return table(["model", "layout", "on", "tokens/s", "ms per step", "MFU", "GiB", "`--plan` predicted, ms"], rows)


def layouts_of_four() -> str:
    """Layouts on 4 GPUs, whose batches differ."""
    rows = []
    for row in load("layouts-h200-4")["rows"]:
        batch = f"{row['batch_size']} x {row['seq_len']:,}"
        idle = f"{row['stages']['idle']:.1%}" if "stages" in row else ""
        rows.append([row["preset"], row["layout"], batch, tokens(row), f"{row['step_ms']:,.0f}",
                     f"{row['mfu_causal']:.1%}", idle, gib(row)])  # fmt: skip
    head = ["model", "layout", "tokens per step", "tokens/s", "ms per step", "MFU", "idle", "GiB"]
    return table(head, rows)


def layouts_peers() -> str:
    """Layouts of kos and of other libraries, on the same batch in the same run."""
    names = {"cudnn-master": "PyTorch", "cudnn-master-async": "PyTorch, async", "cudnn-master-alltoall":
             "PyTorch, all-to-all", "flash-master": "PyTorch, its flash attention", "flash": "picotron",
             "flash-fused": "picotron, fused"}  # fmt: skip
    rows: list[list[str]] = []
    for on, (ours, *theirs) in measured.layout_peers():
        what = [ours["preset"], ours["layout"], f"{ours['batch_size']} x {ours['seq_len']:,}", on]
        rows.append([*what, "kos", tokens(ours), gib(ours), ""])
        for row in theirs:
            slower = ratio(row["step_ms"] / ours["step_ms"])
            rows.append(["", "", "", "", names[row["variant"]], tokens(row), gib(row), slower])
    head = ["model", "layout", "tokens per step", "on", "library", "tokens/s", "GiB", "kos / library"]
    return table(head, rows)


def attention() -> str:
    rows = []
    for preset, label in measured.ATTENTION:
        ways = {way: measured.attention(preset, way) for way in ("", "_backward")}
        limits = {way: one(measured.attention_file(), op=f"attention{way}", preset=preset)["of_limit"] for way in ways}
        rows.append([label, *(f"{ways[''][name]:.0f}/{ways['_backward'][name]:.0f}" for name in ways[""]),
                     f"{limits['']:.0%}/{limits['_backward']:.0%}"])  # fmt: skip
    return table(["TFLOP/s, forward/backward", *measured.attention("8b", ""), "kos of the limit"], rows)


def baby() -> str:
    result = load("baby-h200")
    last, best = result["last"], result["best"]
    return table(
        ["steps", "validation loss, last", "least", "nanoGPT, published", "tokens/s"],
        [[f"{last['step']:,}", f"{last['val_loss']:.3f}", f"{best['val_loss']:.3f}", "1.4697",
          f"{result['tokens_per_second']:,}"]],
    )  # fmt: skip
