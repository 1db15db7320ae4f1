"""``--fit whole``: plans by best fit, what packed sequences hold, and runs on them."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError, DataError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data import Shard, Tokens, packing
from kos.train.data.batches import Dataset, load_data
from kos.train.data.packing import PackedTokens, best_fit, counted, make_plan, pack
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.parallel.mesh import Layout
from tests.train import emulated_runs, layouts
from tests.train.corpora import overwrite, token_bytes
from tests.train.refusal import refused
from tests.train.runs import SMALL, _losses, run
from tests.train.sharded import tensors_of_run
from tests.train.test_loss_masks import write_lines
from tests.train.tokenizer_files import byte_level_bpe


def row_of(lengths: list[int], masked: bool = False) -> Tokens:
    """Documents of these lengths: token 1000 n + i is the i-th of the n-th document; with ``masked`` odd ones do not
    count."""
    row = np.concatenate([1000 * n + np.arange(length) for n, length in enumerate(lengths, 1)])
    shard, half = Shard(row.astype(np.uint32), (1 - row % 2).astype(np.uint8) if masked else None), len(row) // 2
    return Tokens([shard[:7], shard[7:half], shard[half:]], np.cumsum([0, *lengths[:-1]]))


def lengths_of(documents: int, most: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, most + 1, documents).tolist()


def dataset(tokens: Tokens, seq_len: int = 20, **changes: Any) -> Dataset:
    """Of which all is packed; six sequences a step."""
    skips = bool(changes.pop("skips", False))
    train, val, plan = pack(tokens, row_of([5, 6]), "data", seq_len, 7, skips, ())
    values = {"batch_size": 6, "eval_batches": 0, "fingerprint": "", "packs": True, "packing": plan, **changes}
    return Dataset("rows", train, val, NumberTokenizer(2**31), 7, seq_len=seq_len, **values)


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """How full sequences are, by definition."""
    sums: list[int] = []
    for length in lengths:
        fitting = [each for each in sums if each + length <= capacity]
        if fitting:
            sums[sums.index(max(fitting))] += length
        else:
            sums.append(length)
    return sorted(sums)


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
def test_best_fit_is_that_of_its_definition(capacity):
    lengths = sorted(lengths_of(300, capacity), reverse=True)
    found = best_fit(lengths, capacity)
    assert sorted(number for sequence in found for number in sequence) == [*range(300)]
    sums = sorted(sum(lengths[number] for number in sequence) for sequence in found)
    assert sums == naive_best_fit(lengths, capacity)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sequence_has_whole_documents_and_then_padding(small, masked, small_pieces):
    """A document lies in one place, its first token and padding are no targets, and attention stays within it."""
    if small:
        small_pieces()
    lengths = lengths_of(50, 20)
    with_target = [number for number, length in enumerate(lengths, 1) if length > 1 + masked]
    data, seen = dataset(row_of(lengths, masked), epochs=1), list[int]()
    for step in range(data.steps_per_epoch):
        batch = data.batch(step)
        batch.check()
        for tokens, targets, starts in zip(*batch[:3], strict=True):
            if len(seen) == len(with_target):
                assert (targets == -1).all(), "fills the last batch"
                continue
            for start in np.unique(starts):
                at = np.flatnonzero(starts == start)
                if not tokens[start]:
                    assert at[-1] == 19 and not tokens[at].any() and (targets[at] == -1).all(), "padding"
                    continue
                number = int(tokens[start]) // 1000
                assert at.tolist() == [*range(start, start + lengths[number - 1])]
                assert (tokens[at] == 1000 * number + np.arange(len(at))).all()
                following = tokens[at][1:]
                assert targets[at].tolist() == [*np.where(masked * (following % 2), -1, following), -1]
                seen.append(number)
    assert sorted(seen) == with_target and 30 < len(seen) < 50


def test_a_plan_is_a_function_of_documents_length_and_seed():
    tokens = row_of(lengths_of(200, 30))
    plans = [make_plan(tokens, length, seed, False).tolist() for length, seed in ((30, 7), (30, 7), (30, 8), (40, 7))]
    assert plans[0] == plans[1] and plans[0] not in plans[2:]
    known = [-38, 33, -13, 0, 10, -26, 58]
    assert make_plan(row_of([10, 2, 13, 8, 4, 21, 3]), 25, 3, False).tolist() == known, "kept plans are as before"


@pytest.mark.parametrize("masked", [False, True])
def test_long_documents_are_cut_and_no_target_is_lost(masked):
    lengths = [3, 70, 20, 21, 22, 40, 41, 5]
    tokens = row_of(lengths, masked)
    data = dataset(tokens, epochs=1)
    got = sorted(x for step in range(data.steps_per_epoch) for x in data.batch(step).targets.ravel() if x >= 0)
    row, mask = tokens.window(0, len(tokens))
    expected = [x for x in row[mask > 0] if x % 1000]  # all but the first of each
    assert got == sorted(expected)
    words = data.describe_fit().splitlines()[0]
    lack = sum(1 for x in expected if x % 1000 > 20)
    size = 220 if masked else 222  # the rest of the document of 22 tokens has no target then
    assert words.startswith(f"training: 8 documents of {size} tokens, of which the loss counts {len(expected)}, in ")
    assert (
        "; 5 documents longer than --seq-len cut into 11 pieces: "
        f"{lack / len(expected):.0%} of the counted tokens lack the beginning of their document (--long-documents)"
    ) in words
    assert ("; left out, because the loss counts none of their tokens: 1 piece" in words) == masked


@pytest.mark.parametrize("skips", [False, True])
def test_what_has_no_target_is_left_out(skips, small_pieces):
    """A piece of a document sees no other piece, so without a target it teaches nothing."""
    small_pieces()
    lengths = [9, 7, 70, 4, 45]
    whole = row_of(lengths).window(0, sum(lengths))[0].astype(np.int32)
    number, place = np.divmod(whole, 1000)
    counts = ((number == 1) & (place > 5)) | ((number == 3) & (place > 61)) | ((number == 5) & (place < 40))
    shard = Shard(whole, counts.astype(np.uint8))
    data = dataset(Tokens([shard[:7], shard[7:40], shard[40:]], np.cumsum([0, *lengths[:-1]])), epochs=1, skips=skips)
    batch, kept = data.rows(0, range(data.sequences_in(data.train))), counts & (place > 0) & (not skips or number == 1)
    assert sorted(batch.targets[batch.targets >= 0]) == whole[kept].tolist()
    assert (batch.targets >= 0).any(axis=1).all() and len(batch.targets) == (1 if skips else 3)
    said = data.describe_fit().splitlines()[0]
    what = "2 documents" if skips else "2 documents and 4 pieces"
    assert f"; left out, because the loss counts none of their tokens: {what}" in said
    assert f"training: {'1 document of 9' if skips else '3 documents of 59'} tokens" in said
    with refused(DataError, "--data: expected a document", "with a token that the loss counts, got none"):
        none = Tokens([Shard(whole, np.zeros(len(whole), np.uint8))], np.array([0]))
        dataset(none, skips=skips, sources=("--data", "--data"))


def test_counting_goes_over_shards_and_pieces(small_pieces):
    """Some shards have a mask, others have none; ranges may overlap."""
    small_pieces()
    tokens = row_of(lengths_of(60, 12), masked=True)
    rest = Shard(*tokens.window(16, 99))
    mixed = Tokens([tokens.shards[0], tokens.window(7, 9)[0].astype(np.uint32), rest], tokens.documents)
    starts, stops = np.array([9, 3, 0, 20, 8]), np.array([12, 20, 115, 20, 2])
    each = [int(mixed.window(a, b - a)[1].sum()) if b > a else 0 for a, b in zip(starts, stops, strict=True)]
    assert counted(mixed, starts, stops).tolist() == each


@pytest.mark.parametrize("ends", [False, True])
def test_documents_between_separators_are_packed(ends, tmp_path, small_pieces):
    small_pieces()
    at, flags = 1 if ends else 50_256, ["--fit", "whole", "--seq-len", "6", "--eval-batches", "0"]
    if ends:
        byte_level_bpe(["the"], 300, ["<|end|>"]).save(str(tmp_path / "tokenizer.json"))
        flags += ["--tokenizer", str(tmp_path / "tokenizer.json")]
    train, val = tmp_path / "train.bin", tmp_path / "val.bin"
    train.write_bytes(token_bytes([at, 11, 12, at, 13, 14, 15, at, 16, at, 17, 18]))
    train.with_suffix(".mask").write_bytes(bytes([1] * 9 + [0] + [1] * 2))
    val.write_bytes(token_bytes([15] * 9))
    data = load_data(parse(["--data", str(train), "--val-data", str(val), *flags]))
    assert data.packed and data.train.begins.tolist() == ([0, 1, 4, 8, 10] if ends else [0, 3, 7, 9])
    assert data.val.begins.tolist() == [0]


def test_a_later_start_reads_no_tokens(tmp_path, all_is_kept):
    """Where documents begin is kept, and without masks all tokens count."""
    path = tmp_path / "tokens.bin"
    path.write_bytes(token_bytes([50_256, 1, 2, 3, 50_256, 4, 5] * 99))
    of_all = ["--eval-batches", "0", "--hold-out", "0.1"]
    config = parse(["--data", str(path), "--fit", "whole", "--seq-len", "6", *of_all])
    first = load_data(config)
    overwrite(path, token_bytes([1] * 7 * 99))
    again = load_data(config)
    assert again.describe_fit() == first.describe_fit()
    assert "of 623 tokens, of which the loss counts 445, in " in again.describe_fit().splitlines()[0]


# --- losses ---------------------------------------------------------------------------------------------------

CHATS = [13, 9, 32, 5, 27, 14, 18, 21, 8, 11, 30, 2, 16, 16, 7, 23, 25, 31, 32, 32]
"""Lengths of documents that fill fewer sequences of 32 tokens."""


def of_numbers(config: TrainConfig) -> Dataset:
    """The documents of ``CHATS``, half of whose tokens count; a sequence for each if the batch has as many."""
    rng, begins = np.random.default_rng(1), np.cumsum([0, *CHATS[:-1]])
    row = (rng.choice([1, 1, 1, 7, 11], sum(CHATS)).cumsum() % 40).astype(np.uint8)
    tokens = Tokens([Shard(row, (rng.random(len(row)) >= 0.5).astype(np.uint8))], begins)
    train, val, plan = pack(tokens, tokens, "", config.seq_len, 5, False, ())
    if config.batch_size == len(CHATS):
        train, val = (PackedTokens(tokens, config.seq_len, ~begins, False) for _ in range(2))
    sizes = config.seed, config.batch_size, config.seq_len, 3
    packs = config.documents == "pack"
    return Dataset("chats", train, val, NumberTokenizer(40), *sizes, "", packs=packs, packing=plan, epochs=9)


@pytest.fixture
def chats(monkeypatch):
    """Trains on all of ``of_numbers`` at each step."""
    monkeypatch.setattr(layouts, "make_data", of_numbers)

    def train(layout, batch_size, **changes):
        how = {"batch_size": batch_size, "documents": "pack", **changes}
        return layouts.train(layout, layouts.Precise, 2, True, 4, **how)

    return train


def test_packed_chats_have_the_losses_of_each_alone(chats):
    """Four steps with the validation after them, in float64; 20 chats lie in 16 sequences at most.  Attention across
    chats gives other losses."""
    (alone,), (crossing,) = chats(Layout(), len(CHATS)), chats(Layout(), 16, documents="cross")
    assert alone["rows"][0, 0] > alone["rows"][-1, 0] + 0.02, "it learns"
    for rank in chats(Layout(dp=2), 16):
        np.testing.assert_allclose(rank["rows"], alone["rows"], rtol=1e-10)
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-10)
    assert abs(crossing["rows"][0, 0] / alone["rows"][0, 0] - 1) > 1e-4


# --- runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Prompts and completions of many lengths, some longer than a sequence of 64."""
    rng, words = np.random.default_rng(0), ["ring ", "tree ", "barrier ", "rank\n"]
    parts = [["".join(rng.choice(words, rng.integers(1, 7))) for _ in range(2)] for _ in range(100)]
    lines = [{"prompt": prompt, "completion": completion} for prompt, completion in parts]
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", lines)


