"""The cuda dialect of ``kos.train.ops``: kernels compiled by NVRTC and cuBLASLt, queued on one stream.

Activations are bfloat16 or float32 and lie row-major; statistics are float32, and so may gradients of weights
be.  Nothing waits for the device but ``to_host``, and with a fixed arena nothing is allocated: once a pass has
run, the next can be captured into a CUDA graph.  Sums have a fixed order: results repeat bit for bit.

Shapes that a kernel can unroll over are constants of its compilation.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu
from kos.cuda.graphs import capture
from kos.cuda.kernels import load_kernel
from kos.dtypes import DTYPES, DType
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import LEAST_NORM, NEWTON_SCHULZ, Attend, Batch, CudaLoss, Mask, Normalize, Scaled, of_function
from kos.train.ops.cuda import attention, fp8
from kos.train.ops.cuda.cublaslt import Columns, Matmul, row_of
from kos.train.ops.cuda.norms import BLOCK, FLOAT32, NormOps, access_width
from kos.train.ops.cuda.parts import PartsOps
from kos.train.ops.cuda.swiglu import HOPPER, SwigluOps

KERNELS = Path(__file__).parent / "kernels"
DIGIT_BITS, DIGITS, TILE, RUN = 9, 512, 1024, 32  # of embedding.cu
TERMS = 8  # that are added in one pass
INT32 = DTYPES["int32"]


class CudaOps(NormOps, SwigluOps, PartsOps):
    """The operations on ``device``, in the order of ``stream`` (a new one unless given).

    Matrix products use ``algorithms``, to which callers may add before a shape's first use; ``search`` times those
    that are then missing, and adds them.  ``multiple`` and ``sequential`` are those of ``Matmul``.
    """

    one_scale = False

    few_rows, matrix_batch = 16, 1 << 25

    sequential = False
    """Whether products add up the terms of an element one after another."""

    overlap_rows: int | None = 2048
    """Products of fewer rows leave multiprocessors idle: a thread block computes up to 256 rows and 128 columns."""

    def __init__(
        self, device: int, stream: Any = None, *, algorithms: dict[str, str] | None = None, search: bool = False,
        multiple: int | None = None, sequential: bool = False,
    ) -> None:  # fmt: skip
        driver.set_device(device)
        self.device = device
        self.stream = streams.create_stream(device) if stream is None else streams.as_stream(stream)
        self.algorithms = {} if algorithms is None else algorithms
        self.search = search
        self.sequential = sequential
        self.matmul = Matmul(
            device, self.stream, algorithms=self.algorithms, search=search, multiple=multiple, sequential=sequential
        )
        self.multiprocessors = device_info(device).multiprocessors
        self.attention_kernels = attention.fastest_kernels(device)  # from which ``attention.kernel_set`` chooses
        self.hopper = device_info(device).arch == HOPPER
        self.one_scale = device_info(device).compute_capability != fp8.OF_BLOCKS
        optin = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_memory = int(call(cu.cuDeviceGetAttribute, optin, device))  # bytes
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, file: str, name: str, grid: Any, block: int, *arguments: Any, shared: int = 0, **defines: str | int
    ) -> None:
        """Queue the kernel ``name`` of ``file``; arrays are passed by address."""
        key = (file, name, *defines.items())
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = load_kernel(KERNELS / file, name, self.device, **defines)
        values = (
            x.pointer if isinstance(x, Array) else x.encode() if isinstance(x, attention.Tokens) else x
            for x in arguments
        )
        kernel(self.stream, grid, block, *values, shared=shared)

    def update(
        self, rule: Any, weights: Array, gradients: Array, state: Sequence[Array], copy: Array, count: int,
        chunks: Array, groups: Array, scalars: Array, seed: int, **defines: Any,
    ) -> None:  # fmt: skip
        """Queue the kernel of an ``UpdateRule`` (``kos.train.optim``), over ``count`` chunks."""
        operands = (weights, gradients, *state, copy, chunks, groups, scalars, *rule.operands, seed)
        self.launch(f"{rule.kernel}.cu", rule.kernel, count, 256, *operands, **defines)

    # --- memory --------------------------------------------------------------------------------------

    def make_arena(self) -> Arena:
        def allocate(nbytes: int) -> Array:
            return Array.empty(nbytes, np.uint8, self.device, stream=self.stream, label="arena")

        def view(slab: Array, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
            return Array(slab.pointer + offset, shape, dtype, self.device, owner=slab.owner, stream=self.stream)

        return Arena(0, allocate, view)

    @contextmanager
    def step(self, arena: Arena) -> Iterator[None]:
        driver.set_device(self.device)
        try:
            yield
        finally:
            arena.release(0)

    def zeros(self, shape: Any, dtype: Any) -> Array:
        return Array.zeros(shape, dtype, self.device, stream=self.stream)

    def replayable(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # loads kernels, and takes the memory that replays use
        with capture(self.stream) as graph:
            work()
        return partial(graph.replay, self.stream)

    def statistics_dtype(self, dtype: Any) -> DType:
        return FLOAT32

    def indices(self, source: Any, arena: Arena) -> Array:
        if isinstance(source, Array):
            return source
        dtype = FLOAT32 if source.dtype.kind == "f" else INT32
        return arena.take(source.shape, dtype).copy_from(np.ascontiguousarray(source, dtype.numpy), self.stream)

    def empty_columns(self, arena: Arena, rows: int, columns: int, dtype: Any) -> Array:
        return arena.take((rows, columns), dtype)

    def copy(self, source: Array, out: Array) -> None:
        """out = source, of another dtype if need be; one of them may be the host's."""
        if isinstance(out, np.ndarray):
            source.copy_to(out, self.stream)
        elif isinstance(source, np.ndarray) or source.dtype is out.dtype:
            out.copy_from(source, self.stream)
        else:
            self.cast(source, out)

    def to_host(self, array: Array) -> np.ndarray:
        return array.numpy(self.stream)

    def zero(self, out: Array) -> None:
        out.fill_bytes(0, self.stream)

    # --- elementwise ---------------------------------------------------------------------------------

    def add(self, a: Array, b: Array, out: Array) -> None:
        self._elementwise("add", out, a, b, out)

    def add_tree(self, terms: Array, out: Array) -> None:
        """out = ((t0 + t1) + (t2 + t3)) + …; the number of ``terms`` is a power of two, and they are overwritten."""
        while len(terms) > TERMS:
            for i in range(0, len(terms), TERMS):
                self._add_terms(terms[i : i + TERMS], terms[i // TERMS])
            terms = terms[: len(terms) // TERMS]
        self._add_terms(terms, out)

    def _add_terms(self, terms: Array, out: Array) -> None:
        self._elementwise("add_tree", out, terms, out, out.size, SOURCE=terms.dtype.name, TERMS=len(terms))

    def cast(self, source: Array, out: Array) -> None:
        """out = source, of another dtype."""
        self._elementwise("cast", out, source, out, SOURCE=source.dtype.name)

    def gelu(self, x: Array, out: Array, arena: Arena) -> None:
        self._elementwise("gelu", out, x, out)

    def gelu_backward(self, d_out: Array, x: Array, dx: Array, arena: Arena) -> None:
        self._elementwise("gelu_backward", dx, d_out, x, dx)

    def _elementwise(self, name: str, of: Array, *arguments: Any, row: int = 0, **defines: str | int) -> None:
        """A thread computes the elements of ``of`` in one memory access; accesses divide ``row``, or the whole."""
        width = access_width(row or of.size, of, *(x for x in arguments if isinstance(x, Array)))
        every: dict[str, Any] = {"DTYPE": of.dtype.name, "WIDTH": width, "COLUMNS": width, "SOURCE": "float32"}
        every["TERMS"] = 1
        if packs := of.size // width:
            self.launch("elementwise.cu", name, -(-packs // BLOCK), BLOCK, *arguments, packs, **every | defines)

    # --- embedding -----------------------------------------------------------------------------------

    def embedding(self, tokens: Array, table: Array, out: Array, first: int | None = None) -> None:
        vocabulary, columns = table.shape
        width = access_width(columns, out, table)
        otherwise = np.float32(math.nan if first is None else 0)
        if packs := out.size // width:
            self.launch(
                "embedding.cu", "embedding", -(-packs // BLOCK), BLOCK,
                tokens, table, out, first or 0, vocabulary, otherwise, packs,
                DTYPE=out.dtype.name, WIDTH=width, COLUMNS=columns, GRADIENT="float32", ACCUMULATE=0,
            )  # fmt: skip

    def embedding_backward(
        self, d_out: Array, tokens: Array, d_table: Array, accumulate: bool, arena: Arena, first: int | None = None,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        """Sorts the positions by token on the device; see embedding.cu."""
        if not accumulate:
            self.zero(d_table)
        n, columns = d_out.shape
        if not n:
            return
        vocabulary = d_table.shape[0]
        width = access_width(columns, d_out, d_table)
        defines: dict[str, Any]
        defines = {"DTYPE": d_out.dtype.name, "WIDTH": width, "COLUMNS": columns,
                   "GRADIENT": d_table.dtype.name, "ACCUMULATE": int(accumulate)}  # fmt: skip

        def launch(name: str, grid: Any, block: int, *arguments: Any) -> None:
            self.launch("embedding.cu", name, grid, block, *arguments, **defines)

        tiles, runs = -(-n // TILE), -(-n // RUN)
        threads = min(BLOCK, -(-columns // width // 32) * 32)
        grid = (runs, -(-columns // (width * threads)))
        with arena.scope():
            counts = arena.take((tiles, DIGITS), INT32)
            buffers = arena.take((2, 2, n), INT32)
            edges = arena.take((runs, 2, columns), FLOAT32)
            keys, positions, begin, largest = tokens, 0, 0, vocabulary - 1
            if first is not None or padding is not None:  # other tokens keep their places: runs are cut as on one rank
                keys, begin, largest = arena.take((n,), INT32), 1, vocabulary + 1
                none = -1 if padding is None else padding
                launch("count_from", -(-n // BLOCK), BLOCK, tokens, n, first or 0, vocabulary, none, keys)
            for turn, shift in enumerate(range(0, max(1, largest.bit_length()), DIGIT_BITS)):
                keys_out, positions_out = buffers[turn % 2][0], buffers[turn % 2][1]
                launch("digit_counts", tiles, TILE, keys, n, shift, counts)
                launch("scan", 1, DIGITS, counts, tiles)
                launch("scatter", tiles, TILE, keys, positions, n, shift, counts, keys_out, positions_out)
                keys, positions = keys_out, positions_out
            launch("sum_runs", grid, threads, d_out, keys, positions, n, d_table, begin, vocabulary, edges)
            launch("join_runs", grid, threads, keys, n, d_table, begin, vocabulary, edges)

    # --- linear --------------------------------------------------------------------------------------

    def linear(
        self, x: Array, weight: Array, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        self.matmul(x, weight, out, transpose_b=True, c=residual, bias=bias)

    def linear_few(
        self, x: Array, weight: Array, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        rows, columns = x.shape
        features, width = len(weight), access_width(columns, x, weight)
        more = (0 if each is None else each for each in (bias, residual))
        self.launch(
            "linear_few.cu", "linear_few", -(-features // 4), 128, x, weight, *more, out, columns, features,
            DTYPE=x.dtype.name, WIDTH=width, ROWS=rows,
        )  # fmt: skip

    def linear_input_gradient(self, d_out: Array, weight: Array, dx: Array) -> None:
        self.matmul(d_out, weight, dx)

    def bits_of_parts(self, dtype: Any) -> bool:
        return self.sequential and self.hopper and bool(dtype.name == "bfloat16")

    def columns_of(self, x: Array, columns: slice) -> Array:
        return Columns(x, columns)

    def low_rank(
        self, x: Array, weight: Array, out: Array, transposed: bool, factor: float, accumulate: bool, arena: Arena
    ) -> None:
        self.matmul(x, weight, out, transpose_b=transposed, c=out if accumulate else None, alpha=factor)

    def quantize(self, x: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
        fp8.quantize(self, x, None, rows, columns, arena)

    def quantize_rms_norm(
        self, x: Array, norm: Normalize, rstd: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
    ) -> None:
        self.normalize(x, norm, None, rstd)
        fp8.quantize(self, x, norm.weight, rows, columns, arena, rstd)

    def quantize_swiglu(self, gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
        fp8.quantize(self, None, gate_up, rows, columns, arena)

    def quantize_swiglu_backward(
        self, d_out: Array, gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
    ) -> None:
        fp8.quantize(self, d_out, gate_up, rows, columns, arena)

    def scaled_product(
        self, a: Scaled, b: Scaled, out: Array, residual: Array | None, bias: Array | None, arena: Arena,
        rounded: bool = True,
    ) -> None:  # fmt: skip
        self.matmul(a.values, b.values, out, transpose_b=True, c=residual, bias=bias, scales=(a.scales, b.scales))

    # --- rope ----------------------------------------------------------------------------------------

    def rope_tables(
        self, frequencies: Sequence[float], positions: Sequence[int], dtype: Any, length: float = 1.0
    ) -> tuple[Array, Array]:
        """cos and sin (T, d / 2), in float32 whatever the activations are."""
        angles = np.multiply.outer(np.asarray(positions, np.float64), np.asarray(frequencies, np.float64))
        cos, sin = (
            Array.from_numpy(table.astype(np.float32), self.device, stream=self.stream, label="rope tables")
            for table in (length * np.cos(angles), length * np.sin(angles))
        )
        return cos, sin

    def rope(self, qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
        self._rotate(qkv, tables, head_dim, heads, 1)

    def rope_backward(self, d_qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
        self._rotate(d_qkv, tables, head_dim, heads, -1)

    def _rotate(self, qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, sign: int) -> None:
        rows, columns = qkv.shape
        width = access_width(math.gcd(head_dim // 2, columns), qkv)
        if packs := rows * heads * (head_dim // 2) // width:
            self.launch(
                "rope.cu", "rope", -(-packs // BLOCK), BLOCK, qkv, *tables, len(tables[0]), packs,
                DTYPE=qkv.dtype.name, WIDTH=width, HALF=head_dim // 2, HEADS=heads, ROW=columns, SIGN=sign,
            )  # fmt: skip

    # --- attention -----------------------------------------------------------------------------------

    def attention_mask(
        self, document_starts: Array | None, window: int | None, mask: Mask, positions: Array | None = None,
        key_positions: Array | None = None,
    ) -> None:  # fmt: skip
        attention.attention_mask(document_starts, window, mask, positions, key_positions, self)

    def attention(self, attend: Attend, arena: Arena) -> None:
        attention.attention(attend, self)

    def empty_cache(self, sequences: int, kv_heads: int, head_dim: int, capacity: int, dtype: Any) -> Array:
        """(B, 2, K, capacity, d)."""
        shape = (sequences, 2, kv_heads, capacity, head_dim)
        return Array.empty(shape, dtype, self.device, stream=self.stream, label="the KV cache")

    def append_to_cache(self, attend: Attend, cache: Array, positions: Array) -> None:
        qkv, (_, _, kv_heads, capacity, head_dim) = attend.qkv, cache.shape
        keys = qkv.pointer + attend.heads * head_dim * qkv.dtype.itemsize
        width = access_width(math.gcd(head_dim, qkv.shape[1]), qkv, cache)
        packs = len(qkv) * 2 * kv_heads * head_dim // width
        more = (keys, cache, positions, kv_heads, attend.length, capacity, packs)
        self._cache("append", -(-packs // BLOCK), BLOCK, attend, *more, WIDTH=width)

    def attention_to_cache(
        self, attend: Attend, cache: Array, positions: Array, window: int | None, arena: Arena
    ) -> None:
        (_, _, kv_heads, capacity, head_dim), heads, rows = cache.shape, attend.heads, len(cache) * attend.heads
        chunks, sizes = -(-capacity // attention.CHUNK), (heads, kv_heads, capacity, window or 0)
        with arena.scope():
            partial = arena.take((rows, chunks, head_dim + 2), FLOAT32)
            operands = (attend.qkv, cache, positions, partial)
            self._cache("attend", (chunks, rows), attention.CHUNK, attend, *operands, *sizes)
            self._cache("merge", rows, 128, attend, partial, positions, attend.out, heads, chunks, window or 0)

    def _cache(self, name: str, grid: Any, block: int, attend: Attend, *arguments: Any, **defines: int) -> None:
        every: dict[str, Any] = attention.macros_of(attend)
        every |= {"WIDTH": 1, "ROW": attend.qkv.shape[1], "CHUNK": attention.CHUNK, **defines}
        self.launch("cache.cu", name, grid, block, *arguments, **every)

    def attention_backward(
        self, attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, d_kv: Array | None = None
    ) -> None:
        if d_kv is not None:
            self.zero(d_kv)
        attention.attention_backward(attend, d_out, d_qkv, arena, self, d_kv)

    def keys_and_values(self, attend: Attend, arena: Arena) -> Array:
        kv = arena.take((len(attend.qkv), 2 * attend.kv_heads * attend.head_dim), attend.qkv.dtype)
        self._last_columns("last_columns", attend.qkv, kv)
        return kv

    def add_keys_and_values(self, d_kv: Array, d_qkv: Array) -> None:
        self._last_columns("add_to_last_columns", d_qkv, d_kv)

    def _last_columns(self, name: str, x: Array, y: Array) -> None:
        columns = y.shape[1]
        self._elementwise(name, y, x, y, x.shape[1], row=math.gcd(columns, x.shape[1]), COLUMNS=columns)

    # --- cross_entropy -------------------------------------------------------------------------------

    def count_targets(self, targets: Array, out: Array) -> None:
        self._entropy("count_targets", 1, 1024, targets, out, targets.size)

    def cross_entropy(self, logits: Array, targets: Array, count: Array | None, losses: Array, arena: Arena) -> None:
        (rows, vocabulary), backward = logits.shape, int(count is not None)
        width = access_width(vocabulary, logits)
        itemsize = logits.dtype.itemsize
        # Two blocks on a multiprocessor where both rows fit its shared memory, one of twice the threads else.
        half = self.shared_memory // 2 - 1024
        room, most = (half, 512) if vocabulary * itemsize <= half else (self.shared_memory - 1024, 1024)
        packs = -(-vocabulary // width)
        threads = min(most, _power_of_two(packs))
        slots = min(-(-packs // threads), room // (16 * threads)) if backward and width > 1 else 0
        if rows:
            self._entropy(
                "cross_entropy", min(rows, self.multiprocessors * (1024 // threads)), threads,
                logits, targets, 0 if count is None else count, losses, rows,
                DTYPE=logits.dtype.name, WIDTH=width, BACKWARD=backward, VOCABULARY=vocabulary,
                THREADS=threads, SLOTS=slots, shared=slots * threads * 16,
            )  # fmt: skip

    def scale_rows(self, x: Array, targets: Array, weights: Array | None, count: Array | None) -> None:
        operands = (x, targets, 0 if weights is None else weights, 0 if count is None else count, x.shape[1])
        self._entropy("scale_rows", len(x), 256, *operands, DTYPE=x.dtype.name)

    def custom_loss(self, loss: Any, logits: Array, batch: Batch, losses: Array, backward: bool) -> None:
        if isinstance(loss, CudaLoss):
            path, weights = source_file(loss.source).name, 0 if batch.weights is None else batch.weights
            operands = logits, batch.targets, weights, losses, logits.shape[1]
            self.launch(path, "loss", len(logits), loss.threads, *operands, DTYPE=logits.dtype.name)
            return
        for given, out in zip(of_function(loss(logits, batch), losses, logits), (losses, logits), strict=True):
            array = given if isinstance(given, Array) else Array.from_dlpack(given, stream=self.stream)
            if array.pointer != out.pointer and (backward or out is losses):
                self.copy(array, out)

    def logit_statistics(self, logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
        self._of_parts("logit_statistics", logits, 0, row_of(logits), targets, first, out)

    def cross_entropy_of_parts(
        self, logits: Array, targets: Array, first: int, statistics: Array, count: Array | None, losses: Array,
        arena: Arena,
    ) -> None:  # fmt: skip
        operands = (targets, first, statistics, len(statistics), 0 if count is None else count, losses)
        self._of_parts("cross_entropy_of_parts", logits, int(count is not None), *operands)

    def _of_parts(self, name: str, logits: Array, backward: int, *operands: Any) -> None:
        rows, vocabulary = logits.shape
        width = access_width(math.gcd(vocabulary, row_of(logits)), logits)
        threads = min(512, _power_of_two(-(-vocabulary // width)))
        if rows:
            self._entropy(
                name, rows, threads, logits, *operands,
                DTYPE=logits.dtype.name, WIDTH=width, BACKWARD=backward, VOCABULARY=vocabulary, THREADS=threads,
            )  # fmt: skip

    def mean_loss(self, losses: Array, count: Array, out: Array) -> None:
        self._entropy("mean_loss", 1, 1024, losses, count, out, losses.size)

    # --- of optimizers -------------------------------------------------------------------------------

    def orthogonalize(self, x: Array, arena: Arena) -> None:
        """All matrices at once: the products of small ones leave multiprocessors idle."""
        count, rows, columns = x.shape
        tall, least = rows > columns, min(rows, columns)
        size = rows * columns
        blocks = max(1, min(64, size // 4096))
        with arena.scope():
            y = arena.take(x.shape, x.dtype)
            gram, poly = (arena.take((count, least, least), x.dtype) for _ in range(2))
            partial = arena.take((count, blocks), FLOAT32)
            for name, *more in (("frobenius",), ("normalize", np.float32(LEAST_NORM), y)):
                self.launch(
                    "muon.cu", name, (blocks, count), 256, x, size, partial, *more,
                    DTYPE=x.dtype.name, MASTER="float32", GRADIENT="float32", WEIGHT="float32", COPY=0,
                )  # fmt: skip
            x, y = y, x  # so that the last of an odd number of steps writes x
            for a, b, c in NEWTON_SCHULZ:
                self.matmul(x, x, gram, transpose_a=tall, transpose_b=not tall)
                self.matmul(gram, gram, poly, c=gram, alpha=c, beta=b)
                left, right = (x, poly) if tall else (poly, x)
                self.matmul(left, right, y, c=x, beta=a)
                x, y = y, x

    def _entropy(
        self, name: str, grid: int, block: int, *arguments: Any, shared: int = 0, **defines: str | int
    ) -> None:
        every: dict[str, Any]
        every = {"DTYPE": "float32", "WIDTH": 4, "BACKWARD": 0, "VOCABULARY": 1, "THREADS": 32, "SLOTS": 0, **defines}
        self.launch("cross_entropy.cu", name, grid, block, *arguments, shared=shared, **every)


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` and a warp."""
    return max(32, 1 << (size - 1).bit_length())


@cache
def source_file(source: str) -> Any:
    """A file with a kernel of a ``CudaLoss``, which exists as long as this process."""
    file = tempfile.NamedTemporaryFile("w", prefix="kos-loss-", suffix=".cu")  # noqa: SIM115
    file.write(f'#include "{KERNELS / "vectors.cuh"}"\n#line 1 "loss"\n{source}')
    file.flush()
    return file
