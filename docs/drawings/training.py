"""Pipeline schedules (``kos.train.parallel.schedules``), and one step on a GPU as the planner predicts it."""

from __future__ import annotations

from docs.drawings.svg import COLOURS, GREY, LIGHT, Box, timeline
from kos.train.device.choose import layout_of
from kos.train.device.costs import gpu_rates
from kos.train.device.dry_run import DryRun
from kos.train.parallel import schedules
from kos.train.parallel.schedules import simulate
from kos.train.tools.plan import make_job, parse_plan

PASSES = dict(zip("FIWB", (*COLOURS[:3], COLOURS[1]), strict=True))
SECOND = dict(zip("FIWB", (*LIGHT, LIGHT[1]), strict=True))
"""Of a rank's second chunk of layers."""


def pipeline(name: str, stages: int = 4, micro_batches: int = 8) -> str:
    """A pipeline schedule with passes of equal length: a rank's forward, and each half of its backward, take 1."""
    schedule = schedules.build(name, stages, micro_batches)
    schedules.verify(schedule)
    times = simulate(schedule, dict.fromkeys("FIW", 1 / schedule.chunks))
    boxes = [Box(rank, start, end, str(action.micro_batch), (SECOND if action.chunk else PASSES)[action.kind])
             for rank, passes in enumerate(times.passes) for action, start, end in passes]  # fmt: skip
    kinds = {action.kind for actions in schedule.actions for action in actions}
    names = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradients"}
    legend = {names[kind]: PASSES[kind] for kind in "FBIW" if kind in kinds}
    legend |= {"lighter: second chunk of layers": SECOND["F"]} if schedule.chunks > 1 else {}
    kept = ", ".join(f"{slots / schedule.chunks:g}" for slots in schedule.slots)
    note = (
        f"{stages} ranks, {micro_batches} micro-batches: {times.idle_of_all:.1%} idle; activations kept by rank: {kept}"
    )
    rows = [f"rank {rank}" for rank in range(stages)]
    return timeline(name, note, rows, boxes, legend, until=3.0 * (micro_batches + stages - 1))


def gpu_step(zero: int) -> str:
    """A step of the preset 124m on four H200, two micro-batches a rank, as ``--plan`` predicts it."""
    words = ["--plan", "--ranks", "4", "--gpu", "H200", "--preset", "124m", "--zero", str(zero)]
    config, _, _, ranks, gpu, _ = parse_plan(words)
    config = config.model_copy(update={"device": "cuda"})
    assert gpu is not None and config.model.vocab_size is not None
    model = config.model_config_for(config.model.vocab_size)
    rates = gpu_rates(gpu, model.head_dim)
    job = make_job(config, model, layout_of(config, ranks), rates, micro_batch_size=config.batch_size // (2 * ranks))
    log = DryRun.timed(job, 0).clock.log
    end = max(stop for _, _, stop in log)
    forward, backward, moving, update = COLOURS
    kinds = {"F": ("forward {}", forward), "B": ("backward {}", backward), "g": ("", moving), "n": ("", update),
             "u": ("AdamW", update)}  # fmt: skip
    boxes = [Box(int(what == "gradients"), start, stop, kinds[what[0]][0].format(what[1:]), kinds[what[0]][1])
             for what, start, stop in log if what[0] in kinds]  # fmt: skip
    for row, start, stop, name in ((3, 0.0, 0.15, "results s-1"), (3, 0.16, 0.30, "queue s+1"),
                                   (3, 0.31, 0.45, "batch s+2"), (2, 0.45, 0.60, "batch s+2")):  # fmt: skip
        boxes.append(Box(row, start * end, stop * end, name, GREY))
    legend = {"forward": forward, "backward": backward, "collectives": moving, "norm, AdamW": update,
              "host, not to scale": GREY}  # fmt: skip
    note = (f"--zero {zero}, {ranks} {rates.name}, {config.batch_size} x {config.seq_len} tokens: "
            f"predicted {1e3 * end:.1f} ms")  # fmt: skip
    title = "Step s on a GPU: one CUDA graph, and the host a step ahead"
    return timeline(title, note, ["compute", "collectives", "copies", "host"], boxes, legend)
