"""What the plan of a GPU's memory counts, and what it advises, for GPUs that need not be there."""

import pytest

from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.device.costs import GPUS
from kos.train.device.dry_run import GIB, DryOps, plan_memory
from kos.train.ops.fp8 import linears
from kos.train.optim import CHUNK
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.schedules import build


def plan(*flags, ranks=1, rank=0, local=1, one_scale=False, **axes):
    """The plan of a preset on GPUs with 138.9 GiB free; ``ranks`` are those of dp."""
    mesh = Mesh.dry(layout := Layout(dp=ranks, **axes), rank, local)
    config = parse([*flags, *(f"--{axis}={size}" for axis, size in axes.items())]).for_world(ranks, "cuda")
    steps = config.batch_size // config.micro_batch_size // ranks
    model = config.model_config_for(256)
    schedule = build(config.pp_schedule, layout.pp, steps)
    gpu = GPUS["H200"]._replace(one_scale=one_scale)
    return plan_memory(config, model, gpu, mesh, schedule, reaches=False, free=int(138.9 * GIB))


def on_cpu(*flags, ranks=2):
    config = parse(["--device", "cpu", *flags]).for_world(ranks)
    schedule = build("1f1b", 1, config.batch_size // config.micro_batch_size // ranks)
    return plan_memory(
        config, config.model_config_for(256), DryOps(), Mesh.dry(Layout(dp=ranks)), schedule, sharing=ranks
    )


def test_the_plan_of_published_models():
    """Llama-3.1-8B on eight GPUs takes ZeRO-1; what is computed again is not kept."""
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
    count = -(-8_030_261_248 // (8 * CHUNK)) * 8 * CHUNK  # of which a rank's share is a multiple of CHUNK
    assert sharded.uses["gradients, float32"] - short.uses["gradients, bfloat16"] == 2 * count
    more, gradient = short.arena - sharded.arena, 4 * 128_256 * 4096  # a head's, over two chunks of tokens
    assert more == gradient  # in both, the head's backward takes the most
    alone = plan("--preset", "8b", "--master-weights", "none", ranks=8)
    assert 14 * 8.03e9 < alone.total - alone.arena < 14.3 * 8.03e9 and "  weights, bfloat16 " in str(alone)
    taken = [plan("--preset", "1b", "--recompute", how).arena for how in ("none", "norms", "block")]
    # Kept of a token and layer: x, mid, norms, heads (5 D), q k v (1.5 D), gate, up and their product (12 D).
    assert taken[0] > 32768 * 16 * 2048 * 2 * 18.5 and taken[1] < 0.72 * taken[0] and taken[2] < 0.2 * taken[0]


def test_scales_in_8_bits_are_counted():
    """Two a block of 128 x 128, rows of them filled up to 4; or two a matrix. On a CPU as on Hopper."""
    use, flags = "weights of layers, fp8, and transposed", ("--preset", "tiny", "--dtype", "fp8")
    config = parse(flags).for_world(1)
    model = config.model_config_for(256)
    shapes = [(each.rows, each.columns) for each in linears(model.layers(range(model.num_hidden_layers)))]
    numbers = sum(rows * columns for rows, columns in shapes)

    def padded(across, along):
        return -(-across // 128) * -(-along // 512) * 4

    of_blocks = sum(padded(*shape) + padded(*shape[::-1]) for shape in shapes)
    assert plan(*flags).uses[use] == 2 * numbers + 4 * of_blocks
    assert plan(*flags, one_scale=True).uses[use] == 2 * numbers + 8 * len(shapes)
    on_cpu = plan_memory(config, model, DryOps(), Mesh.dry(Layout()), build("1f1b", 1, 1))
    assert on_cpu.uses[use] == 2 * numbers + 4 * of_blocks


def test_what_takes_less_memory_is_said():
    flags = ["--batch-size", "8"]
    for option in ("--zero 1", "--grad-dtype bfloat16", "--master-weights none", "--recompute block"):
        before, flags = plan(*flags, ranks=2), [*flags, *option.split()]
        after = plan(*flags, ranks=2)
        assert after.total < before.total and any(option.split()[0] in each for each in before.savings), option
        assert not any(option in each for each in after.savings), option
    assert after.savings == ["a --micro-batch-size below 4"]


def test_only_what_helps_a_schedule_is_said():
    """With split backwards, what is recomputed is kept for the second half."""
    flags = "--batch-size", "8", "--micro-batch-size", "1", "--pp-schedule"
    before = plan(*flags, "zero-bubble-v", pp=2)
    assert not any("--recompute" in each for each in before.savings) and "--pp-schedule 1f1b" in before.savings
    for how in ("norms", "block"):
        assert plan(*flags, "zero-bubble-v", "--recompute", how, pp=2).total == before.total
    after = plan(*flags, "1f1b", pp=2)
    assert after.total < before.total and "--pp-schedule 1f1b" not in after.savings
    assert "--recompute norms or block" in after.savings


def test_the_plan_has_the_residual_of_compressed_gradients():
    """As large as the gradients, and none on one rank; what a sum takes beside is that of a bucket."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        flags = "--preset", "1b", "--grad-dtype", dtype
        exact, one = plan(*flags, ranks=4), plan(*flags, "--compress", "int4")
        both = plan(*flags, "--compress", "int4", ranks=4)
        assert both.uses["residual of gradients sent as int4"] == exact.uses[f"gradients, {dtype}"]
        assert "--compress none" in both.savings and "--compress none" not in exact.savings
        assert one.uses == plan(*flags).uses
        beside = both.uses["kernels, graph, communication"] - exact.uses["kernels, graph, communication"]
        bucket = exact.uses[f"gradients, {dtype}"] / size / 32
        assert beside == pytest.approx(5 * 34 / 64 * bucket, rel=0.01)
        assert both.total == exact.total + both.uses["residual of gradients sent as int4"] + beside
        hosts = plan(*flags, "--compress", "int4", ranks=4, local=2)
        assert 2 * hosts.uses["residual of gradients sent as int4"] == both.uses["residual of gradients sent as int4"]
        more = hosts.uses["kernels, graph, communication"] - both.uses["kernels, graph, communication"]
        assert more == pytest.approx(2 * bucket * size, rel=0.01)


def test_the_plan_has_the_published_versions():
    """Two, in the type with which ranks compute; replicas share them out."""
    flags, count = ("--preset", "tiny", "--publish", "trainer:29600"), parse([]).model_config_for(256).num_parameters()
    for ranks, dtype, itemsize in ((1, "float32", 4), (2, "bfloat16", 2)):
        uses = plan(*flags, "--dtype", dtype, ranks=ranks).uses
        assert uses["versions for servers"] == pytest.approx(2 * itemsize * count / ranks, rel=1e-3)
    assert "versions for servers" not in plan(*flags[:2]).uses


def test_the_plan_has_the_merged_weights():
    """With --publish-merged, beside both versions of all weights: one more copy of the adapted matrices."""
    flags = ("--preset", "tiny", "--lora", "4", "--lora-targets", "q_proj", "--publish", "trainer:29600")
    model = parse([]).model_config_for(256)
    count, adapted = model.num_parameters(), model.num_hidden_layers * model.hidden_size**2
    for ranks, dtype, itemsize in ((1, "float32", 4), (2, "bfloat16", 2)):
        uses = plan(*flags, "--publish-merged", "--dtype", dtype, ranks=ranks).uses
        assert uses["versions for servers"] == pytest.approx(itemsize * (2 * count + adapted) / ranks, rel=1e-3)
        alone = plan(*flags, "--dtype", dtype, ranks=ranks).uses["versions for servers"]
        assert alone < uses["versions for servers"] / 20
        for merged in ([], ["--publish-merged"]):  # frozen adapters are published or merged as others
            frozen = plan(*flags, *merged, "--freeze", "*lora_A*", "--dtype", dtype, ranks=ranks).uses
            expected = uses["versions for servers"] if merged else alone
            assert frozen["versions for servers"] == pytest.approx(expected, rel=1e-3)


def test_the_plan_of_pipeline_stages():
    """A stage has the activations of the micro-batches that its schedule keeps in flight. The last one has logits."""
    flags = "--preset", "8b", "--batch-size", "32", "--micro-batch-size", "1", "--pp-schedule", "1f1b"
    first, last = (plan(*flags, pp=4, rank=rank) for rank in (0, 3))
    assert "activations, recompute none, 4 micro-batches in flight" in first.uses
    assert "logits of 8192 tokens" in last.uses and "logits of 8192 tokens" not in first.uses


@pytest.mark.timeout(60)
def test_a_model_that_fits_nowhere_is_refused_at_once():
    with pytest.raises(ConfigError, match="memory: expected at most"):
        on_cpu("--hidden-size", "400000").check()


def test_a_cpu_and_a_gpu_are_planned_by_one_rule():
    """Weights, gradients and state are listed apart, and the same options are named."""
    whole, sharded = on_cpu(), on_cpu("--zero", "1")
    assert "--zero 1" in whole.savings and "--zero 1" not in sharded.savings and "fewer ranks" in whole.savings[0]
    assert sharded.uses["both Adam moments, float32, 1/2 (ZeRO-1)"] < whole.uses["both Adam moments, float32"]
    gpu = plan("--dtype", "float32", "--batch-size", "8", "--seq-len", "64", ranks=2)
    of_parameters = ("weights, float32", "both Adam moments, float32", "gradients, float32")
    sizes = [whole.uses[use] for use in of_parameters]  # ranks reach into those of a GPU vector by vector
    assert [gpu.uses[use] for use in of_parameters] == pytest.approx(sizes, rel=1e-3)
    tied = on_cpu("--deterministic", "--batch-size", "16", ranks=1)
    assert tied.uses["gradients, float32"] % tied.uses["weights, float32"], "a tied embedding has two gradients then"
