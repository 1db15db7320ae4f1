"""Tokens of long texts, which are encoded in pieces, beside those of the whole text."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from kos.train.data.documents import Document
from kos.train.data.tokenizers import HuggingFaceTokenizer
from tests.packages import Package, needs

pytestmark = needs("tokenizers")
tokenizers = Package("tokenizers")

WORDS = [
    "the", " ring", "two", "x", "ring(", "):", "\n", "\n", "\n", "\r\n", " ", "  ", "\t", ".", "/", "don't", "12", "3",
    "2024", "é", "e\u0301", "\u0301", "漢字", "。", "🙂", "ΣΑΣ", "▁", "\n\n", "it'S", "<x>", "<y>", "Ab", "\u2028",
    "\0",
]  # fmt: skip
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = "|".join([
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", SPACES,
])  # fmt: skip
NEMO = O200K.replace(f"{SHORT}?", "").replace("{1,3}", "")


def metaspace(scheme: str = "first", split: bool = False) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def byte_level(prefix: bool = False, regex: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(pattern: str, kind: str = "Regex", behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def several(*steps: Any, key: str = "pretokenizers") -> dict[str, Any]:
    return {"type": "Sequence", key: [*steps]}


def replaced(pattern: str, kind: str = "String", content: str = "▁") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def added(**options: Any) -> dict[str, Any]:
    return {"content": "<x>", "special": True, **options}


PREPEND, STRIP = {"type": "Prepend", "prepend": "▁"}, {"type": "Strip", "strip_left": True, "strip_right": True}
LEGACY = several(PREPEND, replaced(" "), key="normalizers")
LINES = {"lines": True}
"""Trained on single lines: no token has a line's end and what follows."""
IN_PIECES: dict[str, dict[str, Any]] = {
    "gpt2": {"pre": byte_level(regex=True)},
    "gpt2, prefix": {"pre": byte_level(True, True)},
    "qwen": {"pre": several(split(QWEN), byte_level()), "norm": {"type": "NFC"}},
    "qwen, prefix": {"pre": several(split(QWEN), byte_level(True))},
    "llama 3": {"pre": several(split(LLAMA), byte_level()), "added": added()},
    "nemo": {"pre": several(split(NEMO), byte_level())},
    "o200k": {"pre": several(split(O200K), byte_level()), "norm": {"type": "NFKC"}},
    "smollm": {"pre": several({"type": "Digits", "individual_digits": True}, byte_level(regex=True))},
    "right": {"pre": byte_level(regex=True), "added": added(rstrip=True)},
    "words": {"pre": byte_level(regex=True), "added": added(single_word=True)},
    "whitespace": {"pre": {"type": "Whitespace"}, "norm": {"type": "Lowercase"}},
    "whitespace, unigram": {"pre": {"type": "WhitespaceSplit"}, "model": "Unigram"},
    "whitespace, wordpiece": {"pre": {"type": "Whitespace"}, "model": "WordPiece"},
    "whitespace, metaspace": {"pre": several({"type": "WhitespaceSplit"}, metaspace("always", True))},
    "accents": {"pre": {"type": "Whitespace"},
                "norm": several({"type": "NFD"}, {"type": "StripAccents"}, key="normalizers")},
    **{f"metaspace {scheme} {apart}": {"pre": metaspace(scheme, apart), **LINES}
       for scheme in ("first", "always", "never") for apart in (False, True)},
    "metaspace, added": {"pre": metaspace(), **LINES, "added": added()},
    "metaspace always, added": {"pre": metaspace("always"), **LINES, "added": added(normalized=False)},
    "metaspace, bytes": {"pre": metaspace(), **LINES, "bytes": True},
    "legacy": {"norm": LEGACY, **LINES},
    "legacy, bytes": {"norm": LEGACY, **LINES, "bytes": True, "added": added(normalized=False)},
    "legacy, normalized": {"norm": LEGACY, **LINES, "bytes": True, "added": added(normalized=True)},
    "gemma": {"norm": replaced(" "), "pre": split(" ", "String", "MergedWithPrevious"), **LINES},
    "bytes of lines": {"pre": byte_level(True), **LINES},
    "digits": {"pre": several({"type": "Punctuation", "behavior": "Isolated"},
                              {"type": "Digits", "individual_digits": False}), **LINES},
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "no parts": {},
    "strip": {"pre": byte_level(regex=True), "norm": STRIP},
    "start": {"pre": byte_level(regex=True), "norm": replaced("^.", "Regex")},
    "end": {"pre": byte_level(regex=True), "norm": several(replaced(".$", "Regex"), key="normalizers")},
    "lines joined": {"pre": byte_level(regex=True), "norm": replaced("\n", content="")},
    "regex of ends": {"pre": several(split(r"\w+$|\s+"), byte_level())},
    "regex of starts": {"pre": several(split(r"^\w+|\s+"), byte_level(regex=True))},
    "two lines": {"pre": several(split(r"\w+\n\w+|\s+"), byte_level())},
    "fives": {"pre": split(r"[\s\S]{5}")},
    "merged": {"pre": several(split(QWEN, behavior="MergedWithNext"), byte_level())},
    "metaspace, two lines": {"pre": metaspace()},
    "metaspace, unigram": {"pre": metaspace("always"), "model": "Unigram", **LINES},
    "bytes of two lines": {"pre": byte_level()},
    "bytes before words": {"pre": several(byte_level(), {"type": "Whitespace"})},
    "unknown lines": {"pre": metaspace(), **LINES, "without": "\n"},
    "ends of words": {"pre": metaspace(), **LINES, "suffix": "</w>"},
    "prefix after a token": {"pre": byte_level(True, True), "added": added()},
    "left": {"pre": byte_level(regex=True), "added": added(lstrip=True)},
    "token of lines": {"pre": byte_level(regex=True), "added": added(content="x\nthe")},
}
KINDS = {**IN_PIECES, **WHOLE}


