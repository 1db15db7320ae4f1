"""Prints sequences as text (``--show-data``).  The marks «» enclose the tokens that the loss counts."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from kos.train.checkpoint import Checkpoint
from kos.train.checkpoint.adapter import tokenizer_folder
from kos.train.checkpoint.resume import check_tokenizer, data_settings
from kos.train.config.flags import without_effect
from kos.train.config.options import TrainConfig
from kos.train.data.batches import LEFT_OUT, Dataset, load_data

_BEFORE, _SHOWN = 50, 110
"""Lengths in ``first_line``, in characters: of the text before the first token that counts, and of all text."""


REPLACEMENT = "\ufffd"
"""The replacement character, which a decoder writes if the tokens have only some of the bytes of a character."""

SEARCHED = 10_000
"""The number of sequences among which ``report`` looks for those of each source."""


def report(config: TrainConfig, found: Checkpoint | None = None) -> str:
    """The first ``config.show_data`` sequences of a run, or of one that resumes from the checkpoint ``found``.

    In a mixture, it shows the first sequences of each source, as far as they are among the first SEARCHED.  A line
    before each sequence gives its place, its source in a mixture, and its counts.  The last lines describe how
    documents fit into sequences, the data, and the settings that have no effect.  Raises CheckpointError if the data
    have another tokenizer than the weights of the run.
    """
    asked, source = config.to_json(), config.init_from if found is None else str(found.path)
    first, weights, runs, shown = 0, tokenizer_folder(config.init_from), list[Path](), []
    config = config.with_data_settings(found and data_settings(found.config))
    if found is not None:
        first, runs = found.step * config.batch_size, [found.path.parent.parent]
        weights = weights and str(found.path)
    data = load_data(config, weights=weights, runs=runs)
    if source is not None:
        check_tokenizer(Path(source), data.tokenizer)
    left = dict.fromkeys([""] if data.mixture is None else data.mixture.parts, config.show_data)
    for number in range(first, first + max(SEARCHED, config.show_data)):
        step, row = divmod(number, config.batch_size)
        name, part, start = data.place(step, row)
        if not any(left.values()):
            break
        only_fills = row * data.seq_len >= data.tokens_in(step + 1) - data.tokens_in(step)  # at the end of an epoch
        if not left[name] or only_fills:
            continue
        left[name] -= 1
        text, counts = sequence(data, step, row)
        of = f"{counts} of {data.seq_len} tokens count"
        if padding := part.train.padding(start, data.seq_len):
            of += f", {padding} are padding"
        where = f"step {step + 1}, sequence {row + 1}{f', of {name}' * bool(name)}"
        shown.append(f"--- {where}: {of}\n{text}")
    fit = [f"--- {line}" for line in data.describe_fit().splitlines()]
    about = [f"--- {data.describe()}; {data.trained_on}; {data.held_out}"]
    config = config.model_copy(update={"fit": "whole" if data.packing else config.fit})
    if useless := without_effect(config, asked, data.unused_settings):
        about.append(f"--- without effect: {', '.join(useless)}")
    return "\n".join([*shown, *fit, *about])


def first_line(data: Dataset, step: int) -> str:
    """A line for the log: an excerpt of the first sequence of ``step``, around the first token that counts."""
    text, counts = sequence(data, step, 0, _SHOWN)
    text = text.replace(REPLACEMENT, "")
    start = max(0, text.find("«") - _BEFORE)
    stop = start + _SHOWN
    shown = json.dumps(f"{'…' * (start > 0)}{text[start:stop]}{'…' * (stop < len(text))}", ensure_ascii=False)
    return f"the first sequence, of which {counts} of {data.seq_len} tokens count, in «»: {shown} (--show-data N)"


def sequence(data: Dataset, step: int, row: int, shown: int | None = None) -> tuple[str, int]:
    """The text of a sequence without padding, including its last target, and how many targets the loss counts.

    With ``shown``, the text may end once that many characters follow the first token that the loss counts.
    """
    batch, (_, part, start) = data.rows(step, [row]), data.place(step, row)
    tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
    counted = [False, *(target != LEFT_OUT for target in targets)]
    ids = [*tokens, *targets[-1:] * counted[-1]][: len(counted) - part.train.padding(start, len(counted))]
    text, written, done = "", "", 0
    for counts, group in groupby(counted[: len(ids)]):
        done += len([*group])
        whole = data.tokenizer.decode(ids[:done])  # a decoder may treat a first token differently
        whole = whole if done == len(ids) else whole.rstrip(REPLACEMENT)
        piece, written = whole[len(written) :], whole
        text += f"«{piece}»" if counts and piece else piece
        if shown is not None and "«" in text and len(text) > text.index("«") + shown:
            break
    return text, sum(counted)
