"""A layer split over ranks gives what one rank gives: loss, every gradient and the logits, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.data.batch import Batch
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.tensor import TensorParallel
from tests.train.models import loss_and_gradients, make, make_batch, part_of

CASES = list(itertools.product([2, 4], ["tied", "untied", "llama3"], ["none", "norms", "block"], [None, 7]))
QUICK = [case for case in CASES if case[:2] in ((2, "tied"), (2, "untied"), (4, "llama3")) and case[2:] != ("block", 7)]


@pytest.mark.parametrize(
    ("tp", "kind", "recompute", "head_rows"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_gradients(kind, tp, recompute, head_rows):
    config, whole, weights, expected = make(
        kind, np.float64, num_key_value_heads=4, num_attention_heads=8, vocab_size=40, intermediate_size=28,
    )
    tokens, targets = make_batch(config, 2, 12, seed=3)
    targets[0, :5] = -1
    loss = loss_and_gradients(whole, weights, tokens, targets, expected, accumulate=False)
    logits = whole.logits(weights, tokens)

    def run(comm):
        mesh = Mesh(comm, Layout(tp=tp))
        local = config.local(mesh.tp.rank, tp)
        own = Parameters(config.parameter_shapes(local), np.float64, config.fused_groups(local))
        for name in own:
            own[name][...] = part_of(name, weights[name], config, tp, comm.rank)
        gradients = own.like()
        gradients.flat[:] = np.nan
        tensor = TensorParallel(numpy_ops, mesh.tp, local.vocabulary.start)
        model = Model(config, numpy_ops, local=local, tensor=tensor, recompute=recompute, head_rows=head_rows)
        for accumulate in (False, True):
            got = loss_and_gradients(model, own, tokens, targets, gradients, accumulate=accumulate)
            assert got == pytest.approx(loss, rel=1e-12)
        assert model.loss(own, Batch(tokens, targets)) == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(
            model.logits(own, tokens), logits[..., local.vocabulary.start : local.vocabulary.stop], atol=1e-10
        )
        for name, value in gradients.items():
            if value.ndim == 1:
                tensor.sum_replicated(value)
            wanted = 2 * part_of(name, expected[name], config, tp, comm.rank)
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12, err_msg=name)

    spawn(run, tp)
