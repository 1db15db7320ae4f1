"""Tokenizers: text to numbers and back, against plain Python and the tokenizers library itself."""

import json
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kos.errors import CheckpointError, ConfigError, DataError
from kos.train import checkpoint
from kos.train.data.batches import load_data
from kos.train.data.chat import read_chat_template
from kos.train.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NumberTokenizer,
    make_tokenizer,
    tokenizer_from_json,
)
from tests.train.of_transformers import transformers
from tests.train.refusal import refused
from tests.train.runs import _config, _train
from tests.train.sharded import save_alone
from tests.train.test_checkpoint import MODEL
from tests.train.tokenizer_files import TEXT


@given(st.lists(st.integers(0, 0x10FFFF)).map(lambda points: "".join(map(chr, points))))  # st.text() sorts them first
def test_bytes_are_utf8(text):
    tokenizer = ByteTokenizer()
    try:
        expected = list(text.encode("utf-8"))
    except UnicodeEncodeError:
        return
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and ids.tolist() == expected
    assert tokenizer.decode(ids) == text


def test_bytes_of_half_a_character_and_beyond_the_vocabulary():
    assert ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"
    assert ByteTokenizer().decode(np.array([300, 0x62])) == "\ufffdb"


def test_a_prompt_that_the_shell_gave_as_raw_bytes():
    assert ByteTokenizer().encode(b"\xff".decode("utf-8", "surrogateescape")).tolist() == [0xFF]
    with pytest.raises(DataError, match=r"tokenizer bytes: expected text, got '\\ud800' at character 1"):
        ByteTokenizer().encode("a\ud800")  # such as a prompt from JSON


@pytest.mark.parametrize(("count", "dtype"), [(256, np.uint8), (257, np.uint16), (65_537, np.uint32)])
def test_the_smallest_dtype_that_holds_the_vocabulary(count, dtype):
    ids = NumberTokenizer(count).encode(f"0 {count - 1}")
    assert ids.dtype == dtype and ids.max() == count - 1


