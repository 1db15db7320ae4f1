"""Text to token numbers and back: bytes, Hugging Face's tokenizer.json, or bare numbers.

A checkpoint carries its tokenizer, for kos and, where transformers can hold it, as a ``tokenizer.json``.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kos.commands import python_code
from kos.errors import CheckpointError, ConfigError, DataError, SettingError, install
from kos.train.data.pieces import ANYWHERE, Documents, Piece, adds_to_start, pieces_of, portions, where_to_cut
from kos.train.data.tokenizer_classes import by_class

SAVED = "kos_tokenizer.json"  # a tokenizer of any kind, in a checkpoint
_SOURCES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files of which transformers makes a ``tokenizer.json``."""



class Encoded(NamedTuple):
    """A part of the tokens of documents."""

    tokens: NDArray[Any]
    mask: NDArray[np.uint8]  # 1 if the loss counts the token
    begins: NDArray[np.int64]  # where documents begin in it
    characters: int
    pieces: int  # of documents
    spelled_out: Counter[str]  # special tokens that were encoded as text


class Tokenizer(ABC):
    """The interface of tokenizers that the trainer uses."""

    kind: ClassVar[str]
    name: str
    vocab_size: int
    arguments: Mapping[str, Any] = {}  # what the class is called with to make this tokenizer again
    bos: int | None = None  # begins a document, where the vocabulary has such a token
    eos: int | None = None  # ends one
    start = 0  # what generation starts from when there is no prompt
    prefix: Sequence[int] = ()  # the special tokens that ``encode`` adds before a text,
    suffix: Sequence[int] = ()  # and after it
    cuts: re.Pattern[str] | None = ANYWHERE  # where a text may be cut before it is encoded; None: nowhere
    rules = ""  # the class by whose rules it encodes, if these are not those of its tokenizer.json

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned dtype that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    @abstractmethod
    def encode(self, text: str) -> NDArray[Any]:
        """Token ids, of ``dtype``, as ``tokenizer(text)`` of transformers gives them.

        ``prefix`` and ``suffix`` are added.  Special tokens that are spelled out in the text become special tokens.
        DataError if the text has a part that the vocabulary cannot encode.
        """

    def encode_prompt(self, prompt: str) -> list[int]:
        """As ``encode``, without ``suffix``, since the model continues the text; ``start`` if there are no ids."""
        ids = self.encode(prompt).tolist()
        return ids[: len(ids) - len(self.suffix)] or [self.start]

    @property
    def document_affixes(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a document of training data: what ``encode`` adds, and ``eos`` at the end."""
        ends = [] if self.eos is None or self.eos in self.suffix else [self.eos]
        return [*self.prefix], [*self.suffix, *ends]

    def encode_documents(
        self, documents: Documents, split_special_tokens: bool, skip: int = 0
    ) -> Iterator[Encoded]:
        """The tokens of documents, with ``document_affixes``, in parts, without those of the first ``skip`` pieces.

        With ``split_special_tokens``, special tokens that are spelled out in a document are encoded as text.
        """
        dtype = self.dtype

        def encode(portion: list[Piece]) -> tuple[list[list[NDArray[Any]]], Counter[str]]:
            splits = split_special_tokens and not portion[0].rendered
            texts = ("".join(text for text, _ in piece.parts) for piece in portion)
            return self._encode(portion, splits), self.spelled_out(texts if splits else ())

        for portion, (encodings, spelled_out) in _ahead(encode, portions(documents, self.cuts, skip)):
            affixes = ([], []) if portion[0].rendered else self.document_affixes
            (before, after), pieces, masks = (np.array(ids, dtype) for ids in affixes), list[Any](), list[Any]()
            for encoded, piece in zip(encodings, portion, strict=True):
                ids = [*encoded]
                ids[0] = np.concatenate([*[before] * (not piece.before), ids[0]])
                ids[-1] = np.concatenate([ids[-1], *[after] * piece.last])
                pieces.append(np.concatenate(ids))
                masks.append(np.repeat(np.array([counted for _, counted in piece.parts], np.uint8), [*map(len, ids)]))
            places = zip(np.cumsum([0, *map(len, pieces)]), portion, strict=False)
            begins = np.array([at for at, piece in places if not piece.before], np.int64)
            size = sum(len(text) for piece in portion for text, _ in piece.parts)
            yield Encoded(np.concatenate(pieces), np.concatenate(masks), begins, size, len(portion), spelled_out)

    def _encode(self, pieces: Sequence[Piece], split_special_tokens: bool) -> list[list[NDArray[Any]]]:
        """The tokens of each part of each piece, without those that ``encode`` adds."""
        return [[self.encode(part) for part, _ in piece.parts] for piece in pieces]

    def spelled_out(self, texts: Iterable[str]) -> Counter[str]:
        """How often each special token is spelled out in texts."""
        return Counter()

    def separators(self) -> str:
        """A phrase for the log: the special tokens between documents."""
        roles = zip(("begin", "end"), self.document_affixes, strict=True)
        said = [f"{role} with {self.decode(ids)}" for role, ids in roles if ids]
        return f"documents {' and '.join(said)}" if said else "nothing between documents"

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers; bytes that are not text become U+FFFD."""

    def token_bytes(self) -> NDArray[np.int64] | None:
        """The bytes of text that each token stands for, (vocab_size,), special tokens 0.  None: tokens are no text."""
        return None

    def to_json(self) -> dict[str, Any]:
        """What ``tokenizer_from_json`` needs to make this tokenizer again."""
        return {"kind": self.kind, **self.arguments}

    def is_like(self, other: Tokenizer) -> bool:
        """Whether token numbers mean the same text in both.  Names (paths) do not count; bare numbers match any."""
        if self.kind != other.kind:
            return NumberTokenizer.kind in (self.kind, other.kind)
        return {**self.arguments, "name": ""} == {**other.arguments, "name": ""}

    @abstractmethod
    def huggingface(self) -> dict[str, Any]:
        """The content of a ``tokenizer.json`` that gives the same numbers."""

    def files(self) -> dict[str, Any]:
        """The JSON files of a checkpoint by which kos, and AutoTokenizer of transformers, load this tokenizer."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {f"{role}_token": self.arguments[role] for role in ("bos", "eos") if self.arguments.get(role)}
        return {SAVED: self.to_json(), "tokenizer_config.json": settings, "tokenizer.json": self.huggingface()}


class ByteTokenizer(Tokenizer):
    """UTF-8: 256 tokens, nothing to learn."""

    kind = name = "bytes"
    vocab_size = 256
    start = ord("\n")

    def encode(self, text: str) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        except UnicodeEncodeError as error:
            got = f"{text[error.start]!r} at character {error.start}"
            raise DataError(f"tokenizer bytes: expected text, got {got}") from None

    def huggingface(self) -> dict[str, Any]:
        """BPE without merges over characters that stand for bytes: GPT-2's (openai/gpt-2, src/encoder.py)."""
        seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = {byte: 256 + number for number, byte in enumerate(sorted({*range(256)} - {*seen}))}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        vocab = {chr(others.get(byte, byte)): byte for byte in range(256)}
        return {"pre_tokenizer": level, "decoder": level, **_one_token_each(vocab)}

    def token_bytes(self) -> NDArray[np.int64]:
        return np.ones(self.vocab_size, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode("utf-8", "replace")


def _one_token_each(vocab: Mapping[str, int]) -> dict[str, Any]:
    """Of a ``tokenizer.json``: one token a character."""
    return {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}


class NumberTokenizer(Tokenizer):
    """Token files without a tokenizer: text is the token numbers themselves, separated by spaces."""

    kind = name = "numbers"

    def __init__(self, vocab_size: int) -> None:
        self.arguments = {"vocab_size": vocab_size}
        self.vocab_size = vocab_size

    def encode(self, text: str) -> NDArray[Any]:
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(
                    f"tokenizer numbers: expected token numbers below {self.vocab_size} (for text, let "
                    f"--tokenizer name a tokenizer.json), got {word!r}"
                )
        return np.array(text.split(), self.dtype)

    def huggingface(self) -> dict[str, Any]:
        vocab = {str(number): number for number in range(self.vocab_size)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "no number"}
        return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


class HuggingFaceTokenizer(Tokenizer):
    """``tokenizer``, the content of a tokenizer.json, through the ``tokenizers`` library (extra ``tokenizers``).

    ``bos`` and ``eos`` are the tokens that tokenizer_config.json names.
    """

    kind = "huggingface"

    def __init__(self, tokenizer: Any, name: str, bos: str | None = None, eos: str | None = None) -> None:
        try:
            import tokenizers as library
        except ImportError:
            how = install("tokenizers")
            raise SettingError("--tokenizer", f"the package tokenizers for {name}", f"none ({how})") from None
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(tokenizer))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{name}: expected a Hugging Face tokenizer.json, got {error}") from None
        self._tokenizer.no_truncation()  # as transformers by default
        self._tokenizer.no_padding()
        self.name = name
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.bos, self.eos = self._number("bos", bos), self._number("eos", eos)
        self.start = next((token for token in (self.bos, self.eos) if token is not None), 0)
        self.prefix, self.suffix = self._added_tokens()
        source = json.loads(self._tokenizer.to_str())
        self.arguments = {"name": name, "bos": bos, "eos": eos, "tokenizer": source}
        self.cuts, self._adds_to_start = where_to_cut(source), adds_to_start(source)
        self._post = library.Tokenizer(library.models.BPE())  # a post-processor may take spaces out of offsets
        self._post.post_processor, self._tokenizer.post_processor = self._tokenizer.post_processor, None

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor adds before and after a text, found with an id that no vocabulary has."""
        none = 2**32 - 1
        text = self._tokenizer.encode("", add_special_tokens=False)
        text.pad(1, pad_id=none, pad_token="")
        ids = self._tokenizer.post_process(text).ids
        return ids[: ids.index(none)], ids[ids.index(none) + 1 :]

    def _number(self, role: str, token: str | None) -> int | None:
        number = None if token is None else self._tokenizer.token_to_id(token)
        if token is not None and number is None:
            raise DataError(f"{self.name}: expected the {role} token in the vocabulary, got {token!r}")
        return number

    def without(self, tokens: Iterable[str]) -> list[str]:
        """Those of ``tokens`` that the vocabulary has not."""
        return [token for token in tokens if self._tokenizer.token_to_id(token) is None]

    def huggingface(self) -> dict[str, Any]:
        return dict(self.arguments["tokenizer"])

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.arguments["tokenizer"].get("added_tokens", ())
        special = sorted((token["content"] for token in added if token["special"]), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def spelled_out(self, texts: Iterable[str]) -> Counter[str]:
        return Counter(match[0] for text in texts for match in self._special.finditer(text))

    def encode(self, text: str) -> NDArray[Any]:
        pieces = self._encode([*pieces_of([text], self.cuts)], split_special_tokens=False)
        prefix, suffix = (np.array(ids, self.dtype) for ids in (self.prefix, self.suffix))
        return np.concatenate([prefix, *itertools.chain(*pieces), suffix])

    def _encode(self, pieces: Sequence[Piece], split_special_tokens: bool) -> list[list[NDArray[Any]]]:
        """Each piece as a whole: some tokenizers add a space to whatever they are given. A token of two parts is in the
        one that counts, as in transformers; if both do, or none, in the second."""
        self._tokenizer.encode_special_tokens = split_special_tokens
        before = [piece.before * self._adds_to_start for piece in pieces]
        wholes = [each + "".join(text for text, _ in piece.parts) for each, piece in zip(before, pieces, strict=True)]
        offsets = any(before) or any(len(piece.parts) > 1 for piece in pieces)  # else they are not computed
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            encodings = encode(wholes, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{self.name}: expected a tokenizer that can spell the text, got {error}") from None
        found = []
        for lead, (parts, *_), encoding in zip(map(len, before), pieces, encodings, strict=True):
            own = next((n for n, (at, _) in enumerate(encoding.offsets) if at >= lead), len(encoding)) if lead else 0
            places = itertools.accumulate((len(text) for text, _ in parts[:-1]), initial=lead)
            needed = self._post.post_process(encoding, None, False).offsets[own:] if len(parts) > 1 else ()
            begins, ends = zip(*needed, strict=True) if needed else ((), ())
            cuts = [
                np.searchsorted(begins, at) if first and not second else np.searchsorted(ends, at, side="right")
                for at, (_, first), (_, second) in zip([*places][1:], parts, parts[1:], strict=False)
            ]
            bounds = [*itertools.accumulate(cuts, max)]  # a token without characters may be on both sides of a place
            found.append(np.split(np.array(encoding.ids[own:], self.dtype), bounds))
        return found

    def token_bytes(self) -> NDArray[np.int64]:
        """Of byte-level vocabularies, in which a character stands for a byte, and of those with ▁ for a space."""
        counts = np.zeros(self.vocab_size, np.int64)
        byte_level = '"ByteLevel"' in json.dumps(self.arguments["tokenizer"].get("decoder"))
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            text = re.sub("<0x[0-9A-F]{2}>", ".", token.replace("▁", " "))
            counts[number] = len(token) if byte_level else len(text.encode())
        for token in self.arguments["tokenizer"].get("added_tokens", ()):
            counts[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return counts

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _ahead(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Each item with its result.  A thread computes that of the next item while the caller uses this one."""
    with ThreadPoolExecutor(1) as pool:
        begun: Iterable[Any] = ((item, pool.submit(function, item)) for item in items)
        for (item, future), _ in itertools.pairwise(itertools.chain(begun, [None])):
            yield item, future.result()


KINDS = {kind.kind: kind for kind in (ByteTokenizer, NumberTokenizer, HuggingFaceTokenizer)}


def tokenizer_from_json(values: Mapping[str, Any]) -> Tokenizer:
    """The inverse of a tokenizer's ``to_json``.  Raises DataError for anything else."""
    arguments = dict(values)
    if values.get("kind") == "chars" and isinstance(alphabet := values.get("alphabet"), str):  # of a run of kos 0.3
        vocab = {character: number for number, character in enumerate(alphabet)}
        arguments = {"kind": "huggingface", "name": "chars", "tokenizer": _one_token_each(vocab)}
        arguments["tokenizer"]["decoder"] = {"type": "Fuse"}
    kind = KINDS.get(arguments.pop("kind", None))
    if kind is None:
        raise DataError(f"tokenizer: expected kind {', '.join(KINDS)}, got {values.get('kind')!r}")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise DataError(f"tokenizer {values['kind']}: expected its saved values, got {error}") from None


def make_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` names.

    In a checkpoint of kos that is the run's, of any kind.  DataError: PATH is not a tokenizer.json.  CheckpointError:
    it is in a checkpoint whose tokenizer cannot be read.  ConfigError: PATH is missing; the library is not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)
    if path.name == "tokenizer.json" and path.with_name(SAVED).exists():
        return read_tokenizer(path.parent)
    tokenizer, beside = _read_json(path), path.with_name("tokenizer_config.json")
    more, older, settings, config = (
        _read_json(each) if each.is_file() else {}
        for each in map(path.with_name, ("added_tokens.json", "special_tokens_map.json", beside.name, "config.json"))
    )
    try:
        listed = [*more, *(token["content"] for token in settings.get("added_tokens_decoder", {}).values())]
        end, added = config.get("eos_token_id"), tokenizer.get("added_tokens", ())  # GPT-2's folder names it only here
        ending = next((token["content"] for token in added if token["id"] == end), None)
        settings = {"eos_token": ending} | older | settings
        named = {role: settings.get(f"{role}_token") for role in ("bos", "eos")}  # plain text, or with more about it
        special = {role: token["content"] if isinstance(token, dict) else token for role, token in named.items()}
        wrong = [token for token in special.values() if not isinstance(token, str | None)]
        tokenizer, rules = by_class(tokenizer, settings, config)
    except (AttributeError, KeyError, TypeError):
        wrong = [settings]
    if wrong:
        raise DataError(f"{beside}: expected JSON with bos_token and eos_token, got {reprlib.repr(wrong[0])}")
    made = HuggingFaceTokenizer(tokenizer, str(path), **special)
    made.rules = rules
    if missing := made.without(listed):
        how = how_to_make(path.parent, ("added_tokens.json", beside.name))
        raise DataError(f"{path}: expected the added token {missing[0]!r} of the files beside it, got none{how}")
    return made


def how_to_make(folder: Path, sources: Iterable[str] = _SOURCES) -> str:
    """For an error: how transformers makes the ``tokenizer.json`` of a folder that has one of ``sources``."""
    code = "import sys; from transformers import AutoTokenizer as T; T.from_pretrained(sys.argv[1])"
    how = f"; to make it, run: {python_code(f'{code}.save_pretrained(sys.argv[1])', folder)}"
    return how if any((folder / name).is_file() for name in sources) else ""


def has_tokenizer(folder: Path) -> bool:
    """Whether ``make_tokenizer`` finds one in a folder of weights."""
    return any((folder / name).is_file() for name in (SAVED, "tokenizer.json"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the checkpoint in ``folder``.  Raises CheckpointError, or DataError where it is of no use."""
    path = folder / SAVED
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a tokenizer that kos saved, got {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise CheckpointError(f"{path}: expected a tokenizer that kos saved, got JSON without its kind")
    return tokenizer_from_json(values)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror}{how_to_make(path.parent)}"
        expected = "bytes or the PATH of a tokenizer.json"
        kind = ConfigError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"--tokenizer: expected {expected}, got {got}").about("tokenizer") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"--tokenizer {path}: expected JSON, got {error}").about("tokenizer") from None
