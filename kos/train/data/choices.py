"""Multiple-choice questions, for evaluation by likelihood: which ending of a context a model finds the most likely.

They are read from JSON Lines or from llm.c's evaluation files. A line has the fields ``ctx``, ``endings`` and
``label``, or those of HellaSwag (Rowan/hellaswag) or ARC (allenai/ai2_arc). Texts of these two are joined as the tasks
of lm-evaluation-harness join them. An ending follows its context after a space.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.errors import DataError
from kos.train.data import HEADER_BYTES
from kos.train.data.corpus import errors_with
from kos.train.data.documents import read_records
from kos.train.data.tokenizers import Tokenizer

LLMC = 20240522
"""The magic number of llm.c's evaluation files."""

BEGINS = 65_535
"""The number that begins a question in these files."""


class Question(NamedTuple):
    """A question in tokens.

    ``sequences`` are the context with each ending, whose tokens are the last ``counts``. ``lengths`` divide the
    likelihoods of the endings for acc_norm: they are in characters, or in tokens of an llm.c file. ``label`` is the
    index of the right ending. ``cut``: whether contexts are longer than the model's, so that they lack their beginning.
    """

    sequences: Sequence[Sequence[int]]
    counts: Sequence[int]
    lengths: Sequence[int]
    label: int
    cut: bool = False


def read_questions(path: Path, tokenizer: Tokenizer, most: int) -> list[Question]:
    """Read a file for a model whose context is ``most`` tokens.

    Raises DataError, with the line or the question, for fields that are missing or of other types, an empty ending or
    one that is longer than the context, a label of no ending, and a token beyond the vocabulary.
    """
    flag = f"--choices {path}"
    with errors_with("--choices", str(path)):
        with path.open("rb") as file:
            of_llmc = int.from_bytes(file.read(4), "little") == LLMC
        if of_llmc:
            questions = [*_of_llmc(path, flag, tokenizer.vocab_size)]
        else:
            records = read_records(path)
            questions = [_encoded(*_texts(value, f"{flag}, {place}"), tokenizer) for place, value in records]
    if not questions:
        raise DataError(f"{flag}: expected lines with questions, got none")
    if (longest := max(max(question.counts) for question in questions)) > most:
        raise DataError(f"{flag}: expected endings of up to {most} tokens, the model's context, got {longest}")
    return [
        question._replace(sequences=[ids[-most - 1 :] for ids in question.sequences], cut=longest > most + 1)
        for question in questions for longest in [max(map(len, question.sequences))]
    ]  # fmt: skip


def _encoded(context: str, endings: Sequence[str], label: int, tokenizer: Tokenizer) -> Question:
    """Encode a context and an ending together, since a token may be of both. It then belongs to the ending."""

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).tolist()
        return ids[: len(ids) - len(tokenizer.suffix)]

    before = len(tokens(context.rstrip()))
    start = [] if before else [tokenizer.start]
    each = [tokens(f"{context} {ending}") for ending in endings]
    counts = [len(ids) - before for ids in each]
    return Question([[*start, *ids] for ids in each], counts, [*map(len, endings)], label)


def _texts(value: Any, where: str) -> tuple[str, Sequence[str], int]:
    """The context, the endings, and the index of the right one."""
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    context, endings, label = (fields.get(name) for name in ("ctx", "endings", "label"))
    if isinstance(choices := fields.get("choices"), dict) and isinstance(names := choices.get("label"), list):
        context, endings, label = fields.get("question"), choices.get("text"), fields.get("answerKey")
        context = f"Question: {context}\nAnswer:" if isinstance(context, str) else None
        label = names.index(label) if label in names else label
    elif isinstance(label, str) and label.isdecimal():
        label = int(label)
    sound = isinstance(endings, list) and endings and all(isinstance(each, str) and each for each in endings)
    if not isinstance(context, str) or not sound or not isinstance(endings, list):
        forms = "ctx and endings, or question, choices and answerKey, with texts"
        raise DataError(f"{where}: expected {forms}, got {reprlib.repr(value)}")
    if type(label) is not int or not 0 <= label < len(endings):
        raise DataError(f"{where}: expected the label of one of {len(endings)} endings, got {label!r}")
    if {"activity_label", "ctx_a", "ctx_b"} <= fields.keys():
        context = f"{fields['activity_label']}: {fields['ctx_a']} {str(fields['ctx_b']).capitalize()}"
        return _without_markup(context), [*map(_without_markup, endings)], label
    return context, endings, label


def _without_markup(text: str) -> str:
    """Remove the markup of WikiHow from a text of HellaSwag, as lm-evaluation-harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _of_llmc(path: Path, flag: str, vocab_size: int) -> Iterator[Question]:
    """The questions of a file whose header has 256 int32: LLMC, the version 1, and their number.

    Each question has these uint16: BEGINS, its bytes, its number, its label, how many endings it has, then the tokens
    of the context and of each ending, each after their count. Source: karpathy/llm.c, dev/data/data_common.py.
    """
    content = path.read_bytes()
    header = np.frombuffer(content[:12].ljust(12, b"\0"), "<i4").tolist()
    raw = np.frombuffer(content[HEADER_BYTES : len(content) // 2 * 2], "<u2").tolist()
    if header[1] != 1 or header[2] < 1:
        raise DataError(f"{flag}: expected questions of version 1, got a header of {header}")
    at = 0
    for number in range(header[2]):
        words = raw[at : at + raw[at + 1] // 2] if at + 1 < len(raw) else []
        at, parts, left = at + len(words), list[list[int]](), words[5:]
        while left and len(left) > left[0] > 0:
            parts, left = [*parts, left[1 : 1 + left[0]]], left[1 + left[0] :]
        if left or len(words) < 5 or words[0] != BEGINS or len(parts) != 1 + words[4] or words[3] >= words[4]:
            raise DataError(f"{flag}, question {number}: expected a whole question, got {reprlib.repr(words)}")
        if (most := max(map(max, parts))) >= vocab_size:
            expected = f"tokens below the vocabulary's {vocab_size}"
            raise DataError(f"{flag}, question {number}: expected {expected}, got {most}")
        counts = [*map(len, parts[1:])]
        yield Question([parts[0] + ending for ending in parts[1:]], counts, counts, words[3])