def test_the_characters_of_a_checkpoint_of_0_3():
    """They are read as a tokenizer.json."""
    pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    alphabet = "\n ahé漢"
    tokenizer = tokenizer_from_json({"kind": "chars", "alphabet": alphabet})
    text = "haha é\n漢"
    assert tokenizer.encode(text).tolist() == [alphabet.index(each) for each in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.vocab_size == len(alphabet)
    assert tokenizer_from_json(tokenizer.to_json()).is_like(tokenizer)


def test_start_is_a_token_that_text_starts_with():
    assert ByteTokenizer().decode([ByteTokenizer().start]) == "\n"
    assert NumberTokenizer(9).start == 0


def test_numbers():
    tokenizer = NumberTokenizer(50_257)
    assert tokenizer.encode(" 0 50256\n7").tolist() == [0, 50_256, 7]
    assert tokenizer.decode(np.array([0, 50_256, 7])) == "0 50256 7"
    for wrong in ("50257", "-1", "the"):
        with refused(DataError, "below 50257", f"got '{wrong}'"):
            tokenizer.encode(f"3 {wrong}")


def test_huggingface_is_the_library(huggingface_file):
    library = pytest.importorskip("tokenizers")
    theirs = library.Tokenizer.from_file(str(huggingface_file))
    tokenizer = make_tokenizer(str(huggingface_file))
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == theirs.encode(TEXT).ids == [0, *theirs.encode(TEXT, add_special_tokens=False).ids]
    assert ids.dtype == np.uint16 and tokenizer.vocab_size == theirs.get_vocab_size()
    assert tokenizer.decode(ids) == f"<|begin|>{TEXT}"
    assert (tokenizer.eos, tokenizer.start) == (1, 0)
    assert tokenizer.encode("").tolist() == [0]
    assert tokenizer.decode([*ids, 1]) == f"<|begin|>{TEXT}<|end|>"
    assert make_tokenizer(str(huggingface_file.parent)).encode(TEXT).tolist() == ids.tolist()


def test_long_text_is_encoded_in_pieces(huggingface_file, small_pieces):
    """They end with lines, so a text without lines is one piece."""
    tokenizer = make_tokenizer(str(huggingface_file))
    texts = "def f(x):\nreturn the the\n" * 40, "xé" * 100
    wholes = [tokenizer.encode(text).tolist() for text in texts]
    small_pieces()
    assert [tokenizer.encode(text).tolist() for text in texts] == wholes
    pieces = [sum(part.pieces for part in tokenizer.encode_documents([text], True)) for text in texts]
    assert pieces[0] > 20 and pieces[1] == 1


ADDED = {
    "begin": ("<|begin|> $A", [0], []), "end": ("$A <|end|>", [], [1]), "both": ("<|begin|> $A <|end|>", [0], [1]),
    "none": (None, [], []),
}  # fmt: skip


def with_added(huggingface_file: Path, template: str | None, folder: Path) -> Path:
    """The tokenizer with another post-processor, which also cuts and pads, as tokenizer.json may say."""
    library = pytest.importorskip("tokenizers")
    shutil.copytree(huggingface_file.parent, folder)
    bpe = library.Tokenizer.from_file(str(huggingface_file))
    kinds = [library.processors.ByteLevel(trim_offsets=False)]
    if template is not None:
        special = [("<|begin|>", 0), ("<|end|>", 1)]
        kinds.append(library.processors.TemplateProcessing(template, special_tokens=special))
    bpe.post_processor = library.processors.Sequence(kinds)
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("template", "before", "after"), ADDED.values(), ids=list(ADDED))
def test_tokens_that_a_tokenizer_adds(tmp_path, huggingface_file, template, before, after, small_pieces):
    """The tokens are added once per text of any length, and the end-of-text token once per document."""
    tokenizer = make_tokenizer(str(with_added(huggingface_file, template, tmp_path / "other")))
    plain = make_tokenizer(str(with_added(huggingface_file, None, tmp_path / "plain")))
    text = "def f(x):\nreturn\n\n  the \r\n the\n" * 9
    inner = plain.encode(text).tolist()
    assert len(inner) > 9 and tokenizer.encode(text).tolist() == [*before, *inner, *after]
    assert tokenizer.encode_prompt(text) == [*before, *inner], "a prompt goes on"
    assert tokenizer.encode_prompt("") == [0]
    small_pieces()
    assert tokenizer.encode(text).tolist() == [*before, *inner, *after]
    parts = [*tokenizer.encode_documents([text, "", text], split_special_tokens=True)]
    assert sum(part.characters for part in parts) == 2 * len(text) and len(parts) > 1
    whole, none = [*before, *inner, 1], [*before, 1]
    assert np.concatenate([part.tokens for part in parts]).tolist() == [*whole, *none, *whole]
    sizes = np.cumsum([0, *(len(part.tokens) for part in parts)])
    begins = [size + at for size, part in zip(sizes, parts, strict=False) for at in part.begins]
    assert begins == [0, len(whole), len([*whole, *none])]
    assert tokenizer.separators() == f"documents {'begin with <|begin|> and ' * bool(before)}end with <|end|>"
    assert ByteTokenizer().separators() == "nothing between documents"


