"""Batches: windows of the data, a pure function of seed and step, the same for any number of ranks."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import DataError
from kos.train.config.flags import parse
from kos.train.data import Separator
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


def test_windows_are_drawn_by_philox_of_seed_and_step():
    count = 1000
    for seed, step in ((5, 0), (5, 1), (0, 0), (2**63 - 1, 10**6)):
        tokens, targets, *_ = make(np.arange(count), seed=seed).batch(step)
        starts = [word % (count - 4) for word in philox4x64((seed, step), 6)]
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.tolist() == [list(range(s, s + 4)) for s in starts]
        assert targets.tolist() == [list(range(s + 1, s + 5)) for s in starts]


def test_shards_are_one_row_of_tokens():
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 2**16, 50).astype(np.uint16)
    cuts = np.sort(rng.integers(0, 51, 6))
    tokens = Tokens(np.split(whole, cuts))
    assert len(tokens) == 50
    for start in range(50):
        for length in (1, 3, 50 - start):
            if start + length <= 50:
                assert np.array_equal(tokens.window(start, length)[0], whole[start : start + length])


@pytest.mark.parametrize(
    ("tokens", "batches", "rows"),
    [(10_000, 3, 6), (4 * 18 + 1, 3, 6), (4 * 17 + 1, 2, 6), (4 * 3 + 1, 1, 3), (5, 1, 1), (8, 1, 1)],
)
def test_validation_windows_are_fixed_spread_and_apart(tokens, batches, rows):
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


def test_validation_batches_are_bounded_in_tokens():
    data = make(np.arange(50), np.arange(10**6), batch_size=64, seq_len=40)
    assert data.val_starts().shape[1] == 64
    long = make(np.arange(9000), np.arange(10**6), batch_size=64, seq_len=8192)
    assert long.val_starts().shape == (3, EVAL_BATCH_TOKENS // 8192)


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json of four words that adds ``<begin>``, with an end-of-text token."""
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    vocab = {"<end>": 0, "a": 1, "b": 2, "[UNK]": 3, "<begin>": 4}
    words = library.Tokenizer(library.models.WordLevel(vocab, unk_token="[UNK]"))
    words.add_special_tokens(["<begin>", "<end>"])
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.post_processor = library.processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 4)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return str(tmp_path / "tokenizer.json")


def read(data: str, *flags: str) -> tuple[list[int], list[int], str]:
    """The tokens that ``--data`` gives, and what the log says about them."""
    got = load_data(parse(["--data", data, "--seq-len", "1", *flags]))
    train, val = (tokens.window(0, len(tokens))[0].tolist() for tokens in (got.train, got.val))
    return train, val, got.held_out


