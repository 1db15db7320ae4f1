"""Tokenizer rules that transformers 5 takes from the class, ``tokenizer_class``, and not from ``tokenizer.json``.

A tokenizer class of transformers (src/transformers/models, ``llama``, ``code_llama``, ``qwen2``, ``gpt2`` and
``gpt_neox``) reads the vocabulary, the merges and the special tokens from the file. The class itself defines the
normalizer, the pre-tokenizer and the decoder. For example, the files of Llama 2 and TinyLlama have the normalizer
Prepend, which puts a space at the start of the text and after every special token. LlamaTokenizer puts one at the start
of the text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

OF_MODEL = {
    "mistral": "", "olmo2": "", "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer",
    "code_llama": "CodeLlamaTokenizer", "gpt_neox": "GPTNeoXTokenizer", "olmo": "GPTNeoXTokenizer",
}  # fmt: skip
"""The classes that transformers registers for values of ``model_type``; "" if it uses the rules in ``tokenizer.json``.

It uses this class if the folder names no class, and for ``IGNORED`` whatever the folder names.
Source: the module models.auto.tokenization_auto of transformers 5.24.
"""

IGNORED = ("mistral", "olmo2", "qwen2")
"""Values of ``model_type`` for which transformers ignores the class that the folder names."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_class(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, str]:
    """Apply the rules of the tokenizer's class to ``tokenizer``, the content of a ``tokenizer.json``.

    ``settings`` and ``config`` are the contents of ``tokenizer_config.json`` and ``config.json`` in the same folder.
    Returns the new content and the name of the class.  If no class applies, or the file already has the rules of its
    class, returns ``tokenizer`` unchanged and "".
    """
    model_type, model = str(config.get("model_type")), tokenizer.get("model")
    named, of_model = settings.get("tokenizer_class") or config.get("tokenizer_class"), OF_MODEL.get(model_type, "")
    name = of_model if model_type in IGNORED or not named else str(named).removesuffix("Fast")
    if not isinstance(model, dict) or model.get("type") != "BPE" or name not in _RULES:
        return tokenizer, ""
    rules, bpe = _RULES[name](settings)
    alike = all(_splits(tokenizer.get(key)) == _splits(rules[key]) for key in ("normalizer", "pre_tokenizer"))
    if alike or (name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps([*map(tokenizer.get, rules)])):
        return tokenizer, ""
    return {**tokenizer, **rules, "model": {**model, "unk_token": None, "dropout": None, **bpe}}, name


def _splits(rule: Any) -> Any:
    """A rule without the options that only affect offsets, not the tokens, and without one that is on by default."""
    if isinstance(rule, list):
        return [*map(_splits, rule)]
    if not isinstance(rule, dict):
        return rule
    kept = {key: rule[key] for key in rule if key != "trim_offsets" and (key, rule[key]) != ("use_regex", True)}
    return {key: _splits(value) for key, value in kept.items()}


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


def _code_llama(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    rules, bpe = _llama({**settings, "legacy": False})
    unknown = settings.get("unk_token") or "<unk>"
    stripped = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    rules["decoder"] = {"type": "Sequence", "decoders": [*rules["decoder"]["decoders"][:3], stripped]}
    return rules, {**bpe, "unk_token": unknown["content"] if isinstance(unknown, dict) else unknown}


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


def _gpt2(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    level = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")), "trim_offsets": True}
    rules = {
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return rules, {"fuse_unk": False, "byte_fallback": False}


def _gpt_neox(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    rules, bpe = _gpt2(settings)
    return {**rules, "normalizer": {"type": "NFC"}}, bpe


_RULES = {
    "LlamaTokenizer": _llama, "CodeLlamaTokenizer": _code_llama, "Qwen2Tokenizer": _qwen, "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
}  # fmt: skip