def test_special_tokens_in_a_text(huggingface_file):
    """They are special tokens in a prompt, as in transformers, and text in a document by default."""
    tokenizer = make_tokenizer(str(huggingface_file))
    assert tokenizer.encode("the<|end|>").tolist()[-1] == 1
    for split in (True, False):
        ((ids, *_),) = tokenizer.encode_documents(["the<|end|>the"], split)
        assert ids.tolist().count(1) == (1 if split else 2)
        assert tokenizer.decode(ids) == "<|begin|>the<|end|>the<|end|>"
    assert tokenizer.encode("the<|end|>").tolist()[-1] == 1


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """A small tokenizer in the files of Qwen2's: normalizer, regular expression, added tokens, chat template."""
    library = pytest.importorskip("tokenizers")
    level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bpe, parts = library.Tokenizer(library.models.BPE()), library.pre_tokenizers
    bpe.normalizer, bpe.decoder = library.normalizers.NFC(), library.decoders.ByteLevel(**level)
    bpe.pre_tokenizer = parts.Sequence([parts.Split(library.Regex(QWEN), "isolated"), parts.ByteLevel(**level)])
    bpe.post_processor = library.processors.ByteLevel(**level)
    trainer = library.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=parts.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([TEXT, "12 345 it's we'll \n\n 漢字 🙂 " * 9], trainer)
    added = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False}
    tokens = [library.AddedToken(name, special=special, normalized=False) for name, special in added.items()]
    bpe.add_tokens(tokens)
    bpe.save(str((folder := tmp_path_factory.mktemp("qwen")) / "tokenizer.json"))
    model = json.loads(bpe.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>", "chat_template": CHATML, "add_prefix_space": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_qwen_tokenizer_gives_the_numbers_of_transformers(qwen_folder, small_pieces, golden):
    """Of texts and documents, with special tokens and without, in pieces, and of chats; and the text back."""
    ours = make_tokenizer(str(qwen_folder))
    chat = [{"role": role, "content": TEXT} for role in ("user", "assistant") * 2]
    special = "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}<|endoftext|>"
    texts = [
        TEXT, special, "", " ", "\n", "12345 3.14 2024-01-01 ١٢٣", "🙂👨\u200d👩\u200d👧🇩🇪", "漢字と日本語 한국어 मनीष",
        "a\n\n\nb\r\n  c\t\td  \n ", "It's we'LL I'm", "cafe\u0301 ﬁ", "\0\7", "x" * 300,
    ]  # fmt: skip

    def by_transformers() -> dict[str, Any]:
        theirs = transformers.AutoTokenizer.from_pretrained(str(qwen_folder))
        found = {each: [theirs(each, split_special_tokens=split)["input_ids"] for split in (False, True)]
                 for each in texts}  # fmt: skip
        assert all(theirs(each)["input_ids"] == ids for each, (ids, _) in found.items())
        whole = theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
        return {"texts": found, "eos": theirs.eos_token_id, "chat": [*whole],
                "rendered": theirs.apply_chat_template(chat, tokenize=False)}  # fmt: skip

    theirs = golden("qwen", by_transformers)
    for example in texts:
        ids = ours.encode(example).tolist()
        assert ids == theirs["texts"][example][0], example
        assert ours.decode(ids) == unicodedata.normalize("NFC", example)
        for split in (False, True):
            found = [part.tokens for part in ours.encode_documents([example], split)]
            assert np.concatenate(found).tolist() == [*theirs["texts"][example][split], theirs["eos"]], example
    whole = ours.encode(TEXT).tolist()
    small_pieces()
    assert ours.encode(TEXT).tolist() == whole
    template = read_chat_template(str(qwen_folder))
    assert template is not None
    rendered = "".join(part for part, _ in template.documents({}, chat, "here")[0])
    assert rendered == theirs["rendered"]
    assert ours.encode(rendered).tolist() == theirs["chat"]


def test_a_checkpoint_carries_the_tokenizer(huggingface_file):
    every = [ByteTokenizer(), NumberTokenizer(77), make_tokenizer(str(huggingface_file))]
    for tokenizer in every:
        again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        text = "5 76" if isinstance(tokenizer, NumberTokenizer) else TEXT
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        for attribute in ("name", "vocab_size", "eos", "start", "prefix", "suffix"):
            assert getattr(again, attribute) == getattr(tokenizer, attribute), (tokenizer.name, attribute)


@pytest.mark.parametrize("values", [{}, {"kind": "words"}, {"kind": "chars"}, {"kind": "huggingface"}])
def test_a_saved_tokenizer_of_another_kind_is_refused(values):
    with refused(DataError, "tokenizer"):
        tokenizer_from_json(values)


def test_missing_library_names_the_extra(huggingface_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(ConfigError, "[tokenizers]'"):
        make_tokenizer(str(huggingface_file))


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, None, None),
        ({"special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}}, 0, 1),
        ({"special_tokens_map.json": {"eos_token": "<|begin|>"}, "config.json": {"eos_token_id": 1}}, None, 0),
        ({"config.json": {"eos_token_id": 1, "bos_token_id": 0}}, None, 1),
        ({"config.json": {"eos_token_id": [1, 7]}}, None, None),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, None, None),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}, "config.json": {"eos_token_id": 0}}, None, 1),
    ],
)
def test_special_tokens_of_older_folders(tmp_path, huggingface_file, files, bos, eos):
    """Those that tokenizer_config.json does not mention; GPT-2's has no eos_token."""
    (tmp_path / "tokenizer.json").write_bytes(huggingface_file.read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = make_tokenizer(str(tmp_path))
    assert (found.bos, found.eos) == (bos, eos)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = read_chat_template(str(tmp_path))
    mentioned = files.get("special_tokens_map.json", {}) | files.get("tokenizer_config.json", {})
    assert template is not None and set(template.special) == {name for name, token in mentioned.items() if token}


def test_added_tokens_that_the_tokenizer_lacks(tmp_path, huggingface_file, golden):
    """transformers would add them. The command of the error does."""
    (tmp_path / "tokenizer.json").write_bytes(huggingface_file.read_bytes())
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 1, "<|call|>": 330}')
    with refused(DataError, f"{tmp_path / 'tokenizer.json'}: expected the added token '<|call|>' of the", "; to make"):
        make_tokenizer(str(tmp_path))
    token = {"content": "<|call|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": {"330": token}}))
    (tmp_path / "added_tokens.json").unlink()
    with refused(DataError, "expected the added token '<|call|>' of the files beside it, got none; to make it, run"):
        make_tokenizer(str(tmp_path))

    def saved_by_transformers() -> list[Any]:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        theirs.save_pretrained(tmp_path / "saved")
        added = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["added_tokens"]
        return [added, [*theirs("<|call|>").input_ids]]

    added, ids = golden("added tokens", saved_by_transformers)
    whole = json.loads(huggingface_file.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, "added_tokens": added}))
    assert make_tokenizer(str(tmp_path)).encode("<|call|>").tolist() == ids


