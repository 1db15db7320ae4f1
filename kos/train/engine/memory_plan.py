"""What a training step will need of a GPU's memory, before anything of it is allocated."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kos.cuda.driver import call, cu
from kos.dtypes import DTYPES, DType
from kos.errors import ConfigError
from kos.memory.arena import ALIGNMENT, Arena
from kos.memory.array import Array
from kos.train.config.options import TrainConfig
from kos.train.engine.stage import make_stage
from kos.train.model.llama import LOOKUPS, Gradients, Slot
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops.cuda import attention, cublaslt
from kos.train.ops.cuda.adamw import CHUNK
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.parallel.data import waiting_subtrees
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.schedules import Schedule

BUCKET_BYTES = 64 << 20  # at least
BUCKETS = 32  # about, at most: each waits, on all ranks, until a kernel ends and its own find multiprocessors
ALIGNED = 128  # elements: other ranks reach into buckets vector by vector
HEAD_ROWS = 8192  # tokens whose logits are in memory at once
RESERVE = 768 << 20  # bytes: kernels, graphs and what NCCL takes when ranks first meet
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

    def check(self) -> MemoryPlan:
        """This plan; ConfigError, with the options that can help, where it does not fit."""
        if self.total <= self.free:
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


class Buckets(NamedTuple):
    """How the gradients of a rank lie in memory, and how they are summed over ranks."""

    multiple: int  # elements
    nbytes: int  # of a bucket
    staging: int  # bytes to which copy engines bring what is added

    @classmethod
    def of(
        cls, config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], mesh: Mesh, reaches: bool
    ) -> Buckets:
        """Of a rank of ``mesh``; ``reaches``: the ranks of a machine reach into one another's memory."""
        ranks, nbytes = mesh.gradients.size, BUCKET_BYTES
        if not config.deterministic:  # nothing overlaps then, and sums in rank order may need a bucket of each rank
            itemsize = DTYPES[config.grad_dtype].itemsize
            nbytes = max(BUCKET_BYTES, itemsize * model.num_parameters(*parts) // BUCKETS)
        multiple = ranks * (CHUNK if config.zero == 1 else ALIGNED) if ranks > 1 else 1
        staging = nbytes if reaches and ranks > 1 and not config.deterministic else 0
        return cls(multiple, nbytes, staging)


def plan_memory(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], ops: CudaOps, mesh: Mesh, schedule: Schedule,
    buckets: Buckets, sharing: int = 1, free: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """The plan of one rank of ``mesh``, a silent one, which holds ``parts`` of the model, a stage each.

    ``sharing``: ranks on this GPU.  ``free``: bytes of a GPU that is not there."""
    assert config.micro_batch_size is not None
    ranks, accumulation_steps = mesh.gradients.size, schedule.micro_batches
    waiting = waiting_subtrees(mesh.dp.rank, accumulation_steps) if config.deterministic else 0
    count = -(-model.num_parameters(*parts) // buckets.multiple) * buckets.multiple
    apart = config.deterministic and model.tie_word_embeddings and any(part.first for part in parts)
    lookups = len(parts[0].vocabulary) * model.hidden_size * apart
    itemsize = DTYPES[config.dtype].itemsize
    sharded = config.zero == 1 and ranks > 1
    held, share = (count // ranks, f", 1/{ranks} (ZeRO-1)") if sharded else (count, "")
    master = config.master_dtype
    has_copy = sharded or config.dtype != master
    tokens = config.micro_batch_size * config.seq_len // mesh.cp.size
    rows = min(HEAD_ROWS, tokens)
    logits = rows * len(parts[0].vocabulary) * itemsize * any(part.last for part in parts)
    split = any(action.kind == "I" for action in schedule.actions[mesh.pp.rank])
    sizing = ops if isinstance(ops, Sizing) else Sizing(ops)
    scratch, slot = peaks(config, model, parts, sizing, mesh, split, head_rows=HEAD_ROWS)
    bucket = max(buckets.nbytes // DTYPES[config.grad_dtype].itemsize, buckets.multiple)  # of the state, to be saved
    scratch = max(scratch, (4 * min(bucket, count) + ALIGNMENT) * (2 if mesh.tp.size > 1 else 1))
    slots, between = schedule.slots[mesh.pp.rank], tokens // mesh.tp.size * model.hidden_size * itemsize
    in_flight = f", {slots} micro-batches in flight" if slots > 1 else ""
    arena = scratch + slots * slot + between * (1 if mesh.pp.size == 1 else 6)
    uses = {
        **({f"weights, {config.dtype}": count * itemsize} if has_copy else {}),
        f"{'master ' * has_copy}weights, {master}{share}": DTYPES[master].itemsize * held,
        f"both Adam moments, float32{share}": 8 * held,
        f"gradients, {config.grad_dtype}": DTYPES[config.grad_dtype].itemsize * (count + lookups) * (1 + waiting),
        f"activations, recompute {config.recompute}{in_flight}": arena - logits,
        f"logits of {rows} tokens": logits,
        "tokens, cuBLASLt's workspace": 3 * 8 * accumulation_steps * tokens + cublaslt.WORKSPACE,
        "kernels, graph, communication": RESERVE + buckets.staging,
    }
    savings = {
        f"a --micro-batch-size below {config.micro_batch_size}": config.micro_batch_size > 1,
        "--recompute norms or block": config.recompute == "none",
        "--recompute block": config.recompute == "norms",
        "--zero 1": not config.zero and ranks > 1,
        "--grad-dtype bfloat16": config.dtype != config.grad_dtype and accumulation_steps == 1
        and not config.deterministic,
        "--master-weights none": config.dtype != master,
    }  # fmt: skip
    if free is None:
        free, _ = call(cu.cuMemGetInfo)
    name, uses = f"cuda:{ops.device}", {use: size for use, size in uses.items() if size}
    return MemoryPlan(uses, arena, free // sharing, name, [*filter(savings.get, savings)], scratch, slot)


def peaks(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], sizing: Any, mesh: Mesh, split: bool, *,
    head_rows: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Bytes that passes take from the arena of scratch memory, and a micro-batch in flight from its own, at most.

    ``mesh`` is silent, and ``sizing`` are operations that do nothing.  ``split``: gradients of weights are left for
    later."""
    dtype, scratch, slots = sizing.dtype(config.dtype), sizing.make_arena(), [0]
    assert config.micro_batch_size is not None
    loss = sizing.zeros(1, np.float64)

    for local in parts:
        llama = make_stage(
            config, model, sizing, local, mesh, head_rows=head_rows, recompute=config.recompute, arena=scratch
        )
        pieces = llama.context.pieces
        shape = config.micro_batch_size * pieces, config.seq_len // (mesh.cp.size * pieces)
        tokens = sizing.zeros(shape, np.int32)
        weights = Parameters(model.parameter_shapes(local), config.dtype, model.fused_groups(local), sizing.zeros)
        gradients = weights.like(config.grad_dtype)
        slot, rows = Slot(sizing.make_arena()), (llama.tensor.rows(math.prod(shape)), model.hidden_size)
        of = ChainMap[str, Any]({LOOKUPS: gradients.flat}, gradients)  # type: ignore[arg-type]
        into = Gradients(of, False, lambda name: None, slot.deferred if split else None)
        with sizing.step(scratch):
            received = None if local.first else slot.arena.take(rows, dtype)
            llama.queue_forward(weights, slot, tokens, received)
            if any(other.layers.start == local.layers.stop for other in parts):  # which leaves its gradient here
                slot.arena.take(rows, dtype)
            dx = sizing.zeros(rows, dtype)
            llama.queue_backward(weights, slot, into, dx, targets=tokens, loss=loss)
            if split:
                llama.queue_weight_gradients(into)
        slots.append(slot.arena.peak)
        with sizing.step(scratch):
            x = llama.evaluate_stage(weights, tokens, None if local.first else sizing.zeros(rows, dtype))
            if local.last:
                llama.evaluate_loss(weights, x, tokens, loss)
    return scratch.peak + 4 * tokens.nbytes + ALIGNMENT * 4, max(slots)  # validation brings its tokens from the host


class Sizing(CudaOps):
    """Operations that do nothing, on arrays without memory: what they take from the arena is counted."""

    def __init__(self, ops: CudaOps) -> None:
        self.device, self.stream = ops.device, ops.stream
        self.multiprocessors, self.shared_memory = ops.multiprocessors, ops.shared_memory

    def family(self, dtype: str, head_dim: int) -> str:
        return attention.family_for(self.device, dtype, head_dim)

    def matmul(self, *operands: Any, **options: Any) -> None:  # type: ignore[override]
        pass

    def dtype(self, name: str) -> DType:
        return DTYPES[name]

    def make_arena(self) -> Arena:
        return Arena(0, lambda nbytes: None, lambda slab, offset, shape, dtype: self.zeros(shape, dtype))

    @contextmanager
    def step(self, arena: Arena) -> Iterator[None]:
        yield
        arena.release(0)

    def zeros(self, shape: Any, dtype: Any) -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return Array(ALIGNMENT, shape, dtype, self.device)

    def launch(self, *arguments: Any, **options: Any) -> None:
        pass

    def attention(self, qkv: Array, heads: int, kv_heads: int, out: Array, lse: Array, arena: Arena) -> None:
        pass

    def attention_backward(
        self, d_out: Any, qkv: Any, out: Any, lse: Array, heads: int, kv_heads: int, d_qkv: Any, arena: Arena
    ) -> None:
        self._attention_scratch(qkv, lse, heads, kv_heads, arena)

    def attention_to(self, *operands: Any) -> None:
        pass

    def attention_to_backward(
        self, d_out: Any, qkv: Array, kv: Any, out: Any, lse: Array, heads: int, kv_heads: int, queries: slice,
        keys: slice, d_qkv: Any, d_kv: Any, arena: Arena,
    ) -> None:  # fmt: skip
        self._attention_scratch(qkv, lse, heads, kv_heads, arena)  # of all tokens, at most

    def _attention_scratch(self, qkv: Array, lse: Array, heads: int, kv_heads: int, arena: Arena) -> None:
        head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
        with arena.scope():
            family = self.family(qkv.dtype.name, head_dim)
            if family != "simple":
                attention.take_scratch(lse, kv_heads, head_dim, family, arena)

    def rope_tables(self, frequencies: Any, positions: Any, dtype: Any) -> tuple[Array, Array]:
        shape = (len(positions), len(frequencies))
        return self.zeros(shape, np.float32), self.zeros(shape, np.float32)

    def copy(self, source: Array, out: Array) -> None:
        pass

    def zero(self, out: Array) -> None:
        pass

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        return np.zeros(array.shape, array.dtype.numpy)
