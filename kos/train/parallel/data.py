"""Data parallelism: every rank holds the whole model and works on its share of the batch.

A step's batch is cut into micro-batches; micro-batch ``i`` goes to rank ``i mod size``, so that in
round ``j`` the ranks together work on micro-batches ``j*size … j*size + size-1``.

*Default*: a rank adds up its own gradients over the rounds, and in the last round buckets of the flat
gradient are summed over the ranks as the backward finishes them.

*Deterministic*: after each round the ranks' gradients are added in rank order, with rank 0 carrying the
sum of the rounds before. That is the sum ``((g0 + g1) + g2) + …`` in micro-batch order for any number of
ranks: losses and weights do not depend on it by a single bit. The price is one all-reduce a round.
"""

from __future__ import annotations

import numpy as np

from kos.comm.communicator import Communicator
from kos.comm.work import Work
from kos.train.parameters import Parameters


def deal(batch_size: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """The rows of the batch that ``rank`` works on, a range a round; ``batch_size`` is cut evenly."""
    starts = range(rank * micro_batch_size, batch_size, size * micro_batch_size)
    return [range(start, start + micro_batch_size) for start in starts]


class DataParallel:
    """Sums gradients over micro-batches and ranks, in place, in ``gradients.flat``."""

    def __init__(
        self, comm: Communicator, gradients: Parameters, *, deterministic: bool = False, bucket_bytes: int = 4 << 20
    ) -> None:
        self.comm = comm
        self.gradients = gradients
        self.deterministic = deterministic
        self._carry = np.empty_like(gradients.flat) if deterministic and comm.rank == 0 else None
        self._buckets = _buckets(gradients, bucket_bytes)
        self._in_flight: list[Work] = []

    def accumulates(self, round_index: int) -> bool:
        """Whether the backward of this round adds to ``gradients`` rather than writing them."""
        return round_index > 0 and not self.deterministic

    def gradient_ready(self, name: str) -> None:
        """Called in the last round as the backward finishes each gradient: starts the bucket it completes."""
        bucket = self._buckets.get(name)
        if bucket is not None and self.comm.size > 1 and not self.deterministic:
            self._in_flight.append(self.comm.all_reduce(self.gradients.flat[bucket], async_op=True))

    def finish_round(self, round_index: int, rounds: int) -> None:
        """Called after each backward; after the last, ``gradients`` hold the sum over all micro-batches."""
        if self.deterministic:
            flat = self.gradients.flat
            if self._carry is not None and round_index > 0:
                np.add(self._carry, flat, out=flat)
            if self.comm.size > 1:
                self.comm.all_reduce(flat, deterministic=True)
            if self._carry is not None and round_index + 1 < rounds:
                np.copyto(self._carry, flat)
        elif round_index + 1 == rounds:
            for work in self._in_flight:
                work.wait()
            self._in_flight.clear()


def _buckets(gradients: Parameters, bucket_bytes: int) -> dict[str, slice]:
    """Slices of about ``bucket_bytes``, keyed by the tensor whose gradient completes each."""
    buckets: dict[str, slice] = {}
    start = 0
    for name, span in gradients.spans.items():
        if (span.stop - start) * gradients.flat.itemsize >= bucket_bytes or span.stop == gradients.flat.size:
            buckets[name] = slice(start, span.stop)
            start = span.stop
    return buckets
