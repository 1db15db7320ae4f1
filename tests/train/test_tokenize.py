"""kos tokenize: a run on its folder sees what a run on the text sees; it goes on where it was stopped."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kos.errors import ConfigError, DataError, KosError
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data import pieces, tokenized
from kos.train.data.batches import Dataset, load_data
from kos.train.data.loading import TOKENS_VERSION
from kos.train.data.tokenizers import make_tokenizer
from kos.train.tokenize import tokenize
from kos.train.trainer import Trainer
from tests.forked import python
from tests.launcher import run_program
from tests.train.commands import ENVIRONMENT
from tests.train.corpora import jsonl
from tests.train.refusal import refused
from tests.train.runs import SMALL

TEXT = "def f(x):\n    return the the é\n" * 40
SECONDS = 120


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a_train.txt").write_text(TEXT)
    (data / "b_train.jsonl").write_bytes(jsonl(*(f"the {number} return\n" * (number % 5) for number in range(1, 40))))
    pairs = [{"prompt": f"def {number}", "completion": f" return {number}"} for number in range(30)]
    (data / "c_train.json").write_text(json.dumps(pairs))
    return data


def load(data: Path, *flags: str) -> Dataset:
    return load_data(parse(["--data", str(data), "--seq-len", "8", "--batch-size", "4", *flags]))


def same(got: Dataset, expected: Dataset) -> None:
    for ours, theirs in ((got.train, expected.train), (got.val, expected.val)):
        for one, other in zip(ours.window(0, ours.size), theirs.window(0, theirs.size), strict=True):
            assert one.tolist() == other.tolist()
        assert ours.begins.tolist() == theirs.begins.tolist()
    for name in ("fingerprint", "held_out", "trained_on", "note"):
        assert getattr(got, name) == getattr(expected, name)
    assert got.tokenizer.is_like(expected.tokenizer)
    for ours, theirs in zip(got.batch(3), expected.batch(3), strict=True):
        assert np.array_equal(ours, theirs) if ours is not None else theirs is None


@contextmanager
def small_shards(portion: int = 100) -> Iterator[None]:
    """Shards of 300 tokens or a little more, of portions of so many characters."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in ((tokenized, "SHARD_TOKENS", 300), (pieces, "PORTION", portion)):
            patch.setattr(module, name, size)
        yield


