"""Batches: windows of the data, a pure function of seed and step, the same for any number of ranks."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError, DataError
from kos.train.config.flags import parse
from kos.train.data import batches as kos_data
from kos.train.data.batches import EVAL_BATCH_TOKENS, Dataset, Tokens, load_data
from kos.train.data.tokenizers import NumberTokenizer
from tests.train.refusal import refused

MASK = 2**64 - 1


def philox4x64(key: tuple[int, int], count: int) -> list[int]:
    """The first ``count`` words of Philox4x64-10 from counter 1 on, after Salmon et al. (SC11), figure 2."""
    words: list[int] = []
    for counter in range(1, -(-count // 4) + 1):
        (k0, k1), (c0, c1, c2, c3) = key, (counter, 0, 0, 0)
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = p1 >> 64 ^ c1 ^ k0, p1 & MASK, p0 >> 64 ^ c3 ^ k1, p0 & MASK
            k0, k1 = k0 + 0x9E3779B97F4A7C15 & MASK, k1 + 0xBB67AE8584CAA73B & MASK
        words += [c0, c1, c2, c3]
    return words[:count]


def make(train: Any, val: Any = None, **changes: Any) -> Dataset:
    train = np.asarray(train, np.uint32)
    values: dict[str, Any] = {
        "name": "test", "tokenizer": NumberTokenizer(10**6), "seed": 5, "batch_size": 6, "seq_len": 4,
        "eval_batches": 3, "fingerprint": "",
    }  # fmt: skip
    val = train if val is None else np.asarray(val, np.uint32)
    return Dataset(train=Tokens([train]), val=Tokens([val]), **values | changes)


def write(tmp_path: Path, content: str | bytes, name: str = "text.txt") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_windows_are_drawn_by_philox_of_seed_and_step() -> None:
    count = 1000
    for seed, step in ((5, 0), (5, 1), (0, 0), (2**63 - 1, 10**6)):
        tokens, targets = make(np.arange(count), seed=seed).batch(step)
        starts = [word % (count - 4) for word in philox4x64((seed, step), 6)]
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.tolist() == [list(range(s, s + 4)) for s in starts]
        assert targets.tolist() == [list(range(s + 1, s + 5)) for s in starts]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_any_number_of_ranks_sees_the_same_batch(size: int) -> None:
    data = make(np.random.default_rng(3).integers(0, 1000, 500))
    whole = data.batch(11)
    for rank in range(size):
        rows = range(rank, 6, size)
        tokens, targets = make(data.train.shards[0]).rows(11, rows)
        assert np.array_equal(tokens, whole[0][rows]) and np.array_equal(targets, whole[1][rows])
        assert tokens.flags.c_contiguous and targets.flags.c_contiguous


def test_shards_are_one_row_of_tokens() -> None:
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 2**16, 50).astype(np.uint16)
    cuts = np.sort(rng.integers(0, 51, 6))
    tokens = Tokens(np.split(whole, cuts))
    assert len(tokens) == 50
    for start in range(50):
        for length in (1, 3, 50 - start):
            if start + length <= 50:
                assert np.array_equal(tokens.window(start, length), whole[start : start + length])


@pytest.mark.parametrize(
    ("tokens", "batches", "rows"),
    [(10_000, 3, 6), (4 * 18 + 1, 3, 6), (4 * 17 + 1, 2, 6), (4 * 3 + 1, 1, 3), (5, 1, 1), (8, 1, 1)],
)
def test_validation_windows_are_fixed_spread_and_apart(tokens: int, batches: int, rows: int) -> None:
    data = make(np.arange(50), np.arange(tokens))
    got = [data.windows(data.val, starts) for starts in data.val_starts()]
    assert len(got) == batches and [batch[0].shape for batch in got] == [(rows, 4)] * batches
    starts = [int(start) for batch in got for start in batch[0][:, 0]]
    gaps = np.diff(starts)
    assert starts[0] == 0 and (gaps >= 4).all()
    assert tokens - 1 - starts[-1] >= 4
    if gaps.size:
        assert gaps.max() - gaps.min() <= 4
        assert tokens - 1 - starts[-1] < gaps.max() + 8, "the end is seen too"
    assert np.array_equal(data.val_starts(), make(np.arange(9), np.arange(tokens), seed=8).val_starts())
    assert all(np.array_equal(batch[0] + 1, batch[1]) for batch in got)


def test_validation_batches_are_bounded_in_tokens() -> None:
    data = make(np.arange(50), np.arange(10**6), batch_size=64, seq_len=40)
    assert data.val_starts().shape[1] == 64
    long = make(np.arange(9000), np.arange(10**6), batch_size=64, seq_len=8192)
    assert long.val_starts().shape == (3, EVAL_BATCH_TOKENS // 8192)


def test_the_default_data() -> None:
    data = load_data(parse([]))
    assert data.name == "stdlib" and data.tokenizer.name == "bytes" and len(data.val_starts()) == 8
    tokens, _ = data.batch(0)
    assert tokens.shape == (16, 128)
    assert "stdlib (bytes)" in data.describe() and f"{len(data.train):,}" in data.describe()


def test_text_becomes_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, "é" + "abcdefghi" * 10 + "abcdefgh!")
    data = load_data(parse(["--data", path, "--seq-len", "4"]))
    text = Path(path).read_bytes()
    assert data.train.window(0, len(data.train)).tobytes() == text[: 1 + 90]
    assert data.val.window(0, len(data.val)).tobytes() == text[91:]
    chars = load_data(parse(["--data", path, "--seq-len", "4", "--tokenizer", "chars", "--prompt", "cab"]))
    assert chars.tokenizer.vocab_size == 11 and len(chars.train) == 90
    assert chars.tokenizer.decode(chars.train.window(0, 5)) == "éabcd"


def test_documents_end_with_eos(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    words = library.Tokenizer(library.models.WordLevel({"<end>": 0, "a": 1, "b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"1": "a b a", "2": "b", "3": "a a"}.items():
        write(folder, text, name)
    data = load_data(parse(["--data", str(folder), "--tokenizer", str(tmp_path / "tokenizer.json"), "--seq-len", "1"]))
    assert data.train.window(0, len(data.train)).tolist() == [1, 2, 1, 0, 2, 0]
    assert data.val.window(0, len(data.val)).tolist() == [1, 1, 0]


def tokens_file(tmp_path: Path, tokens: list[int]) -> str:
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    return write(tmp_path, header + struct.pack(f"<{len(tokens)}H", *tokens), "tokens.bin")


def test_token_files_and_their_tokenizer(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, [*range(100)])
    data = load_data(parse(["--data", path, "--seq-len", "5"]))
    assert (data.tokenizer.name, data.tokenizer.vocab_size) == ("numbers", 50_257)
    assert load_data(parse(["--data", path, "--seq-len", "5", "--vocab-size", "100"])).tokenizer.vocab_size == 100
    assert load_data(parse(["--data", path, "--seq-len", "5", "--tokenizer", "bytes"])).tokenizer.vocab_size == 256
    with refused(ConfigError, "--tokenizer", "'chars'", "tokens.bin"):
        load_data(parse(["--data", path, "--seq-len", "5", "--tokenizer", "chars"]))


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, [7] * 99 + [256])
    data = load_data(parse(["--data", path, "--seq-len", "9", "--tokenizer", "bytes", "--eval-batches", "1"]))
    data.batch(0)
    with pytest.raises(DataError, match=r"expected tokens below the vocabulary's 256, got 256"):
        data.windows(data.val, data.val_starts()[0])


def test_data_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "x" * 100)
    assert load_data(parse(["--data", path, "--seq-len", "9"])).val_starts().shape[1] == 1
    with refused(DataError, "text.txt", "--seq-len + 1 = 11", "validate", "got 10"):
        load_data(parse(["--data", path, "--seq-len", "10"]))
    with refused(DataError, "text.txt", "--seq-len + 1 = 91", "train on", "got 90"):
        load_data(parse(["--data", path, "--seq-len", "90"]))


def test_a_prompt_that_cannot_be_spelt_is_refused_before_training(tmp_path: Path) -> None:
    config = parse(["--data", write(tmp_path, "ab" * 99), "--seq-len", "4", "--tokenizer", "chars", "--prompt", "abc"])
    with refused(DataError, "2 characters", "'c'"):
        load_data(config)


def test_the_fingerprint_tells_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(text: str) -> str:
        return load_data(parse(["--data", write(tmp_path, text), "--seq-len", "4"])).fingerprint

    text = "0123456789" * 100
    seen = {fingerprint(other) for other in (text, text + "0", "1" + text[1:], text[:-1] + "0")}
    assert len(seen) == 4 and fingerprint(text) in seen
    monkeypatch.setattr(kos_data, "HASHED_BYTES", 10)
    assert fingerprint(text) != fingerprint("1" + text[1:]), "the ends of a large shard are read"
    assert fingerprint(text[:400] + "x" + text[401:]) == fingerprint(text), "and not its middle"
