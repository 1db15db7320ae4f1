"""``--data PATH:WEIGHT``, repeated: the share of each source, the order of its sequences, and runs on mixtures."""

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError, ConfigError, DataError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data import packing
from kos.train.data.batches import Dataset, counted, load_data
from kos.train.data.tokenizers import ByteTokenizer
from kos.train.tools import plan
from tests.train.refusal import refused
from tests.train.runs import SMALL, _losses, run
from tests.train.sharded import tensors_of_run
from tests.train.test_loss_masks import write_lines

# --- batches --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts with completions, which padding follows, and two texts; one name has colons."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    words = ["ring ", "tree ", "barrier ", "rank\n"]
    parts = [["".join(rng.choice(words, rng.integers(2, 7))) for _ in range(2)] for _ in range(90)]
    write_lines(folder / "pairs.jsonl", [{"prompt": prompt, "completion": completion} for prompt, completion in parts])
    (folder / "a:0.5.txt").write_text("".join(rng.choice(["zig ", "zag\n"], 500)))
    (folder / "b.txt").write_text("".join(rng.choice(["ONE ", "TWO\n"], 3000)))
    return folder


def flags(folder: Path, *more: str, weights: tuple[str, ...] = ("0.5", "1", "0.25")) -> list[str]:
    paths = [f"{folder / name}:{weight}" for name, weight in zip(("pairs.jsonl", "a:0.5.txt", "b.txt"), weights)]  # noqa: B905
    return [*(word for path in paths for word in ("--data", path)), "--seq-len=48", "--batch-size=8", *more]


def source_of(tokens: np.ndarray) -> int:
    """Which of the files of ``folder`` a sequence of bytes is from."""
    return 2 if tokens.min(initial=99, where=tokens > 32) < 97 else 1 if ord("z") in tokens else 0


def seen(data: Dataset, steps: int) -> tuple[list[int], list[bytes]]:
    """The source and the tokens of each sequence of a run."""
    rows = [row for step in range(steps) for row in data.batch(step).tokens]
    return [*map(source_of, rows)], [row.tobytes() for row in rows]


def test_each_source_has_its_share_of_the_tokens(folder):
    """Padding is no token. In a part of the run a source has its share too, and the metrics count what batches have."""
    data, steps = load_data(parse(flags(folder))), 400
    assert data.mixture is not None
    fill = data.parts[0].train.fill
    assert 0.7 < fill < 0.98
    sources, _ = seen(data, steps)
    for at in (0, 55, 200):
        counts = np.bincount(sources[8 * at :], minlength=3) * [48 * fill, 48, 48]
        assert np.abs(counts / counts.sum() - np.array([2, 4, 1]) / 7).max() < 10 / len(sources[8 * at :])
    for count in (1, 17, 399):
        of_sources = np.bincount(sources[: 8 * count], minlength=3)
        assert [*data.mixture.tokens(8 * count).values()] == [round(x) for x in of_sources * [48 * fill, 48, 48]]
    starts = data.batch(3).document_starts
    assert starts is not None and (starts[np.array(sources[24:32]) > 0] == 0).all(), "a text is one document"


def test_a_source_has_each_sequence_once_before_any_again(folder):
    data = load_data(parse(flags(folder)))
    assert data.mixture is not None
    sources, rows = seen(data, 300)
    for source, part in enumerate(data.parts):
        mine = [row for each, row in zip(sources, rows, strict=True) if each == source]
        count = part.sequences_in(part.train)
        first, second = mine[:count], mine[count : 2 * count]
        alone = load_data(parse([f"--data={[*data.mixture.parts][source]}", "--seq-len=48", "--epochs=1"]))
        once = [row.tobytes() for step in range(alone.steps_per_epoch) for row in alone.batch(step).tokens]
        assert sorted(first) == sorted(once[:count])
        assert len(second) > 9 and Counter(second) <= Counter(first) and first[: len(second)] != second
    assert seen(load_data(parse(flags(folder, "--seed=5"))), 1)[1] != rows[:8]


@pytest.mark.parametrize("weights", [("0.5", "1", "0.25"), ("1", "0.000001"), ("0.003", "1", "1")], ids=str)
def test_epochs_are_those_of_the_first_source(folder, weights):
    """The last step may have sequences of the next epoch."""
    data = load_data(parse(flags(folder, "--epochs=3", weights=weights)))
    steps, count = data.steps_of(3), 3 * data.parts[0].sequences_in(data.parts[0].train)
    assert data.mixture is not None
    before, after = (data.mixture.sequences(8 * each)[0] for each in (steps - 1, steps))
    assert before < count <= after


# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("b.txt", "pairs.jsonl"), ("pairs.jsonl", "b.txt")], ids=str)
def test_text_and_masked_pairs_may_come_in_any_order(folder, names):
    """Text has no mask, and its numbers no sign."""
    of_names = [word for name in names for word in ("--data", f"{folder / name}:1")]
    data = load_data(parse([*of_names, "--seq-len=48", "--batch-size=1", "--steps=20"]))
    counted = {bool((data.batch(step).targets == -1).any()) for step in range(20)}
    assert counted == {False, True}


def test_a_source_of_token_numbers_needs_the_tokenizer_of_the_others(folder, tmp_path):
    np.arange(5000, dtype=np.uint16).tofile(path := tmp_path / "t.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 5000
    path.write_bytes(header.tobytes() + np.arange(5000, dtype=np.uint16).tobytes())
    for names in ([folder / "b.txt", path], [path, folder / "b.txt"]):
        of_names = [word for name in names for word in ("--data", f"{name}:1")]
        with refused(DataError, "expected the tokenizer of ", "; --tokenizer names that of all"):
            load_data(parse([*of_names, "--seq-len=48", "--batch-size=2", "--steps=2"]))


def test_a_path_may_have_colons(folder, tmp_path):
    """Of several the weight is after the last colon; one alone is a path as it is. Weights need not have the sum 1."""
    alone = parse(["--data", str(folder / "a:0.5.txt"), "--seq-len=9"])
    assert alone.data == str(folder / "a:0.5.txt") and load_data(alone).mixture is None
    several = [f"{folder / 'a:0.5.txt'}:3", "stdlib:.5"]
    (tmp_path / "mix.toml").write_text(f"data = {json.dumps(several)}")
    config = parse(["--config", str(tmp_path / "mix.toml")])
    assert config.data == tuple(several) and config.to_json()["data"] == several
    assert parse(["--config", str(tmp_path / "mix.toml"), "--data", "stdlib"]).data == "stdlib"
    mixture = load_data(config).mixture
    assert mixture is not None and [*mixture.parts] == [str(folder / "a:0.5.txt"), "stdlib"]
    assert mixture.weights.tolist() == [3 / 3.5, 0.5 / 3.5]
    (tmp_path / "one.toml").write_text('data = ["stdlib"]')
    assert parse(["--config", str(tmp_path / "one.toml")]).data == "stdlib"


def test_errors_name_the_source(folder, tmp_path):
    with refused(ConfigError, "--data: expected stdlib, or the path", f"{tmp_path / 'none'}"):
        load_data(parse(["--data=stdlib:1", f"--data={tmp_path / 'none'}:1"]))
    (tmp_path / "short.txt").write_text("short")
    short = tmp_path / "short.txt"
    with refused(DataError, f"--data {short}: expected at least --seq-len + 1 = 10 tokens to train on"):
        load_data(parse(["--data=stdlib:1", f"--data={short}:1", "--seq-len=9"]))


# --- runs -----------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {**SMALL, "seq_len": 48, "steps": 12, "eval_every": 6, "eval_batches": 2, "schedule": "constant",
                       "save_every": 1, "keep": 99, "sample_tokens": 0}  # fmt: skip


def names(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("pairs.jsonl", "a:0.5.txt", "b.txt")]


