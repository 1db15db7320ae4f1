"""Which kernel of ``peer`` runs an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kos.comm.compression import Format
from kos.comm.contract import Backend, Piece
from kos.comm.gpu.composed import CompressedOperation, OrderedReduction, format_of, tile
from kos.comm.gpu.memory import NONE, exchange_of, whole
from kos.comm.gpu.peer.copies import OVERLAPPED
from kos.comm.gpu.peer.engine import KERNELS, PeerEngine
from kos.comm.operation import AUTO, NO_MESSAGE, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import PACKETS, KernelConfig
from kos.comm.work import Work
from kos.cuda.kernels import NOTHING, Plan
from kos.dtypes import DTYPES, DType
from kos.memory.windows import Run

_BY_COPIES = ("all_reduce", "reduce_scatter", "all_gather")
_BY_PARTS = 128 << 10
"""Bytes from which a broadcast goes to every rank in parts, which go on to all."""
_OVERLAPPED_FROM = 4 << 20
"""Bytes of an overlapped operation from which copy engines carry it: multiprocessors are left to what it overlaps."""

def bind(route: Backend, engine: PeerEngine, o: Operation) -> Plan:
    """The plan of calls like ``o``; ``route`` exchanges the parts of reductions without a kernel of their own."""
    if o.name == "barrier":
        return _plan(engine.bind_barrier())
    if o.options.compress:
        return _bind_compressed(route, engine, o)
    if o.name == "all_reduce":
        return _bind_all_reduce(route, engine, o)
    return _bind_move(engine, o) if o.reduction is None else _bind_reduction(route, engine, o)


def by_copies(engine: PeerEngine, o: Operation) -> bool:
    """Whether copy engines carry it: it overlaps other work, is large, and its buffers are symmetric."""
    buffer = o.recv if o.name == "all_gather" else o.send
    large = buffer is not None and buffer.nbytes >= _OVERLAPPED_FROM and engine.size > 1
    if buffer is None or not large or not o.options.overlap or o.name not in _BY_COPIES:
        return False
    complex_or_scaled = buffer.dtype.kind == "complex" or (o.reduction and o.reduction.op is ReduceOp.PREMUL_SUM)
    odd = o.name != "all_reduce" and buffer.nbytes % (16 * engine.size)
    if o.options.algorithm != AUTO or complex_or_scaled or odd:
        return False
    several = (o.send, o.recv) if o.name == "all_reduce" else (buffer,)
    return all(each is not None and engine.is_symmetric(each.pointer, each.nbytes) for each in several)


def _bind_all_reduce(route: Backend, engine: PeerEngine, o: Operation) -> Plan:
    assert o.send is not None and o.recv is not None and o.reduction is not None
    dtype, op, nbytes, ends = o.reduction.element, o.reduction.op, o.send.nbytes, (o.send.pointer, o.recv.pointer)
    if not nbytes or dtype.kind == "complex":
        return _bind_reduction(route, engine, o)
    launch = None if o.options.algorithm == AUTO else KernelConfig(o.options.algorithm, threads=128)
    launch = engine.choose(*ends, nbytes, op, OVERLAPPED if by_copies(engine, o) else launch)
    reached = () if launch.algorithm in PACKETS else ends[launch.algorithm == "push" :]
    count, factor = o.send.count * o.reduction.parts, o.reduction.factor
    run = engine.bind_all_reduce(*ends, count, dtype, op, factor=factor, launch=launch)
    return _plan(run, engine.route(launch, nbytes, *reached))


def _bind_compressed(route: Backend, engine: PeerEngine, o: Operation) -> Plan:
    """One kernel for an all_reduce and a reduce_scatter; otherwise kernels around the exchange of what is encoded."""
    form, run = format_of(route, o.options.compress), None
    if o.reduction is not None and o.send is not None and o.name in ("all_reduce", "reduce_scatter"):
        recv = o.send.pointer if o.recv is None else o.recv.pointer
        ends = o.send.pointer, recv, o.send.count
        run = bind_compressed(engine, o.name, *ends, DTYPES[o.send.dtype.name], o.reduction.op, form)
    return _plan(run) if run else CompressedOperation(route, o).plan()


def _bind_reduction(route: Backend, engine: PeerEngine, o: Operation) -> Plan:
    """reduce, reduce_scatter, reduce_scatter_v, scan and exscan."""
    assert o.reduction is not None and o.send is not None
    if not o.send.count:
        return NOTHING
    dtype, op, factor, per = o.reduction.element, o.reduction.op, o.reduction.factor, o.reduction.parts
    ends, count, run, kernel = (o.send.pointer, whole(o.recv)[0]), o.send.count * per, None, None
    if o.name.startswith("reduce_scatter"):
        overlapped = by_copies(engine, o)
        if overlapped:
            kernel = engine.route(KernelConfig("copies"), o.send.nbytes, o.send.pointer)
        counts = [n * per for n in o.send_counts or [o.send.count // engine.size] * engine.size]
        run = engine.bind_reduce_scatter(*ends, counts, dtype, op, factor=factor, overlapped=overlapped)
    elif o.name.endswith("scan"):
        run = engine.bind_scan(o.name, *ends, count, dtype, op, factor=factor)
    elif o.name == "reduce" and dtype.kind != "complex":
        launch = engine.pick(o.send.nbytes)
        if launch.algorithm in PACKETS:
            run = engine.bind_all_reduce(*ends, count, dtype, op, factor=factor, launch=launch)
    return replace(_plan(run) if run else OrderedReduction(route, o).plan(), name=kernel)


def _bind_move(engine: PeerEngine, o: Operation) -> Plan:
    """Everything that only moves bytes: one exchange, or what is faster."""
    send, recv = whole(o.send), whole(o.recv)
    if o.name == "broadcast" and recv[1] >= _BY_PARTS and engine.size > 2:
        return _plan(engine.bind_broadcast(send, recv, o.root or 0))
    if o.name in ("all_gather", "all_to_all"):
        overlapped, part = by_copies(engine, o), send[1] // (1 if o.name == "all_gather" else engine.size)
        direct = engine.bind_writes(o.name, send[0], recv[0], part, overlapped)
        if direct is not None:
            launch = KernelConfig(engine.write_algorithm(o.name, part, overlapped))
            return _plan(direct, engine.route(launch, recv[1], recv[0]))
    pieces = exchange_of(o, engine.rank, engine.size)
    message = o.message is not NO_MESSAGE
    return _plan(engine.bind_exchange(*pieces, messages=message, overlapped=message and o.options.overlap))


def _plan(run: Run, name: str | None = None) -> Plan:
    return Plan((run,), name)


def bind_messages(engine: PeerEngine, works: Sequence[Work[Any]]) -> list[Run]:
    """The k-th message of each pair in the k-th exchange, as on the other side."""
    sends: list[list[Piece]] = [[] for _ in range(engine.size)]
    recvs: list[list[Piece]] = [[] for _ in range(engine.size)]
    for work in works:
        o = work.operation
        dst, src, *_ = o.message
        if dst is not None and o.send is not None and o.send.count:
            sends[dst].append((work.send, o.send.nbytes))
        if src is not None and o.recv is not None and o.recv.count:
            recvs[src].append((work.recv, o.recv.nbytes))
    rounds = max(map(len, (*sends, *recvs)))
    return [
        engine.bind_exchange(
            *([to[k] if k < len(to) else NONE for to in side] for side in (sends, recvs)), messages=True
        )
        for k in range(rounds)
    ]


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
