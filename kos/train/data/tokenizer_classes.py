"""Tokenizer rules that transformers 5 takes from the class, ``tokenizer_class``, and not from ``tokenizer.json``.

A tokenizer class of transformers (src/transformers/models, ``llama`` and ``qwen2``) reads the vocabulary, the merges
and the special tokens from the file. The class itself defines the normalizer, the pre-tokenizer and the decoder. For
example, the files of Llama 2 and TinyLlama have the normalizer Prepend, which puts a space at the start of the text and
after every special token. LlamaTokenizer puts one at the start of the text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

AS_IN_FILE = ("mistral", "olmo2")
"""Values of ``model_type`` for which transformers uses the rules in ``tokenizer.json``."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_class(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, str]:
    """Apply the rules of the tokenizer's class to ``tokenizer``, the content of a ``tokenizer.json``.

    ``settings`` and ``config`` are the contents of ``tokenizer_config.json`` and ``config.json`` in the same folder.
    Returns the new content and the name of the class.  If no class applies, or the file already has the rules of its
    class, returns ``tokenizer`` unchanged and "".
    """
    named = str(settings.get("tokenizer_class") or config.get("tokenizer_class")).removesuffix("Fast")
    model_type, model = config.get("model_type"), tokenizer.get("model")
    name = "Qwen2Tokenizer" if model_type == "qwen2" and named == "LlamaTokenizer" else named
    if not isinstance(model, dict) or model.get("type") != "BPE" or model_type in AS_IN_FILE or name not in _RULES:
        return tokenizer, ""
    rules, bpe = _RULES[name](settings)
    alike = all(_splits(tokenizer.get(key)) == _splits(rules[key]) for key in ("normalizer", "pre_tokenizer"))
    if alike or (name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps([*map(tokenizer.get, rules)])):
        return tokenizer, ""
    return {**tokenizer, **rules, "model": {**model, "unk_token": None, "dropout": None, **bpe}}, name


def _splits(rule: Any) -> Any:
    """A rule without the options that only affect offsets, not the tokens."""
    if isinstance(rule, list):
        return [*map(_splits, rule)]
    return {key: _splits(rule[key]) for key in rule.keys() - {"trim_offsets"}} if isinstance(rule, dict) else rule


def _llama(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    space = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if space else "never"
    replaced = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * space
    decoders = [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]
    rules = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    return rules, {"fuse_unk": True, "byte_fallback": True}


def _qwen(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    space = bool(settings.get("add_prefix_space"))
    split = {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": False}
    rules = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return rules, {"fuse_unk": False, "byte_fallback": False}


_RULES = {"LlamaTokenizer": _llama, "Qwen2Tokenizer": _qwen}
