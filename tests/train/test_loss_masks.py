"""Data of which the loss counts some tokens: prompts and completions, chats, token files with a mask."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError, DataError
from kos.train.config.flags import parse
from kos.train.data.batches import Dataset, load_data
from kos.train.ops import Batch
from tests.train.corpora import token_bytes
from tests.train.of_transformers import transformers
from tests.train.refusal import refused
from tests.train.runs import _config, _train, run
from tests.train.test_left_out_targets import mean_loss
from tests.train.tokenizer_files import byte_level_bpe

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|begin|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("{% generation %}", "{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}")
"""As Qwen3's: another text of a turn if it is the last one."""

CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "two + two?"},
    {"role": "assistant", "content": " four "}, {"role": "user", "content": "four?"},
    {"role": "assistant", "content": "yes"},
]  # fmt: skip


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Prompts and completions of many lengths, and some lines of text."""
    rng, words = np.random.default_rng(0), ["ring ", "tree ", "barrier ", "rank\n"]

    def some(most):
        return "".join(rng.choice(words, rng.integers(1, most)))

    lines = [{"prompt": some(20), "completion": some([2, 30][n % 2])} for n in range(250)]
    lines[::7] = [{"text": some(9)} for _ in lines[::7]]
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_level_bpe([json.dumps(CHAT) * 9], 330, ["<|begin|>"]).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return path


def read(path: Path, *flags: str) -> tuple[list[int], list[bool], Dataset]:
    """The training tokens, and whether the loss counts each."""
    data = load_data(parse(["--data", str(path), "--seq-len", "1", "--fit", "cut", *flags]))
    batch = data.windows(data.train, range(len(data.train) - 1))
    tokens, mask = data.train.window(0, len(data.train))
    counted = mask > 0
    assert (batch.tokens[:, 0] == tokens[:-1]).all()
    assert (batch.targets[:, 0] == np.where(counted, tokens.astype(np.int64), -1)[1:]).all()
    return tokens.tolist(), counted.tolist(), data


def test_only_completions_count(tmp_path, folder):
    lines = [{"prompt": "ab", "completion": "c", "id": 5}, {"text": "de"}, {"prompt": "", "completion": "f"}]
    path = write_lines(tmp_path / "a.jsonl", [*lines, {"prompt": "g", "completion": ""}, {"text": "val"}])
    tokens, counted, data = read(path)
    assert bytes(tokens) == b"abcdefg" and counted == [False, False, True, True, True, True, False]
    assert data.held_out.endswith("(--documents); the loss counts 4 of 7 tokens (--loss-on completion)")
    tokens, counted, _ = read(path, "--tokenizer", str(folder))
    text = data_text(folder, tokens)
    assert text == "<|begin|>ab c<|end|> <|begin|>de<|end|> <|begin|> f<|end|> <|begin|>g <|end|>".replace(" ", "")
    ones = [n for n, count in zip(tokens, counted, strict=True) if count]
    assert data_text(folder, ones) == "c<|end|><|begin|>de<|end|>f<|end|><|end|>"


def test_fields_of_other_names(tmp_path):
    """``--fields`` gives kos's names; other forms in a record are then ignored, and fields of the same form are not."""
    for number, (names, line) in enumerate((
        ("prompt=q,response=a", {"q": "ab", "a": "cd", "text": "x", "messages": []}),
        ("response=a", {"prompt": "ab", "a": "cd", "text": "x"}), ("completion=a", {"prompt": "ab", "a": "cd"}),
        ("prompt=completion,completion=prompt", {"completion": "ab", "prompt": "cd"}),
    )):
        path = write_lines(tmp_path / f"{number}.jsonl", [line, line])
        tokens, counted, _ = read(path, "--fields", names)
        assert (bytes(tokens), counted) == (b"abcd", [False, False, True, True])
    with refused(DataError, f"--data {path}, line 1: expected the field 'q' (--fields prompt=q), got the fields comp"):
        read(path, "--fields", "prompt=q,completion=completion")
    for given, expected in (("q=prompt", "NAME=FIELD with names of prompt, "), ("prompt", "NAME=FIELD with names of")):
        with refused(ConfigError, f"--fields: expected {expected}"):
            parse(["--fields", given])
    with refused(ConfigError, "--fields: expected none (--text-field), got prompt=q"):
        parse(["--fields", "prompt=q", "--text-field", "a"])


