"""Matrix products by cuBLASLt: row-major operands, any transposition, optionally added to the output.

A plan is made once per shape: descriptors, and the algorithm.  That is cuBLASLt's first suggestion, or with
``search`` the fastest of the first ``CANDIDATES``, timed on the real operands.  Timing is not reproducible, a table
of what it chose is: it goes to every rank, and to disk for every later process.  Large products run at the GPU's
power limit, its clock as low as their energy demands, which depends on the algorithm and on the operands' bits.  So
those that are about as fast in brief are compared when each has run until the clock has settled.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.errors import BackendUnavailable, InvalidArgument, install
from kos.files import cache_folder, replace_file
from kos.memory.array import Array
from kos.train.ops import SCALE_BLOCK as BLOCK

log = logging.getLogger(__name__)

WORKSPACE = 32 << 20  # bytes; what cuBLAS itself takes on Hopper
CANDIDATES = 12
REPEATS = 5  # brief runs of each
NEAR = 1.15  # times the least brief time: what takes longer is not looked at for long
FINALISTS = 4  # at most of those near, each for SETTLE and MEASURE: a shape takes about a second at most
SHORT = 0.1  # ms: what the host may not queue as fast as it runs is chosen by brief runs
SETTLE, MEASURE = 80, 80  # ms: of runs in which the GPU finds its clock under the power limit, then of those that count
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t), by cuBLASLt's promise to be stored as it is
_DATA_TYPES = {"float32": 0, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29}  # cudaDataType_t
_SCALED = {"float8_e4m3fn", "float8_e5m2"}
_COMPUTE_32F, _SCALE_32F = 68, 0


class Plan(NamedTuple):
    """The descriptors of a call of one shape for cuBLASLt."""

    operation: int
    layouts: tuple[int, int, int]
    algorithm: np.ndarray[Any, Any]


class Columns(Array):
    """Some columns of a matrix, as an operand of ``Matmul``: ``row`` elements lie between the beginnings of rows."""

    __slots__ = ("row", "start")

    def __init__(self, x: Array, columns: slice) -> None:
        pointer, shape = x.pointer + columns.start * x.dtype.itemsize, (x.shape[0], columns.stop - columns.start)
        super().__init__(pointer, shape, x.dtype, x.device, owner=x.owner, stream=x.stream)
        self.row, self.start = row_of(x), getattr(x, "start", 0) + columns.start

    def __getitem__(self, index: Any) -> Array:
        start, stop, _ = index.indices(self.shape[0])
        first = self.pointer + (start * self.row - self.start) * self.dtype.itemsize
        rows = self._view(first, (stop - start, self.row), self.dtype)
        return Columns(rows, slice(self.start, self.start + self.shape[1]))

    def reshape(self, *shape: Any) -> Array:
        raise InvalidArgument(f"reshape: expected rows that follow one another in memory, got {self}")


def row_of(x: Any) -> int:
    """How many elements lie between the beginnings of two rows."""
    return int(getattr(x, "row", x.shape[-1]))


class Matmul:
    """out (M, N) = alpha op(a) op(b) + beta c + bias, in the order of one stream; fp32 inside, of any operands.

    Operands of three dimensions are several matrices each, of as many products.

    ``algorithms`` holds the algorithm of each shape; with ``search`` missing ones are timed and added.  ``multiple``:
    all operands begin at multiples of this many elements, and the choice of an algorithm depends on shapes alone: on no
    address, and not on the rows of which an operand is some columns.  ``sequential``: only algorithms that add up the
    terms of an element one after another, not in several parts.  In bfloat16, on Hopper, an element then has the same
    bits whatever the shape of the output (``tests/train/test_device_ops.py``).
    """

    def __init__(
        self, device: int, stream: Any, *, algorithms: dict[str, str] | None = None, search: bool = False,
        multiple: int | None = None, sequential: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.multiple, self.sequential = device, multiple, sequential
        self.stream = streams.handle(stream)
        self.algorithms, self.search = {} if algorithms is None else algorithms, search
        self.lt = library()
        with driver.on_device(device):
            self._handle = self.lt.create()
        self.workspace = Array.empty(WORKSPACE, np.uint8, device, stream=stream, label="cuBLASLt workspace")
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._constants: dict[float, np.ndarray[Any, Any]] = {}

    def __call__(
        self, a: Array, b: Array, out: Array, *, transpose_a: bool = False, transpose_b: bool = False,
        c: Array | None = None, bias: Array | None = None, alpha: float = 1.0, beta: float = 1.0,
        scales: tuple[Array, Array] | None = None, fast: bool = False,
    ) -> None:  # fmt: skip
        """``a`` (M, K), or (K, M) if transposed; ``b`` (K, N) likewise; ``c`` like ``out``, and may be it.

        ``bias`` (N,), of the dtype of ``out``, is added to each row.
        Operands of 8 bits need ``scales`` of both (``scale_mode`` has their shapes), and ``transpose_b`` alone: Hopper
        has no other order of memory.  ``fast`` lets tensor cores add up their products with fewer bits.
        """
        if not out.size:
            return
        key = (a.shape, b.shape, a.dtype, out.dtype, transpose_a, transpose_b, c is not None,
               *(self._alignment(x) for x in (a, b, out if c is None else c, out)),
               *(() if bias is None else ("bias",)), *(("fast",) if fast else ()),
               *(row_of(x) for x in (a, b, out) if row_of(x) != x.shape[-1]),
               *(() if scales is None else (b.dtype, *(scale.shape for scale in scales))))  # fmt: skip
        plan = self._plans.get(key)
        try:
            if plan is None:
                plan = self._plans[key] = self._plan(key, a, b, out, transpose_a, transpose_b, c, bias, scales, fast)
            elif bias is not None or scales is not None:
                self._set_pointers(plan.operation, bias, scales)
            self._run(plan, plan.algorithm.ctypes.data, a, b, c, out, alpha, beta)
        except self.lt.cuBLASLtError as error:
            raise driver.library_error("a matmul by cuBLASLt", error) from error

    def _run(
        self, plan: Plan, algorithm: int, a: Array, b: Array, c: Array | None, out: Array, alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:  # fmt: skip
        # Row-major out is column-major out^T = op(b)^T op(a)^T: the operands change places, nothing is moved.
        first, second, result = plan.layouts
        self.lt.matmul(
            self._handle, plan.operation, self._constant(alpha), b.pointer, first, a.pointer, second,
            self._constant(0.0 if c is None else beta), out.pointer if c is None else c.pointer, result,
            out.pointer, result, algorithm, self.workspace.pointer, WORKSPACE, self.stream,
        )  # fmt: skip

    def _constant(self, value: float) -> int:
        """Its address on the host."""
        return int(self._constants.setdefault(value, np.array([value], np.float32)).ctypes.data)

    def _set(self, operation: int, name: str, value: int, kind: Any) -> None:
        content: np.ndarray[Any, Any] = np.array([value], kind)
        attribute = getattr(self.lt.MatmulDescAttribute, name)
        self.lt.matmul_desc_set_attribute(operation, attribute, content.ctypes.data, content.nbytes)

    def _set_pointers(self, operation: int, bias: Array | None, scales: tuple[Array, Array] | None) -> None:
        """Those of operands that a plan does not take at each call."""
        if bias is not None:
            self._set(operation, "BIAS_POINTER", bias.pointer, np.uint64)
        if scales is not None:  # as the operands, they change places
            self._set(operation, "B_SCALE_POINTER", scales[0].pointer, np.uint64)
            self._set(operation, "A_SCALE_POINTER", scales[1].pointer, np.uint64)

    def _plan(
        self, key: tuple[Any, ...], a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool,
        c: Array | None, bias: Array | None, scales: tuple[Array, Array] | None, fast: bool,
    ) -> Plan:  # fmt: skip
        m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
        k_of_b, n = b.shape[:-3:-1] if transpose_b else b.shape[-2:]
        expected = [(*a.shape[:-2], m, n), (*a.shape[:-2], *b.shape[-2:]), k]
        if [out.shape, b.shape, k_of_b] != expected or (
            c is not None and (c.shape, c.dtype) != (out.shape, out.dtype)
        ):
            raise InvalidArgument(
                f"matmul: expected (M, K) (K, N) -> (M, N), got {a.shape}{'^T' * transpose_a} "
                f"{b.shape}{'^T' * transpose_b} -> {out.shape}"
            )
        _check_types(a, b, out, scales is not None, transpose_b and not transpose_a)
        lt = self.lt
        operation = lt.matmul_desc_create(_COMPUTE_32F, _SCALE_32F)
        self._set(operation, "TRANSA", transpose_b, np.int32)
        self._set(operation, "TRANSB", transpose_a, np.int32)
        if bias is not None:
            if (bias.shape, bias.dtype) != ((n,), out.dtype):
                raise InvalidArgument(f"matmul: expected a bias {out.dtype}({n},), got {bias.dtype}{bias.shape}")
            self._set(operation, "EPILOGUE", lt.Epilogue.BIAS, np.uint32)
        if fast:
            self._set(operation, "FAST_ACCUM", 1, np.int8)
        for side, x, scale in zip("BA", (a, b), scales or (), strict=False):
            if mode := scale_mode(scale.shape, *x.shape):
                self._set(operation, f"{side}_SCALE_MODE", mode, np.int32)
        self._set_pointers(operation, bias, scales)
        first, second, result = (self._layout(x) for x in (b, a, out))
        plan = Plan(operation, (first, second, result), np.zeros(ALGORITHM_BYTES, np.uint8))
        if self.multiple is not None:
            first, second, result = (self._layout(x, x.shape[-1]) for x in (b, a, out))
            apart = plan._replace(layouts=(first, second, result))
            algorithm = self._candidates(apart, a, b, out if c is None else c, out)[0]
            if not self._usable(plan, algorithm):
                raise BackendUnavailable(
                    f"cuBLASLt's algorithm for {a} {b} -> {out} does not take some of their columns"
                )
            return plan._replace(algorithm=algorithm)
        name = " ".join(map(str, key))
        known = _algorithm(self.algorithms.get(name))
        if known is not None:
            if self._usable(plan, known):
                return plan._replace(algorithm=known)
            log.warning("cuBLASLt does not take the stored algorithm of %s: another run's bits may differ", name)
        candidates = self._candidates(plan, a, b, out if c is None else c, out)
        if len(candidates) == 1:  # all that is asked for without ``search``
            return plan._replace(algorithm=candidates[0])
        best = self._fastest(plan, candidates, a, b, c, out)
        self.algorithms[name] = best.tobytes().hex()
        return plan._replace(algorithm=best)

    def _layout(self, x: Array, row: int | None = None) -> int:
        rows, columns = x.shape[-2:]
        layout = int(self.lt.matrix_layout_create(_DATA_TYPES[x.dtype.name], columns, rows, row or row_of(x)))
        if len(x.shape) == 3:
            of = self.lt.MatrixLayoutAttribute
            for attribute, value in (
                (of.BATCH_COUNT, np.array(x.shape[:1], np.int32)),
                (of.STRIDED_BATCH_OFFSET, np.array([rows * columns], np.int64)),
            ):
                self.lt.matrix_layout_set_attribute(layout, attribute, value.ctypes.data, value.nbytes)
        return layout

    def _candidates(self, plan: Plan, a: Array, b: Array, c: Array, out: Array) -> list[np.ndarray[Any, Any]]:
        """cuBLASLt's suggestions, the best one first."""
        lt = self.lt
        preference = lt.matmul_preference_create()
        limits: dict[str, Any] = {"MAX_WORKSPACE_BYTES": np.array([WORKSPACE], np.uint64)}
        if self.sequential:
            limits["REDUCTION_SCHEME_MASK"] = np.array([lt.ReductionScheme.NONE], np.uint32)
        elif out.dtype.itemsize < 4:  # parts of a sum over K must not be rounded before they are added
            limits["REDUCTION_SCHEME_MASK"] = np.array([lt.ReductionScheme.COMPUTE_TYPE], np.uint32)
        for which, operand in zip("ABCD", (b, a, c, out), strict=True):
            limits[f"MIN_ALIGNMENT_{which}_BYTES"] = np.array([self._alignment(operand)], np.uint32)
        for name, value in limits.items():
            attribute = getattr(lt.MatmulPreferenceAttribute, name)
            lt.matmul_preference_set_attribute(preference, attribute, value.ctypes.data, value.nbytes)
        found = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        first, second, result = plan.layouts
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, plan.operation, first, second, result, result, preference,
                CANDIDATES if self.search else 1, found.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        finally:
            lt.matmul_preference_destroy(preference)
        found = found[: count[0]]
        found = found[found["state"] == 0]  # CUBLAS_STATUS_SUCCESS: the fields of others are undefined
        if not found.size:
            raise BackendUnavailable(f"cuBLASLt has no algorithm for {a} {b} -> {out}")
        return [row[:ALGORITHM_BYTES].copy() for row in found.view(np.uint8).reshape(found.size, -1)]

    def _alignment(self, array: Array) -> int:
        """The largest power of two up to 256 that divides addresses and the length of a row, in bytes."""
        at = array.pointer if self.multiple is None else self.multiple * array.dtype.itemsize
        if array.dtype.itemsize == 1:  # an arena's or a store's own, not a part of a layout
            at = 0
        row = row_of(array) | getattr(array, "start", 0) if self.multiple is None else array.shape[-1]
        bits = at | row * array.dtype.itemsize | 256
        if (array.pointer | row_of(array) * array.dtype.itemsize) % (bits & -bits):
            raise InvalidArgument(f"matmul: expected rows that begin at multiples of {bits & -bits} bytes, got {array}")
        return bits & -bits

    def _usable(self, plan: Plan, algorithm: np.ndarray[Any, Any]) -> bool:
        """Whether cuBLASLt accepts a stored algorithm."""
        first, second, result = plan.layouts
        answer = np.zeros(1, self.lt.matmul_heuristic_result_dtype)
        try:
            self.lt.matmul_algo_check(
                self._handle, plan.operation, first, second, result, result,
                algorithm.ctypes.data, answer.ctypes.data,
            )  # fmt: skip
        except self.lt.cuBLASLtError:
            return False
        return int(answer.view(np.uint64)[ALGORITHM_BYTES // 8]) <= WORKSPACE

    def _fastest(
        self, plan: Plan, candidates: list[np.ndarray[Any, Any]], a: Array, b: Array, c: Array | None, out: Array
    ) -> np.ndarray[Any, Any]:
        shape = (*out.shape[:-1], row_of(out))
        scratch = Array.empty(shape, out.dtype, self.device, stream=self.stream, label="matmul search")

        def run(algorithm: np.ndarray[Any, Any]) -> None:
            self._run(plan, algorithm.ctypes.data, a, b, c, scratch)

        def runs(algorithm: np.ndarray[Any, Any]) -> bool:
            try:
                streams.milliseconds(functools.partial(run, algorithm), self.stream)
            except self.lt.cuBLASLtError:  # other algorithms will run
                if driver.broken():
                    raise
                return False
            return True

        candidates = [*filter(runs, candidates)] or candidates
        return candidates[fastest([functools.partial(run, each) for each in candidates], self.stream)]


def fastest(runs: Sequence[Callable[[], None]], stream: Any) -> int:
    """The index of the fastest of ``runs``: a long test compares those that are nearly the fastest in a short test.

    The runs of the short test take turns, so that none of them has a cooler GPU than the others.
    """

    def each(run: Callable[[], None], count: int = 1) -> float:
        """Milliseconds of one run, if ``count`` of them are queued one after another."""

        def all_of_them() -> None:
            for _ in range(count):
                run()

        return streams.milliseconds(all_of_them, stream) / count

    def lasting(index: int) -> float:
        each(runs[index], math.ceil(SETTLE / brief[index]))
        return each(runs[index], math.ceil(MEASURE / brief[index]))

    brief = np.min([[each(run) for run in runs] for _ in range(REPEATS)], axis=0)
    first, *others = (int(index) for index in np.argsort(brief, kind="stable")[:FINALISTS])
    near = [index for index in others if brief[index] <= NEAR * brief[first]]
    if brief[first] < SHORT or not near:
        return first
    return min(first, *near, key=lasting)


def scale_mode(shape: tuple[int, ...], rows: int, columns: int) -> int:
    """The cublasLtMatmulMatrixScale_t of scales of this shape, of an 8-bit operand (rows, columns).

    0: (1,), one for all. 3: (rows,), one a row. 4: (columns / 128, rows), one for 128 neighbours in a row. 5: (rows /
    128, columns / 128), one for 128 x 128; the second is rounded up to a multiple of 4. 3 to 5 need Hopper and cuBLAS
    12.9, and two operands of 5 are not multiplied.
    """
    along, across = -(-columns // BLOCK), -(-rows // BLOCK)
    modes = {(1,): 0, (rows,): 3, (along, rows): 4, (across, -(-along // 4) * 4): 5}
    if shape not in modes:
        raise InvalidArgument(f"matmul: expected scales of one of the shapes {', '.join(map(str, modes))}, got {shape}")
    return modes[shape]


def _check_types(a: Array, b: Array, out: Array, scaled: bool, along_sum: bool) -> None:
    """InvalidArgument for dtypes, or an order of 8-bit operands, that no product has."""
    of_a, of_b, of_out = a.dtype.name, b.dtype.name, out.dtype.name
    narrow = of_a in _SCALED and of_b in _SCALED
    right = of_out in ("float32", "bfloat16") and (
        scaled and along_sum and "float8_e4m3fn" in (of_a, of_b) if narrow
        else not scaled and a.dtype is b.dtype and of_a in ("float32", "bfloat16")
    )  # fmt: skip
    if not right:
        scales = f"{'with' if scaled else 'without'} scales"
        raise InvalidArgument(
            "matmul: expected float32 or bfloat16, or float8 that lies along the sum, with scales, "
            f"got {of_a}, {of_b} -> {of_out} {scales}"
        )
    if narrow and (sizes := [size for size in (*a.shape, *b.shape) if size % 16]):
        raise InvalidArgument(f"matmul: expected sizes of float8 operands that are multiples of 16, got {sizes[0]}")


@functools.cache
def library() -> Any:
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailable(f"cuBLASLt is not installed: {install('cuda')} ({reason})") from error
    return cublasLt


def stored_algorithms(device: int) -> Stored:
    """Those found on such a GPU, for this cuBLASLt; under the name of the rule, so that no other's are taken over."""
    return Stored("matmul-lasting", f"{device_info(device).name}-{library().get_version()}")


def _algorithm(text: str | None) -> np.ndarray[Any, Any] | None:
    try:
        algorithm = np.frombuffer(bytes.fromhex(text or ""), np.uint8).copy()
    except ValueError:
        return None
    return algorithm if algorithm.size == ALGORITHM_BYTES else None


class Stored:
    """The measurements, by shape: one JSON file per GPU model and versions, shared by the user's processes.

    One that cannot be read or written is reported once, by a warning.
    """

    _reported: ClassVar[set[Path]] = set()

    def __init__(self, kind: str, name: str) -> None:
        self._path = cache_folder() / kind / f"{name.replace(' ', '_')}.json"
        self.known = self._read()

    def keep(self, found: Mapping[str, str]) -> None:
        """Add to ``known`` and to the file.

        Entries that other processes have stored meanwhile are kept, and are added to ``known``.  So runs that measure
        at the same time, and later runs, compute the same bits.  ``found`` replaces only what was known before.
        """
        before, self.known = self.known, {**self.known, **found}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path.with_suffix(".lock"), "ab") as lock:  # closing it unlocks it
                with suppress(OSError):  # the file system may have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                self.known.update(self._read().items() - before.items())
                replace_file(self._path, json.dumps(self.known).encode())
        except OSError as error:
            self._warn(error)

    def _read(self) -> dict[str, str]:
        try:
            return {str(key): str(value) for key, value in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            self._warn(error)
            return {}

    def _warn(self, error: Exception) -> None:
        if self._path not in self._reported:
            log.warning(
                "cache: %s cannot be used, measuring anew: another run may choose otherwise, with other bits: %s",
                self._path, error,
            )  # fmt: skip
            self._reported.add(self._path)
