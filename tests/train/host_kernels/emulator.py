"""The cuda dialect without a GPU: its kernels compiled by the host's C++ compiler, their threads run as fibers.

Device memory is host memory; what CUDA's driver would do to it is done by memmove and memset.  cuBLASLt and
attention are numpy's: they are not what is tested.
"""

import contextlib
import ctypes
import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kos.cuda.kernels import read_sources
from kos.memory import array as array_module
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Mask, Scaled
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import KERNELS, CudaOps
from kos.train.ops.cuda.attention import Tokens
from kos.train.ops.cuda.cublaslt import Columns
from kos.train.ops.numpy_blocks import widen
from tests.host_compiler import compiled

SIMT = Path(__file__).with_name("simt.h")
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^\n]*\)\s*)?(\w+)\(([^{]*)\)\s*\{')
# What the kernels say in PTX.
PTX = [
    (r'asm\("cvt\.rn\.bf16\.f32[^;]*?;" : "=h"\(out\.bits\) : "f"\(x\)\);', "out.bits = to_bfloat16(x);"),
    (
        r'asm\("cvt\.rn\.bf16x2[^;]*?;" : "=r"\((\w+)\)[^;]*;',
        r"\1 = to_bfloat16(low) | unsigned(to_bfloat16(high)) << 16;",
    ),
    (
        r'asm\("cvt\.rn\.satfinite\.(e\dm\d)x2\.f32[^;]*?;" : "=h"\(out\) : "f"\(high\), "f"\(low\)\);',
        r"out = to_\1(low) | to_\1(high) << 8;",
    ),
    (r'asm\("(?:cvt\.rn\.f16x2|\{\.reg \.f16)[^"]*"[^;]*;', "abort();"),  # float16 is not emulated
    (r'asm\("ex2[^;]*?;" : "=f"\(y\) : "f"\(x\)\);', "y = exp2f(x);"),
    (r'asm\("ex2[^;]*?;"[^;]*;', "y = exp2f(fmaf(x, log2e, -shift * log2e));"),
    (r'asm volatile\("bar\.sync[^;]*?;" ::"r"\(id\)[^;]*;', "wait_named(id, threads);"),
    (r'asm volatile\("bar\.arrive[^;]*?;"[^;]*;', "arrive_named(id, threads);"),
    (r"asm volatile\(\"bar\.sync[^;]*?;\"[^;]*;", "group_barrier(THREADS);"),
    (
        r'asm volatile\("cp\.async\.cg[^;]*;" ::"r"\(chunk_at[^;]*;',
        "copy_later(at_shared(chunk_at(tile, row, chunk)), exists ? (const void*)source : zeros);",
    ),
    (r'asm volatile\("cp\.async\.cg[^;]*;"[^;]*;', "copy_later(to, from);"),
    (r'asm volatile\("cp\.async\.commit_group;"[^;]*;', "commit_copies();"),
    (r'asm volatile\("cp\.async\.wait_group[^;]*;"[^;]*;', "wait_for_copies(PENDING);"),
    (r"extern __shared__ .*? shared\[\];", "unsigned char* shared = dynamic_shared;"),
    (r"extern __shared__ char raw\[\];", "#define raw ((char*)dynamic_shared)"),
    (r'asm volatile\("ldmatrix[^"]*\.trans\.[^;]*;"[^;]*;', "load_matrices(r, address, true);"),
    (r'asm volatile\("ldmatrix[^;]*;"[^;]*;', "load_matrices(r, address, false);"),
    (r'asm volatile\("stmatrix[^;]*;"[^;]*;', "store_matrices(shared_address(at), x);"),
    (r'asm volatile\(MMA [^;]*;"[^;]*;', "multiply_matrices(d, a, b0, b1);"),
    # Hopper's: what happens beside a thread happens at once, and all lanes of a warp come to what is in order.
    (r"(?s)#define SHARED32.*?(?=__device__ inline void wgmma_fence)", ""),  # tensor_cores.h has these functions
    (r'asm volatile\("wgmma\.(?:fence|commit_group|wait_group)[^;]*;"[^;]*;', "warp_barrier();"),
    (r'asm volatile\("(?:fence\.proxy|prefetch|setmaxnreg|cp\.async\.bulk\.[cw])[^"]*"[^;]*;', ""),
    (r'asm volatile\("" : [^;]*;', ";"),
    (r'asm volatile\("mbarrier\.init[^;]*;"[^;]*;', "init_arrivals(barrier, arrivals);"),
    (r'asm volatile\("mbarrier\.arrive\.expect[^;]*;"[^;]*;', "arrive(barrier, bytes);"),
    (r'asm volatile\("mbarrier\.arrive[^;]*;"[^;]*;', "arrive(barrier);"),
    (r'(?s)asm volatile\(\s*"\{\\n.*?: "memory"\);', "wait_for_phase(barrier, phase);"),
    (
        r'asm volatile\(\s*"cp\.async\.bulk\.tensor\.4d\.shared::cluster[^;]*;"[^;]*;',
        "load_a_box(target, &map, barrier, column, head, token, sample);",
    ),
    (
        r'asm volatile\("cp\.async\.bulk\.shared[^;]*;"[^;]*;',
        "memcpy(target, source, bytes), bytes_came(barrier, bytes);",
    ),
    (
        r'asm volatile\("cp\.async\.bulk\.tensor\.4d\.global[^;]*;"[^;]*;',
        "store_a_box(&map, source, column, head, token, sample);",
    ),
    (r"struct alignas\(64\) TensorMap", "struct TensorMap"),  # libffi aligns arguments to 8 bytes
]
C_TYPES = {"float": ctypes.c_float, "double": ctypes.c_double, "int": ctypes.c_int, "unsigned": ctypes.c_uint}


class HostMap(ctypes.Structure):
    """What ``load_a_box`` and ``store_a_box`` of tensor_cores.h take for a tensor map; as large as one."""

    _fields_ = (("pointer", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("tokens", "stride", "columns",
                "head_dim")), ("_", ctypes.c_byte * 88))  # fmt: skip

    @classmethod
    def of(cls, pointer, samples, tokens, length, columns, head_dim):
        return cls(pointer, tokens, length, columns, head_dim)


def to_host_source(path: Path, causal: bool = True, masked: bool = False) -> tuple[str, dict[str, list[type]]]:
    """A kernel file as C++ with a C function ``run_<kernel>`` for each kernel, and their parameters' types."""
    source, headers = read_sources(path)
    while any(f'#include "{name}"' in source for name in headers):
        for name, text in headers.items():
            source = source.replace(f'#include "{name}"', text)
    for pattern, meaning in PTX:
        source = re.sub(pattern, meaning, source)
    if others := re.findall(r"^#define OTHERS(.*)", source, re.MULTILINE):  # those of causal kernels come first
        source = re.sub(r"(?<!define )\bOTHERS\b", others[0 if causal else 1], source)
    if masks := re.findall(r"^#define MASK\b(.*)", source, re.MULTILINE):  # those of masked kernels come first
        source = re.sub(r"(?<!define )\bMASK\b", masks[0 if masked else 1], source)
    source = source.replace("#pragma once", "").replace("#pragma unroll", "//")
    assert "asm" not in source.replace("__asm", ""), f"{path.name}: PTX whose meaning is not written down"
    runners, types = [], {}
    for kernel, parameters in KERNEL.findall(source):
        fields = [" ".join(field.split()).replace("__restrict__ ", "") for field in parameters.split(",")]
        names = [re.search(r"(\w+)$", field)[1] for field in fields]
        types[kernel] = [
            ctypes.c_void_p
            if "*" in field
            else HostMap
            if "TensorMap" in field
            else C_TYPES.get(field.split()[0], ctypes.c_long)
            for field in fields
        ]
        members = ", ".join(f"packed_->{name}" for name in names)
        runners.append(
            f"struct {kernel}_arguments {{ {'; '.join(fields)}; }};\n"
            f'extern "C" EXPORTED void run_{kernel}(int grid_x_, int grid_y_, int threads_, {", ".join(fields)}) {{\n'
            f"    {kernel}_arguments packed_ = {{{', '.join(names)}}};\n    kernel_arguments = &packed_;\n"
            f"    kernel_body = [](void* p) {{ auto packed_ = ({kernel}_arguments*)p; {kernel}({members}); }};\n"
            f"    run_grid(grid_x_, grid_y_, threads_);\n}}\n"
        )
    return f'#include "{SIMT}"\n{source}\n{"".join(runners)}', types


@functools.cache
def library(file: str, defines: tuple[tuple[str, object], ...]) -> tuple[ctypes.CDLL, dict[str, list[type]]]:
    source, types = to_host_source(KERNELS / file, ("CAUSAL", 0) not in defines, ("MASKED", 1) in defines)
    options = [f"-D{name}={value}" for name, value in defines]
    if not file.startswith("attention"):  # the others take longer to compile than to run
        options.append("-Og")
    return compiled({"kernels.cc": source}, options), types


def host_memory(monkeypatch) -> None:
    """Let ``kos.memory.array`` work on host memory."""

    def allocate(nbytes, stream=None, *, label=None):
        raw = np.full(nbytes + 256, 255, np.uint8)
        return SimpleNamespace(pointer=-(-raw.ctypes.data // 256) * 256, raw=raw)

    fakes = {
        "pool_of": lambda device: SimpleNamespace(allocate=allocate),
        "driver": SimpleNamespace(on_device=lambda device: contextlib.nullcontext()),
        "streams": SimpleNamespace(handle=lambda stream: 0, synchronize=lambda stream, device: None),
        "call": lambda function, *arguments: function(*arguments),
        "cu": SimpleNamespace(
            cuMemcpyAsync=lambda target, source, nbytes, _: ctypes.memmove(target, source, nbytes),
            cuMemsetD8Async=lambda target, value, nbytes, _: ctypes.memset(target, value, nbytes),
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(array_module, name, fake)


def of_columns(array):
    """The memory of some columns of a matrix."""
    size, itemsize = (len(array) - 1) * array.row + array.shape[1], array.dtype.itemsize
    flat = np.frombuffer((ctypes.c_byte * (size * itemsize)).from_address(array.pointer), array.dtype.numpy)
    return np.lib.stride_tricks.as_strided(flat, array.shape, (array.row * itemsize, itemsize))


def _read(array):
    return of_columns(array) if isinstance(array, Columns) else array.numpy()


class HostOps(CudaOps):
    """``CudaOps`` whose kernels run on the host; needs ``host_memory``."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = None
        self.algorithms = {}
        self.multiprocessors = 3
        self.attention_kernels = "simple"
        self.shared_memory = 99 << 10  # of the smallest GPUs: long rows of logits do not fit

    @contextlib.contextmanager
    def step(self, arena):
        yield
        arena.release(0)

    def launch(self, file, name, grid, block, *arguments, shared=0, **defines):
        code, types = library(file, tuple(sorted(defines.items())))
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        assert shared <= self.shared_memory and block <= 1024
        values = [a.pointer if isinstance(a, Array) else a.encode() if isinstance(a, Tokens) else a for a in arguments]
        assert len(values) == len(types[name]), f"{name}: expected {len(types[name])} arguments, got {len(values)}"
        converted = [x if isinstance(x, HostMap) else kind(x) for kind, x in zip(types[name], values, strict=True)]
        getattr(code, f"run_{name}")(x, y, block, *converted)

    def replayable(self, work):
        work()
        return work

    def matmul(
        self, a, b, out, *, transpose_a=False, transpose_b=False, c=None, bias=None, alpha=1.0, beta=1.0, scales=(),
        fast=False,
    ):
        left, right = (_read(x).astype(np.float32) for x in (a, b))
        for wide, x, of_x in zip((left, right), (a, b), scales, strict=False):
            widen(Scaled(x.numpy(), of_x.numpy()), wide)
        result = (left.mT if transpose_a else left) @ (right.mT if transpose_b else right)
        result *= np.float32(alpha)
        for more, factor in ((c, beta), (bias, 1.0)):
            if more is not None:
                result += np.float32(factor) * _read(more).astype(np.float32)
        if isinstance(out, Columns):
            of_columns(out)[...] = result
        else:
            out.copy_from(result.astype(out.dtype.numpy))

    def attention(self, attend, arena):
        if attend.kv is not None:
            super().attention(attend, arena)
            return
        attend64 = _as_float64(attend)
        reference.attention(attend64, Arena())
        _put(attend64.out, attend.out)
        _put(attend64.log_sum_exp, attend.log_sum_exp)

    def attention_backward(self, attend, d_out, d_qkv, arena, d_kv=None):
        if attend.kv is not None:
            super().attention_backward(attend, d_out, d_qkv, arena, d_kv)
            return
        d64 = _columns(d_qkv)
        reference.attention_backward(_as_float64(attend), _columns(d_out), d64, Arena())
        _put(d64, d_qkv)


def _as_float64(attend):
    qkv, out = map(_columns, (attend.qkv, attend.out))
    return replace(attend, qkv=qkv, out=out, log_sum_exp=attend.log_sum_exp.numpy().astype(np.float64),
                   mask=_on_host(attend.mask))  # fmt: skip


def _on_host(mask):
    return mask and Mask(*(x.numpy() for x in mask[:2]))


def _columns(array):
    return np.asfortranarray(array.numpy().astype(np.float64))


def _put(values, array):
    array.copy_from(np.ascontiguousarray(values).astype(array.dtype.numpy))
