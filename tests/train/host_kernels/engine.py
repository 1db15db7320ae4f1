"""CudaDevice on the emulated device, its ranks threads with a communicator over the mock backend.

A stream runs what it is given at once, unless it is being captured: then it is written down, and run at each
replay.  What CUDA refuses during a capture is refused here: allocating, freeing, waiting, copies from pageable memory.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kos.dtypes import DTYPES
from kos.memory import array as array_module
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.device import cuda as engine_module
from kos.train.device import dry_run
from kos.train.ops import Attend
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import CudaOps
from kos.train.ops.cuda.cublaslt import Columns
from kos.train.ops.numpy_optimizer import CHUNKS, KERNELS, SCALARS
from kos.train.ops.protocol import Ops
from kos.train.optim import CHUNK
from tests.host_compiler import COMPILER
from tests.train.host_kernels import emulator
from tests.train.host_kernels.emulator import HostOps

_thread, _lock, _captures = threading.local(), threading.Lock(), 0
BFLOAT16 = DTYPES["bfloat16"].numpy
MEMORY = 8 << 30  # bytes free of the emulated device


def on_device(work):
    """Run ``work``, or write it down for the graph that is being captured."""
    written = getattr(_thread, "captured", None)
    if written is None:
        work()
    else:
        written.append(work)


def capture_of_rank():
    """What this rank has written down of the graph that it captures; None if it captures none."""
    return getattr(_thread, "captured", None)


def captured():
    return capture_of_rank() is not None


def not_captured(what):
    assert not captured(), f"{what} while a graph is captured"


def _capturing(more):
    """No garbage is collected while any rank captures, as ``kos.cuda.graphs.capture`` has it."""
    global _captures
    with _lock:
        _captures += more
        (gc.disable if _captures else gc.enable)()


class Capture:
    def __init__(self, stream):
        self.graph = SimpleNamespace(close=lambda: None)

    def __enter__(self):
        _capturing(1)
        written = _thread.captured = []
        self.graph.replay = lambda stream: [work() for work in written]
        self.graph.size = lambda: len(written)
        return self.graph

    def __exit__(self, kind, *_):
        _thread.captured = None
        _capturing(-1)
        assert kind or not pending(), "a captured stream forked and was not joined"
        assert not _freed(), f"memory freed while a graph is captured, bytes: {_freed()}"


class Event:
    clock = staticmethod(time.perf_counter)

    def __init__(self, device, *, timed=False):
        self.timed, self.time, self.recorded = timed, None, False

    def record(self, stream):
        not_captured("an event of the host's")
        self.time, self.recorded = self.clock() if self.timed else None, True

    def hold(self, stream):
        not_captured("an event of the host's")
        assert self.recorded, "a stream that waits for an event of no work"

    def seconds_since(self, before):
        assert self.timed and before.timed
        return self.time - before.time

    def done(self):
        return True

    def synchronize(self):
        not_captured("waiting")


COLUMN_MAJOR = {
    f"{name}{backward}"
    for name in ("rope", "attention", "swiglu", "gelu", "quantize_swiglu")
    for backward in ("", "_backward")
}  # fmt: skip
MEMORY_OF = {"make_arena", "zeros", "step", "statistics_dtype", "indices", "empty_columns", "copy", "to_host", "zero",
             "columns_of", "add_tree", "bits_of_parts", "product_of_parts"}  # fmt: skip
OPERATIONS = {name for name in vars(Ops) if not name.startswith("_")} - MEMORY_OF - {"rope_tables"}
# The kernels': their arrays lie otherwise than numpy's.
OPERATIONS -= {"keys_and_values", "add_keys_and_values", "empty_cache", "append_to_cache", "attention_to_cache"}
OPERATIONS -= {"custom_loss"}  # the device's, of the program's arrays or kernel


class QueuedOps(HostOps):
    """The model's operations are numpy's, and what optimizers have in common (fibers are slow); update rules are the
    host's.  All go the way of ``on_device``."""

    def __init__(self, sequential=False):
        super().__init__()
        self.sequential = sequential

    def __getattribute__(self, name):
        if name not in OPERATIONS:
            return object.__getattribute__(self, name)
        operations = _InOrder if self.sequential and name in vars(_InOrder) else reference
        return lambda *arguments: on_device(_numpy(name, arguments, operations))

    def bits_of_parts(self, dtype):
        return self.sequential and dtype.name == "bfloat16"  # by ``_InOrder``

    def launch(self, file, name, grid, block, *arguments, **options):
        launch = super().launch
        if file == "optimizer.cu":
            on_device(lambda: _OPTIMIZER[name](*(on_host(x) if isinstance(x, Array) else x for x in arguments)))
        else:
            on_device(lambda: launch(file, name, grid, block, *arguments, **options))

    def update(self, rule, weights, gradients, state, copy, count, *tables, **options):
        *arrays, seed = tables

        def run():
            w, g, c, *of_chunks = map(on_host, (weights, gradients, copy, *arrays))
            _update(rule, w, g, [on_host(x) for x in state], c, *of_chunks, seed)

        on_device(run)


