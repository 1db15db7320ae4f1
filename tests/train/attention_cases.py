"""Cases of attention on GPUs: random operands, what they should give in float64, and how close results are.

A test with ``on_devices`` runs on a GPU, and on an emulated one, whose kernels are compiled for the host: tensor cores,
TMA and its barriers are emulated. What the GPU does beside a thread is done at once there: arithmetic, indexing and the
order of barriers are checked, not what only a race shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.cuda.devices import device_info
from kos.dtypes import DTYPES, dtype_of
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Attend, Mask
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import CudaOps
from kos.train.ops.cuda import attention as ops
from tests.host_compiler import needs_compiler
from tests.train import masks
from tests.train.host_kernels import emulator
from tests.train.ops_cases import on_gpu

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}

# samples, T, heads, kv_heads, head_dim
SMALL = [(2, 65, 4, 2, 48), (1, 130, 4, 1, 128), (1, 40, 2, 2, 200)]
# samples, T, heads, kv_heads, head_dim, the queries of each sample, and the keys of another rank that they all see
TO_OTHERS = [
    (2, 256, 4, 2, 64, (0, 256), (0, 128)),
    (1, 256, 4, 1, 128, (128, 256), (0, 256)),
    (2, 170, 3, 3, 128, (0, 170), (0, 85)),
    (2, 170, 4, 1, 64, (85, 170), (0, 170)),
    (3, 333, 2, 1, 64, (300, 301), (130, 333)),
    (2, 333, 2, 2, 128, (1, 333), (332, 333)),
]


EMULATED = ["mma", "hopper"]
"""Sets of kernels that are compiled for the host; "simple" is there too."""


def kernel_sets() -> list[str]:
    if cuda.unavailable() is not None:
        return ["mma"]
    return ["mma", "hopper"] if device_info(0).arch == "sm_90a" else ["mma"]


SETS = kernel_sets()
Shapes = Iterable[tuple[Any, ...]]


def on_devices(names: str = "", gpu: Shapes = ((),), host: Shapes = (), slow: Shapes = ()) -> pytest.MarkDecorator:
    """Run a test on ``stream`` with values of ``names``: on a GPU and on an emulated one; ``slow`` are emulated too."""
    late = [needs_compiler, pytest.mark.slow]
    cases = [
        pytest.param(device, *values, id="-".join(map(str, (device, *values))), marks=marks)
        for device, of, marks in (("gpu", gpu, pytest.mark.gpu), ("host", host, needs_compiler), ("host", slow, late))
        for values in of
    ]
    return pytest.mark.parametrize(("stream", *names.split()), cases, indirect=["stream"])


@pytest.fixture
def stream(request, monkeypatch):
    """That of the device; None on an emulated GPU."""
    if request.param == "gpu":
        cuda.set_device(0)
        return cuda.create_stream(0)
    emulator.host_memory(monkeypatch)
    monkeypatch.setattr(ops, "tensor_map", emulator.HostMap.of)
    return None


def launcher(stream: Any, kernels: str | None = None) -> CudaOps:
    """Operations on this stream; ``kernels`` are those of the GPU by default."""
    launch: CudaOps
    if stream is None:
        launch = emulator.HostOps()
        launch.shared_memory, launch.multiprocessors, launch.attention_kernels = 227 << 10, 2, kernels or "simple"
        return launch
    launch = copy(on_gpu(0))  # made before any capture, in which it could not be made
    launch.stream, launch.shared_memory = stream, 227 << 10 if "hopper" in SETS else 99 << 10
    launch.attention_kernels = kernels or launch.attention_kernels
    return launch


@dataclass
class Case:
    """An attention with its operands on the device, and what it should give, from float64."""

    attend: Attend
    d_out: Array
    d_qkv: Array
    expected: dict[str, np.ndarray]

    def masked(self, mask: Mask) -> Case:
        return replace(self, attend=replace(self.attend, mask=mask))

    def run(self, stream: Any, arena: Arena, kernels: str | None = None) -> dict[str, np.ndarray]:
        """All outputs, poisoned beforehand."""
        for array in (self.attend.out, self.attend.log_sum_exp, self.d_qkv):
            array.fill_bytes(255, stream)
        self.launch(stream, arena, kernels)
        return self.results(stream)

    def launch(self, stream: Any, arena: Arena, kernels: str | None = None) -> None:
        assert kernels is None or ops.kernel_set(self.attend, kernels) == kernels
        launch = launcher(stream, kernels)
        ops.attention(self.attend, launch)
        ops.attention_backward(self.attend, self.d_out, self.d_qkv, arena, launch)

    def results(self, stream: Any) -> dict[str, np.ndarray]:
        names = {"out": self.attend.out, "log_sum_exp": self.attend.log_sum_exp, "d_qkv": self.d_qkv}
        return {name: array.numpy(stream) for name, array in names.items()}


def upload(x: np.ndarray, stream: Any) -> Array:
    """``x`` on the device.  Kernels on another stream could run before the copy, even of pageable memory, has ended."""
    return Array.from_numpy(x, 0, stream=stream)


def device_arena(stream: Any) -> Arena:
    if stream is None:
        return launcher(stream).make_arena()
    return Arena(
        allocate=lambda nbytes: Array.empty(max(nbytes, 1), "uint8", 0, stream=stream),
        view=lambda slab, offset, shape, dtype: Array(slab.pointer + offset, shape, dtype, 0, owner=slab),
    )


def make_case(
    rng: np.random.Generator, stream: Any, shape: tuple[int, ...], dtype: str, spread: float = 1.0, **asked: Any
) -> Case:
    """``asked``: other fields of the Attend."""
    samples, length, heads, kv_heads, d = shape
    tokens, kind = samples * length, DTYPES[dtype].numpy
    qkv = (rng.standard_normal((tokens, (heads + 2 * kv_heads) * d)) * spread).astype(kind)
    d_out = rng.standard_normal((tokens, heads * d)).astype(kind)
    return on_device(stream, attend := on_host(qkv, samples, heads, kv_heads, **asked), d_out, expect(attend, d_out))


def on_host(qkv: np.ndarray, samples: int, heads: int, kv_heads: int, **asked: Any) -> Attend:
    """An attention in NumPy whose results are not written yet; ``asked`` are other fields."""
    out = np.empty((len(qkv), qkv.shape[1] // (heads + 2 * kv_heads) * heads), qkv.dtype)
    return Attend(qkv, heads, kv_heads, out, np.empty((samples, heads, len(qkv) // samples), np.float32), **asked)


def on_device(stream: Any, attend: Attend, d_out: np.ndarray, expected: dict[str, np.ndarray]) -> Case:
    """The case of an attention in NumPy."""
    arrays = attend.out, attend.log_sum_exp, attend.qkv
    out, log_sum_exp, d_qkv = (Array.empty(x.shape, dtype_of(x.dtype).name, 0, stream=stream) for x in arrays)
    attend = replace(attend, qkv=upload(attend.qkv, stream), out=out, log_sum_exp=log_sum_exp)
    return Case(attend, upload(d_out, stream), d_qkv, expected)


def columns(x: np.ndarray) -> np.ndarray:
    """As the reference reads it, in float64."""
    return np.asfortranarray(x.astype(np.float64))


def expect(attend: Attend, d_out: np.ndarray, out: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What an attention in NumPy gives.

    ``out``: what the backward pass is given, unless it is the forward's of here, rounded.
    """
    empty = {"out": np.empty(attend.out.shape, order="F"), "log_sum_exp": np.empty(attend.log_sum_exp.shape)}
    wide = replace(attend, qkv=columns(attend.qkv), **empty)
    reference.attention(wide, Arena())
    stored = columns(wide.out.astype(attend.qkv.dtype) if out is None else out)
    d_qkv = np.empty(attend.qkv.shape, order="F")
    reference.attention_backward(replace(wide, out=stored), columns(d_out), d_qkv, Arena())
    return {**empty, "d_qkv": d_qkv}


