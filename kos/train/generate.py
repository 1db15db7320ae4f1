"""Text generation: the sampler, the loop over a batch of prompts, and the text as it is generated.

``Decoder`` computes logits with a KV cache, and ``Uncached`` without one. Each prompt of a batch gives the text that it
gives alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from kos.errors import InvalidArgument, TrainingError
from kos.train.data.tokenizers import Tokenizer
from kos.train.layers.attention import make_cache
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model, join_parts, make_whole
from kos.train.ops.fp8 import MULTIPLE, Fp8Ops
from kos.train.ops.linear import FewRows, LinearOps
from kos.train.parallel.gradients import Weights
from kos.train.parallel.mesh import ALONE, Axis

CONTEXT = 8  # new tokens are decoded after the last tokens of the prompt, since a word's space depends on what precedes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.  Raises InvalidArgument for values out of range.

    The settings apply in the order of their fields, as in transformers: the penalty (Keskar et al. 2019,
    arXiv:1909.05858), the temperature, then the limits on which tokens can be drawn (top-p: Holtzman et al. 2020,
    arXiv:1904.09751; min-p: Nguyen et al. 2024, arXiv:2407.01082).
    """

    repetition_penalty: float = 1.0
    """Divides the logit of each token that is already in the text; a negative logit is multiplied.  1: no penalty."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 40
    """Draw among the k most likely tokens; 0: no limit."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens whose probabilities sum to top_p; 1: no limit."""
    min_p: float = 0.0
    """Draw among the tokens at least min_p times as likely as the most likely one; 0: no limit."""
    seed: int = 0

    def __post_init__(self) -> None:
        p, penalty = self.top_p, self.repetition_penalty
        for name, expected, valid in (
            ("repetition_penalty", "more than 0", 0 < penalty < math.inf),
            ("top_p", "more than 0, at most 1", 0 < p <= 1), ("min_p", "0 to 1", 0 <= self.min_p <= 1),
            *((name, "0 or more", getattr(self, name) >= 0) for name in ("temperature", "top_k", "seed")),
        ):  # fmt: skip
            if not valid:
                raise InvalidArgument(f"{name}: expected {expected}, got {getattr(self, name)}")

    def draw(self, logits: np.ndarray, before: Sequence[int], rng: np.random.Generator) -> int:
        """Draw the token that follows the tokens ``before``, from its ``logits`` (V,)."""
        if not np.isfinite(top := logits.max()):
            raise TrainingError(f"sampling: expected finite logits, got {top}: the weights are not usable")
        scores = logits.astype(np.float64)
        if self.repetition_penalty != 1:
            seen = np.unique(before)
            scores[seen] *= np.where(scores[seen] < 0, self.repetition_penalty, 1 / self.repetition_penalty)
        if self.temperature == 0:
            return int(np.argmax(scores))
        with np.errstate(over="ignore"):  # at most 0, however small the temperature
            scores = (scores - scores.max()) / self.temperature
        if 0 < self.top_k < scores.size:
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        odds = np.exp(scores)
        if self.top_p < 1:
            order = np.argsort(-odds, kind="stable")
            sums = np.cumsum(odds[order])
            odds[order[np.searchsorted(sums, self.top_p * sums[-1]) + 1 :]] = 0
        odds[odds < self.min_p * odds.max()] = 0
        return int(rng.choice(scores.size, p=odds / odds.sum()))


class Uncached:
    """Computes all tokens of a sequence again for each new one.  ``next_logits`` maps (1, T) to (V,)."""

    def __init__(self, next_logits: Callable[[np.ndarray], np.ndarray]) -> None:
        self._next_logits, self._tokens = next_logits, dict[int, list[int]]()

    def prefill(self, index: int, tokens: Sequence[int]) -> np.ndarray:
        self._tokens[index] = [*tokens]
        return self._next_logits(np.array([tokens], np.int32))

    def step(self, tokens: Mapping[int, int]) -> Mapping[int, np.ndarray]:
        return {index: self.prefill(index, [*self._tokens[index], token]) for index, token in tokens.items()}