def data_text(folder: Path, tokens: list[int]) -> str:
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    return str(library.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens, skip_special_tokens=False))


def test_all_tokens_count_if_asked(tmp_path, pairs):
    """Then the data are those of the same text, bit by bit."""
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    plain = write_lines(
        tmp_path / "pairs.jsonl", [{"text": x.get("text") or x["prompt"] + x["completion"]} for x in lines]
    )
    _, counted, data = read(pairs, "--loss-on", "all")
    tokens, *_, expected = read(plain)
    assert all(counted) and data.fingerprint == expected.fingerprint and not data.masks_targets
    assert data.held_out.endswith(f"the loss counts {len(tokens):,} of {len(tokens):,} tokens (--loss-on all)")


def test_what_a_template_gets_beside_the_messages(tmp_path, folder, golden):
    """As from transformers: tools and documents are none, not undefined. From a line: tools, and settings by name."""
    template = (
        "{% if tools is not none %}tools {{ tools | tojson }}{% endif %}{% if documents is not none %}no{% endif %}"
        "{% if brief is defined %}brief {{ brief }}{% endif %}"
    ) + CHATML
    beside = tmp_path / "tokenizer"
    shutil.copytree(folder, beside)
    (beside / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    given = [
        {}, {"tools": None, "chat_template_kwargs": None}, {"tools": tools}, {"tools": json.dumps(tools)},
        {"chat_template_kwargs": {"brief": True}},
    ]  # fmt: skip
    # a line of a data set that has the first message in a field of its own too
    lines = [{"messages": CHAT, **options} for options in given] + [{"prompt": "two + two?", "messages": CHAT}]
    tokens, *_ = read(write_lines(tmp_path / "chats.jsonl", [*lines, {"text": "val"}]), "--tokenizer", str(beside))
    options = [{}, {}, {"tools": tools}, {"tools": tools}, {"brief": True}, {}]

    def theirs() -> list[list[int]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, chat_template=template)
        how = {"tokenize": True, "return_dict": True}
        return [[*tokenizer.apply_chat_template(CHAT, **how, **each)["input_ids"]] for each in options]

    assert tokens == [token for each in golden("what a template gets", theirs) for token in each]


def spaced(folder: Path, kind: str) -> Path:
    """A tokenizer as of Llama 2 (``prepend``) or of later ones (``metaspace``): it adds a space to what it is given."""
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    bpe = library.Tokenizer(library.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "prepend":
        steps = [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
        bpe.normalizer = library.normalizers.Sequence(steps)
    else:
        bpe.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decoders = library.decoders
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<|begin|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = library.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    bpe.train_from_iterator([each["content"] for each in CHAT] * 9, trainer)
    saved = json.loads(bpe.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # bytes are none
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
def test_a_text_in_parts_is_encoded_as_a_whole(tmp_path, kind, small_pieces, golden):
    """No part has a space that the text has not; a token of two parts is in the second."""
    folder = spaced(tmp_path / "tokenizer", kind)
    pairs = [("two + two?", "four"), ("two + two? ", "four"), ("Be bri", "ef.")]
    pairs += [("é", "€\n"), ("", "yes"), ("four", "")]
    lines = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    path = write_lines(tmp_path / "pairs.jsonl", [*lines, {"text": "val"}])
    tokens, counted, _ = read(path, "--tokenizer", str(folder))

    def theirs() -> list[list[int]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        chat = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
        return [*([*tokenizer("".join(pair)).input_ids] for pair in pairs), [*chat]]

    *expected, of_chat = golden(kind, theirs)
    assert tokens == [id for each in expected for id in [*each, 2]]
    ones = [id for id, count in zip(tokens, counted, strict=True) if count]
    answers = data_text(folder, ones).split("<|end|>")
    assert [answer.strip(" ") for answer in answers] == ["four", "four", "Be brief.", "€\n", "yes", "", ""]
    assert answers[0] == "four"
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"text": "val"}])
    tokens, counted, _ = read(path, "--tokenizer", str(folder))
    assert tokens == of_chat
    ones = [id for id, count in zip(tokens, counted, strict=True) if count]
    assert data_text(folder, ones).replace(" ", "") == "fouryes"
    whole = tokens
    small_pieces()  # cut between other tokens, parts in several pieces
    tokens, counted, _ = read(path, "--tokenizer", str(folder))
    assert data_text(folder, tokens).replace(" ", "") == data_text(folder, whole).replace(" ", "")
    ones = [id for id, count in zip(tokens, counted, strict=True) if count]
    assert data_text(folder, ones).replace(" ", "") == "fouryes"


def test_a_chat_needs_a_template(tmp_path, folder, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 9)
    with refused(DataError, f"--data {path}, line 1: expected a tokenizer with a chat template", "; put a file"):
        read(path)
    wrong = tmp_path / "tokenizer"
    wrong.mkdir()
    (wrong / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for template, message in (
        ("{% for %}", "expected a chat template, got "),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "got another text up to mess"),
        ("{% for m in messages %}{{ m.content }}{{ loop.last }}{% endfor %}", "got another text up to message 3"),
    ):
        (wrong / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with refused(DataError, str(wrong / "tokenizer_config.json"), message):
            read(path, "--tokenizer", str(wrong))
    (wrong / "tokenizer_config.json").write_text('["chat_template"]')
    with refused(DataError, f"{wrong / 'tokenizer_config.json'}: expected JSON with"):
        read(path, "--tokenizer", str(wrong))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with refused(ConfigError, "chat data: expected the package jinja2", "got none", "[chat]'"):
        read(path, "--tokenizer", str(folder))


def test_lines_without_anything_to_train_on_or_to_hold_out(tmp_path, folder):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}] * 9)
    with refused(DataError, f"--data {path}: expected completions or answers to train on, got none"):
        read(path, "--tokenizer", str(folder))
    write_lines(path, [{"messages": CHAT}])
    with refused(DataError, f"--data {path}: expected at least --seq-len + 1 = 2 tokens to validate on, got 0 (held"):
        read(path, "--tokenizer", str(folder))
    _, _, data = read(path, "--tokenizer", str(folder), "--eval-batches", "0")
    assert len(data.train) > 2 and not len(data.val) and not data.val_starts().size