def test_wrong_tokenizer_files(tmp_path, huggingface_file):
    with refused(ConfigError, "bytes or the PATH", "'bites'", "No such file"):
        make_tokenizer("bites")
    for content in (b"{}", b"\xff\xfe", b"[1", b"[" * 100_000):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(content)
        with refused(DataError, str(path)):
            make_tokenizer(str(path))
    source = huggingface_file.read_text("utf-8")
    path.write_text(source, "utf-8")
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with refused(DataError, "eos token", "'</s>'"):
        make_tokenizer(str(path))
    path.with_name("tokenizer_config.json").write_text("{")
    with refused(DataError, "tokenizer_config.json", "JSON"):
        make_tokenizer(str(path))
    for content in ('{"eos_token": 5}', '{"bos_token": {"content": 5}}', '{"bos_token": {}}', "[]", '"x"'):
        path.with_name("tokenizer_config.json").write_text(content)
        with refused(DataError, f"{path.with_name('tokenizer_config.json')}: expected", "bos_token and eos_token"):
            make_tokenizer(str(path))
    path.with_name("tokenizer_config.json").unlink()
    words = {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}
    path.write_text(json.dumps({**dict.fromkeys(("pre_tokenizer", "decoder", "normalizer")), "model": words}))
    with refused(DataError, f"{path}: expected a tokenizer that can spell the text, got", "[UNK]"):
        make_tokenizer(str(path)).encode("the dog")
    assert HuggingFaceTokenizer(json.loads(source), "x").eos is None


def test_a_run_goes_on_with_its_tokenizer_elsewhere(text, tmp_path, huggingface_file):
    """Its path is none of what makes it another."""
    _train(text, tmp_path / "run", steps=1, tokenizer=str(huggingface_file))
    shutil.copytree(huggingface_file.parent, tmp_path / "copy")
    rows = _train(text, tmp_path / "run", steps=2, tokenizer=str(tmp_path / "copy"), resume="auto")
    assert [row["step"] for row in rows] == [1, 2]


