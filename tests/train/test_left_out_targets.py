"""Where targets are left out, a step's loss and gradients are means over all that remain, however they are cut."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kos.train.data.batches import Dataset
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from tests.train.emulated_runs import train as train_on_host


def mean_loss(config: Any, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Of the initial weights, over the targets that are not left out, in float64."""
    shape = config.model_config_for(256)
    model, weights = Model(shape, numpy_ops), Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
    init_weights(shape, weights, config.seed)
    logits = model.logits(weights, tokens).astype(np.float64)
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = targets >= 0
    return float(-np.take_along_axis(odds, np.where(kept, targets, 0)[..., None], -1)[..., 0][kept].mean())


@pytest.mark.parametrize(("device", "masked"), [("cpu", True), ("cuda", False), ("cuda", True)])
def test_a_rank_reads_only_its_own_rows_and_once(emulated, text, tmp_path, device, masked, data_of):
    read, evaluated = [], []

    class Watched(Dataset):
        masks_targets = masked

        def rows(self, step, indices):
            read.append((step, *indices))
            return super().rows(step, read[-1][1:])

        def windows(self, tokens, starts):
            evaluated.extend(map(int, starts if tokens is self.val else ()))
            return super().windows(tokens, starts)

    data_of(Watched)
    how = {"ranks": 2, "batch_size": 12, "micro_batch_size": 3, "steps": 2, "eval_every": 0}
    train_on_host(text, tmp_path, device, **how)
    assert sorted(rows for rows in read if rows[0] == 1) == [(1, *range(at, at + 3)) for at in range(0, 12, 3)]
    assert set(Counter(evaluated).values()) == {2}  # before training, and after it