class _InOrder:
    """The products of an algorithm that adds the terms of an element one after another, whatever the shape."""

    def linear(x, weight, out, residual=None, bias=None):
        out[...] = _product(x, weight.T)
        for more in (bias, residual):
            if more is not None:
                out += more

    def linear_input_gradient(d_out, weight, dx):
        dx[...] = _product(d_out, weight)

    def linear_weight_gradient(d_out, x, d_weight, accumulate, arena, outputs=None):
        d_weight[...] = _product(d_out.T, x) + (d_weight if accumulate else 0)

    def low_rank(x, weight, out, transposed, factor, accumulate, arena):
        out[...] = factor * _product(x, weight.T if transposed else weight) + (out if accumulate else 0)


def _product(a, b):
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total


def _numpy(name, arguments, operations=reference):
    """The work of an operation: numpy's, on copies of those arrays that do not lie in memory as it wants."""
    arrays = {}
    columns = name in COLUMN_MAJOR

    def there(x):
        if isinstance(x, tuple):
            return getattr(x, "_make", tuple)(map(there, x))
        if isinstance(x, Attend):
            arrays_of = {name: there(getattr(x, name)) for name in ("qkv", "out", "log_sum_exp", "mask")}
            return replace(x, **arrays_of, kv=x.kv and there(x.kv).T)
        if isinstance(x, Arena):
            return _mine("scratch", Arena)
        if not isinstance(x, Array):
            return x
        if id(x) not in arrays:  # an output may be an input too
            dtype = np.float32 if x.dtype.name == "bfloat16" else x.dtype.numpy
            memory = on_host(x)
            alike = memory.dtype == dtype and (memory.T if columns else memory).flags.c_contiguous
            arrays[id(x)] = x, memory, memory if alike else np.empty(memory.shape, dtype, "F" if columns else "C")
        return arrays[id(x)][2]

    values = [there(x) for x in arguments]
    if name == "attention_backward" and len(values) == 5:  # with a gradient of keys and values
        values[-1] = values[-1].T
    copied = [(memory, copy) for _, memory, copy in arrays.values() if memory is not copy]
    operation = getattr(operations, name)

    def run(held=arguments):
        with np.errstate(all="ignore"):  # as in ``reference.step``: a trial of kernels computes on memory as it is
            for memory, copy in copied:
                copy[...] = memory
            operation(*values)
            for memory, copy in copied:
                memory[...] = copy

    return run


def _invalidate_if_aborted(addresses, count, report):
    if any(ctypes.c_uint64.from_address(int(address)).value for address in addresses[:count]):
        report[1] = -1


def _check_in_step(report, reports, ranks, columns, state):
    theirs = reports.reshape(ranks, columns)[:, 1:3]
    if (theirs != report[1:3]).any() or (theirs[:, 0] < 0).any():
        state[SCALARS.index("halted")] = 1


def _mixed(bits):
    """lowbias32 (https://nullprogram.com/blog/2018/07/31/) of uint32."""
    bits = (bits ^ bits >> 16) * np.uint32(0x7FEB352D)
    bits = (bits ^ bits >> 15) * np.uint32(0x846CA68B)
    return bits ^ bits >> 16


def random_bits(seed, step, places):
    """The 16 bits that an update adds, before it drops the lower half, to the weight at each of ``places``."""
    low, high, step = (np.array([x], np.uint32) for x in (seed & 0xFFFFFFFF, seed >> 32, step))
    key = _mixed(_mixed(_mixed(low) ^ high) ^ step)
    return _mixed(key ^ _mixed((places >> 32).astype(np.uint32)) ^ places.astype(np.uint32)) & np.uint32(0xFFFF)


def rounded_at_random(x, seed, step, places):
    """float32 to bfloat16: up with the probability of the distance from below, by ``random_bits``."""
    x = x.astype(np.float32)
    bits = (x.view(np.uint32) + random_bits(seed, step, places)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), bits.view(np.float32), x).astype(BFLOAT16)