def assert_close(case: Case, results: dict[str, np.ndarray], dtype: str, d: int) -> None:
    """Errors as multiples of the dtype's rounding: of every part as a whole, and of each head of each token."""
    epsilon = EPSILON[dtype]
    np.testing.assert_allclose(results["log_sum_exp"], case.expected["log_sum_exp"], rtol=0, atol=2e-5)
    q_end, k_end = case.attend.heads * d, sum(case.attend.shape) * d
    parts = {"out": ("out", slice(None)), "dq": ("d_qkv", slice(0, q_end)),
             "dk": ("d_qkv", slice(q_end, k_end)), "dv": ("d_qkv", slice(k_end, None))}  # fmt: skip
    for name, (array, columns) in parts.items():
        got = results[array][:, columns].astype(np.float64)
        want = np.ascontiguousarray(case.expected[array][:, columns])
        assert np.isfinite(got).all(), f"{name}: not all written"
        size = np.linalg.norm(want)
        if size < 1e-12:  # one token: its q and k have no gradient
            assert np.abs(got).max() < 1e-2
            continue
        error = np.linalg.norm(got - want) / size
        assert error < (2 if dtype != "float32" else 16) * epsilon, f"{name}: {error / epsilon:.2f} epsilon"
        rows = want.reshape(-1, d)
        floor = np.sqrt((rows**2).mean()) * np.sqrt(d)
        worst = (np.linalg.norm(got.reshape(-1, d) - rows, axis=1) / (np.linalg.norm(rows, axis=1) + floor)).max()
        assert worst < (8 if dtype != "float32" else 64) * epsilon, f"{name}: a row with {worst / epsilon:.2f} epsilon"


