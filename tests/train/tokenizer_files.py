"""Tokenizers of Hugging Face that tests train, and their files."""

import json
from pathlib import Path
from typing import Any

import pytest

TEXT = "Öl & naïve 漢字 🙂\n\ndef f(x):\n\treturn x  # one\r\n" * 3


def byte_level_bpe(texts: list[str], vocab_size: int, added: list[str]) -> Any:
    """A tokenizer of Hugging Face, trained on the texts; ``added``: those of <|begin|> and <|end|> that it adds."""
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    parts = [token for token in ("<|begin|>", "$A", "<|end|>") if token == "$A" or token in added]
    special = [(token, bpe.token_to_id(token)) for token in added]
    bpe.post_processor = library.processors.TemplateProcessing(parts, special_tokens=special)
    return bpe


def letters(folder: Path, text: str) -> str:
    """The path of a new tokenizer.json with one token for each character of a text."""
    pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    vocab = {character: number for number, character in enumerate(sorted(set(text)))}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    (path := folder / f"letters-{len(vocab)}" / "tokenizer.json").parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}))
    return str(path)


@pytest.fixture(scope="module")
def huggingface_file(tmp_path_factory):
    """A byte-level BPE trained here, with bos and eos in both spellings of tokenizer_config.json."""
    bpe = byte_level_bpe([TEXT, "return return def def the the\n" * 20], 330, ["<|begin|>"])
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    bpe.save(str(path))
    settings = {"bos_token": {"content": "<|begin|>", "special": True}, "eos_token": "<|end|>"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    return path