def _update(rule, weights, gradients, state, copy, chunks, groups, scalars, seed):
    now = {name: float(x) for name, x in zip(SCALARS, scalars, strict=True)}
    for start, local, length, group, _, place, kept in chunks.view(CHUNKS) if now["finite"] else ():
        here, there = slice(local, local + length), slice(kept, kept + length)
        decay, lr_scale = map(float, groups.view(np.float64).reshape(-1, 2)[group])
        w, g = (x.astype(np.float32) for x in (weights[here], gradients[start : start + length]))
        g *= now["scale"]
        rule.step(int(now["updates"]), now["lr"] * lr_scale, decay)(w, g, [x[there] for x in state], np.empty_like(w))
        if weights.dtype == BFLOAT16:
            w = rounded_at_random(w, seed, int(now["step"]), np.arange(place, place + length))
        weights[here] = w
        copy[start : start + length] = weights[here]


_OPTIMIZER = KERNELS | {"check_in_step": _check_in_step, "invalidate_if_aborted": _invalidate_if_aborted}


def pending():
    """What this rank has not waited for."""
    return _mine("pending", set)


def _freed():
    """What this rank has freed during its capture."""
    return _mine("freed", list)


def _mine(name, make):
    """What this rank has under that name, made when it is first needed."""
    if not hasattr(_thread, name):
        setattr(_thread, name, make())
    return getattr(_thread, name)


def on_host(array):
    """The memory of an Array of the emulated device as an ndarray."""
    if isinstance(array, Columns):
        return emulator.of_columns(array)
    return _memory(array.pointer, array.shape, array.dtype)


@functools.lru_cache(1 << 14)
def _memory(pointer, shape, dtype):
    memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, dtype.numpy).reshape(shape)


def host_engine(monkeypatch) -> None:
    """Let ``kos.train.device.cuda`` run on host memory.  Skips the test where no compiler can make the kernels."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    emulator.host_memory(monkeypatch)
    peak = SimpleNamespace(statistics=lambda: SimpleNamespace(peak=0), reset_peak=lambda: 0)
    monkeypatch.setattr("kos.memory.pool.pool_of", lambda device: peak)
    make, allocated = array_module.pool_of(0).allocate, weakref.WeakValueDictionary()

    def allocate(nbytes, stream=None, *, label=None):
        not_captured("allocating")
        memory = make(nbytes)
        allocated[memory.pointer] = memory.raw
        weakref.finalize(memory.raw, freed, nbytes)
        return memory

    def freed(nbytes):
        if getattr(_thread, "captured", None) is not None:
            _freed().append(nbytes)

    def copy(target, source, nbytes, stream):
        if getattr(_thread, "captured", None) is not None:
            assert all(any(at <= x < at + raw.nbytes for at, raw in list(allocated.items())) for x in (target, source))
        on_device(lambda: ctypes.memmove(target, source, nbytes))

    def fill(target, value, nbytes, stream):
        on_device(lambda: ctypes.memset(target, value, nbytes))

    streams = SimpleNamespace(handle=lambda stream: 0, synchronize=lambda stream, device: not_captured("waiting"))
    about = SimpleNamespace(name="host", uuid="host", compute_capability=(9, 0))

    def pinned_empty(shape, dtype, device):
        return np.full(shape, -1, getattr(dtype, "numpy", dtype))

    driver = SimpleNamespace(cuMemGetInfo=lambda: (0, MEMORY, MEMORY))  # the CUDA packages need not be installed

    algorithms = {}
    fakes = {
        (array_module, "pool_of"): lambda device: SimpleNamespace(allocate=allocate),
        (array_module, "streams"): streams,
        (array_module, "cu"): SimpleNamespace(cuMemcpyAsync=copy, cuMemsetD8Async=fill),
        (engine_module, "pool_of"): lambda device: SimpleNamespace(trim=lambda: None),
        (engine_module, "driver"): SimpleNamespace(set_device=lambda device: None),
        (engine_module, "device_info"): lambda device: about,
        (engine_module, "CudaOps"): lambda device, stream=None, **options: QueuedOps(options.get("sequential")),
        (engine_module.cublaslt, "stored_algorithms"): lambda device: SimpleNamespace(
            known=algorithms, keep=algorithms.update
        ),
        (dry_run, "cu"): driver,
        (dry_run, "BUCKET_BYTES"): 4 * CHUNK,  # small models have several buckets
        (CudaOps, "overlap_rows"): 1,  # a micro-batch of 8 tokens has two halves, or two turns
        (engine_module, "cu"): driver,
        (engine_module, "capture"): Capture,
        (engine_module, "create_stream"): lambda device: None,
        (engine_module, "Event"): Event,
        (engine_module, "pinned_empty"): pinned_empty,
    }
    for (module, name), fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