def make_mask(
    stream: Any, starts: np.ndarray | None, window: int | None, samples: int, *positions: np.ndarray
) -> tuple[Mask, Any]:
    """A mask on the device, which is that of NumPy, and the device's starts of documents.

    ``positions``: of the queries and of the keys.
    """
    poison = [np.full((samples, len(at)), -9, np.int32) for at in positions]
    mask, want = Mask(*(upload(x, stream) for x in poison)), Mask(*poison)
    on_device = None if starts is None else upload(starts, stream)
    of_device = [upload(at.astype(np.int32), stream) for at in positions]
    ops.attention_mask(on_device, window, mask, *of_device, launcher(stream))
    reference.attention_mask(starts, window, want, *positions)
    for got, expected in zip(mask[:2], want[:2], strict=True):
        np.testing.assert_array_equal(got.numpy(stream), expected)
    return mask, on_device


def check_to_others(
    rng: np.random.Generator, stream: Any, kernels: str, dtype: str, shape: tuple[Any, ...], unlike: bool = False,
    window: int | None = None, **asked: Any,
) -> None:  # fmt: skip
    """``unlike``: all scores are far below 0, and the last keys' values far above all others.

    ``asked``: other fields of the Attend. With ``window`` queries and keys are at random positions of a sequence of
    documents.
    """
    samples, length, heads, kv_heads, d, *parts = shape
    queries, keys = (slice(*part) for part in parts)
    tokens, kind, width = samples * length, DTYPES[dtype].numpy, (heads + 2 * kv_heads) * d

    def some(*shape: int, kind: Any = kind) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    qkv, kv, d_out = some(tokens, width), some(tokens, 2 * kv_heads * d), some(tokens, heads * d)
    out, lse = some(tokens, heads * d, kind="float32"), 5 + some(samples, heads, length, kind="float32")
    d_qkv, launch = some(tokens, width, kind="float32"), launcher(stream, kernels)
    if unlike:
        qkv[:, : heads * d], lse = 1, lse - 300
        kv[:, : kv_heads * d] -= 200 / np.sqrt(d)
        kv.reshape(samples, length, -1)[:, keys][:, -9:, kv_heads * d :] *= 1000
    mask = mask64 = None
    if window is not None:
        positions = masks.random_positions(rng, length)
        starts = masks.random_starts(rng, samples, length, positions[0])
        mask, _ = make_mask(stream, starts, window, samples, *positions)
        mask64 = Mask(*(x.numpy(stream) for x in mask[:2]))
    out64, lse64, d_qkv64, kv64 = columns(out), lse.astype(np.float64), columns(d_qkv), columns(kv).T
    attend64 = Attend(columns(qkv), heads, kv_heads, out64, lse64, **asked).to(kv64, queries, keys, mask64)
    with np.errstate(divide="ignore"):
        reference.attention(attend64, Arena())
    qkv_, kv_, out_, lse_, d_out_, d_qkv_ = (upload(x, stream) for x in (qkv, kv, out, lse, d_out, d_qkv))
    attend = Attend(qkv_, heads, kv_heads, out_, lse_, **asked).to(kv_, queries, keys, mask)
    assert ops.kernel_set(attend, kernels) == kernels
    ops.attention(attend, launch)

    def close(name: str, got: np.ndarray, want: np.ndarray, units: float) -> None:
        error, size = np.linalg.norm(got - want), np.linalg.norm(want)
        print(name, error, size, EPSILON[dtype])
        assert error <= units * EPSILON[dtype] * size, f"{name}: {error / size / EPSILON[dtype]:.2f} epsilon"

    def of(x: np.ndarray, part: slice) -> np.ndarray:
        return x.reshape(samples, length, -1)[:, part]

    units, merged = 16 if dtype == "float32" else 2, out_.numpy(stream)
    np.testing.assert_allclose(lse_.numpy(stream), lse64, rtol=0, atol=1e-3 if unlike else 2e-5)
    close("out", of(merged, queries), of(out64, queries), units)
    merged_kind, d_kv_ = merged.astype(kind), upload(np.zeros(kv.shape, np.float32), stream)
    attend = replace(attend, out=upload(merged_kind, stream))
    ops.attention_backward(attend, d_out_, d_qkv_, device_arena(stream), launch, d_kv_)
    d_kv64 = np.empty(kv64.shape)
    attend64 = replace(attend64, out=columns(merged_kind))
    reference.attention_backward(attend64, columns(d_out), d_qkv64, Arena(), d_kv64)
    added, d_kv = d_qkv_.numpy(stream), d_kv_.numpy(stream)
    units *= 8 if unlike else 1  # what all keys have in common is not in dq: slopes add up to 0, but for their rounding
    close("dq", of(added - d_qkv, queries)[..., : heads * d], of(d_qkv64 - d_qkv, queries)[..., : heads * d], units)
    for name, half in (("dk", slice(0, kv_heads * d)), ("dv", slice(kv_heads * d, None))):
        close(name, of(d_kv, keys)[..., half], of(d_kv64.T, keys)[..., half], units)
    assert not np.delete(of(d_kv, slice(None)), np.r_[keys], axis=1).any()
    for before, after in ((out, merged), (d_qkv, added)):
        unseen = [np.delete(of(x, slice(None)), np.r_[queries], axis=1) for x in (before, after)]
        np.testing.assert_array_equal(*unseen)
    np.testing.assert_array_equal(added[:, heads * d :], d_qkv[:, heads * d :])