def test_token_files_with_masks(tmp_path):
    """The mask is cut, fingerprinted and read with its tokens; a file without a mask counts."""
    tokens, rng = [*range(200)], np.random.default_rng(3)
    marks = rng.integers(0, 2, 200).astype(np.uint8)
    (tmp_path / "a.bin").write_bytes(token_bytes(tokens))
    (tmp_path / "a.mask").write_bytes(marks.tobytes())
    got, counted, data = read(tmp_path / "a.bin")
    assert got == tokens[:180] and counted == marks[:180].astype(bool).tolist()
    assert f"the loss counts {marks[:180].sum()} of 180 tokens (--loss-on completion)" in data.held_out
    got, counted, whole = read(tmp_path / "a.bin", "--loss-on", "all")
    assert got == tokens[:180] and all(counted) and not whole.masks_targets
    (tmp_path / "a.mask").write_bytes((1 - marks).tobytes())
    assert len({data.fingerprint, whole.fingerprint, read(tmp_path / "a.bin")[2].fingerprint}) == 3
    (tmp_path / "val.bin").write_bytes(token_bytes([*range(50)]))
    got, counted, data = read(tmp_path)
    assert got == tokens and counted == (1 - marks).astype(bool).tolist()
    assert (data.windows(data.val, [0, 5]).targets == [[1], [6]]).all()


