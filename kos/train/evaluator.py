"""What ``kos eval`` computes: the loss of texts and tokens, and the accuracy in multiple-choice questions.

The device of a training run computes it, in any layout. All matrices are frozen: a rank needs memory for its weights,
but none for their gradients and for the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.communicator import Communicator
from kos.errors import DataError
from kos.train import checkpoint
from kos.train.checkpoint import adapter
from kos.train.checkpoint.state import Tensors
from kos.train.config import preset_values
from kos.train.config.options import FINE_TUNING_SEQ_LEN, TrainConfig, build, model_of
from kos.train.data import Shard, Tokens
from kos.train.data.batches import LEFT_OUT, Dataset, load_held_out, sum_over
from kos.train.data.choices import Question, read_questions
from kos.train.data.corpus import Show
from kos.train.data.own import own_data
from kos.train.data.tokenizers import NumberTokenizer, has_tokenizer, make_tokenizer
from kos.train.device import Piece
from kos.train.device.choose import choose_device, layout_of, make_device
from kos.train.machine import limit_threads
from kos.train.model import peft
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.ops import Batch
from kos.train.parallel.failures import on_every_rank, together
from kos.train.parallel.mesh import Mesh

BATCH_TOKENS = 32_768
"""Tokens of a rank in a batch, which it computes in micro-batches."""

ROUNDED = 64
"""Questions are padded to a multiple of so many tokens, so that few shapes occur."""

Row = dict[str, Any]
"""What is known of a checkpoint on one source of data or on one file of questions."""


def settings_of(path: Path, model: LlamaConfig, flags: Mapping[str, Any], ranks: int) -> TrainConfig:
    """The settings with which ``ranks`` ranks evaluate ``model``, of the folder ``path``; ``flags`` are those given.

    All matrices are frozen.  The default of ``seq_len`` is the model's context, up to ``FINE_TUNING_SEQ_LEN``.
    """
    longest = min(model.max_position_embeddings, FINE_TUNING_SEQ_LEN)
    values = {"eval_batches": 0, "sample_tokens": 0, "recompute": "block", "init_from": str(path), "batch_size": 1}
    values["freeze"] = [name for name, shape in model.parameter_shapes().items() if len(shape) > 1]
    shape = model_of(path, [("flags", flags)])
    config = build([("preset tiny", preset_values("tiny")), ("flags", {"seq_len": longest, **values, **flags}), shape])
    parts = multiple_of(config)
    seq_len = config.seq_len if "seq_len" in flags else max(1, config.seq_len // parts * parts)
    return config.model_copy(update={"seq_len": seq_len, "batch_size": ranks * max(1, BATCH_TOKENS // seq_len)})


def multiple_of(config: TrainConfig) -> int:
    """What the tokens of a sequence must be a multiple of, in the layout of ``config``."""
    return config.tp * (2 * config.cp if config.cp > 1 else 1)


class Evaluator:
    """A model on the ranks of ``comm``, for sequences of ``length`` tokens at most.  All calls are collective."""

    def __init__(
        self, model: LlamaConfig, weights: Tensors, config: TrainConfig, length: int, comm: Communicator, show: Show
    ) -> None:
        layout, device = layout_of(config, comm.size), choose_device(config.device, comm)
        self.mesh, self.length, self.rounded = Mesh(comm, layout), length, math.lcm(ROUNDED, multiple_of(config))
        limit_threads(comm)
        config = config.model_copy(update={"seq_len": length}).for_world(layout.dp, device)
        none = own_data(config.model_copy(update={"init_from": None}))
        self.device = make_device(config, model, none, self.mesh, show)
        together(comm, lambda: self.device.read(weights))
        self.weights = self.device.step.as_read(self.device.whole_weights())
        self.most = len(self.device.micro_batches[0]) * length
        """Tokens of a micro-batch at most."""

    def losses(self, pieces: Sequence[Piece], token_bytes: Any = None) -> tuple[np.ndarray, int, int]:
        """The sum of the losses of each sequence in nats, by its number, then the count of targets and their bytes."""
        device, dp, first = self.device, self.mesh.dp, self.device.step.models[0]
        own, count = pieces[dp.rank :: dp.size], sum(len(piece.numbers) for piece in pieces)
        for tokens in sorted({piece.tokens for piece in own}) if self.mesh.pp.size > 1 else ():
            device.pipeline.connect(first.tensor.rows(tokens // first.context.size))

        def targets_and_bytes(batch: Batch) -> np.ndarray:
            counted = batch.targets[batch.targets != LEFT_OUT]
            return np.array([counted.size, 0 if token_bytes is None else token_bytes[counted].sum()])

        each, seen = device.losses(self.weights, own, Model.losses_of, targets_and_bytes)
        total = np.zeros(count)
        for sums in each:
            total[: len(sums)] += sums
        targets, nbytes = (sum_over(dp, int(number)) for number in np.zeros(2) + seen)
        return total, targets, nbytes

    def of_text(self, data: Dataset) -> Row:
        """The loss in nats per token, the perplexity, and bits per byte where tokens are text.

        Windows of ``data.seq_len`` tokens lie side by side, so each token but the first is a target once.
        """
        length, val = data.seq_len, data.val
        if short := -(len(val) - 1) % length:
            padding = Shard(np.zeros(short, np.uint8), np.zeros(short, np.uint8))
            data = replace(data, val=Tokens([*val.shards, padding], val.documents))
        count, rows, pieces = data.sequences_in(data.val), max(1, self.most // length), list[Piece]()
        for at in range(0, count, rows):
            numbers = range(at, min(at + rows, count))
            make = partial(data.windows, data.val, [length * number for number in numbers])
            pieces.append(Piece(numbers, len(numbers) * length, make))
        sums, targets, nbytes = self.losses(pieces, data.tokenizer.token_bytes())
        if not targets:
            none = DataError(f"{data.sources[0]}: expected a target that the loss counts, got none")
            raise on_every_rank(none.about("data"))
        loss = (total := math.fsum(sums)) / targets
        row = {"tokens": targets, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        return row | ({"bits_per_byte": total / math.log(2) / nbytes} if nbytes else {})

    def of_questions(self, questions: Sequence[Question]) -> Row:
        """acc and acc_norm: how often the right ending is the most likely one, and the most likely by its length."""
        endings = [[(tuple(ids), n) for ids, n in zip(x.sequences, x.counts, strict=True)] for x in questions]
        found = {each: number for number, each in enumerate(dict.fromkeys(chain(*endings)))}  # equal ones score equally
        unique, lengths = [*found], np.array([len(ids) - 1 for ids, _ in found])
        order, pieces, at = np.argsort(-lengths, kind="stable"), list[Piece](), 0
        while at < len(order):
            padded = min(-(-int(lengths[order[at]]) // self.rounded) * self.rounded, self.length)
            numbers = order[at : at + self.most // padded].tolist()
            make = partial(batch_of, [unique[number] for number in numbers], padded)
            pieces.append(Piece(numbers, len(numbers) * padded, make))
            at += len(numbers)
        scores, right = -self.losses(pieces)[0], {"acc": 0, "acc_norm": 0}
        for question, each in zip(questions, endings, strict=True):
            score = scores[[found[ending] for ending in each]]
            right["acc"] += int(np.argmax(score)) == question.label
            right["acc_norm"] += int(np.argmax(score / np.array(question.lengths))) == question.label
        counts = {"questions": len(questions), "cut": sum(question.cut for question in questions)}
        return counts | {name: count / len(questions) for name, count in right.items()}

    def close(self) -> None:
        self.device.close()
        self.mesh.close()


def batch_of(endings: Sequence[tuple[Sequence[int], int]], length: int) -> Batch:
    """Sequences, padded at the right to ``length``. The loss counts the last tokens of each, as many as it says."""
    tokens, targets = np.zeros((len(endings), length), np.int32), np.full((len(endings), length), LEFT_OUT, np.int32)
    for row, (ids, count) in enumerate(endings):
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(ids) - 1 - count : len(ids) - 1] = ids[-count:]
    return Batch(tokens, targets)


def evaluate(
    folder: Path, sources: Sequence[str], tasks: Sequence[Path], flags: Mapping[str, Any], comm: Communicator,
    show: Show = lambda what, share: None,
) -> list[Row]:  # fmt: skip
    """The rows of a checkpoint: one for each source of text or tokens, and one for each file of questions. Collective.

    ``flags`` are settings of ``TrainConfig``.  Raises CheckpointError, ConfigError and DataError on all ranks.
    """
    path = together(comm, lambda: checkpoint.find_weights(folder))
    model, weights = together(comm, lambda: adapter.whole_model(path))
    home = together(comm, lambda: str(adapter.tokenizer_folder(str(path))))
    config = together(comm, lambda: settings_of(peft.base_of(path), model, flags, comm.size))
    most = model.max_position_embeddings // (parts := multiple_of(config)) * parts

    together(comm, lambda: config.check_sources(sources))

    def read() -> tuple[list[Dataset], list[list[Question]]]:
        tokenizer = make_tokenizer(home) if has_tokenizer(Path(home)) else NumberTokenizer(model.vocab_size)
        data = [load_held_out(config, "--data", name, tokenizer, show, home) for name in sources]
        return data, [read_questions(task, tokenizer, most) for task in tasks]

    first = together(comm, lambda: read() if comm.local_rank == 0 else None)
    datasets, questions = together(comm, lambda: first or read())
    longest = max((len(ids) - 1 for each in questions for question in each for ids in question.sequences), default=1)
    length = max(config.seq_len, -(-longest // parts) * parts)
    evaluator = Evaluator(model, weights, config, length, comm, show)
    about = {"checkpoint": str(folder if folder == path else path), "seq_len": config.seq_len}
    rows = [about | {"data": name} | evaluator.of_text(data) for name, data in zip(sources, datasets, strict=True)]
    for task, each in zip(tasks, questions, strict=True):
        rows.append(about | {"data": str(task)} | evaluator.of_questions(each))
    evaluator.close()
    return rows
