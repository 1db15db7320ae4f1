"""The rules by which transformers 5 encodes for some ``tokenizer_class``: they replace those in ``tokenizer.json``.

A class of transformers (src/transformers/models, ``llama`` and ``qwen2``) takes the vocabulary, the merges and the
special tokens of the file, and gives the rest.  LlamaTokenizer puts a space before a text alone, where a file with the
normalizer Prepend, as of Llama 2 and TinyLlama, puts one after every special token as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

AS_IN_FILE = ("mistral", "olmo2")
"""Values of ``model_type`` for which transformers follows the file."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_class(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, str]:
    """The content of a ``tokenizer.json`` with the rules of its class, and the name of the class if they are others.

    ``settings`` and ``config`` are those of ``tokenizer_config.json`` and ``config.json`` beside it.
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
    """A rule without what changes offsets alone."""
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
