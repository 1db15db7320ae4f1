"""Attention by cuDNN through nvidia-cudnn-frontend (extra ``cudnn``): what ``attention.py`` computes, in 16 bits.

A graph is built once for a shape and a direction.  Its tensors are our arrays as they lie, by their strides:
nothing is copied, keys and values are not repeated.  The backward is the deterministic one, which does not take T = 1.
On Hopper it keeps the gradients of all scores, 2 B H T² bytes of workspace; since cuDNN 9.25 the frontend has a slower
one, linear in T, by CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment (NVIDIA/cudnn-frontend#398).
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kos.comm.communicator import Communicator
from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.errors import BackendUnavailable, CudaError, KosError, install
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops.cuda import attention
from kos.train.ops.cuda.cublaslt import Stored
from kos.train.parallel.failures import alone, together

LEAST = "9.18.0"  # of cuDNN: older ones were not reproducible on Hopper (NVIDIA-NeMo/Megatron-Bridge#2169)
WARM, REPEATS = 2, 5
Q, K, V, OUT, LOG_SUM_EXP, D_OUT, DQ, DK, DV = range(1, 10)  # what tensors are called in graphs


class Shape(NamedTuple):
    """What a graph is built for."""

    samples: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


class CudnnAttention:
    """For one device and thread (a handle of cuDNN belongs to both), in the order of one stream."""

    def __init__(self, device: int, stream: Any) -> None:
        self._library, self.version = library()
        with driver.on_device(device):
            self._handle = self._library.create_handle()
            self._library.set_stream(self._handle, streams.handle(stream))
        self._graphs: dict[tuple[Shape, bool], tuple[Any, int]] = {}

    def forward(
        self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena, dry: bool = False
    ) -> None:
        """As ``attention.attention``; ``dry``: only takes the workspace from ``arena``, and gives it back."""
        self._run(arena, dry, heads, kv_heads, qkv, out, log_sum_exp)

    def backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena, dry: bool = False,
    ) -> None:  # fmt: skip
        """As ``attention.attention_backward``; ``dry`` as in ``forward``."""
        attention.expect("d_out", d_out, out.shape, out.dtype)
        attention.expect("d_qkv", d_qkv, qkv.shape, qkv.dtype)
        self._run(arena, dry, heads, kv_heads, qkv, out, log_sum_exp, d_out, d_qkv)

    def _run(self, arena: Arena, dry: bool, heads: int, kv_heads: int, qkv: Array, *others: Array) -> None:
        samples, length, d = attention.check(qkv, heads, kv_heads, others[0], others[1])
        backward = len(others) > 2
        graph, nbytes = self.graph(Shape(samples, length, heads, kv_heads, d, qkv.dtype.name), backward)
        starts = [d * qkv.dtype.itemsize * at for at in (0, heads, heads + kv_heads)]  # of q, k and v, in bytes
        pointers = [qkv.pointer + start for start in starts] + [x.pointer for x in others]
        if backward:
            pointers[-1:] = [pointers[-1] + start for start in starts]
        with arena.scope():
            workspace = arena.take((nbytes,), np.uint8)
            if not dry:
                try:
                    graph.execute(dict(enumerate(pointers, Q)), workspace.pointer, handle=self._handle)
                except (self._library.cudnnGraphNotSupportedError, RuntimeError) as error:
                    raise driver.library_error("attention by cuDNN", error) from error

    def graph(self, shape: Shape, backward: bool) -> tuple[Any, int]:
        """The graph of a shape and its workspace in bytes; BackendUnavailable, with the reason, where it has none."""
        built = self._graphs.get((shape, backward))
        if built is None:
            if shape.dtype == "float32":
                raise BackendUnavailable("attention by cuDNN: expected bfloat16 or float16, got float32")
            try:
                graph = self._build(shape, backward)
            except (self._library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:300]
                raise BackendUnavailable(f"attention: cuDNN {self.version} refuses {shape}: {reason}") from error
            built = self._graphs[shape, backward] = graph, int(graph.get_workspace_size())
        return built

    def _build(self, shape: Shape, backward: bool) -> Any:
        samples, length, heads, kv_heads, d, dtype = shape
        types = self._library.data_type
        kind = {"bfloat16": types.BFLOAT16, "float16": types.HALF}[dtype]
        graph = self._library.pygraph(
            io_data_type=kind, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=self._handle
        )

        def layout(uid: int) -> dict[str, Any]:
            """Sizes (B, heads, T, d) and strides in elements, of heads that lie side by side in rows of tokens."""
            if uid == LOG_SUM_EXP:
                dim, stride = [samples, heads, length, 1], [heads * length, length, 1, 1]
                return {"dim": dim, "stride": stride, "data_type": types.FLOAT, "uid": uid}
            row = heads * d if uid in (OUT, D_OUT) else (heads + 2 * kv_heads) * d
            dim = [samples, kv_heads if uid in (K, V, DK, DV) else heads, length, d]
            return {"dim": dim, "stride": [length * row, d, row, 1], "data_type": kind, "uid": uid}

        uids = (Q, K, V, OUT, D_OUT, LOG_SUM_EXP) if backward else (Q, K, V)
        inputs = [graph.tensor(**layout(uid)) for uid in uids]
        causal = {"attn_scale": 1 / math.sqrt(d), "diagonal_band_right_bound": 0,
                  "diagonal_alignment": self._library.diagonal_alignment.TOP_LEFT}  # fmt: skip
        if backward:
            outputs = graph.sdpa_backward(*inputs, use_deterministic_algorithm=True, **causal)
        else:
            outputs = graph.sdpa(*inputs, generate_stats=True, **causal)
        for uid, output in zip((DQ, DK, DV) if backward else (OUT, LOG_SUM_EXP), outputs, strict=True):
            output.set_output(True)
            for name, value in layout(uid).items():
                getattr(output, f"set_{name}")(value)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._library.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph


@functools.cache
def library() -> tuple[Any, str]:
    """nvidia-cudnn-frontend and cuDNN's version; BackendUnavailable, naming the extra, where either is missing."""
    try:
        from cuda import pathfinder

        pathfinder.load_nvidia_dynamic_lib("cudart")  # the frontend looks for it among what is loaded
        import cudnn

        number = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendUnavailable(f"cuDNN is not installed: {install('cuda,cudnn')} ({reason})") from error
    version = (number // 10_000, number // 100 % 100, number % 100)
    if version < tuple(map(int, LEAST.split("."))):
        raise BackendUnavailable(f"attention: expected cuDNN {LEAST} or later, got {'.'.join(map(str, version))}")
    return cudnn, ".".join(map(str, version))


def choose(asked: str, shape: Shape, ops: Any, comm: Communicator, check: Callable[[], object]) -> str:
    """Give ``ops`` (CudaOps) the attention that ``--attention`` asks for, the same on all ranks; says which, and why.

    ``auto`` takes the faster on rank 0, which is measured once and kept in the user's cache; and our own kernels
    where cuDNN is missing, refuses the shape, or ``check`` fails with it.

    Raises:
        BackendUnavailable: on all ranks, ``cudnn`` cannot be had; the message says why.
    """
    if asked == "flash":
        return asked

    def prepare() -> None:
        ops.cudnn = CudnnAttention(ops.device, ops.stream)
        for backward in (False, True):
            ops.cudnn.graph(shape, backward)

    try:
        times, version = alone(comm, lambda: _known(shape, ops.device)) if asked == "auto" else (None, "")
        if times is None or times[1] < times[0]:  # else nobody needs its graphs, which take seconds
            together(comm, prepare)
            if asked == "cudnn":
                return f"cuDNN {ops.cudnn.version}"
            together(comm, check)
            times = times or alone(comm, lambda: _measured(shape, ops))
    except KosError as error:
        if asked == "cudnn" or not error.on_every_rank or isinstance(error, CudaError):
            raise
        ops.cudnn = None
        return f"flash ({error})"
    flash, other = times
    name = f"cuDNN {version}"
    said = f"forward and backward of a layer: {flash:.3f} ms by flash, {other:.3f} ms by {name}"
    if flash <= other:
        ops.cudnn, name = None, "flash"
    return f"{name} ({said})"


def _stored(device: int) -> Stored:
    """What was measured on such a GPU with this cuDNN and these kernels of ours."""
    sources = b"".join(path.read_bytes() for path in sorted(attention.KERNELS.glob("attention*")))
    return Stored("attention", f"{device_info(device).name}-cuDNN-{library()[1]}-{zlib.crc32(sources):08x}")


def _known(shape: Shape, device: int) -> tuple[list[float] | None, str]:
    """The ``_times`` of a run before, if there was one, and cuDNN's version."""
    known = _stored(device).known.get(" ".join(map(str, shape))) or ""
    sound = re.fullmatch(r"\d+\.\d+ \d+\.\d+", known)
    return [float(word) for word in known.split()] if sound else None, library()[1]


def _measured(shape: Shape, ops: Any) -> list[float]:
    """``_times``; BackendUnavailable where cuDNN's kernels do not run, on a GPU that is not lost by it."""
    try:
        return _times(shape, ops)
    except CudaError as error:
        if driver.broken():
            raise
        raise BackendUnavailable(str(error)) from error


def _times(shape: Shape, ops: Any) -> list[float]:
    """Milliseconds of our forward and backward, and of cuDNN's: the least of ``REPEATS``, taken in turns."""
    samples, length, heads, kv_heads, d, dtype = shape
    some = np.random.default_rng(0).standard_normal(1 << 16)

    def new(*shape: int, dtype: Any = dtype) -> Array:
        array = Array.empty(shape, dtype, ops.device, stream=ops.stream, label="attention to be measured")
        return array.copy_from(np.resize(some.astype(array.dtype.numpy), shape), ops.stream)

    tokens, width = samples * length, (heads + 2 * kv_heads) * d
    qkv, d_qkv, out, d_out = (new(tokens, n) for n in (width, width, heads * d, heads * d))
    log_sum_exp, arena, cudnn = new(samples, heads, length, dtype="float32"), ops.make_arena(), ops.cudnn

    def run() -> None:
        ops.attention(qkv, heads, kv_heads, out, log_sum_exp, arena)
        ops.attention_backward(d_out, qkv, out, log_sum_exp, heads, kv_heads, d_qkv, arena)

    least = [math.inf, math.inf]
    for turn in range(2 * (WARM + REPEATS)):
        ops.cudnn = cudnn if turn % 2 else None
        took = streams.milliseconds(run, ops.stream)
        if turn >= 2 * WARM:
            least[turn % 2] = min(least[turn % 2], took)
    ops.cudnn = cudnn
    times = [round(each, 4) for each in least]  # as they are stored, so that later runs choose alike
    _stored(ops.device).keep({" ".join(map(str, shape)): "{:.4f} {:.4f}".format(*times)})
    return times
