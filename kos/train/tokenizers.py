"""Text to token numbers and back: bytes, characters, Hugging Face's tokenizer.json, or bare numbers.

A checkpoint carries its tokenizer: ``tokenizer_from_json(tokenizer.to_json())`` is the same tokenizer.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kos.errors import ConfigError, DataError

PIECE = 1 << 20
"""Characters that a Hugging Face tokenizer is given at once: longer text is cut, at a line's end."""


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer.

    ``bos`` and ``eos`` are None where the vocabulary has no such token; ``start`` is the token that
    generation starts from when there is no prompt.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    start: int

    def encode(self, text: str) -> NDArray[Any]:
        """Token numbers, of the smallest unsigned dtype that holds the vocabulary; no bos or eos is added.

        Raises:
            DataError: the text has something that the vocabulary cannot spell.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers; what is no text becomes U+FFFD."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What ``tokenizer_from_json`` needs to make this tokenizer again."""
        ...


class ByteTokenizer:
    """UTF-8: 256 tokens, nothing to learn."""

    name = "bytes"
    vocab_size = 256
    bos: int | None = None
    eos: int | None = None
    start = ord("\n")

    def encode(self, text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharTokenizer:
    """One token a character of ``alphabet``, sorted, as nanoGPT's data/shakespeare_char."""

    name = "chars"
    bos: int | None = None
    eos: int | None = None

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise DataError("tokenizer chars: expected an alphabet of at least one character, got none")
        self.vocab_size = len(self.alphabet)
        self.start = max(0, self.alphabet.find("\n"))
        self._codes = _code_points(self.alphabet)

    def encode(self, text: str) -> NDArray[Any]:
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if unknown.size:
            raise DataError(
                f"tokenizer chars: expected one of its {self.vocab_size} characters, "
                f"got {text[unknown[0]]!r} at character {unknown[0]}"
            )
        return ids.astype(smallest_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] if 0 <= i < self.vocab_size else "\ufffd" for i in map(int, ids))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "chars", "alphabet": self.alphabet}


class NumberTokenizer:
    """Token files without a tokenizer: text is the token numbers themselves, separated by spaces."""

    name = "numbers"
    bos: int | None = None
    eos: int | None = None
    start = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> NDArray[Any]:
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(
                    f"tokenizer numbers: expected token numbers below {self.vocab_size} (for text, let "
                    f"--tokenizer name a tokenizer.json), got {word!r}"
                )
        return np.array([int(word) for word in words], smallest_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "numbers", "vocab_size": self.vocab_size}


class HuggingFaceTokenizer:
    """A tokenizer.json through the ``tokenizers`` library (extra ``tokenizers``)."""

    def __init__(self, source: str, *, name: str, bos: str | None = None, eos: str | None = None) -> None:
        """``source`` is the JSON text; ``bos`` and ``eos`` are the tokens of tokenizer_config.json."""
        try:
            library = importlib.import_module("tokenizers")
        except ImportError:
            raise ConfigError(
                f"--tokenizer: expected the package tokenizers for {name} (pip install 'kos[tokenizers]'), "
                "got no such package"
            ) from None
        try:
            self._tokenizer = library.Tokenizer.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{name}: expected a Hugging Face tokenizer.json, got {error}") from None
        self.name = name
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.bos, self.eos = self._special("bos", bos), self._special("eos", eos)
        self.start = next((token for token in (self.bos, self.eos) if token is not None), 0)
        self._tokens = {"bos": bos, "eos": eos}

    def _special(self, role: str, token: str | None) -> int | None:
        number = None if token is None else self._tokenizer.token_to_id(token)
        if token is not None and number is None:
            raise DataError(f"{self.name}: expected the {role} token in the vocabulary, got {token!r}")
        return number

    def encode(self, text: str) -> NDArray[Any]:
        pieces = [
            np.array(encoding.ids, smallest_dtype(self.vocab_size))
            for encoding in self._tokenizer.encode_batch(list(_pieces(text)), add_special_tokens=False)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, smallest_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> dict[str, Any]:
        source = json.loads(self._tokenizer.to_str())
        return {"kind": "huggingface", "name": self.name, **self._tokens, "tokenizer": source}


def make_tokenizer(spec: str, *, text: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` names; ``text`` gives ``chars`` its alphabet.

    Raises:
        DataError: PATH is missing or not a tokenizer.json.
        ConfigError: the library is not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "chars":
        return CharTokenizer("".join(sorted(set().union(*text))))
    path = Path(spec)
    if path.is_dir():
        path /= "tokenizer.json"
    source = _read(path, "bytes, chars or the PATH of a tokenizer.json")
    return HuggingFaceTokenizer(source, name=str(path), **_special_tokens(path))


def tokenizer_from_json(values: Mapping[str, Any]) -> Tokenizer:
    """The inverse of a tokenizer's ``to_json``.  Raises DataError for anything else."""
    kind = values.get("kind")
    try:
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "chars":
            return CharTokenizer(values["alphabet"])
        if kind == "numbers":
            return NumberTokenizer(values["vocab_size"])
        if kind == "huggingface":
            source = json.dumps(values["tokenizer"])
            return HuggingFaceTokenizer(
                source, name=values["name"], bos=values.get("bos"), eos=values.get("eos")
            )
    except (KeyError, TypeError) as error:
        raise DataError(f"tokenizer {kind}: expected its saved values, got {error}") from None
    raise DataError(f"tokenizer: expected kind bytes, chars, numbers or huggingface, got {kind!r}")


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and uint32 that holds every token."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of about PIECE characters, each cut after a line's end (else where it is full)."""
    at = 0
    while at < len(text):
        stop = len(text) if at + PIECE >= len(text) else text.rfind("\n", at, at + PIECE) + 1
        stop = stop if stop > at else at + PIECE
        yield text[at:stop]
        at = stop


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"--tokenizer: expected {expected}, got {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"--tokenizer: expected {expected}, got {str(path)!r}: not UTF-8 text") from None


def _special_tokens(path: Path) -> dict[str, str | None]:
    """bos and eos of the tokenizer_config.json beside ``path``: plain text, or objects with ``content``."""
    settings_path = path.with_name("tokenizer_config.json")
    if not settings_path.is_file():
        return {}
    source = _read(settings_path, "JSON")
    try:
        entries = {role: json.loads(source).get(f"{role}_token") for role in ("bos", "eos")}
        return {role: e["content"] if isinstance(e, dict) else e for role, e in entries.items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise DataError(f"{settings_path}: expected JSON with bos_token and eos_token, got {error}") from None
