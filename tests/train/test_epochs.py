"""``--epochs``: every sequence once an epoch, in an order that neither ranks nor resuming change."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.batches import load_data
from kos.train.data.mixture import permuted
from tests.train.refusal import refused
from tests.train.runs import SMALL, _losses, run
from tests.train.sharded import tensors_of_run
from tests.train.test_data import make
from tests.train.test_left_out_targets import mean_loss
from tests.train.test_loss_masks import pairs

__all__ = ["pairs"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """42 sequences of 32 bytes to train on: five batches of 8, and one of 2."""
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 105, 1509, np.uint8).tobytes())
    return path


def _config(data: Path, out: Path | None, **changes: Any) -> TrainConfig:
    values = {**SMALL, "epochs": 1, "schedule": "constant", "sample_tokens": 0, "hold_out": 0.1, **changes}
    del values["steps"]
    return TrainConfig.from_preset("tiny", data=str(data), out=out, **values)


def _train(data: Path, out: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    return run(_config(data, out, **changes), ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_a_permutation_has_every_index_once(size):
    orders = [permuted(np.arange(size), size, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (2**63 - 1, 9))]
    assert all(sorted(order) == list(range(size)) for order in orders)
    each = [permuted(np.array([index]), size, 1, 0)[0] for index in range(0, size, 1 + size // 9)]
    assert each == orders[0][:: 1 + size // 9].tolist()
    if size > 16:
        assert len({order.tobytes() for order in orders}) == 4
        assert all(abs(np.corrcoef(order, np.arange(size))[0, 1]) < 5 / size**0.5 for order in orders)


def test_all_orders_are_as_likely():
    counts = np.unique([permuted(np.arange(4), 4, seed, 3) for seed in range(4800)], axis=0, return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 200) ** 2 / 200).sum() < 50  # chi squared: 0.1% of 23 degrees are above


def test_a_permutation_needs_no_table():
    assert len({*permuted(np.arange(10**15, 10**15 + 999), 2 * 10**15, 1, 2).tolist()}) == 999


@pytest.mark.parametrize("windows", [1, 2, 5, 6, 7, 12, 13, 100])
@pytest.mark.parametrize("rest", [0, 3])
def test_every_sequence_is_seen_once_an_epoch(windows, rest):
    """The last batch of an epoch has those that are left, in its first rows; what fills no sequence is left out."""
    data, orders = make(np.arange(4 * windows + 1 + rest), epochs=2), []
    assert data.steps_per_epoch == -(-windows // 6)
    for epoch in range(2):
        batches = [data.batch(epoch * data.steps_per_epoch + step) for step in range(data.steps_per_epoch)]
        seen = [batch.targets[(batch.targets >= 0).all(1)] for batch in batches]
        assert [len(rows) for rows in seen] == [min(6, windows - 6 * step) for step in range(len(batches))]
        for batch, rows in zip(batches, seen, strict=True):
            assert (batch.targets[len(rows) :] == -1).all() and (batch.tokens[: len(rows)] + 1 == rows).all()
        orders.append(np.concatenate(seen))
        assert sorted(orders[-1].ravel().tolist()) == list(range(1, 4 * windows + 1))
        assert (orders[-1] == orders[-1][:, :1] + np.arange(4)).all()
    assert windows < 12 or (orders[0] != orders[1]).any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_batch_is_a_mean_over_what_it_has(text, tmp_path, ranks):
    path = tmp_path / "short.txt"
    path.write_bytes(np.random.default_rng(1).integers(97, 123, 3 * 32 + 1 + 20, np.uint8).tobytes())
    data = load_data(config := _config(path, None, val_data=str(text)))
    assert data.steps_per_epoch == 1 and int((data.batch(0).targets >= 0).all(1).sum()) == 3
    rows = _train(path, tmp_path / "out", ranks, val_data=str(text), eval_batches=0, micro_batch_size=2)
    assert len(rows) == 1
    assert rows[0]["loss"] == pytest.approx(mean_loss(config, data.batch(0).tokens, data.batch(0).targets), rel=1e-5)


def test_resuming_gives_the_bits_of_an_uninterrupted_run(text, tmp_path):
    """In a later epoch, and with more epochs than were asked for at first."""
    how = {"save_every": 4, "keep": 9, "eval_batches": 0}
    whole = _train(text, tmp_path / "whole", epochs=3, **how)
    short = _train(text, tmp_path / "short", epochs=1, **how)
    assert len(whole) == 18 and len(short) == 6 and _losses(short).tobytes() == _losses(whole)[:6].tobytes()
    for name, start in (("whole", 8), ("short", 6)):
        out = tmp_path / f"{name}-{start}"
        rows = _train(text, out, epochs=3, resume=str(tmp_path / name / "checkpoints" / f"step-{start}"), **how)
        assert _losses(rows).tobytes() == _losses(whole)[start:].tobytes()
        assert tensors_of_run(out) == tensors_of_run(tmp_path / "whole")


def test_rows_that_fill_a_batch_are_no_tokens(text, tmp_path):
    """Of two epochs of 42 sequences in six batches of 8."""
    rows = _train(text, tmp_path, epochs=2, eval_batches=0)
    assert [row["tokens"] // 32 for row in rows] == [8, 16, 24, 32, 40, 42, 50, 58, 66, 74, 82, 84]
    before = 0
    for row in rows:
        tokens = row["tokens_per_second"] * row["step_seconds"]
        assert tokens == pytest.approx(row["tokens"] - before)
        before = row["tokens"]


def test_another_order_is_warned_of(text, tmp_path, caplog):
    _train(text, tmp_path / "run", epochs=1, eval_batches=0)
    with caplog.at_level(logging.WARNING):
        _train(text, tmp_path / "run", epochs=2, resume="auto", eval_batches=0)
        assert "resuming with another" not in caplog.text
        flags = ["--config", str(tmp_path / "run" / "config.json"), "--resume", "auto", "--steps", "14"]
        run(parse(flags))
    assert "resuming with another order of sequences (--epochs): its results will differ" in caplog.text


def test_epochs_are_not_resumed_with_other_data(text, tmp_path):
    """Of which the steps that are done would count as trained on. A run of --steps draws at random, and may."""
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    _train(text, tmp_path / "run", epochs=1, eval_batches=0)
    with refused(CheckpointError, f"--data {other}: expected the data of the run that is resumed", f"{text} ("):
        _train(other, tmp_path / "run", 2, epochs=1, resume="auto", eval_batches=0)
    same = tmp_path / "same.txt"
    same.write_bytes(text.read_bytes())
    assert len(_train(same, tmp_path / "run", epochs=2, resume="auto", eval_batches=0)) == 12