EPOCHS: dict[str, Any] = {"seq_len": 64, "schedule": "constant", "sample_tokens": 0, "eval_batches": 2, "save_every": 3,
                          "keep": 9}  # fmt: skip


def train(pairs: Path, out: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    values = {**SMALL, **EPOCHS, "epochs": 1, **changes}
    del values["steps" if values["epochs"] else "epochs"]
    return run(TrainConfig.from_preset("tiny", data=str(pairs), out=out, **values), ranks)


def test_the_default_is_whole_for_chats_and_cut_for_text(pairs, tmp_path):
    lines = pairs.read_text().splitlines()
    mixed, text = (write_lines(tmp_path / f"{name}.jsonl", [json.loads(x) for x in each] + [{"text": "word " * 99}])
                   for name, each in (("mixed", lines), ("text", [])))  # fmt: skip
    (tmp_path / "a.bin").write_bytes(token_bytes([50256, *range(30)] * 40))
    for path, default in ((pairs, True), (mixed, False), (text, False), (tmp_path / "a.bin", False)):
        for flags, whole in (([], default), (["--fit", "whole"], True), (["--fit", "cut"], False)):
            data = load_data(parse(["--data", str(path), "--eval-batches", "0", "--seq-len", "9", *flags]))
            assert isinstance(data.train, PackedTokens) == (data.packing is not None) == whole
    expected = "a document of at most --seq-len = 1 tokens to train on, with a token that the loss counts"
    with refused(DataError, f"expected {expected}, got none (--long-documents cut takes pieces of longer ones)"):
        load_data(parse(["--data", str(pairs), "--long-documents", "skip", "--seq-len", "1"]))


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    """A run of two epochs, of which each step is saved: its folder and its rows."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(pairs, out, epochs=2, save_every=1, keep=99)


def test_resuming_gives_the_bits_of_an_uninterrupted_run(pairs, whole, tmp_path, before_call, caplog):
    """Also in the next epoch and into another folder, by the plan that is kept, without a warning."""
    out, rows = whole
    before_call(packing, "make_plan", lambda *_: pytest.fail("another plan is made"))
    for steps in (len(rows) // 2 - 1, len(rows) - 2):
        source, into = out / "checkpoints" / f"step-{steps}", tmp_path / str(steps)
        resumed = train(pairs, into, epochs=2, resume=str(source), save_every=0)
        assert _losses(resumed).tobytes() == _losses(rows)[steps:].tobytes()
        assert tensors_of_run(into) == tensors_of_run(out)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_sequence_is_at_most_full():
    """The last target of a document may be beyond its sequence."""
    tokens = row_of([21, 21])
    packed = PackedTokens(tokens, 20, make_plan(tokens, 20, 0, False), False)
    assert "2 sequences of 20, 100.0% full" in packed.describe("text")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no plan", "cut", "changed", "pickle"])
def test_a_broken_plan_is_one_line_and_is_made_again(pairs, whole, tmp_path, content, caplog):
    out, steps = shutil.copytree(whole[0], tmp_path / "whole"), len(whole[1]) - 2
    path = out / packing.FILE
    good = path.read_bytes()
    changed = bytes([*good[:-2], good[-2] ^ 1, good[-1]])
    np.save(tmp_path / "objects.npy", np.array([{}, print], object))
    pickle = (tmp_path / "objects.npy").read_bytes()
    broken = {"cut": good[:-8], "changed": changed, "pickle": pickle}
    path.write_bytes(content if isinstance(content, bytes) else broken[content])
    rows = train(pairs, tmp_path / "again", epochs=2, resume=str(out / "checkpoints" / f"step-{steps}"))
    assert _losses(rows).tobytes() == _losses(whole[1])[steps:].tobytes()
    (said,) = [each.getMessage() for each in caplog.records if "packing plan" in each.getMessage()]
    assert said.startswith(f"{path}: expected the packing plan of this run, got ") and "\n" not in said
    assert said.endswith("; it is made again") and (tmp_path / "again" / packing.FILE).read_bytes() == good


def test_a_run_goes_on_with_its_plan_or_not_at_all(pairs, whole, tmp_path, monkeypatch, caplog):
    """A checkpoint without the folder of its run, which another version of kos packed."""
    (out, whole_rows), made, drawn = whole, packing.make_plan, {"epochs": None, "steps": 4, "eval_batches": 0}
    train(pairs, tmp_path / "drawn", **drawn)
    alone, steps = {}, len(whole_rows) - 2
    for name, folder, step in (("whole", out, steps), ("drawn", tmp_path / "drawn", 3)):
        source = folder / "checkpoints" / f"step-{step}"
        alone[name] = shutil.copytree(source, tmp_path / f"{name}-alone" / source.name)
    rows = train(pairs, tmp_path / "same", epochs=2, resume=str(alone["whole"]))  # the same plan is made again
    assert _losses(rows).tobytes() == _losses(whole_rows)[steps:].tobytes()
    monkeypatch.setattr(packing, "make_plan", lambda tokens, length, seed, skips: made(tokens, length, seed + 1, skips))
    assert not caplog.records
    plan = alone["whole"].parents[1] / packing.FILE
    with refused(CheckpointError, f"({plan}), got another"):
        train(pairs, tmp_path / "lone", epochs=2, resume=str(alone["whole"]))
    # Another line warns of the other length.
    train(pairs, tmp_path / "other-length", epochs=2, resume=str(alone["whole"]), seq_len=60)
    train(pairs, tmp_path / "lone-drawn", resume=str(alone["drawn"]), **drawn)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2 and "another seq_len" in said[0] and packing.FILE in said[1], said


# --- a batch in which nothing counts --------------------------------------------------------------------------


class Nothing(Dataset):
    """The loss counts nothing of the second step and of the fourth one."""

    masks_targets = True

    def rows(self, step: int, indices: Any) -> Any:
        batch = super().rows(step, indices)
        return batch._replace(targets=np.full_like(batch.targets, -1)) if step % 2 else batch


@pytest.mark.parametrize(("device", "ranks", "how"), [
    ("cpu", 1, {"dtype": "fp8"}), ("cpu", 2, {"compress": "int8", "optimizer": "muon"}), ("cpu", 2, {"pp": 2}),
    ("cpu", 1, {"deterministic": True}), ("cpu", 2, {"zero": 1, "skip_outliers": 9.0}),
    ("cuda", 2, {"compress": "int8"}), ("cuda", 1, {"optimizer": "muon", "dtype": "bfloat16"}),
    ("cuda", 2, {"tp": 2, "graph": False}),
], ids=str)  # fmt: skip
def test_a_batch_in_which_nothing_counts_moves_nothing(emulated, data_of, pairs, tmp_path, device, ranks, how, capfd):
    """Neither weights, by decay or momentum, nor moments; residuals of compressed sums were sent. The learning rate of
    later steps is that of their numbers."""
    data_of(Nothing)
    model = {**emulated_runs.SMALL["model"], "intermediate_size": 32, "hidden_size": 32, "head_dim": 8}
    values = {"weight_decay": 0.5, "save_every": 1, "keep": 9, "eval_batches": 0, "model": model,
              "schedule": "cosine", "batch_size": 8, "seq_len": 32, "micro_batch_size": 2}  # fmt: skip
    rows = emulated_runs.train(pairs, tmp_path / "out", device, ranks, **{**values, **how})
    steps = [tensors_of_run(tmp_path / "out" / "checkpoints" / f"step-{step}") for step in range(1, 5)]
    steps = [{name: each for name, each in step.items() if not name.startswith("residual.")} for step in steps]
    assert steps[0] == steps[1] != steps[2] == steps[3]
    assert [row.get("no_targets") for row in rows] == [None, True, None, True]
    assert [row["loss"] for row in rows[1::2]] == [0, 0] and all(np.isfinite(row["loss"]) for row in rows)
    assert "compress" in how or [row["grad_norm"] for row in rows[1::2]] == [0, 0], "nothing but residuals is sent"
    assert rows[2]["lr"] == pytest.approx(parse_rate(2))
    said, warned = capfd.readouterr()
    text = "the loss counts no token of the batch, so the weights stay as they are"
    assert f"step 2: {text} (1 of 2 steps so far; no_targets in metrics.jsonl)" in warned + said
    assert (warned + said).count(text) == 2 and f"\n2 of 4 steps: {text}\n" in said


def parse_rate(step: int) -> float:
    values = {**emulated_runs.SMALL, "schedule": "cosine"}
    return TrainConfig.from_preset("tiny", **values).learning_rate()(step)