class Decoder:
    """Computes the logits of the next token of ``sequences`` sequences, of at most ``capacity`` tokens each.

    On a GPU, a step is one forward of all sequences, in one CUDA graph.  On CPUs, it is one forward for each sequence
    (``Ops.few_rows``).  With several ranks of ``tp``, ``weights`` are this rank's part, all ranks make the same calls,
    and each gets all logits.

    ``stages``: those of this rank of a model in training (``kos.train.device.RunStages``), if a pipeline has several
    ranks, or if weights of linear layers are held in 8 bits.  Then nothing is captured.
    """

    def __init__(
        self, config: LlamaConfig, ops: Any, weights: Weights, sequences: int, capacity: int, tp: Axis = ALONE,
        stages: Any = None,
    ) -> None:  # fmt: skip
        self._ops, self._weights, self._together, self._of_run = ops, weights, ops.few_rows > 1, stages
        in_8_bits = stages is not None and stages.in_8_bits
        self._multiple = MULTIPLE if in_8_bits and self._together else 1
        sequences, capacity = (-(-size // self._multiple) * self._multiple for size in (sequences, capacity))
        few = sequences <= ops.few_rows or not self._together
        parts = [config.local(tp.rank, tp.size)] if stages is None else stages.parts

        def models(wrapped: Any) -> list[Model]:
            arena = ops.make_arena()
            wrapped = Fp8Ops(LinearOps(ops), arena, tp.size == 1) if in_8_bits else wrapped
            return [make_whole(config, wrapped, tp, part, arena) for part in parts]

        self._prompts, self._steps = models(ops), models(FewRows(ops) if few else ops)
        self._stages = [] if stages is None else [*map(stages.join, (self._prompts, self._steps))]
        self._beginning = ops.zeros((1,), np.dtype(np.int32))
        self.inputs = ops.zeros((2, sequences), np.dtype(np.int32))
        self._next = np.zeros((2, sequences), np.int32)
        """The next token of each sequence and its position, on the host; ``inputs`` is their copy on the device."""
        dtype = weights[config.final_norm].dtype if stages is None else stages.dtype
        attentions = [each for model in self._prompts for each in model.attentions]
        self._cache = make_cache(ops, attentions, self.inputs[1], capacity, dtype, tp.size)
        self._logits = ops.zeros((tp.size, sequences, config.vocab_size // tp.size), np.dtype(np.float32))
        self._replay: Callable[[], None] | None = None

    def prefill(self, index: int, tokens: Sequence[int]) -> np.ndarray:
        """Restart sequence ``index`` with ``tokens``; returns the logits (V,) of the next token."""
        cache = self._cache.of(slice(index, index + 1), self._beginning)
        padded = np.zeros((1, -(-len(tokens) // self._multiple) * self._multiple), np.int32)
        padded[0, : len(tokens)] = tokens
        self._next[1, index] = len(tokens)
        if self._of_run is not None:
            last = slice(len(tokens) - 1, len(tokens))
            return self._of_run.logits(self._stages[0], self._weights, padded, cache, last)[0]
        return np.asarray(self._prompts[0].next_logits(self._weights, padded, cache), np.float32)

    def step(self, tokens: Mapping[int, int]) -> Mapping[int, np.ndarray]:
        """Append one token to each sequence, by its index; returns the logits (V,) of the tokens after them."""
        for index, token in tokens.items():
            self._next[0, index] = token
        np.minimum(self._next[1], self._cache.capacity - 1, out=self._next[1])  # ended sequences stay within
        self._ops.copy(self._next, self.inputs)
        if self._of_run is not None:
            every = slice(0, self._next.shape[1])
            cache, column = self._cache.of(every, self._cache.positions), self.inputs[0].reshape(-1, 1)
            logits = self._of_run.logits(self._stages[1], self._weights, column, cache, every)
        elif not self._together:
            for index in tokens:
                self._queue(slice(index, index + 1))
        elif self._replay is None:
            self._replay = self._ops.replayable(lambda: self._queue(slice(0, self._next.shape[1])))
        else:
            self._replay()
        self._next[1, [*tokens]] += 1
        if self._of_run is None:
            logits = join_parts(self._ops.to_host(self._logits))
            self._steps[0].tensor.check()
        return {index: logits[index] for index in tokens}

    def _queue(self, which: slice) -> None:
        cache = self._cache.of(which, self._cache.positions[which])
        tokens = self.inputs[0][which].reshape(-1, 1)
        logits = self._logits if self._together else self._logits[:, which]
        self._steps[0].queue_next_logits(self._weights, tokens, cache, logits)


def generate(
    source: Decoder | Uncached, context: int, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *,
    ends: Collection[int] = (), ended: set[int] | None = None, stopped: Callable[[], bool] = lambda: False,
    warns: bool = True, tp: Axis = ALONE,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Generate up to ``count`` tokens after each of ``prompts``; yields (index of the prompt, token id), in turn.

    The tokens of a prompt end at a token of ``ends``, or once the caller adds the prompt's index to ``ended``.  All end
    when ``stopped()`` is true.  When a text outgrows the ``context``, in tokens, it continues from its last tokens, as
    many as half of the context.  With ``warns``, this is logged once.  All ranks of ``tp`` take the tokens that rank 0
    draws, since processors of another kind may compute other probabilities.
    """
    ended, ids, warned = set[int]() if ended is None else ended, [[*prompt] for prompt in prompts], not warns
    random = [np.random.default_rng(sampling.seed) for _ in prompts]
    held, logits = [0] * len(ids), dict[int, np.ndarray]()  # how many tokens of each text the source holds

    for number in range(count):
        tokens = {index: each[-1] for index, each in enumerate(ids) if index not in ended}
        for index in [*tokens]:
            if number and held[index] < context:
                held[index] += 1
                continue
            del tokens[index]
            if len(seen := ids[index]) > context:
                seen = seen[-max(1, context // 2) :]
                if not warned:
                    said = "the text is longer than the context of %d tokens: the model sees the last %d, then more"
                    _log.warning(said, context, len(seen))
                warned = True
            held[index], logits[index] = len(seen), source.prefill(index, seen)
        if tokens:
            logits |= source.step(tokens)
        if not (going := [index for index in range(len(ids)) if index not in ended]):
            return
        drawn = np.array([sampling.draw(logits[index], ids[index], random[index]) for index in going], np.int64)
        if tp.size > 1:
            drawn = np.frombuffer(tp.comm.broadcast_bytes(drawn.tobytes() if tp.rank == 0 else None), np.int64)
        for index, token in zip(going, drawn.tolist(), strict=True):
            if stopped():
                return
            if token in ends:
                ended.add(index)
                continue
            ids[index].append(token)
            yield index, token


class _Text:
    """The text of a prompt's new tokens, in pieces that are final.  It ends before the first text of ``stop``."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop, self.stopped = tokenizer, stop, False
        self._unsaid, self._said = "", 0  # text of tokens that are decoded, and how much of all text is returned
        self._done: list[list[int]] = []  # the last tokens before, in groups of whole characters
        self._begin(prompt[-CONTEXT:])

    def _begin(self, done: Sequence[int]) -> None:
        """Decode only the tokens that follow, after some of those before them."""
        self._done.append([*done])
        while sum(map(len, self._done[1:])) >= CONTEXT:
            del self._done[0]
        self._prompt, self._tokens = [*chain.from_iterable(self._done)], list[int]()
        self._before = self._tokenizer.decode(self._prompt)

    def add(self, *tokens: int, last: bool = False) -> str:
        """Add tokens; returns the text that is now final.  ``last``: no more tokens follow, so all text is final."""
        self._tokens += tokens
        text = self._tokenizer.decode([*self._prompt, *self._tokens])  # with the space between prompt and new text
        new = text.startswith(self._before) and bool(self._prompt)
        text = self._unsaid + (text.removeprefix(self._before) if new else self._tokenizer.decode(self._tokens))
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        whole = text.rstrip("\ufffd")
        ready = len(text) if last else len(whole) - self._withheld(whole)
        if found:
            ready, self.stopped = min(found), True
        piece, self._said = text[self._said : ready], max(self._said, ready)
        if whole == text:  # the next token does not change it
            self._unsaid, self._said = text[self._said :], 0
            self._begin(self._tokens)
        return piece

    def _withheld(self, text: str) -> int:
        """The length of the longest suffix of ``text`` that is a proper prefix of a text of ``stop``."""
        ends = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(ends, default=0)


def continue_texts(
    source: Decoder | Uncached, context: int, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], count: int,
    sampling: Sampling, *, ends: Collection[int] = (), stop: Sequence[str] = (), **options: Any,
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Generate the texts that follow ``prompts``; yields (index of the prompt, piece of its text).

    ``prompts`` are lists of token ids; an empty one begins a new text.  ``options`` are those of ``generate``.
    """
    texts, ended = [_Text(tokenizer, prompt, stop) for prompt in prompts], set[int]()
    given = [[*prompt] or tokenizer.encode_prompt("") for prompt in prompts]
    for index, token in generate(source, context, given, count, sampling, ends=ends, ended=ended, **options):
        if piece := texts[index].add(token):
            yield index, piece
        if texts[index].stopped:
            ended.add(index)
    for index, text in enumerate(texts):
        if not text.stopped and (piece := text.add(last=True)):
            yield index, piece


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The token ids of ``Tokenizer.encode_prompt``; none for an empty prompt, whose start token is not printed."""
    return tokenizer.encode_prompt(prompt) if prompt else []
