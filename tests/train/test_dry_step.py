"""The step that --plan predicts: bytes counted by axis, and times."""

import math

import numpy as np
import pytest

from kos.train.config.flags import parse
from kos.train.device.costs import ONE_HOST, Clock, Link, Network, gpu_rates
from kos.train.device.dry_run import DryRun
from kos.train.parallel.mesh import Layout
from kos.train.tools import plan as planning
from kos.train.tools.plan import make_job, predict
from tests.train.dry_runs import LAYERS, SHAPE, SLOW, A, B, D, F, T, V, W

MATRICES = LAYERS * (W * D + D * A + 3 * F * D)
PARAMETERS = 2 * V * D + MATRICES + (2 * LAYERS + 1) * D


def predicted(*flags, axes=None, speed=SLOW, network=ONE_HOST):
    config, layout = parse([*SHAPE, *flags]), Layout(**(axes or {}))
    job = make_job(config, config.model_config_for(V), layout, speed, network)
    return predict(job, job.memory(0))


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_summed_once_a_step(zero):
    """An all-reduce, or a reduce-scatter of the gradients and an all-gather of the weights, in whole blocks."""
    sent = predicted("--zero", str(zero), axes={"dp": 4}).sent
    whole = -(-PARAMETERS // (4 * 16_384)) * 4 * 16_384 if zero else PARAMETERS
    assert sent == {"gradients": 2 * 3 / 4 * 4 * whole, "tp": 0, "pp": 0, "cp": 0}


def test_weights_are_gathered_in_bfloat16_in_fp8_too():
    sent = {}
    for dtype in ("bfloat16", "fp8"):
        config = parse(["--device=cuda", "--zero=1", "--preset=1b", "--micro-batch-size=1", "--dtype", dtype])
        model = config.model_config_for(V)
        job = make_job(config, model, Layout(dp=4), gpu_rates("H100", model.head_dim))
        sent[dtype] = DryRun.timed(job, 0).clock.spent["gradients"]
    assert sent["fp8"] == sent["bfloat16"] == pytest.approx(3 / 4 * (4 + 2) * model.num_parameters(), rel=0.01)


def test_where_each_axis_lies_decides_what_leaves_a_host():
    """A pipeline sends its messages, a group of tp or cp all that it exchanges; what stays on a host sends nothing."""
    for inner, outer in (("tp", "dp"), ("cp", "pp"), ("dp", "pp")):
        found = predicted(axes={inner: 2, outer: 2}, network=Network(2, 1e9))
        one = predicted(axes={inner: 2, outer: 2})
        axis = {"dp": "gradients"}.get(outer, outer)
        assert found.sent.pop("hosts") == found.sent[axis] * 2 > 0 and found.sent == one.sent
        assert found.seconds >= one.seconds
    across = predicted(axes={"tp": 2}, network=Network(2, 1e9)).sent
    assert across["hosts"] == across["tp"] > 0


@pytest.mark.parametrize("batch", [8, 16])
def test_tensor_parallel_sends_four_activations_each_way_in_a_block(batch):
    """A gather or a sum before and behind both pairs of matrices, forward and backward; two more for weights.

    The embedding and the head: a sum and a gather, and in the backward the same; what a loss needs; gradients of norms.
    """
    tp = 2
    sent = predicted("--batch-size", str(batch), axes={"tp": tp}).sent
    one = B * T * D * 4 * (tp - 1) / tp  # of a micro-batch's residual stream
    statistics = 3 * B * T * 4 * (tp - 1)
    norms = 2 * (tp - 1) / tp * (2 * LAYERS + 1) * D * 4
    forward, backward = 4 * LAYERS + 1, 6 * LAYERS + 1
    head = 2
    assert sent["tp"] == batch // B * ((forward + backward + head) * one + statistics) + norms
    assert sent["gradients"] == sent["pp"] == sent["cp"] == 0


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_tensor_parallel_sums_the_gradients_of_all_norms_in_one_call(axes, before_call):
    sums = []
    before_call(Link, "all_reduce", lambda link, x, *_, **__: sums.extend([x.size] * (link.axis == "tp")))
    config = parse([*SHAPE, "--model-type=qwen3", "--head-dim=8"])
    DryRun.timed(make_job(config, config.model_config_for(V), Layout(**axes), SLOW), 0)
    stages = axes.get("pp", 1)
    assert sums == [(2 * D + 2 * 8) * LAYERS // stages + (0 if stages > 1 else D)]


@pytest.mark.parametrize(("sequences", "most"), [(1, 0.25), (2, 0.13), (3, 0.25)])
def test_collectives_of_tensor_parallel_overlap_products_on_gpus(sequences, most):
    """``most``: the share of the collectives' time that the step may wait, more if both halves share a sequence."""
    flags = ["--device=cuda", "--preset=8b", "--num-hidden-layers=4", f"--micro-batch-size={sequences}"]
    config, layout = parse([*flags, f"--batch-size={sequences}", "--tp=4"]), Layout(tp=4)
    model, rates = config.model_config_for(config.model.vocab_size), gpu_rates("H200", 128)

    def step(wire):
        return DryRun.timed(make_job(config, model, layout, rates._replace(wire=wire, latency=0.0)), 0).clock

    clock, without = step(rates.wire), step(math.inf)
    under_way = sum(end - start for axis, start, end in clock.log if axis == "tp")
    assert 0 < clock.spent["seconds"] - without.spent["seconds"] < most * under_way


@pytest.mark.parametrize(("schedule", "borders"), [("1f1b", 1), ("zero-bubble-v", 2)])
def test_a_pipeline_sends_an_activation_and_a_gradient_a_border(schedule, borders):
    """Each rank of two."""
    sent = predicted("--pp-schedule", schedule, axes={"pp": 2}).sent
    assert sent["pp"] == 4 * borders * B * T * D * 4 and sent["tp"] == sent["gradients"] == 0


def test_context_parallel_passes_keys_and_values_round_and_their_gradients_too():
    cp = 4
    sent = predicted(axes={"cp": cp}).sent
    assert sent["cp"] == 4 * LAYERS * 3 * (cp - 1) * B * T // cp * (W - A) * 4
    assert sent["gradients"] == 2 * (cp - 1) / cp * 4 * PARAMETERS and sent["tp"] == sent["pp"] == 0


@pytest.mark.parametrize("window", [1, 3, 4, 16, 20])
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_attention_time_counts_the_pairs_in_a_window(axes, window):
    """The backward has five matrix products, the forward two. With cp, the rank with the most pairs is planned."""
    exact = SLOW._replace(linear=math.inf, memory=math.inf, operation=0.0, wire=math.inf, latency=0.0)
    flags = ["--model-type=mistral", "--micro-batch-size=1", "--sliding-window"]
    seconds = predicted(*flags, str(window), axes=axes, speed=exact).seconds
    pairs = T * window - window**2 / 2 if window < T else T * T / 2
    if "cp" in axes and window <= T // 4:
        pairs = T * window  # neither of the rank's two chunks is the first
    of_rank = LAYERS * 8 * 3.5 * 4 * A * pairs / 1e9 / 2 ** len(axes)
    assert seconds == pytest.approx(of_rank * (9 / 8 if "pp" in axes else 1))


def test_many_micro_batches_count_as_each_of_a_few():
    two, three, many = (predicted("--batch-size", str(2 * n), axes={"tp": 2}) for n in (2, 3, 40))
    for of in (lambda each: each.sent["tp"], lambda each: each.seconds):
        assert of(many) - of(three) == pytest.approx(37 * (of(three) - of(two)), rel=1e-4) != 0


def test_products_in_8_bits_have_their_own_rate_and_casts():
    """Where only products take time, a step is as much faster; where only memory does, slower by the casts."""
    shape = ("--device", "cuda", "--dtype")
    for exact, expected in (
        (SLOW._replace(memory=1e18, operation=0.0, attention=(1e18, 1e18), fp8=2e9), 0.5),
        (SLOW._replace(linear=1e18, operation=0.0, attention=(1e18, 1e18), fp8=1e18), None),
    ):
        times = [predicted(*shape, dtype, speed=exact._replace(name="H100")).seconds for dtype in ("bfloat16", "fp8")]
        head = 6 * B * T * 4 * D * V / 1e9 if expected else 0.0  # which stays in bfloat16
        if expected:
            assert times[1] - head == pytest.approx(expected * (times[0] - head), rel=1e-3)
        else:
            assert times[1] > times[0]


def test_a_pipeline_has_the_times_of_each_stage_and_pass(before_call):
    """A backward takes about twice its forward, and its two halves together as long as the whole."""
    given = {}
    before_call(planning, "simulate", lambda schedule, costs, message: given.update({schedule.name: costs}))
    exact = SLOW._replace(memory=1e15, operation=0.0)
    for name in ("1f1b", "zero-bubble-v"):
        predicted("--pp-schedule", name, axes={"pp": 2}, speed=exact)
    whole, split = given["1f1b"], given["zero-bubble-v"]
    assert whole["W"] == [0.0, 0.0] and min(split["W"]) > 0.5 * min(split["F"])
    np.testing.assert_allclose(sum(whole["F"]), sum(split["F"]), rtol=1e-4)
    np.testing.assert_allclose(sum(whole["I"]), sum(split["I"]) + sum(split["W"]), rtol=1e-4)
    head = 2.0 * B * T * V * D / exact.linear  # which the backward makes, forward and all
    np.testing.assert_allclose(whole["I"], np.add(np.multiply(whole["F"], 2), [0, 3 * head]), rtol=0.1)


def test_what_is_asynchronous_hides_behind_operations():
    """Two at once follow one another; a wait ends with the last; on a CPU they hide behind nothing."""
    x = np.zeros(1000, np.uint8)
    for overlap, expected in ((True, 4.5), (False, 7.5)):
        clock = Clock(SLOW._replace(memory=1.0, operation=0.0, wire=1000.0, latency=1.25, overlap=overlap))
        link = Link(clock, "dp", 0, 2)
        works = [link.all_reduce(x, async_op=True) for _ in range(2)]
        clock.operate("copy", 3, 0.0)
        for work in works:
            work.wait()
        assert clock.spent == {"dp": 2000.0, "seconds": expected}