def config_of(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    data = [f"{name}:{weight}" for name, weight in zip(names(folder), (0.5, 1, 0.25), strict=True)]
    return TrainConfig.from_preset("tiny", out=out, **{**RUN, "data": data, **changes})


def train(folder: Path, out: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    return run(config_of(folder, out, **changes), ranks)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, train(folder, out, deterministic=True, micro_batch_size=1)


def test_metrics_have_the_tokens_and_the_losses_of_sources(folder, whole, tmp_path, capsys):
    """A source's validation loss is that of a run on it alone; the mean by weights is the run's."""
    out, rows = whole
    data = load_data(config_of(folder, tmp_path))
    assert data.mixture is not None
    for row in rows:
        assert [row[f"tokens/{name}"] for name in names(folder)] == [*data.mixture.tokens(8 * row["step"]).values()]
        assert [f"val_loss/{name}" in row for name in names(folder)] == [row["step"] % 6 == 0] * 3
    before = [rows[0][f"val_loss_before/{name}"] for name in names(folder)]
    assert rows[0]["val_loss_before"] == pytest.approx(np.dot([2, 4, 1], before) / 7, rel=1e-12)
    for name in names(folder):
        alone = train(folder, tmp_path / Path(name).stem, data=name, steps=13, deterministic=True, micro_batch_size=1,
                      resume=str(out / "checkpoints" / "step-12"), eval_every=1, lr=1e-30)  # fmt: skip
        assert alone[-1]["val_loss"] == pytest.approx(rows[-1][f"val_loss/{name}"], rel=1e-5)
    capsys.readouterr()
    train(folder, tmp_path / "said")
    said = capsys.readouterr().out
    count = data.mixture.tokens(96)[names(folder)[1]]
    sequences = data.parts[1].sequences_in(data.parts[1].train)
    windows = [(part.windows(part.train, [*range(0, len(part.train) - 48, 48)]), part) for part in data.parts]
    counts = [counted(batch) / (batch.targets.size * part.train.fill) for batch, part in windows]
    in_loss = np.array([2, 4, 1]) * counts
    share = 100 * in_loss[1] / in_loss.sum()
    assert counts[0] < 0.7 and share > 62
    shares = f"57.1% of the tokens, {share:.1f}% of what the loss counts"
    seen = f"{shares}, {count:,} in 12 steps; each of {sequences} sequences"
    assert f"\n{names(folder)[1]}: {seen}" in said
    assert f"\n{names(folder)[0]}: training: 81 documents of " in said
    assert said.count(f"val_loss/{names(folder)[2]} ") == 3


def test_resuming_gives_the_bits_of_an_uninterrupted_run(folder, tmp_path, whole, before_call, caplog):
    """After any step, on two ranks, by the plan that is kept, without a warning."""
    out, one = whole
    before_call(packing, "make_plan", lambda *_: pytest.fail("another plan is made"))
    for steps in (6, 11):
        path, into = out / "checkpoints" / f"step-{steps}", tmp_path / str(steps)
        rows = train(folder, into, resume=str(path), deterministic=True, micro_batch_size=1)
        assert _losses(rows).tobytes() == _losses(one)[steps:].tobytes()
        assert tensors_of_run(into) == tensors_of_run(out)
        assert (into / "source-1" / packing.FILE).read_bytes() == (out / "source-1" / packing.FILE).read_bytes()
    rows = train(folder, tmp_path / "two", 2, resume=str(path), deterministic=True, micro_batch_size=1)
    assert _losses(rows).tobytes() == _losses(one)[11:].tobytes()
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not [text for text in warned if "layout" not in text]


def test_other_weights_are_other_data(folder, tmp_path, whole, caplog):
    data = [f"{name}:1" for name in names(folder)]
    train(folder, tmp_path / "out", data=data, resume=str(whole[0] / "checkpoints" / "step-11"), deterministic=True,
          micro_batch_size=1)  # fmt: skip
    assert "resuming with another data: its results will differ" in caplog.text


def test_the_loss_of_a_mixture_is_that_of_the_sources_with_validation_data(folder, tmp_path):
    (named := tmp_path / "named").mkdir()
    for name in ("train", "val"):
        write_lines(named / f"{name}.jsonl", [{"text": f"{name} and ring " * 20}] * 9)
    plain = write_lines(tmp_path / "plain.jsonl", [{"text": "tree " * 60}] * 9)
    data = [f"{plain}:1", f"{named}:3"]
    *_, last = train(folder, tmp_path / "out", data=data, hold_out=0.0, keep_best=f"val_loss/{named}")
    assert {key for key in last if key.startswith("val_loss")} == {"val_loss", f"val_loss/{named}"}
    assert last["val_loss"] == pytest.approx(last[f"val_loss/{named}"], rel=1e-12)


def test_all_sources_may_share_validation_data(folder, tmp_path, before_call):
    """It is read once."""
    (tmp_path / "val.txt").write_text(text := "ring tree " * 99)
    rows = train(folder, tmp_path / "out", val_data=str(tmp_path / "val.txt"), steps=1)
    assert "val_loss" in rows[-1] and not [key for key in rows[-1] if key.startswith("val_loss/")]
    encoded = list[str]()
    before_call(ByteTokenizer, "encode", lambda tokenizer, text: encoded.append(text))
    data = load_data(config_of(folder, tmp_path, val_data=str(tmp_path / "val.txt")))
    assert encoded.count(text) == 1
    assert data.val.size == 990 and [part.train.size for part in data.parts[1:]] == [
        (folder / name).stat().st_size for name in ("a:0.5.txt", "b.txt")
    ]


def test_other_sources_are_refused_when_a_run_resumes(folder, tmp_path, whole):
    """Their order would begin in its midst."""
    (tmp_path / "other.txt").write_text("another ring, another tree\n" * 99)
    data = [*(f"{name}:1" for name in names(folder)[:2]), f"{tmp_path / 'other.txt'}:1"]
    with pytest.raises(CheckpointError, match="expected the data of the run that is resumed"):
        train(folder, tmp_path / "out", data=data, resume=str(whole[0] / "checkpoints" / "step-11"),
              deterministic=True, micro_batch_size=1)  # fmt: skip


def test_a_plan_of_layouts_and_shown_data(folder, capsys):
    plan.report([*flags(folder), "--plan", "--ranks=2"])
    from kos.train.tools import show

    shown = show.report(parse(flags(folder, "--show-data=2", weights=("0.01", "1", "0.01"))))
    assert shown.count(" tokens count") == 6 and all(shown.count(f", of {name}: ") == 2 for name in names(folder))
    assert dataclasses.replace(load_data(parse(flags(folder)))).mixture is not None
