"""The pictures: each function draws one figure from the recorded results."""

from __future__ import annotations

from typing import Any

from benchmarks.plots import measured
from benchmarks.plots.results import PEAK_TFLOPS, gpus, load, newest, one, select
from benchmarks.plots.style import (
    KOS,
    KOS_LIGHT,
    LIMIT,
    LIMIT_LINE,
    PEER,
    PEER_LIGHT,
    bars,
    limit,
    line,
    new,
    sizes_along,
    times_up,
)

NANOGPT = 1.4697
"""Validation loss of shakespeare_char after 5,000 iterations, as its README has it."""
GPU_NAMES = ("kos, symmetric buffers", "kos, any buffers", "NCCL", "NCCL, symmetric windows")


def faster(axes: Any, ours: dict[int, float], theirs: dict[int, float], name: str, color: str) -> None:
    """How many times as long the other takes, by size."""
    sizes = sorted(set(ours) & set(theirs))
    axes.plot(sizes, [theirs[each] / ours[each] for each in sizes], label=name, color=color, marker="o")
    axes.axhline(1.0, color=LIMIT, linewidth=0.9)


def latency() -> Any:
    """For README: an all_reduce of 2 ranks on a host, and on GPUs in a graph, beside peers."""
    figure, [panels] = new(3.4, columns=2)
    host = {name: measured.on_host(2, name) for name in measured.HOST_LINES}
    draw(panels[0], host, f"2 ranks on {measured.cores(2)}, float32")
    lines = {name: measured.on_gpus(2, name) for name in (*GPU_NAMES, "torch one-shot")}
    draw(panels[1], lines, f"{measured.on(2)}, bfloat16, in a CUDA graph")
    panels[0].set_ylabel("microseconds (lower is better)")
    return figure


def draw(axes: Any, lines: dict[str, dict[int, float]], title: str) -> None:
    """Up to 1 MB, where latency counts; the legend is below."""
    for name, series in lines.items():
        line(axes, name, {nbytes: time for nbytes, time in series.items() if nbytes <= 1 << 20})
    sizes_along(axes, [nbytes for nbytes in next(iter(lines.values())) if nbytes <= 1 << 20], apart=4)
    times_up(axes)
    axes.set_title(title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high])


def training_types() -> Any:
    """For README: speeds on one GPU as parts of that of kos in bfloat16: of PyTorch in bfloat16, of both in 8 bits."""
    figure, [panels] = new(2.8, columns=2, sharey=True)
    models = [row for row in measured.trained(1) if not row.label.startswith("124m, 4 ")]
    names = {"bfloat16": "kos, bfloat16", "fp8": "kos, fp8", "torchao": "torchao, float8"}
    left = {"kos, bfloat16": [row.kos for row in models], "PyTorch, torch.compile": [row.torch for row in models]}
    eight = [measured.eight_bits()[row.kos["preset"]] for row in models]
    right = {title: [found.get(name) for found in eight] for name, title in names.items()}
    for axes, lines, colors, file in (
        (panels[0], left, [KOS, PEER], newest("train", 1)),
        (panels[1], right, [KOS, KOS_LIGHT, PEER_LIGHT], newest("train-fp8", 1)),
    ):
        ours = [row["tokens_per_second"] for row in lines["kos, bfloat16"]]
        for index, (title, rows) in enumerate(lines.items()):
            for at, (row, speed) in enumerate(zip(rows, ours, strict=True)):
                if row is None:
                    continue
                place, width = at + 0.28 * (index - (len(lines) - 1) / 2), 0.26
                drawn = axes.bar(place, row["tokens_per_second"] / speed, width, color=colors[index],
                                 label=title if title not in axes.get_legend_handles_labels()[1] else None)  # fmt: skip
                axes.bar_label(drawn, [f"{row['tokens_per_second'] / 1e3:.3g}k"], padding=1, fontsize=6.5)
        axes.set_xticks(range(len(models)), [row.label.replace(", ", "\n", 1) for row in models])
        axes.set(title=f"training on {gpus(file)}, tokens per second", ylim=(0, 1.6))
        axes.legend(loc="upper left", ncols=2)
    panels[0].set_ylabel("speed of kos in bfloat16 = 1")
    return figure