def test_special_tokens_around_documents(tmp_path, words):
    """For text files and JSON Lines alike: the tokens that the tokenizer adds, and the end-of-text token."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"1": "a b a", "2": "b", "3": "a a"}.items():
        write(folder, text, name)
    lines = write(tmp_path, "".join(f'{{"text": "{text}"}}\n' for text in ("a b a", "b", "a a")), "lines.jsonl")
    within = "; attention stays within a document (--documents)"
    about = f"; documents begin with <begin> and end with <end>{within}"
    expected = [4, 1, 2, 1, 0, 4, 2, 0], [4, 1, 1, 0]
    much = ", which is 33% of the tokens (--val-data, or a file with val in its name, replaces it)"
    said = f"held out for validation: 3 (of 3 files){much}{about}"
    assert read(str(folder), "--tokenizer", words) == (*expected, said)
    said = f"held out for validation: the last tenth of lines.jsonl{about}"
    assert read(lines, "--tokenizer", words) == (*expected, said)
    tenth = "held out for validation: the last tenth of lines.jsonl; nothing between documents"
    assert read(lines)[2] == f"{tenth}{within}"
    assert read(lines, "--documents", "cross")[2] == f"{tenth}; attention crosses documents (--documents)"


def test_documents_begin_where_their_first_tokens_are(tmp_path, words):
    """With and without tokens between them; windows begin anywhere."""
    texts = ["a b a", "b", "", "a a", "b b b"]
    lines = write(tmp_path, "".join(f'{{"text": "{text}"}}\n' for text in texts * 8), "lines.jsonl")
    for flags, between in (((), 0), (("--tokenizer", words), 2)):
        data = load_data(parse(["--data", lines, "--seq-len", "9", "--batch-size", "64", *flags]))
        sizes = [(len(text) if not between else len(text.split())) + between for text in texts * 8 if text]
        begins = np.cumsum([0, *sizes])
        batch = data.batch(3)
        every, _ = data.train.window(0, len(data.train))
        for tokens, starts in zip(batch.tokens, batch.document_starts, strict=True):
            places = [at for at in range(len(every) - 8) if np.array_equal(every[at : at + 9], tokens)]
            wanted = [[max(0, begins[begins <= at + i].max() - at) for i in range(9)] for at in places]
            assert starts.tolist() in wanted
        crossing = load_data(parse(["--data", lines, "--documents", "cross", "--seq-len", "9"]))
        assert crossing.batch(0).document_starts is None


def test_documents_of_token_files(tmp_path):
    """They begin with llm.c's token; where there is none, or numbers have another vocabulary, none is known."""
    tokens = np.random.default_rng(0).integers(0, 99, 3000)
    tokens[::7] = 50_256
    within = "; documents begin with token 50256; attention stays within a document (--documents)"
    for name, content, flags, said in (
        ("marked.bin", tokens, [], within),
        ("plain.bin", tokens % 50_256, [], "; no documents are marked"),
        ("other.bin", tokens, ["--vocab-size", "60000"], "; no documents are marked"),
        ("padded.bin", tokens, ["--vocab-size", "50304"], within),
    ):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(content)
        path = write(tmp_path, header.tobytes() + content.astype("<u2").tobytes(), name)
        data = load_data(parse(["--data", path, "--seq-len", "20", *flags]))
        assert said in data.held_out, data.held_out
        batch = data.batch(0)
        assert (batch.document_starts is None) == ("no documents" in said)
        if batch.document_starts is not None:
            at = np.arange(20)
            wanted = np.maximum.accumulate(np.where(batch.tokens == 50_256, at, 0), axis=1)
            assert np.array_equal(batch.document_starts, wanted) and wanted.any()


def test_documents_begin_beyond_the_largest_int32():
    start = 2**31 - 3
    tokens = Tokens([np.arange(8)], np.array([0, start + 2, start + 5]))
    assert tokens.document_starts(start, np.zeros(8)).tolist() == [0, 0, 2, 2, 2, 5, 5, 5]
    assert tokens.document_starts(start + 5, np.zeros(2)).tolist() == [0, 0]


def test_a_token_that_ends_documents():
    tokens = Tokens([np.arange(8)], Separator(3, ends=True))
    assert tokens.document_starts(0, np.array([1, 3, 5, 3, 3, 6])).tolist() == [0, 0, 2, 2, 4, 5]


def test_special_tokens_in_the_text_are_counted(tmp_path, words, all_is_kept):
    flags = ["--seq-len", "16", "--tokenizer", words]
    for repeats in (1, 2, 2):  # the last start reads the stored tokens of the one before
        path = write(tmp_path, "a <end> b <begin><end>\n" * 100 * repeats)
        count = f"{300 * repeats:,} (<end> {200 * repeats:,}, <begin> {100 * repeats:,})"
        assert load_data(parse(["--data", path, *flags])).note == (
            f"special tokens spelled out in the text and read as text: {count}; "
            "--no-split-special-tokens reads them as special tokens"
        )
    assert load_data(parse(["--data", path, *flags, "--no-split-special-tokens"])).note == ""
    assert load_data(parse(["--data", path, *flags[:2]])).note == ""
    assert load_data(parse(["--data", write(tmp_path, "a b " * 500), *flags])).note == ""


def tokens_file(tmp_path: Path, tokens: list[int]) -> str:
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    return write(tmp_path, header + struct.pack(f"<{len(tokens)}H", *tokens), "tokens.bin")


