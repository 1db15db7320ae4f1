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
from kos.train.model.fixed import LOOKUPS
from kos.train.model.llama import Gradients, Slot
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops.cuda import attention, cublaslt
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.schedules import Schedule

RESERVE = 768 << 20  # bytes: kernels, graphs and what NCCL takes when ranks first meet
GIB = 1 << 30


class MemoryPlan(NamedTuple):
    """Bytes by what they are for, and how many are free; ``arena`` of them are for activations.

    ``knobs`` are the options that take less: how many bytes beside the arena, 0 for those that act on the arena.
    ``scratch`` and ``slot`` are the bytes of the arenas: that of what is computed and that of a micro-batch in flight.
    """

    uses: dict[str, int]
    arena: int
    free: int
    device: str
    knobs: dict[str, int]
    scratch: int = 0
    slot: int = 0

    @property
    def total(self) -> int:
        return sum(self.uses.values())

    def check(self) -> MemoryPlan:
        """This plan; ConfigError, with the options that can help, where it does not fit."""
        if self.total <= self.free:
            return self
        rest = self.total - self.arena
        fits = rest - sum(self.knobs.values()) < self.free
        helpful = [knob for knob, saved in self.knobs.items() if fits and (saved or rest < self.free)]
        uses = sorted(self.uses.items(), key=lambda use: -use[1])
        raise ConfigError(
            f"memory: expected at most {self.free / GIB:.2f} GiB, which are free on {self.device}, "
            f"got {self.total / GIB:.2f} GiB: {', '.join(f'{name} {size / GIB:.2f}' for name, size in uses)}; "
            f"less takes {' or '.join([*helpful, 'a smaller model'])}"
        )

    def __str__(self) -> str:
        rows = [f"  {name:<42}{size / GIB:>9.2f} GiB" for name, size in self.uses.items()]
        rows.append(f"  {'total':<42}{self.total / GIB:>9.2f} GiB of {self.free / GIB:.2f} free on {self.device}")
        return "\n".join(rows)


def plan_memory(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], ops: CudaOps, *, mesh: Mesh, schedule: Schedule,
    head_rows: int, multiple: int, rounds: int, sharing: int = 1, waiting: int = 0, lookups: bool = False,
    staging: int = 0, bucket: int = 0, free: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """The plan of one rank of ``mesh``, a silent one, which holds ``parts`` of the model, a stage each.

    ``sharing``: ranks on this GPU.  ``waiting``: copies of the gradients that are summed in order.
    ``lookups``: those of all ranks are gathered.  ``staging``: bytes to which copy engines bring what is added.
    ``bucket``: elements of the state that pass through the arena at once, in fp32, when it is saved; with tp twice.
    ``free``: bytes of a GPU that is not there."""
    assert config.micro_batch_size is not None
    ranks = mesh.gradients.size
    count = -(-model.num_parameters(*parts) // multiple) * multiple
    itemsize = DTYPES[config.dtype].itemsize
    sharded = config.zero == 1 and ranks > 1
    held, share = (count // ranks, f", 1/{ranks} (ZeRO-1)") if sharded else (count, "")
    master = config.master_dtype
    has_copy = sharded or config.dtype != master
    tokens = config.micro_batch_size * config.seq_len // mesh.cp.size
    rows = min(head_rows, tokens)
    logits = rows * len(parts[0].vocabulary) * itemsize * any(part.last for part in parts)
    split = any(action.kind == "I" for action in schedule.actions[mesh.pp.rank])
    looking = ranks if lookups else 1
    sizing = ops if isinstance(ops, Sizing) else Sizing(ops)
    scratch, slot = peaks(config, model, parts, sizing, mesh, split, head_rows=head_rows, looking=looking)
    scratch = max(scratch, (4 * min(bucket, count) + ALIGNMENT) * (2 if mesh.tp.size > 1 else 1))
    slots, between = schedule.slots[mesh.pp.rank], tokens // mesh.tp.size * model.hidden_size * itemsize
    in_flight = f", {slots} micro-batches in flight" if slots > 1 else ""
    arena = scratch + slots * slot + between * (1 if mesh.pp.size == 1 else 6)
    uses = {
        **({f"weights, {config.dtype}": count * itemsize} if has_copy else {}),
        f"{'master ' * has_copy}weights, {master}{share}": DTYPES[master].itemsize * held,
        f"both Adam moments, float32{share}": 8 * held,
        f"gradients, {config.grad_dtype}": DTYPES[config.grad_dtype].itemsize * count * (1 + waiting),
        f"activations, recompute {config.recompute}{in_flight}": arena - logits,
        f"logits of {rows} tokens": logits,
        "tokens, cuBLASLt's workspace": 3 * 8 * rounds * tokens + cublaslt.WORKSPACE,
        "kernels, graph, communication": RESERVE + staging,
    }
    shard, master_size = count // ranks, DTYPES[master].itemsize
    knobs = {f"a --micro-batch-size below {config.micro_batch_size}": 0} if config.micro_batch_size > 1 else {}
    if config.recompute != "block":
        knobs[f"--recompute {'norms or block' if config.recompute == 'none' else 'block'}"] = 0
    if ops.cudnn is not None:
        knobs["--attention flash"] = 0
    if not config.zero and ranks > 1:
        knobs["--zero 1"] = (8 + master_size) * (count - shard) - (0 if has_copy else count * itemsize)
    if config.dtype != config.grad_dtype and rounds == 1 and not config.deterministic:
        knobs["--grad-dtype bfloat16"] = (DTYPES[config.grad_dtype].itemsize - itemsize) * count
    if config.dtype != master:  # after ZeRO-1, of which a copy for the passes is left
        knobs["--master-weights none"] = (master_size - (itemsize if ranks > 1 else 0)) * shard
    if free is None:
        free, _ = call(cu.cuMemGetInfo)
    name, uses = f"cuda:{ops.device}", {use: size for use, size in uses.items() if size}
    return MemoryPlan(uses, arena, free // sharing, name, knobs, scratch, slot)


def peaks(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], sizing: Any, mesh: Mesh, split: bool, *,
    head_rows: int | None = None, looking: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Bytes that passes take from the arena of scratch memory, and a micro-batch in flight from its own, at most.

    ``mesh`` is silent, and ``sizing`` are operations that do nothing.  ``split``: gradients of weights are left for
    later; ``looking``: ranks whose lookups a backward gathers."""
    dtype, scratch, slots = sizing.dtype(config.dtype), sizing.make_arena(), [0]
    assert config.micro_batch_size is not None
    loss = sizing.zeros(1, np.float64)

    def lookups(*mine: Array) -> Any:
        return [scratch.take((looking * len(x), *x.shape[1:]), x.dtype) for x in mine]

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
        gathered, deferred = lookups if looking > 1 else None, slot.deferred if split else None
        into = Gradients(of, False, lambda name: None, gathered, deferred)
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
        self.device, self.stream, self.cudnn = ops.device, ops.stream, ops.cudnn
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
        if self.cudnn is not None:
            self.cudnn.forward(qkv, heads, kv_heads, out, lse, arena, dry=True)

    def attention_backward(
        self, d_out: Any, qkv: Any, out: Any, lse: Array, heads: int, kv_heads: int, d_qkv: Any, arena: Arena
    ) -> None:
        if self.cudnn is not None:
            self.cudnn.backward(d_out, qkv, out, lse, heads, kv_heads, d_qkv, arena, dry=True)
        else:
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