def test_validation_windows_in_which_nothing_counts_are_refused(tmp_path):
    """Else the loss of validation is 0 all the way. One target that counts is enough."""
    path = tmp_path / "a.bin"
    path.write_bytes(token_bytes([*range(200)]))
    nothing = [1] * 180 + [0] * 20
    path.with_suffix(".mask").write_bytes(bytes(nothing))
    expected = f"--data {path}: expected validation windows in which the loss counts a target, got none"
    held_out = "(held out for validation: the last tenth of a.bin); --eval-batches 0 turns validation off"
    with refused(DataError, expected, held_out):
        read(path)
    read(path, "--eval-batches", "0")
    read(path, "--loss-on", "all")
    path.with_suffix(".mask").write_bytes(bytes([*nothing[:-1], 1]))
    read(path, "--eval-batches", "19", "--batch-size", "1")
    other = tmp_path / "other.bin"
    other.write_bytes(token_bytes([*range(50)]))
    other.with_suffix(".mask").write_bytes(bytes(50))
    with refused(DataError, f"--val-data {other}: expected validation windows"):
        read(path, "--val-data", str(other))
    lines = [{"text": "some text"}, *[{"prompt": "a long prompt", "completion": ""}] * 2]
    pairs = write_lines(tmp_path / "pairs.jsonl", lines)
    with refused(DataError, f"--data {pairs}: expected validation windows"):
        read(pairs)


def test_a_separator_that_does_not_count_still_separates(tmp_path):
    tokens = ([50256, 1, 2, 3] * 50)[2:]
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(token_bytes(tokens))
        (tmp_path / f"{name}.mask").write_bytes(bytes(token == 3 for token in tokens))
    _, counted, data = read(tmp_path)
    assert sum(counted) == 50 and "documents begin with token 50256; attention stays within" in data.held_out
    batch = Dataset(**{**vars(data), "seq_len": 6}).windows(data.train, [0])
    assert batch.tokens.tolist() == [[2, 3, 50256, 1, 2, 3]] and batch.targets.tolist() == [[3, -1, -1, -1, 3, -1]]
    assert batch.document_starts.tolist() == [[0, 0, 2, 2, 2, 2]]


@pytest.mark.parametrize("size", [199, 201])
def test_a_mask_of_another_length_is_refused(tmp_path, size):
    (tmp_path / "a.bin").write_bytes(token_bytes([*range(200)]))
    (mask := tmp_path / "a.mask").write_bytes(bytes(size))
    with refused(DataError, f"--data {mask}: expected 200 bytes, one for each token of a.bin, got {size}"):
        read(tmp_path / "a.bin")


def test_a_mask_written_as_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(token_bytes([7] * 200))
    (tmp_path / "a.mask").write_text("0" * 99 + "1" + "0" * 100)
    with refused(DataError, f"--data {tmp_path / 'a.mask'}: expected bytes of 0 and 1, got 49"):
        read(tmp_path / "a.bin")
    assert len(read(tmp_path / "a.bin", "--loss-on", "all")[0]) == 180
    (tmp_path / "b.bin").write_bytes(token_bytes([7] * 200))
    with refused(DataError, f"--val-data {tmp_path / 'a.mask'}: expected bytes of 0 and 1, got 49"):
        read(tmp_path / "b.bin", "--val-data", str(tmp_path / "a.bin"))


def test_training_and_validation_are_means_over_what_counts(pairs, tmp_path):
    """Of the whole batch, and of all validation windows, however many count in each."""
    config = _config(pairs, None, documents="cross")
    data = load_data(config)
    val = [data.windows(data.val, starts) for starts in data.val_starts()]
    assert len({int((batch.targets >= 0).sum()) for batch in val}) > 1
    batches = [data.batch(0), Batch(*(np.concatenate(each) for each in zip(*((x[0], x[1]) for x in val), strict=True)))]
    expected = [mean_loss(config, batch.tokens, batch.targets) for batch in batches]
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        rows = _train(pairs, out, ranks, steps=1, micro_batch_size=2, documents="cross")
        assert [rows[0]["loss"], rows[0]["val_loss_before"]] == pytest.approx(expected, rel=1e-5)