def all_reduce_gpus() -> Any:
    """2, 4 and 8 GPUs beside NCCL and torch's symmetric memory."""
    figure, panels = new(6.4, rows=2, columns=3, sharey="row")
    names = (*GPU_NAMES, "torch one-shot", "torch two-shot")
    for column, ranks in enumerate((2, 4, 8)):
        times, ratios = panels[0][column], panels[1][column]
        lines = {name: measured.on_gpus(ranks, name) for name in names}
        bound = measured.gpu_limits(ranks)
        for name in names:
            line(times, name, lines[name])
        limit(times, bound)
        times_up(times)
        for name, color in (("kos, symmetric buffers", KOS), ("kos, any buffers", KOS_LIGHT)):
            faster(ratios, lines[name], measured.faster_nccl(ranks), name, color)
        for axes in (times, ratios):
            sizes_along(axes, bound, apart=8)
        times.set_title(f"{measured.on(ranks)}: time of a call")
        ratios.set_title(f"{measured.on(ranks)}: times as fast as NCCL")
    panels[1][0].set_ylim(0, None)
    panels[0][0].set_ylabel("microseconds (lower is better)")
    panels[1][0].set_ylabel("NCCL's faster buffers / kos")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def all_reduce_hosts() -> Any:
    """2 and 4 ranks on two cores, back to back on the same array, beside Open MPI."""
    figure, panels = new(3.3, columns=2)
    for ranks, axes in zip(measured.HOST_RANKS, panels[0], strict=True):
        lines = {name: measured.on_host(ranks, name) for name in measured.HOST_LINES}
        for name, series in lines.items():
            line(axes, name, series)
        sizes_along(axes, lines["kos"])
        times_up(axes)
        axes.set(title=f"{ranks} ranks on {measured.cores(ranks)}: all_reduce, float32")
    panels[0][0].set_ylabel("microseconds (lower is better)")
    panels[0][0].legend()
    return figure


def collectives() -> Any:
    """Nine operations on 4 GPUs."""
    figure, panels = new(7.0, rows=3, columns=3, sharex=True)
    for axes, op in zip(panels.flat, measured.SHOWN_OPERATIONS, strict=True):
        for name in measured.COMPARED:
            line(axes, name, measured.on_gpus(4, name, op))
        bound = measured.gpu_limits(4, op)
        limit(axes, bound)
        sizes_along(axes, bound, apart=8)
        times_up(axes)
        axes.set_title(f"{op}, {measured.on(4)}")
    for axes in panels[:, 0]:
        axes.set_ylabel("microseconds")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def training() -> Any:
    """Tokens per second and GPU of kos and compiled PyTorch, by model and number of GPUs."""
    figure, [[axes]] = new(5.6)
    every = [measured.trained(ranks) for ranks in measured.TRAINED_ON]
    at, names = 0.0, list[tuple[float, str]]()
    for *_, label in measured.MODELS:
        rows = [row for rows in every for row in rows if row.label == label]
        axes.text(0.5, at - 0.85, f"{label.replace(',', ':', 1)} tokens per GPU", va="center", fontsize=7.5)
        for row in rows:
            names.append((at, gpus(newest("train", row.ranks))))
            for shift, part, color in ((-0.2, row.kos, KOS), (0.2, row.torch, PEER)):
                speed = part["tokens_per_second"] / row.ranks
                share = 100 * part["tokens_per_second"] / row.kos["tokens_per_second"]
                axes.barh(at + shift, share, 0.38, color=color)
                axes.text(share + 0.7, at + shift, f"{speed:,.0f}", va="center", fontsize=6.5)
            at += 1
        at += 0.9
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.set(ylim=(at - 0.8, -1.5), xlim=(0, 112), xlabel="percent of the speed of kos (higher is better)",
             title="Training speed. The numbers are tokens per second and GPU")  # fmt: skip
    axes.grid(axis="y", visible=False)
    figure.legend(axes.containers[:2], ["kos", "PyTorch, torch.compile"], loc="outside lower center", ncols=2)
    return figure


