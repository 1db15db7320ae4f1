"""Initial weights: ``Sharded.initial``, or else normal(0, initializer_range), as GPT-2; those of adapters as peft's.

The row of padding in the embedding is 0, as in transformers (``pad_token_id``).

A tensor's values depend on the seed, its name and its whole shape alone, so every layout begins with the same weights.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kos.train.layers.lora import is_adapter
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Parameters

BLOCK = 1 << 26  # elements with a random generator of their own: half a second of one core


class InitialWeights:
    """The tensors ``names`` of a model, to be read in this order. ``threads`` draw the next ones meanwhile."""

    def __init__(self, config: LlamaConfig, seed: int, names: Iterable[str], threads: int = 1) -> None:
        self._config, self._seed, self._placements = config, seed, config.placements()
        self._tensors = self._draw_ahead(names, threads)
        self._name, self._tensor = "", np.empty(0)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor in float32, or a slice of it."""
        while self._name != name:
            self._name, self._tensor = next(self._tensors)
        return self._tensor[index]

    def close(self) -> None:
        """Draw no more."""
        self._tensors.close()

    def _draw_ahead(self, names: Iterable[str], threads: int) -> Generator[tuple[str, np.ndarray]]:
        pool, waiting = ThreadPoolExecutor(threads), deque[tuple[str, np.ndarray, list[Future[None]]]]()
        try:
            for name in [*names, None]:
                while waiting and (name is None or sum(tensor.size for _, tensor, _ in waiting) > threads * BLOCK):
                    drawn, tensor, blocks = waiting.popleft()
                    for block in blocks:
                        block.result()
                    if drawn == self._config.embedding and self._config.padding is not None:
                        tensor[self._config.padding] = 0
                    yield drawn, tensor
                if name is not None:
                    tensor = np.empty(self._placements[name].shape, np.float32)
                    flat, starts = tensor.reshape(-1), range(0, tensor.size, BLOCK)
                    blocks = [pool.submit(self._draw, name, i, flat[at : at + BLOCK]) for i, at in enumerate(starts)]
                    waiting.append((name, tensor, blocks))
        finally:
            pool.shutdown(cancel_futures=True)

    def _draw(self, name: str, number: int, out: np.ndarray) -> None:
        """Block ``number`` of a tensor."""
        at = self._placements[name]
        if at.initial is not None:
            out[...] = at.initial
            return
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode()), number])
        if is_adapter(name):  # A as torch's nn.Linear; B is 0, so that the first forward is the base's
            out[...] = (rng.random(out.shape, np.float32) * 2 - 1) / math.sqrt(at.shape[1])
            return
        std = self._config.initializer_range
        if name.endswith(self._config.residual):
            std /= math.sqrt(2 * self._config.num_hidden_layers)
        rng.standard_normal(out=out, dtype=np.float32)
        out *= std


def init_weights(config: LlamaConfig, weights: Parameters, seed: int) -> None:
    """Fill the weights of a whole model."""
    drawn = InitialWeights(config, seed, weights)
    for name, weight in weights.items():
        weight[...] = drawn.read(name)
    drawn.close()
