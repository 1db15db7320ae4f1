"""Attention split over ranks gives what one rank gives: loss and every gradient, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.model.llama import Llama
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.tensor import TensorParallel
from tests.train.models import make, make_batch
from tests.train.test_tensor_parallel import part_of


def compare(layout, kind="untied", samples=3, length=24, recompute="none", route="ring"):
    """Loss and gradients of a layout of cp and tp against the whole model's."""
    config, whole, weights, expected = make(
        kind, np.float64, num_key_value_heads=2, num_attention_heads=4, vocab_size=40, intermediate_size=28,
    )  # fmt: skip
    tokens, targets = make_batch(config, samples, length, seed=3)
    targets[0, :5] = -1
    count = np.array([np.count_nonzero(targets >= 0)], np.float64)
    loss = whole.loss_and_gradients(weights, tokens, targets, expected, accumulate=False)

    def run(comm):
        mesh = Mesh(comm, layout)
        local = config.local(mesh.tp.rank, layout.tp)
        own = Parameters(config.parameter_shapes(local), np.float64, config.fused_groups(local))
        for name in own:
            own[name][...] = part_of(name, weights[name], config, layout.tp, mesh.tp.rank)
        gradients = own.like()
        gradients.flat[:] = np.nan
        tensor = TensorParallel(numpy_ops, mesh.tp, local.vocabulary.start)
        context = ContextParallel(numpy_ops, mesh.cp, route)
        model = Llama(config, numpy_ops, local=local, tensor=tensor, context=context, recompute=recompute)
        mine, wanted = context.take(tokens), context.take(targets)
        for accumulate in (False, True):
            got = model.loss_and_gradients(own, mine, wanted, gradients, accumulate=accumulate, count=count)
            got = mesh.gradients.comm.all_reduce(np.array([got]))[0]
            assert got == pytest.approx(loss, rel=1e-12)
        mesh.gradients.comm.all_reduce(gradients.flat)
        for name, value in gradients.items():
            if value.ndim == 1:
                tensor.sum_replicated(value)
            whole_gradient = 2 * part_of(name, expected[name], config, layout.tp, mesh.tp.rank)
            np.testing.assert_allclose(value, whole_gradient, rtol=1e-9, atol=1e-12, err_msg=name)

    spawn(run, layout.ranks)


@pytest.mark.parametrize("route", ["ring", "gather"])
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("kind", ["untied", "llama3"])
def test_gradients(kind, cp, route):
    compare(Layout(cp=cp), kind, route=route)
