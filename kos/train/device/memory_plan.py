"""The GPU memory that a training step will need, computed before any of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kos.comm import compression
from kos.dtypes import DTYPES
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.model.llama import LlamaConfig, Local
from kos.train.optim import CHUNK
from kos.train.parallel.data import Buckets
from kos.train.parallel.mesh import Mesh

BUCKET_BYTES = 64 << 20  # at least
HOST_BUCKET_BYTES = 4 << 20  # on CPUs
BUCKETS = 32  # about, at most: each waits, on all ranks, until a kernel ends and its own find multiprocessors
ALIGNED = 128  # elements: other ranks reach into buckets vector by vector
HEAD_ROWS = 8192  # tokens whose logits are in memory at once
ENCODED = 5  # times the bytes of a compressed bucket: what is sent, received and added
GIB = 1 << 30


class MemoryPlan(NamedTuple):
    """Bytes by what they are for, and how many are free; ``arena`` of them are for activations.

    ``savings`` are the options that take less and are not used yet.
    ``scratch`` and ``slot`` are the bytes of the arenas: that of what is computed and that of a micro-batch in flight.
    """

    uses: dict[str, int]
    arena: int
    free: int
    device: str
    savings: Sequence[str] = ()
    scratch: int = 0
    slot: int = 0

    @property
    def total(self) -> int:
        return sum(self.uses.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.free

    def check(self) -> MemoryPlan:
        """This plan; ConfigError, with the options that can help, if it does not fit."""
        if self.fits:
            return self
        uses = sorted(self.uses.items(), key=lambda use: -use[1])
        raise ConfigError(
            f"memory: expected at most {self.free / GIB:.2f} GiB, the memory free on {self.device}, "
            f"got {self.total / GIB:.2f} GiB ({'; '.join(f'{name} {size / GIB:.2f}' for name, size in uses)}); "
            f"to reduce it, use {' or '.join([*self.savings, 'a smaller model'])}"
        )

    def __str__(self) -> str:
        rows = [f"  {name:<42}{size / GIB:>9.2f} GiB" for name, size in self.uses.items()]
        rows.append(f"  {'total':<42}{self.total / GIB:>9.2f} GiB of {self.free / GIB:.2f} free on {self.device}")
        return "\n".join(rows)


def plan_buckets(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], mesh: Mesh, reaches: bool
) -> Buckets:
    """The buckets of a rank with ``parts``; ``reaches``: ranks of a machine access each other's memory."""
    reduction, groups, nbytes = mesh.dense, config.trained_groups(model), BUCKET_BYTES
    regions, places = [{name for group in groups for name in group.names}], model.placements(*parts)
    ends = (any(part.first for part in parts), any(part.last for part in parts))
    tied_across_stages = model.tie_word_embeddings and ends[0] != ends[1]
    if tied_across_stages and model.embedding in regions[0]:
        regions = [regions[0] - {model.embedding}, {model.embedding}]
    # Tensors that every rank of tp holds whole come last, so that one call sums their gradients (``GradientSums``).
    order = sorted(places, key=lambda name: mesh.tp.size > 1 and places[name].along("tp") is None)
    shapes = {name: places[name].local for names in regions for name in order if name in names}
    lies = shapes, {name: each for name, each in model.fused_groups(*parts).items() if each[0] in shapes}, regions
    ranks = reduction.replicas.size
    sharded = config.zero == 1 and ranks > 1
    unsplittable = frozenset(name for group in groups if group.rule for name in group.names)
    mirrored = sharded and config.elastic is not None and reduction.batch.size == ranks and reduction.others.size == 1
    if config.device == "cpu":
        blocks = 1 if config.compress == "none" else compression.BLOCK * mesh.exact("cpu")
        multiple = CHUNK * ranks if sharded else math.lcm(reduction.batch.size, blocks)
        return Buckets(multiple, HOST_BUCKET_BYTES, HOST_BUCKET_BYTES, sharded, unsplittable, mirrored, *lies)
    itemsize = DTYPES[config.grad_dtype].itemsize
    if not config.deterministic:  # else no bucket overlaps, and sums in rank order may need one of each rank
        whole, layout = model.placements(), mesh.layout  # so that all stages of a pipeline have buckets of equal size
        trained = sum(math.prod(whole[name].shape) for names in regions for name in names)
        nbytes = max(BUCKET_BYTES, itemsize * trained // (layout.pp * layout.tp) // BUCKETS)
    multiple = ranks * (CHUNK if config.zero == 1 else ALIGNED) if ranks > 1 else 1
    staging = nbytes if reaches and ranks > 1 and not config.deterministic else 0
    if ranks > 1 and config.compress != "none":
        staging = ENCODED * compression.FORMATS[config.compress].nbytes(nbytes // itemsize)
        staging += 2 * nbytes * (mesh.exact("cuda") > 1)  # terms of exact sums, and with ZeRO-1 their results
    return Buckets(multiple, nbytes, nbytes // 4, sharded, unsplittable, mirrored, *lies, staging)
