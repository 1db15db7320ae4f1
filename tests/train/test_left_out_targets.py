"""Where targets are left out, a step's loss and gradients are means over all that remain, however they are cut."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kos.train.data.batches import Dataset
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from tests.train.emulated_runs import train as train_on_host
from tests.train.runs import _losses
from tests.train.sharded import tensors_of_run


def mean_loss(config: Any, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Of the initial weights, over the targets that are not left out, in float64."""
    shape = config.model_config_for(256)
    model, weights = Model(shape, numpy_ops), Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
    init_weights(shape, weights, config.seed)
    logits = model.logits(weights, tokens).astype(np.float64)
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = targets >= 0
    return float(-np.take_along_axis(odds, np.where(kept, targets, 0)[..., None], -1)[..., 0][kept].mean())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_none_is_left_out_bits_are_those_of_each_ones_own_count(emulated, text, tmp_path, device, monkeypatch):
    settings = {"ranks": 2, "batch_size": 12, "micro_batch_size": 3}
    ours = train_on_host(text, tmp_path / "ours", device, **settings)
    queue, counts = Model.backward, []

    def with_its_own_count(*given, count=None, **options):
        counts.append(count)
        queue(*given, **options)

    monkeypatch.setattr(Model, "backward", with_its_own_count)
    own = train_on_host(text, tmp_path / "own", device, **settings)
    for key in ("loss", "grad_norm"):
        assert _losses(ours, key).tobytes() == _losses(own, key).tobytes()
    assert any(count is not None for count in counts)
    assert tensors_of_run(tmp_path / "ours") == tensors_of_run(tmp_path / "own")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("masked", [False, True])
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
