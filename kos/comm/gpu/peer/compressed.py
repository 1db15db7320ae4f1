"""The launch of a compressed all_reduce or reduce_scatter of ``peer`` as one kernel."""

from __future__ import annotations

from typing import Any

from kos.comm.compression import Format
from kos.comm.gpu.compressed import tile
from kos.comm.gpu.peer.engine import KERNELS, PeerEngine
from kos.comm.reduction import ReduceOp
from kos.dtypes import DType
from kos.memory.windows import Run

BATCH = 16
"""Tiles of a batch.  Of 2 H100, 16 MB of bfloat16 by fp8 take 48 us with 8, 41 with 16 and with 32."""
_SLOTS = 4  # as in kernels/all_reduce_compressed.cu


def bind_compressed(
    engine: PeerEngine, name: str, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp, form: Format
) -> Run | None:
    """The all_reduce or reduce_scatter (``name``) of ``count`` elements from ``send``, which travel by ``form``.

    ``recv`` may be ``send``, or this rank's part of it.  The bits are those of ``CompressedOperation``.  Returns
    None on one rank, without elements, and if the staging memory is too small.
    """
    spread, elements = name == "all_reduce", tile(engine.size)
    tiles = -(-count // (engine.size * elements)) if spread else -(-(count // engine.size) // elements)
    part = tiles * elements if spread else count // engine.size
    room = 3 * engine.staging // (2 * _SLOTS * engine.size * form.nbytes(elements))  # batches of a tile
    blocks = min(engine.blocks, tiles, room)
    if engine.size == 1 or not blocks:
        return None
    share = -(-tiles // blocks)
    blocks, batch = -(-tiles // share), min(BATCH, share, room // blocks)
    threads = 64 * min(batch * (engine.size - 1), 8)  # a tile for each warp of both halves
    macros = {"DTYPE": dtype.name, "OP": op.name, form.name.upper(): 1}
    engine.record_kernel("all_reduce_compressed.cu", *macros.items())
    kernel = engine.load(KERNELS / "all_reduce_compressed.cu", "all_reduce_compressed", **macros)
    return engine._bind(kernel, blocks, threads, engine._in, batch, send, recv, count, part, int(spread))