def loss_curve() -> Any:
    """The run of ``make train``."""
    figure, [[axes]] = new(2.7)
    rows = load("train-tiny-epyc-2")["rows"]
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=KOS_LIGHT, linewidth=1.0,
              label="training loss")  # fmt: skip
    checks = [(0, load("train-tiny-epyc-2")["val_loss_before"])]
    checks += [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    axes.plot(*zip(*checks, strict=True), color=KOS, marker="o", label="validation loss")
    for (step, loss), shift in ((checks[0], 5), (checks[-1], -12)):
        axes.annotate(f"{loss:.2f}", (step, loss), textcoords="offset points", xytext=(shift, 6))
    axes.set(title="make train: a LLaMA of 820,352 parameters on Python's sources, 2 ranks", xlabel="step",
             ylabel="nats a byte", ylim=(1, None), xlim=(-5, 625))  # fmt: skip
    axes.legend()
    return figure


def layouts() -> Any:
    """Step times of each axis on two GPUs."""
    figure, panels = new(2.9, columns=2, width_ratios=[2, 1])
    for axes, preset, batch in zip(panels[0], ("1b", "8b"), ("16 x 4,096", "4 x 8,192"), strict=True):
        rows = [(on, row) for on, row in measured.layout_rows().values() if row["preset"] == preset]
        speeds = {"tokens/s": [row["tokens_per_second"] for _, row in rows]}
        bars(axes, [row["layout"] for _, row in rows], speeds, [KOS])
        axes.set_title(f"{preset}, {batch} tokens on {rows[0][0]}")
    panels[0][0].set_ylabel("tokens a second")
    return figure


KERNELS = (
    "swiglu", "swiglu_backward", "gelu", "rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "linear",
    "linear_residual", "linear_input_gradient", "linear_weight_gradient", "rope", "rope_backward", "attention",
    "attention_backward", "embedding", "cross_entropy", "gradient_norm", "adamw",
)  # fmt: skip


def kernels() -> Any:
    """How much of the physical limit each operation reaches."""
    figure, [[axes]] = new(5.6)
    for index, op in enumerate(KERNELS):
        row = one(newest("kernels", 1), op=op)
        reached = {"kos": row["fast_us"], "PyTorch, eager": row["torch_us"]}
        if "torch_compiled_us" in row:
            reached["PyTorch, torch.compile"] = row["torch_compiled_us"]
        for (name, time), color in zip(reached.items(), (KOS, PEER_LIGHT, PEER), strict=False):
            shift = list(reached).index(name)
            axes.barh(index + 0.27 * (shift - 1), 100 * row["limit_us"] / time, 0.25, color=color,
                      label=name if index == 0 else None)  # fmt: skip
    axes.set_yticks(range(len(KERNELS)), KERNELS)
    axes.invert_yaxis()
    axes.axvline(100, **LIMIT_LINE, label="physical limit")
    axes.grid(axis="y", visible=False)
    axes.set(title=f"Operations of a training step: preset 1b, 8,192 tokens, bfloat16, {gpus(newest('kernels', 1))}",
             xlabel="percent of the physical limit (higher is better)", xlim=(0, 104))  # fmt: skip
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def attention() -> Any:
    """TFLOP/s forward and backward, beside torch and cuDNN."""
    figure, panels = new(3.2, columns=2, sharey=True)
    for axes, way, title in zip(panels[0], ("", "_backward"), ("forward", "backward"), strict=True):
        by_shape = [measured.attention(preset, way) for preset, _ in measured.ATTENTION]
        series = {name: [shape[name] for shape in by_shape] for name in by_shape[0]}
        labels = [label.replace(": ", "\n").replace(", head", "\nhead") for _, label in measured.ATTENTION]
        bars(axes, labels, series, [KOS, PEER])
        axes.axhline(PEAK_TFLOPS, **LIMIT_LINE, label="data sheet's peak")
        axes.set_title(f"causal attention on {gpus(measured.attention_file())}, {title}")
    panels[0][0].set_ylabel("TFLOP/s (higher is better)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def torch_backend() -> Any:
    """All-reduce of torch.distributed: over kos and over NCCL's process group."""
    figure, panels = new(3.1, columns=2, sharey=True)
    rows = load(measured.torch_file())["all_reduce"]
    for axes, mode in zip(panels[0], ("graph", "eager"), strict=True):
        for name, label, color, marker in (("kos", "kos", KOS, "o"), ("nccl", "ProcessGroupNCCL", PEER, "^")):
            axes.plot([row["bytes"] for row in rows], [row[f"{name} {mode}"]["us"] for row in rows], color=color,
                      marker=marker, label=label)  # fmt: skip
        sizes_along(axes, [row["bytes"] for row in rows])
        times_up(axes)
        axes.set_title(
            f"dist.all_reduce on {gpus(measured.torch_file())}, {'CUDA graph' if mode == 'graph' else 'eager'}"
        )
    panels[0][0].set_ylabel("microseconds (lower is better)")
    panels[0][0].legend()
    return figure


def baby() -> Any:
    """Validation loss of the character model."""
    figure, [[axes]] = new(2.5)
    rows = select("baby-h200")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=KOS_LIGHT, label="training loss")
    axes.plot([row["step"] for row in rows], [row["val_loss"] for row in rows], color=KOS, marker="o",
              label="validation loss")  # fmt: skip
    axes.axhline(NANOGPT, **{**LIMIT_LINE, "color": PEER}, label="nanoGPT, published")
    axes.set(title="preset baby: characters of Tiny Shakespeare, one H200", xlabel="step", ylabel="nats a character")
    axes.legend()
    return figure


def fp8_losses() -> Any:
    """Validation losses of pairs of runs in bfloat16 and in 8 bits, and the differences."""
    figure, panels = new(3.6, rows=2, columns=2, sharex="col", height_ratios=[2, 1])
    for (curves, changes), (label, file) in zip(panels.T, measured.EIGHT_BIT_LOSSES.items(), strict=True):
        for seed, found in measured.losses(file, "dtype").items():
            tokens = [seen / 1e6 for seen, _ in found["fp8"]["curve"]]
            sixteen, eight = ([loss for _, loss in found[dtype]["curve"]] for dtype in ("bfloat16", "fp8"))
            for name, series, color, style in (("bfloat16", sixteen, PEER, "-"), ("fp8", eight, KOS, "--")):
                curves.plot(tokens, series, style, color=color, linewidth=0.9, label=name if seed == 1 else None)
            changes.plot(tokens, [100 * (b / a - 1) for a, b in zip(sixteen, eight, strict=True)], color=KOS,
                         linewidth=0.9)  # fmt: skip
        curves.set_title(f"{label} on {gpus(file)}, three seeds")
        changes.axhline(0, **LIMIT_LINE)
        changes.set(xlabel="million tokens", ylim=(-4, 4))
    panels[0][0].set_ylabel("validation loss")
    panels[1][0].set_ylabel("fp8 differs, %")
    panels[0][0].legend()
    return figure


PICTURES = {
    "latency": latency,
    "training-types": training_types,
    "all-reduce-gpus": all_reduce_gpus,
    "all-reduce-hosts": all_reduce_hosts,
    "collectives": collectives,
    "training": training,
    "loss-curve": loss_curve,
    "loss-baby": baby,
    "layouts": layouts,
    "kernels": kernels,
    "attention": attention,
    "torch-backend": torch_backend,
    "fp8-losses": fp8_losses,
}