def test_a_checkpoint_takes_its_own_tokenizer(text, tmp_path, huggingface_file):
    """With begin and end, which its tokenizer.json alone does not name; as a file, as a folder, or unnamed."""
    _train(text, tmp_path / "run", steps=1, tokenizer=str(huggingface_file))
    source = checkpoint.find(tmp_path / "run").path
    settings = json.loads((source / "config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, 1)
    for number, spec in enumerate((str(source / "tokenizer.json"), str(source), "auto")):
        out = tmp_path / str(number)
        assert len(_train(text, out, steps=1, init_from=str(source), tokenizer=spec)) == 1
        assert json.loads((checkpoint.find(out).path / "config.json").read_text())["eos_token_id"] == 1
    shutil.copytree(source, tmp_path / "hugging face")
    (tmp_path / "hugging face" / "kos_tokenizer.json").unlink()
    again = make_tokenizer(str(tmp_path / "hugging face"))
    assert (again.eos, again.start) == (1, 0) and again.encode(TEXT).size


def test_a_tokenizer_that_another_version_wrote(text, tmp_path, huggingface_file):
    """Merges were one string each, and what a library adds has a default."""
    _train(text, tmp_path / "run", steps=1, tokenizer=str(huggingface_file))
    saved = checkpoint.find(tmp_path / "run").path / "kos_tokenizer.json"
    values = json.loads(saved.read_text())
    model = values["tokenizer"]["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    del model["ignore_merges"], model["byte_fallback"]
    saved.write_text(json.dumps(values))
    settings = {"steps": 1, "init_from": str(saved.parent), "tokenizer": str(huggingface_file)}
    assert len(_train(text, tmp_path / "new", **settings)) == 1
    model["merges"] = model["merges"][:-1]
    saved.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="expected the tokenizer of this run"):
        _train(text, tmp_path / "other", 2, **settings)


def test_weights_bring_their_tokenizer(text, tmp_path, huggingface_file, capsys):
    """Text is not read as bytes where the folder of --init-from has a tokenizer, or may want one."""
    _train(text, tmp_path / "run", steps=1, tokenizer=str(huggingface_file))
    folder = tmp_path / "weights"
    shutil.copytree(checkpoint.find(tmp_path / "run").path, folder)
    (folder / "kos_tokenizer.json").unlink()
    capsys.readouterr()
    assert len(_train(text, tmp_path / "theirs", steps=1, init_from=str(folder))) == 1
    assert f"words.txt ({folder}/tokenizer.json)" in capsys.readouterr().out
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=f"--tokenizer: expected bytes or .* as {folder} has none, got auto\n"):
        _train(text, tmp_path / "none", 2, steps=1, init_from=str(folder))
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"got auto; to make it, run: .*T.from_pretrained.* {folder}"):
        _train(text, tmp_path / "none", 2, steps=1, init_from=str(folder))
    assert load_data(_config(text, None, init_from=str(folder), tokenizer="bytes")).tokenizer.kind == "bytes"


SPELT = [(ByteTokenizer(), TEXT), (NumberTokenizer(77), "5 76 0")]


@pytest.mark.parametrize("kind", ["bytes", "numbers", "huggingface"])
def test_transformers_load_it_from_a_checkpoint(tmp_path, huggingface_file, kind, golden):
    spelt = {tokenizer.kind: (tokenizer, text) for tokenizer, text in SPELT}
    tokenizer, text = spelt.get(kind) or (make_tokenizer(str(huggingface_file)), TEXT)
    path = save_alone(tmp_path, MODEL, 1, tokenizer=tokenizer)

    def loaded() -> list[Any]:
        theirs = transformers.AutoTokenizer.from_pretrained(str(path))
        ids = theirs(text)["input_ids"]
        assert theirs.decode(ids, skip_special_tokens=True) == text
        return [ids, theirs.bos_token_id, theirs.eos_token_id, len(theirs)]

    ours = [tokenizer.encode(text).tolist(), tokenizer.bos, tokenizer.eos, tokenizer.vocab_size]
    assert ours == golden(f"a checkpoint of {kind}", loaded)