def test_what_is_kept_is_made_again_when_it_is_another(tmp_path, folder, all_is_kept):
    """For another --loss-on, another template or another mask."""
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT}, {"text": "val"}])
    beside, flags = tmp_path / "tokenizer", ["--tokenizer", str(tmp_path / "tokenizer")]
    shutil.copytree(folder, beside)
    counts = [sum(read(path, *flags, *more)[1]) for more in ([], [], ["--loss-on", "all"])]
    (beside / "chat_template.jinja").write_text(THINKING)
    counts.append(sum(read(path, *flags)[1]))
    assert counts[0] == counts[1] and len({*counts}) == 3
    (tmp_path / "a.bin").write_bytes(token_bytes([*range(200)]))
    prints = []
    for number, mark in enumerate((0, 1)):
        (tmp_path / "a.mask").write_bytes(bytes([mark]) * 199 + b"\1")
        os.utime(tmp_path / "a.mask", (number, number))
        shutil.copy(tmp_path / "a.bin", tmp_path / "val.bin")
        os.utime(tmp_path / "val.bin", (1, 1))
        prints.append(read(tmp_path)[2].fingerprint)
    assert prints[0] != prints[1]


def cuts(path: Path, *flags: str) -> str:
    return load_data(parse(["--data", str(path), "--eval-batches", "0", *flags])).describe_fit()


def test_documents_that_sequences_cut_are_counted(tmp_path):
    """A prompt of 8 tokens and a completion of 4: sequences of 12 tokens have each whole."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x" * 8, "completion": "yes."}] * 50)
    trained = ["--hold-out", "0.1", "--fit", "cut", "--epochs", "1", "--batch-size", "5", "--seq-len"]
    assert cuts(path, *trained, "12") == ""
    all_lack = "about 100% of the counted tokens lack the beginning of their document (--seq-len)"
    assert cuts(path, *trained, "6") == f"sequences of 6 tokens cut 45 of 45 documents: {all_lack}"
    some = cuts(path, *trained, "18")
    assert some == f"sequences of 18 tokens cut 15 of 45 documents: {all_lack.replace('100%', '32%')}", some
    drawn = cuts(path, "--fit", "cut", "--steps", "9", "--batch-size", "5", "--seq-len", "12")
    share = re.fullmatch(r"sequences of 12 tokens cut documents: about (\d+)% of the counted tokens lack.*", drawn)
    assert share and 65 < int(share[1]) < 90, "a completion's last token is 11 places after the first: 79% on average"
    text = write_lines(tmp_path / "text.jsonl", [{"text": "x" * 12}] * 50)
    assert cuts(text, *trained, "6") == "", "text is cut as it comes"


@pytest.mark.parametrize(
    ("fit", "seq_len", "warning"),
    [
        ("cut", 6, "99% of the counted tokens lack the beginning of their document: raise --seq-len"),
        ("whole", 10, "27% of the counted tokens lack the beginning of their document: raise --seq-len, or leave long "
         "ones out (--long-documents skip)"),
        ("whole", 12, None),
    ],
)  # fmt: skip
def test_the_first_lines_say_what_is_cut(tmp_path, capfd, fit, seq_len, warning):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x" * 8, "completion": "yes."}] * 50)
    path = write_lines(path, [*map(json.loads, path.read_text().splitlines()), {"prompt": "x", "completion": "y" * 20}])
    config = _config(path, tmp_path / "out", seq_len=seq_len, fit=fit, steps=1, eval_batches=0, sample_tokens=0)
    run(config, 2)
    out, err = capfd.readouterr()
    assert out.count("\nsequences of 6 tokens cut documents: about ") == (fit == "cut")
    assert err.count("lack the beginning") == (warning is not None)
    assert warning is None or f"kos: --data a.jsonl: {warning}\n" in err
