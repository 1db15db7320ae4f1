"""Where targets are left out, a step's loss and gradients are means over all that remain, however they are cut."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kos.train import run
from kos.train.data.batch import Batch
from kos.train.data.batches import Dataset, load_data
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from tests.train.emulated_runs import train as train_on_host
from tests.train.runs import _config, _losses, _train
from tests.train.sharded import tensors_of_run


class LeftOut(Dataset):
    """Every row leaves out another share of its targets, some all but one."""

    masks_targets = True

    def rows(self, step: int, indices: Iterable[int]) -> Batch:
        indices = list(indices)
        batch = super().rows(step, indices)
        targets = batch.targets.copy()  # a single row's lie in the tokens' memory
        for row, index in enumerate(indices):
            keep = [1, self.seq_len, 3, self.seq_len // 2][(index + step) % 4]
            targets[row, keep:] = -1
        return batch._replace(targets=targets)


def _use(kind: type[Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have data of this kind."""

    def load(*arguments: Any) -> Dataset:
        data = load_data(*arguments)
        return kind(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})

    monkeypatch.setattr(run, "load_data", load)


@pytest.fixture
def left_out(monkeypatch):
    _use(LeftOut, monkeypatch)


CUTS = [(1, 8), (1, 2), (1, 1), (2, 2), (4, 1)]  # ranks, micro-batch size


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_micro_batch_size_does_not_matter(left_out, text, tmp_path, deterministic):
    rows = [
        _train(text, tmp_path / str(number), ranks, steps=6, micro_batch_size=size, deterministic=deterministic)
        for number, (ranks, size) in enumerate(CUTS)
    ]
    for other in rows[1:]:
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(_losses(other, key), _losses(rows[0], key), rtol=1e-5)


def mean_loss(config: Any, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Of the initial weights, over the targets that are not left out, in float64."""
    shape = config.model_config_for(256)
    model, weights = Model(shape, numpy_ops), Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
    init_weights(shape, weights, config.seed)
    logits = model.logits(weights, tokens).astype(np.float64)
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = targets >= 0
    return float(-np.take_along_axis(odds, np.where(kept, targets, 0)[..., None], -1)[..., 0][kept].mean())


def test_the_loss_is_the_mean_over_all_that_remain(left_out, text, tmp_path):
    config = _config(text, None)
    tokens, targets, *_ = run.load_data(config).batch(0)
    expected = mean_loss(config, tokens, targets)
    rows = _train(text, tmp_path, 2, steps=1, micro_batch_size=2)
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-5)


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
def test_a_rank_reads_only_its_own_rows_and_once(emulated, text, tmp_path, device, masked, monkeypatch):
    read, evaluated = [], []

    class Watched(Dataset):
        masks_targets = masked

        def rows(self, step, indices):
            read.append((step, *indices))
            return super().rows(step, read[-1][1:])

        def windows(self, tokens, starts):
            evaluated.extend(map(int, starts if tokens is self.val else ()))
            return super().windows(tokens, starts)

    _use(Watched, monkeypatch)
    how = {"ranks": 2, "batch_size": 12, "micro_batch_size": 3, "steps": 2, "eval_every": 0}
    train_on_host(text, tmp_path, device, **how)
    assert sorted(rows for rows in read if rows[0] == 1) == [(1, *range(at, at + 3)) for at in range(0, 12, 3)]
    assert set(Counter(evaluated).values()) == {2}  # before training, and after it


def test_on_gpus_too(emulated, left_out, text, tmp_path):
    runs = [
        train_on_host(text, tmp_path / f"{ranks}-{size}-{graph}", ranks=ranks, micro_batch_size=size, graph=graph)
        for ranks, size, graph in ((1, 8, True), (1, 2, True), (2, 2, True), (1, 2, False))
    ]
    runs.append(train_on_host(text, tmp_path / "cpu", "cpu", micro_batch_size=4))
    for other in runs[1:]:
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(_losses(other, key), _losses(runs[0], key), rtol=1e-5)
