"""A trained model in Python: logits, loss and text of a checkpoint, on the CPU in float32, without MPI.

``sample_text`` takes any model, such as that of a run at its end.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kos.errors import InvalidArgument, TrainingError
from kos.train import checkpoint
from kos.train.checkpoint import MANIFEST, huggingface
from kos.train.data.batch import Batch
from kos.train.data.tokenizers import NumberTokenizer, Tokenizer, has_tokenizer, make_tokenizer
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops

NextLogits = Callable[[np.ndarray], np.ndarray]
"""The logits (V,) of the token after (1, T)."""


def generate(
    next_logits: NextLogits, context: int, prompt: Sequence[int], count: int, *, seed: int,
    temperature: float = 0.8, top_k: int = 0, stop: int | None = None, stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:  # fmt: skip
    """Up to ``count`` token ids that follow ``prompt``, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest; ``top_k`` > 0 draws among the k likeliest. The model sees the last ``context``
    tokens. Ends early at token ``stop``, or when ``stopped`` returns True.
    """
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(count):
        seen = np.asarray([ids[-context:]], np.int32)
        token = _draw(next_logits(seen), temperature, top_k, rng)
        if token == stop or stopped():
            return
        ids.append(token)
        yield token


def _draw(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if not np.isfinite(top := logits.max()):
        raise TrainingError(f"sampling: expected finite logits, got {top}: the weights are not usable")
    if temperature == 0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # at most 0, however small the temperature
        scores = (logits.astype(np.float64) - top) / temperature
    if 0 < top_k < scores.size:
        scores[scores < np.partition(scores, -top_k)[-top_k]] = -np.inf
    odds = np.exp(scores)
    return int(rng.choice(scores.size, p=odds / odds.sum()))


def sample_text(
    next_logits: NextLogits, context: int, tokenizer: Tokenizer, prompt: str, count: int, **options: Any
) -> str:
    """``prompt`` and up to ``count`` generated tokens, as text; ``options`` are those of ``generate``."""
    ids = tokenizer.encode_prompt(prompt)
    tokens = [*generate(next_logits, context, ids, count, stop=tokenizer.eos, **options)]
    if not prompt:
        return tokenizer.decode(tokens)
    before = tokenizer.decode(ids)
    whole = tokenizer.decode([*ids, *tokens])  # with the space between prompt and sample
    return prompt + (whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(tokens))


class TrainedModel:
    """A model that ``load`` has read, on the CPU in float32.

    ``config`` has its shape, ``tokenizer`` its tokenizer, ``weights`` its arrays by Hugging Face's names.
    """

    def __init__(self, config: LlamaConfig, weights: Parameters, tokenizer: Tokenizer) -> None:
        self.config, self.weights, self.tokenizer = config, weights, tokenizer
        self._model = Model(config, numpy_ops)

    def __repr__(self) -> str:
        return f"<TrainedModel of {sum(x.size for x in self.weights.values()):,} parameters, {self.config}>"

    def logits(self, tokens: str | ArrayLike) -> NDArray[np.float32]:
        """The logits of the next token after each token.

        ``tokens`` are a text or (T,) token ids, with logits (T, V); or (B, T) token ids, with logits (B, T, V).

        Raises:
            InvalidArgument: no tokens, more than the context, or one outside the vocabulary.
        """
        ids = self._ids(tokens)
        rows = self._model.logits(self.weights, np.atleast_2d(ids))
        return rows.reshape(*ids.shape, self.config.vocab_size)

    def loss(self, tokens: str | ArrayLike, targets: ArrayLike | None = None) -> float:
        """The mean cross-entropy in nats per token.

        ``targets`` are token ids of the shape of ``tokens``; -1 excludes a position.  Without ``targets`` each token
        is the target of the token before it.  Raises InvalidArgument for other shapes or values.
        """
        ids = np.atleast_2d(self._ids(tokens, 1 if targets is None else 0))
        if targets is None:
            ids, targets = ids[:, :-1], ids[:, 1:]
            if not ids.size:
                raise InvalidArgument("loss: expected at least two tokens, got one")
        wanted = np.atleast_2d(np.asarray(targets))
        same = wanted.shape == ids.shape and wanted.dtype.kind in "iu"
        if not same or not -1 <= wanted.min() <= wanted.max() < self.config.vocab_size:
            expected = f"integer targets of shape {ids.shape} from -1 to {self.config.vocab_size - 1}"
            got = f"{wanted.dtype} {wanted.shape}, {reprlib.repr(wanted.tolist())}"
            raise InvalidArgument(f"loss: expected {expected}, got {got}")
        return self._model.loss(self.weights, Batch(ids, wanted.astype(np.int32)).map(np.ascontiguousarray))

    def generate(
        self, prompt: str = "", tokens: int = 200, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
    ) -> str:
        """``prompt`` and up to ``tokens`` sampled tokens, as one text, as ``kos sample`` prints it.

        ``temperature`` 0 takes the most likely token.  ``top_k`` limits the choice to the k most likely tokens; 0: no
        limit.  Raises InvalidArgument for negative values.
        """
        for name, value in {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}.items():
            if not value >= 0:
                raise InvalidArgument(f"{name}: expected 0 or more, got {value}")
        return sample_text(
            partial(self._model.next_logits, self.weights), self.config.max_position_embeddings, self.tokenizer, prompt,
            tokens, temperature=temperature, top_k=top_k, seed=seed,
        )  # fmt: skip

    def _ids(self, tokens: str | ArrayLike, more: int = 0) -> NDArray[np.int32]:
        given = np.asarray(self.tokenizer.encode(tokens) if isinstance(tokens, str) else tokens)
        most = self.config.max_position_embeddings + more
        if given.ndim not in (1, 2) or given.dtype.kind not in "iu" or not given.size or given.shape[-1] > most:
            expected = f"a text or integers (T,) or (B, T), T from 1 to {most}"
            raise InvalidArgument(f"tokens: expected {expected}, got {given.dtype} {given.shape}")
        if not 0 <= given.min() <= given.max() < self.config.vocab_size:
            expected = f"0 to {self.config.vocab_size - 1}"
            raise InvalidArgument(f"tokens: expected {expected}, got {given.min()} to {given.max()}")
        return np.ascontiguousarray(given, np.int32)


def load(folder: str | os.PathLike[str]) -> TrainedModel:
    """Read the model in ``folder``: that of a run, of a checkpoint, or of Hugging Face.

    A run stands for its newest complete checkpoint.  A Hugging Face folder without tokenizer.json gets a tokenizer
    whose texts are token numbers.

    Raises:
        CheckpointError: the folder has no model, or a damaged one, or one of an unknown type.
    """
    path = Path(folder)
    if (path / MANIFEST).exists() or not any(path.glob("*.safetensors")):
        path = checkpoint.find(path, weights_only=True).path
    config = huggingface.read_config(path)
    weights = Parameters(config.parameter_shapes(), groups=config.fused_groups())
    huggingface.read_weights(path, weights)
    tokenizer = make_tokenizer(str(path)) if has_tokenizer(path) else NumberTokenizer(config.vocab_size)
    return TrainedModel(config, weights, tokenizer)