def test_token_files_and_their_tokenizer(tmp_path):
    path = tokens_file(tmp_path, [*range(100)])
    data = load_data(parse(["--data", path, "--seq-len", "5"]))
    assert (data.tokenizer.name, data.tokenizer.vocab_size) == ("numbers", 50_257)
    assert load_data(parse(["--data", path, "--seq-len", "5", "--vocab-size", "100"])).tokenizer.vocab_size == 100
    assert load_data(parse(["--data", path, "--seq-len", "5", "--tokenizer", "bytes"])).tokenizer.vocab_size == 256


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    """At the start, wherever it is, masked or not, with its file and place."""
    path = tokens_file(tmp_path, [7] * 5 + [300] + [7] * 93 + [256])
    flags = ["--seq-len", "9", "--tokenizer", "bytes"]
    at_5 = f"--data {path}: expected tokens below the vocabulary's 256, got 300 at token 5"
    with refused(DataError, at_5):
        load_data(parse(["--data", path, *flags]))
    Path(path).with_suffix(".mask").write_bytes(b"\1\0" * 50)
    for loss_on in ("completion", "all"):
        with refused(DataError, at_5):
            load_data(parse(["--data", path, *flags, "--loss-on", loss_on]))
    path = tokens_file(tmp_path, [7] * 99 + [256])
    with refused(DataError, f"--data {path}: expected tokens below the vocabulary's 256, got 256 at token 99"):
        load_data(parse(["--data", path, *flags]))
    folder = tmp_path / "good"
    folder.mkdir()
    good = tokens_file(folder, [7] * 100)
    with refused(DataError, f"--val-data {path}: expected tokens below the vocabulary's 256, got 256 at token 99"):
        load_data(parse(["--data", good, "--val-data", path, *flags]))


def test_a_vocabulary_is_checked_again_when_it_becomes_smaller(tmp_path):
    """Data that are large enough to be looked up were prepared for the other."""
    path = tokens_file(tmp_path, [7, 300] * 300_000)
    load_data(parse(["--data", path, "--seq-len", "9", "--vocab-size", "301"]))
    with refused(DataError, "expected tokens below the vocabulary's 300, got 300 at token 1"):
        load_data(parse(["--data", path, "--seq-len", "9", "--vocab-size", "300"]))


def test_data_shorter_than_a_sequence_is_refused(tmp_path):
    path = write(tmp_path, "x" * 100)
    assert load_data(parse(["--data", path, "--seq-len", "9"])).val_starts().shape[1] == 1
    held_out = "got 10 (held out for validation: the last tenth of text.txt)"
    with refused(DataError, f"--data {path}: ", "--seq-len + 1 = 11", "validate", held_out):
        load_data(parse(["--data", path, "--seq-len", "10"]))
    with refused(DataError, f"--data {path}: ", "--seq-len + 1 = 91", "train on", "got 90"):
        load_data(parse(["--data", path, "--seq-len", "90"]))
    other = write(tmp_path, "x" * 50, "other.txt")
    with refused(DataError, f"--val-data {other}: expected at least --seq-len + 1 = 61", "got 50"):
        load_data(parse(["--data", path, "--val-data", other, "--seq-len", "60"]))


def test_a_prompt_that_cannot_be_spelt_is_refused_before_training(tmp_path):
    config = parse(["--data", tokens_file(tmp_path, [5] * 99), "--seq-len", "4", "--prompt", "abc"])
    with refused(DataError, "expected token numbers below 50257", "'abc'"):
        load_data(config)


def test_the_fingerprint_changes_with_the_data(tmp_path, small_pieces):
    """A difference in any piece counts: tokens are read in pieces."""
    small_pieces()

    def fingerprint(text):
        return load_data(parse(["--data", write(tmp_path, text), "--seq-len", "4"])).fingerprint

    text = "0123456789" * 100
    others = (text, text + "0", "1" + text[1:], text[:-1] + "x", text[:400] + "x" + text[401:])
    seen = {fingerprint(other) for other in others}
    assert len(seen) == 5 and fingerprint(text) in seen
