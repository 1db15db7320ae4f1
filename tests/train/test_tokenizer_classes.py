"""Tokenizers that transformers makes by the rules of their class, whose numbers are recorded, beside ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from kos.train.data.tokenizers import HuggingFaceTokenizer, make_tokenizer
from tests.goldens import shortened
from tests.train.of_transformers import transformers
from tests.train.runs import _train
from tests.train.tokenizer_files import TEXT, byte_level_bpe

CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
CASES = [
    *(("LlamaTokenizer", None, legacy, space) for legacy in (None, False, True) for space in (None, True, False)),
    *((name, model_type, False, None) for name in CLASSES for model_type in ("llama", "mistral", "qwen2")),
    *((f"CodeLlamaTokenizer{fast}", model_type, legacy, space) for fast, legacy in (("", None), ("Fast", True))
      for model_type in (None, "llama", "code_llama", "mistral") for space in (None, True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model_type", "legacy", "space"), CASES)
def test_a_class_of_transformers_has_rules_of_its_own(tmp_path, name, model_type, legacy, space, golden):
    """As of Llama 2 and TinyLlama: their tokenizer.json adds a space after each special token, and the class does not.

    transformers follows the file in folders of Mistral. It has other rules for a model of Qwen 2 of another class.
    """
    folder = sentencepiece_folder(tmp_path, {"tokenizer_class": name, "legacy": legacy, "add_prefix_space": space})
    of_code = name.startswith("Code")
    if of_code:  # the class adds the token, too
        added = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        post = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text], "special_tokens": added}
        saved = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**saved, "post_processor": post}))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = make_tokenizer(str(folder))
    if model_type == "qwen2":
        assert isinstance(ours, HuggingFaceTokenizer) and ours.rules == "Qwen2Tokenizer"
        return
    texts = [TEXT, "a", "", " a", "a</s><s>b", "</s> a", "a\n\n</s>\nb <s>", "é漢🙂", "<s>", "x  y   z "]

    def by_transformers() -> list[Any]:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        found = [theirs(each)["input_ids"] for each in texts]
        return [[shortened(ids), shortened(theirs.decode(ids))] for ids in found]

    expected = golden(f"{name} {model_type} {legacy} {space}", by_transformers)
    for each, theirs in zip(texts, expected, strict=True):
        ids = ours.encode(each).tolist()
        assert [shortened(ids), shortened(ours.decode(ids))] == theirs, each
    by_file, rules = name.startswith("Pre") or model_type == "mistral", "CodeLlamaTokenizer" * of_code
    assert isinstance(ours, HuggingFaceTokenizer) and ours.rules == ("" if by_file else rules or "LlamaTokenizer")


MODELS = [None, "llama", "mistral", "olmo2", "qwen2", "qwen3", "gpt2", "smollm3", "gpt_neox", "olmo"]
NAMES = [
    None, "TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "GPTNeoXTokenizer", "GPTNeoXTokenizerFast",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", MODELS)
def test_the_class_is_that_of_autotokenizer(tmp_path, model_type, name, golden):
    """It follows from the type of the model and from the named class.  The file of the tokenizer splits off digits."""
    library = pytest.importorskip("tokenizers")
    (folder := tmp_path / "tokenizer").mkdir()
    bpe = byte_level_bpe([TEXT, "12 345 it's cafe\u0301 \n\n " * 9], 400, [])
    split = library.pre_tokenizers.Split(library.Regex(r"\p{N}{1,2}|\s"), "isolated")
    bpe.pre_tokenizer = library.pre_tokenizers.Sequence([split, bpe.pre_tokenizer])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "pad_token": "<|end|>", **({"tokenizer_class": name} if name else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    elif name is None:
        return  # AutoTokenizer refuses it
    texts = (TEXT, "12345", "cafe\u0301", "it's\n\n \n a", "<|end|> a", "")

    def by_transformers() -> list[Any]:  # of 5.24: 5.17 has other rules for LlamaTokenizerFast
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        return [type(theirs).__name__, [shortened(theirs(each)["input_ids"]) for each in texts]]

    rules, expected = golden(f"{name} of {model_type}", by_transformers)
    ours = make_tokenizer(str(folder))
    for each, ids in zip(texts, expected, strict=True):
        assert shortened(ours.encode(each).tolist()) == ids, (rules, each)
    assert ours.rules == ("" if rules == "TokenizersBackend" else rules)


@pytest.mark.parametrize(("model_type", "name"), [("code_llama", "CodeLlamaTokenizer"), ("mistral", "")])
def test_a_folder_that_names_no_class_has_that_of_its_model(tmp_path, model_type, name):
    """The first lines of a run say that its rules are followed, where they are others than those of tokenizer.json."""
    folder = sentencepiece_folder(tmp_path, {})
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = make_tokenizer(str(folder))
    assert ours.rules == name and (ours.encode("</s>a").tolist() != plain(folder).encode("</s>a").ids) == bool(name)
    (tmp_path / "a.txt").write_text(TEXT * 3)
    data = load_data(parse(["--data", str(tmp_path / "a.txt"), "--seq-len", "4", "--tokenizer", str(folder)]))
    said = f"; encoded by the rules of {name}, as transformers does, not by those of tokenizer.json"
    assert (said in data.held_out) == bool(name)


def test_the_class_of_gpt_neox_normalizes(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTNeoXTokenizerFast"}')
    byte_level_bpe([TEXT * 9], 400, []).save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(str(tmp_path))
    assert ours.rules == "GPTNeoXTokenizer"
    assert ours.encode("cafe\u0301").tolist() == ours.encode("caf\u00e9").tolist()


def test_the_file_of_gpt_2_has_the_rules_of_its_class(tmp_path):
    """It lacks an option that is on by default.  Nothing is reported."""
    byte_level_bpe([TEXT * 9], 400, []).save(str(tmp_path / "tokenizer.json"))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert make_tokenizer(str(tmp_path)).rules == ""


def plain(folder: Path) -> Any:
    library = pytest.importorskip("tokenizers")
    return library.Tokenizer.from_file(str(folder / "tokenizer.json"))


def sentencepiece_folder(tmp_path: Path, settings: dict[str, Any]) -> Path:
    """A tokenizer in the files of Llama 2's: normalizers Prepend and Replace, bytes for other characters."""
    library = pytest.importorskip("tokenizers")
    bpe = library.Tokenizer(library.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    bpe.normalizer = library.normalizers.Sequence(steps)
    ends = [library.decoders.ByteFallback(), library.decoders.Fuse(), library.decoders.Strip(" ", 1, 0)]
    bpe.decoder = library.decoders.Sequence([library.decoders.Replace("▁", " "), *ends])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(
        TEXT.split() * 9, library.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    saved = json.loads(bpe.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]
    (folder := tmp_path / "sentencepiece").mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    return folder


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_checkpoint_is_read_by_transformers_with_the_same_numbers(tmp_path, name, golden):
    """And by kos, whatever the class was."""
    folder = sentencepiece_folder(tmp_path, {"tokenizer_class": name, "legacy": False})
    (data := tmp_path / "a.txt").write_text(TEXT * 9)
    _train(data, tmp_path / "run", steps=1, tokenizer=str(folder))
    path = str(tmp_path / "run" / "checkpoints" / "step-1")
    texts = ("a</s><s>b", "</s> a", TEXT)

    def by_transformers() -> list[Any]:
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        return [shortened(theirs(each)["input_ids"]) for each in texts]

    for each, theirs in zip(texts, golden(f"a checkpoint of {name}", by_transformers), strict=True):
        for ours in (make_tokenizer(str(folder)), make_tokenizer(path)):
            assert shortened(ours.encode(each).tolist()) == theirs