def made(kind: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The content of a tokenizer.json of this kind, which is trained on ``texts``."""
    name = kind.get("model", "BPE")
    model = getattr(tokenizers.models, name)(**{} if name == "Unigram" else {"unk_token": "<unk>"})
    parts = {"normalizer": kind.get("norm"), "pre_tokenizer": kind.get("pre")}
    plain = json.loads(tokenizers.Tokenizer(model).to_str())
    post = byte_level() if "ByteLevel" in json.dumps(parts) else None  # offsets then leave out spaces
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**plain, **parts, "post_processor": post}))
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if kind.get("bytes"))]
    options = {"vocab_size": 700, "special_tokens": special, "show_progress": False}
    options |= {"unk_token": "<unk>"} if name == "Unigram" else {}
    trainer = getattr(tokenizers.trainers, f"{name.replace('BPE', 'Bpe')}Trainer")(**options)
    lines = [line for text in texts for line in (re.split(r"(?<=\n)", text) if kind.get("lines") else [text])]
    tokenizer.train_from_iterator(lines * 3, trainer)
    saved = json.loads(tokenizer.to_str())
    if name == "BPE":
        left_out = "\n" if kind.get("bytes") else kind.get("without", "<none>")
        model = saved["model"]
        model |= {"fuse_unk": True, "byte_fallback": bool(kind.get("bytes")), "end_of_word_suffix": kind.get("suffix")}
        model["merges"] = [pair for pair in model["merges"] if left_out not in "".join(pair)]
        model["vocab"].pop(left_out, None)
    blank = {"id": 900, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    saved["added_tokens"] = [{**blank, **kind["added"]}] if "added" in kind else []
    return saved


@pytest.mark.parametrize("name", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(name, small_pieces, rng):
    texts = ["".join(rng.choice(WORDS, rng.integers(0, 120)).tolist()) for _ in range(40)]
    content = made(KINDS[name], texts)
    theirs, ours = tokenizers.Tokenizer.from_str(json.dumps(content)), HuggingFaceTokenizer(content, "x")
    small_pieces()
    pieces = 0
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == expected, text
        ends = [match.end() for match in re.finditer(r"\n(?=\w)", text)] or [0]  # pieces may begin there
        bounds = [0, *sorted([int(rng.choice(ends)), int(rng.integers(0, len(text) + 1))]), len(text)]
        parts = [(text[a:b], bool(n % 2)) for n, (a, b) in enumerate(itertools.pairwise(bounds))]
        for document in (text, Document(tuple(parts))):
            found = [*ours.encode_documents([document], split_special_tokens=False)]
            tokens = np.concatenate([part.tokens for part in found])
            assert tokens.tolist() == expected, text
            pieces += sum(part.pieces for part in found)
    assert pieces > 3 * len(texts) if name in IN_PIECES else pieces == 2 * len(texts)
