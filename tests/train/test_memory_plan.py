"""What the plan of a GPU's memory counts, and what it advises, for GPUs that need not be there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.engine import memory_plan
from kos.train.engine.memory_plan import GIB, plan_memory
from kos.train.ops.cuda.dialect import CudaOps


def plan(*flags, ranks=1):
    """The plan of a preset on GPUs of 138.9 GiB."""
    config = parse(list(flags)).for_world(ranks, "cuda")
    ops = CudaOps.__new__(CudaOps)
    ops.__dict__.update(device=0, stream=None, multiprocessors=132, shared_memory=227 << 10)
    rounds = config.batch_size // config.micro_batch_size // ranks
    model = config.model_config_for(256)
    return plan_memory(
        config, model, model.local(), ops, ranks=ranks, head_rows=8192, multiple=1, rounds=rounds
    )


def test_the_plan_of_published_models(monkeypatch):
    """Llama-3.1-8B on eight GPUs takes ZeRO-1; what is computed again is not kept."""
    monkeypatch.setattr(memory_plan, "cu", SimpleNamespace(cuMemGetInfo=lambda: (0, int(138.9 * GIB), 0)))
    monkeypatch.setattr(memory_plan.attention, "family_for", lambda device, dtype, head_dim: "hopper")
    knobs = "or --recompute .* or --zero 1 or --grad-dtype bfloat16 or --master-weights none or a smaller model$"
    with pytest.raises(ConfigError, match=rf"got 20\d.* {knobs}"):
        plan("--preset", "8b", ranks=8).check()
    whole = plan("--preset", "8b", ranks=8)
    with pytest.raises(ConfigError) as caught:
        whole.check()
    assert len(whole.uses) == 8 and all(
        f"{use} {size / GIB:.2f}" in str(caught.value) for use, size in whole.uses.items()
    )
    sharded = plan("--preset", "8b", "--zero", "1", ranks=8).check()
    assert 7.4 * 8.03e9 < sharded.total - sharded.arena < 7.7 * 8.03e9
    short = plan("--preset", "8b", "--zero", "1", "--grad-dtype", "bfloat16", ranks=8).check()
    assert sharded.uses["gradients, float32"] - short.uses["gradients, bfloat16"] == 2 * 8_030_261_248
    assert short.arena - sharded.arena == 4 * 128_256 * 4096  # a head's gradient, over two chunks of tokens
    alone = plan("--preset", "8b", "--master-weights", "none", ranks=8)
    assert 14 * 8.03e9 < alone.total - alone.arena < 14.3 * 8.03e9 and "  weights, bfloat16 " in str(alone)
    taken = [plan("--preset", "1b", "--recompute", how).arena for how in ("none", "norms", "block")]
    # Kept of a token and layer: x, mid, norms, heads (5 D), q k v (1.5 D), gate, up and their product (12 D).
    assert taken[0] > 32768 * 16 * 2048 * 2 * 18.5 and taken[1] < 0.72 * taken[0] and taken[2] < 0.2 * taken[0]


def test_only_what_can_help_against_too_little_memory_is_said(monkeypatch):
    free = 1 << 40
    monkeypatch.setattr(memory_plan, "cu", SimpleNamespace(cuMemGetInfo=lambda: (0, free, 0)))
    monkeypatch.setattr(memory_plan.attention, "family_for", lambda device, dtype, head_dim: "hopper")
    for ranks in (1, 2, 8):
        flags = []
        for knob in (["--zero", "1"], ["--grad-dtype", "bfloat16"], ["--master-weights", "none"]):
            before, flags = plan(*flags, ranks=ranks), [*flags, *knob]
            after = plan(*flags, ranks=ranks)
            saved = (before.total - before.arena) - (after.total - after.arena)
            assert before.knobs.get(" ".join(knob), 0) == saved and (saved > 0 or ranks == 1), (ranks, knob)
            assert " ".join(knob) not in after.knobs
    tiny = plan("--batch-size", "2")
    rest, acting = tiny.total - tiny.arena, "a --micro-batch-size below 2 or --recompute norms or block or "
    other = "--grad-dtype bfloat16 or --master-weights none or "
    least = rest - sum(tiny.knobs.values())
    for free, said in ((tiny.total - 1, acting + other), (rest, other), (least + 1, other), (least, "")):
        with pytest.raises(ConfigError, match=f"; less takes {said}a smaller model$"):
            tiny._replace(free=free).check()