@small_shards()
@pytest.mark.parametrize("name", ["", "a_train.txt", "b_train.jsonl", "c_train.json"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_sees_what_it_sees_of_the_text(folder, tmp_path, name, tokenizer, huggingface_file):
    """In shards of any size."""
    spec = str(huggingface_file) if tokenizer == "bpe" else tokenizer
    manifest = tokenize(tmp_path / "out", [str(folder / name)], tokenizer=spec)
    assert len(manifest["shards"]) > 1 or (tokenizer, name) == ("bpe", "c_train.json")
    expected = load(folder / name, "--tokenizer", spec)
    same(load(tmp_path / "out"), expected)
    assert expected.train.masked == (name in ("", "c_train.json"))
    assert manifest["counted"] == sum(int(shard.arrays()[1].sum()) for shard in expected.train.shards)


def test_several_sources_and_other_validation_data(folder, tmp_path):
    sources = [str(folder / name) for name in ("b_train.jsonl", "a_train.txt")]
    (tmp_path / "other.txt").write_text("other " * 20)
    tokenize(tmp_path / "out", sources, val_data=str(tmp_path / "other.txt"))
    got = load(tmp_path / "out")
    text = bytes(got.train.window(0, len(got.train))[0].tolist()).decode()
    assert text.endswith(TEXT) and text.startswith("the 1 return\n")
    assert bytes(got.val.window(0, len(got.val))[0].tolist()).decode() == "other " * 20
    tokenize(tmp_path / "both", sources)
    both = load(tmp_path / "both")
    assert "the last tenth of b_train.jsonl and the last tenth of a_train.txt" in both.held_out
    tokenize(tmp_path / "all", sources, hold_out=0.0)
    everything = load(tmp_path / "all", "--eval-batches=0")
    assert everything.train.size == both.train.size + both.val.size and not everything.val.size


@pytest.fixture
def interrupt(before_call):
    """Interrupts ``kos tokenize`` while it records its third shard."""
    saved = []

    def stop(path: Path, content: bytes) -> None:
        if 3 not in saved:
            saved.append(len(json.loads(content)["shards"]))
            if saved[-1] == 3:
                raise KeyboardInterrupt

    def interrupt(out: Path, folder: Path) -> None:
        before_call(tokenized, "replace_file", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(out, [str(folder)])
        assert saved == [0, 1, 2, 3]

    return interrupt


@small_shards()
def test_it_goes_on_where_it_was_stopped(folder, tmp_path, interrupt):
    whole, out = tokenize(tmp_path / "whole", [str(folder)]), tmp_path / "out"
    interrupt(out, folder)
    with refused(DataError, f"--data {out}: expected all shards, got 2 of an interrupted kos tokenize"):
        load(out)
    times = [(out / f"{number:05}.bin").stat().st_mtime_ns for number in range(2)]
    with small_shards(170):  # as with another number of cores
        tokenize(out, [str(folder)])
    same(load(out), load(tmp_path / "whole"))
    whole = json.loads((out / "manifest.json").read_text())
    assert [(out / f"{number:05}.bin").stat().st_mtime_ns for number in range(2)] == times, "shards are written once"
    before = (out / "manifest.json").stat().st_mtime_ns
    assert tokenize(out, [str(folder)]) == whole and (out / "manifest.json").stat().st_mtime_ns == before
    same(load(out), load(folder))


def test_new_settings_are_in_the_key_only_if_they_are_not_the_defaults(folder, tmp_path):
    """So folders of earlier versions are completed, unless text is encoded in another way."""

    def key_of(name, sources, **settings):
        return str(tokenize(tmp_path / name, sources, **settings)["key"]).partition(" ")[0]

    source = str(folder / "a_train.txt")
    tokenizer = {**make_tokenizer("bytes").to_json(), "name": ""}
    earlier = [tokenizer, TOKENS_VERSION, True, "completion", False, False, [None]]
    expected = hashlib.sha256(json.dumps([[*earlier, None], [source], None]).encode()).hexdigest()
    assert key_of("same", [source]) == expected != key_of("other", [source], hold_out=0.2)
    several = [source, str(folder / "b_train.jsonl")]  # which are split each on its own now
    earlier[-1] = [None] * 2
    expected = hashlib.sha256(json.dumps([[*earlier, None], several, None]).encode()).hexdigest()
    assert key_of("several", several) != expected


def test_other_data_or_settings_are_no_continuation(folder, tmp_path):
    out = tmp_path / "out"
    tokenize(out, [str(folder)])
    with refused(ConfigError, f"{out}: expected a new folder, got one with tokens of other data or settings"):
        tokenize(out, [str(folder)], split_special_tokens=False)
    (folder / "a_train.txt").write_text("changed")
    with refused(ConfigError, "of other data or settings"):
        tokenize(out, [str(folder)])
    with refused(ConfigError, f"{folder}: expected a new or an empty folder, got one with a_train.txt"):
        tokenize(folder, [str(folder)])
    with refused(ConfigError, f"{out}: expected text, got tokens"):
        tokenize(tmp_path / "again", [str(out)])


def test_a_folder_of_a_failed_call_does_not_block_its_repair(folder, tmp_path, caplog):
    """Nor with other settings, while no shard is complete."""
    out, broken = tmp_path / "out", folder / "d_train.jsonl"
    (val := tmp_path / "val.txt").write_text("val " * 9)
    good = "".join(json.dumps({"text": f"line {number} " * 9}) + "\n" for number in range(40))
    broken.write_text(good + '{"text": 3}\n')
    with refused(DataError, f"--data {broken}, line 41: expected text in the field 'text', got text: 3"):
        tokenize(out, [str(folder)], val_data=str(val), loss_on="all")
    with refused(DataError, f"--data {broken}, line 41: "):
        tokenize(out, [str(folder)], val_data=str(val))
    with small_shards(), refused(DataError, f"--data {broken}, line 41: "):
        tokenize(out, [str(folder)], val_data=str(val))
    assert len([*out.glob("*.bin")]) > 1
    with refused(ConfigError, f"{out}: expected a new folder, got one with tokens of other data or settings"):
        tokenize(out, [str(folder)], val_data=str(val), loss_on="all")
    broken.write_text(good)
    assert not caplog.messages
    tokenize(out, [str(folder)], val_data=str(val))
    assert [message.partition(" since ")[0] for message in caplog.messages] == [f"{out}: the data has changed"]
    assert [path.name for path in out.glob("*.bin")] == ["00000.bin"]
    same(load(out), load(folder, "--val-data", str(val)))


@small_shards()
@pytest.mark.parametrize("change", ["added", "removed"])
def test_it_begins_again_with_other_files(folder, tmp_path, caplog, change, interrupt):
    out = tmp_path / "out"
    interrupt(out, folder)
    if change == "added":
        (folder / "d_train.txt").write_text("more " * 99)
    else:
        (folder / "a_train.txt").unlink()
    tokenize(out, [str(folder)])
    assert [message.partition(" since ")[0] for message in caplog.messages] == [f"{out}: the data has changed"]
    same(load(out), load(folder))


def test_two_calls_do_not_write_to_one_folder(folder, tmp_path, before_call):
    out, refusals = tmp_path / "out", []

    def second(path, content):
        if not refusals:
            refusals.append(kos("tokenize", folder, out))

    before_call(tokenized, "replace_file", second)
    tokenize(out, [str(folder)])
    expected = f"kos: error: {out}: expected a folder of its own, got one to which another kos tokenize writes\n"
    assert (refusals[0].returncode, refusals[0].stderr) == (2, expected)
    same(load(out), load(folder))
    assert kos("tokenize", folder, out).returncode == 0


def test_damaged_shards_are_refused_on_all_ranks(folder, tmp_path):
    out = tmp_path / "out"
    tokenize(out, [str(folder)])
    for name in ("00000.bin", "00000.mask", "00000.documents"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with refused(DataError, f"--data {out / name}: expected SHA-256 ", "as in manifest.json, got "):
            load(out)
        config = TrainConfig.from_preset("tiny", data=str(out), out=tmp_path / "run", **SMALL)
        with pytest.raises(KosError, match="expected SHA-256"):
            spawn(lambda comm, config=config: Trainer(config, comm), 4, timeout=SECONDS)
        (out / name).unlink()
        with refused(DataError, f"--data {out / name}: expected this file of kos tokenize, got none"):
            load(out)
        (out / name).write_bytes(content)
    load(out)
    for text in ('{"format": "kos tokens 1"', '{"format": "kos tokens 1", "complete": true}'):
        (out / "manifest.json").write_text(text)
        with refused(DataError, "manifest.json: expected a manifest of kos tokenize, got"):
            load(out)


def test_settings_that_do_not_fit(folder, tmp_path, huggingface_file):
    out = tmp_path / "out"
    tokenize(out, [str(folder)])
    load(out, "--tokenizer", "bytes")
    with refused(ConfigError, "--tokenizer: expected bytes, that of ", "or auto"):
        load(out, "--tokenizer", str(huggingface_file))
    with refused(ConfigError, f"--loss-on: expected completion, with which {out} was written, got all"):
        load(out, "--loss-on", "all")
    with refused(ConfigError, "--data: expected text, or a folder of kos tokenize as the only --data"):
        load(out, "--val-data", str(folder))
    tokenize(tmp_path / "all", [str(folder)], loss_on="all")
    same(load(tmp_path / "all", "--loss-on", "all"), load(folder, "--loss-on", "all"))


def test_a_folder_within_the_data_is_left_out(folder):
    expected = load(folder)
    tokenize(folder / "out", [str(folder)])
    same(load(folder), expected)


def test_what_was_held_out_stays_as_it_was_written(folder, tmp_path):
    tokenize(out := tmp_path / "out", [str(folder / "a_train.txt")], hold_out=0.0)
    with refused(DataError, "kos tokenize chose what is held out: its --hold-out counts, not that of the run"):
        load(out, "--hold-out=0.05")


def kos(*words: object) -> subprocess.CompletedProcess[str]:
    return run_program(*python(), "-m", "kos", *map(str, words), env=ENVIRONMENT)


def test_the_command(folder, tmp_path):
    out = tmp_path / "out"
    done = kos("tokenize", folder, out, "--no-split-special-tokens")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: ") and "tokens of 64 documents in 1 shard (" in done.stdout
    assert "in 1 shard (bytes)" in kos("tokenize", folder, tmp_path / "unnamed").stdout, "without --tokenizer"
    wrong = [
        (["tokenize", tmp_path / "missing", tmp_path / "new"], "no such file"),
        (["tokenize", folder, folder], "a new or an empty folder, got one with a_train.txt; the last argument of kos"),
        (["tokenize", folder, folder / "a_train.txt"], "got a file; the last argument of kos tokenize is the folder"),
        *[
            (["tokenize", folder, tmp_path / f"more{suffix}"], "expected a folder as OUT, got the name of a file of d")
            for suffix in (".parquet", ".TXT", ".jsonl.zst", ".bin")
        ],
        (["tokenize", folder, tmp_path / "new", "--loss-on", "some"], "loss_on"),
    ]
    for words, text in wrong:
        done = kos(*words)
        assert done.returncode == 2 and done.stderr.startswith("kos: error: ") and text in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
