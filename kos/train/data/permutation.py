"""A permutation that is computed for each index, without a table: the order of an epoch.

A Feistel network (Luby and Rackoff 1988) permutes the numbers of an even count of bits.  What it sends beyond ``size``
it is applied to again, until it is below (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): four times on average at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def permuted(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the permutation of range(``size``) that belongs to ``seed`` and ``epoch`` sends ``indices``."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(ROUNDS)
    x = np.array(indices, np.uint64)
    beyond = np.ones(len(x), np.bool_)
    while beyond.any():
        left, right = x[beyond] >> half, x[beyond] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        x[beyond] = left << half | right
        beyond = x >= size
    return x.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
