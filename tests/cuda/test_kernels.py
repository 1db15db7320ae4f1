"""Kernels: compiled for every architecture without a GPU, errors, the cache on disk, launches on a GPU."""

import contextlib
import ctypes
import logging
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from cuda_ranks import KERNELS

from kos import cuda
from kos.comm.gpu.eager import pack
from kos.cuda import driver, kernels, streams
from kos.cuda.kernels import Address, KernelCache, compile_kernels
from kos.errors import BackendUnavailable, CompileError, CudaError, InvalidArgument
from kos.memory.array import Array
from tests.fake_cuda import installed

SAXPY = KERNELS / "saxpy.cu"
FLOAT = {"DTYPE": "float", "OP": "sum"}
ABSENT = "\n__device__ int f() { return absent; }"

try:
    kernels.nvrtc_version()
except BackendUnavailable as error:
    pytestmark = pytest.mark.skip(reason=str(error))


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "kernels")


class Logged:
    """What kos has logged: compilations, and the ``warnings`` of the cache."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._log = caplog

    def __len__(self) -> int:
        """The number of compilations."""
        return sum(message.startswith("compiled ") for message in self._log.messages)

    @property
    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self._log.records if record.levelno == logging.WARNING]


@pytest.fixture
def compilations(caplog):
    caplog.set_level(logging.DEBUG, "kos")
    return Logged(caplog)


@pytest.mark.parametrize(
    ("files", "arch", "message"),
    [
        ({"a.cu": ABSENT}, "sm_90a", r'^{folder}/a\.cu:2: identifier "absent" is undefined .*sm_90a'),
        (
            {"a.cu": '#include "in/b.cuh"', "in/b.cuh": '#include "c.cuh"', "in/c.cuh": ABSENT},
            "sm_90a",
            r'^{folder}/in/c\.cuh:2: identifier "absent"',
        ),
        (  # the assembler's error comes before the compiler's warnings
            {"a.cu": 'extern "C" __global__ void f(int* x) { int error; asm("absent.u32 %0;" : "=r"(*x)); }'},
            "sm_90a",
            r"(?s)^{folder}/a\.cu: ptxas [^\n]*error.*'absent'.*warning",
        ),
        ({"a.cu": '#include "absent.cuh"'}, "sm_90a", r"cannot read .*absent\.cuh"),
        ({"a.cu": ""}, "sm_1", "gpu-architecture"),
        ({"a.cu": "// \xe9t\xe9"}, "sm_90a", r"cannot read .*a\.cu: expected UTF-8, got .* 0xe9 in position 3"),
    ],
)
def test_errors_name_file_line_and_log(cache, tmp_path, files, arch, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n", "latin-1")
    with pytest.raises(CompileError, match=message.replace("{folder}", str(tmp_path))):
        compile_kernels(str(tmp_path / "a.cu"), arch, {}, cache)


def test_everything_that_matters_is_in_the_key(cache, compilations, tmp_path, monkeypatch):
    source, header = tmp_path / "a.cu", tmp_path / "a.cuh"
    source.write_text('#include "a.cuh"\nextern "C" __global__ void f(int* x) { *x = VALUE + OTHER; }\n')
    header.write_text("#define OTHER 1\n")
    compile_kernels(source, "sm_90a", {"VALUE": 1}, cache)
    compile_kernels(source, "sm_90a", {"VALUE": 2}, cache)
    compile_kernels(source, "sm_80", {"VALUE": 1}, cache)
    header.write_text("#define OTHER 2\n")
    compile_kernels(source, "sm_90a", {"VALUE": 1}, cache)
    source.write_text(source.read_text() + "// another text\n")
    compile_kernels(source, "sm_90a", {"VALUE": 1}, cache)
    monkeypatch.setattr(kernels, "nvrtc_version", lambda: (99, 0))
    compile_kernels(source, "sm_90a", {"VALUE": 1}, cache)
    assert len(compilations) == 6
    compile_kernels(source, "sm_90a", {"VALUE": 1}, cache)
    assert len(compilations) == 6


def test_headers_of_one_name_in_two_folders(cache, tmp_path):
    """Each is in the key."""
    first, second = tmp_path / "in" / "c.cuh", tmp_path / "c.cuh"
    first.parent.mkdir()
    (first.parent / "b.cuh").write_text('#include "c.cuh"\n')
    (tmp_path / "a.cu").write_text(
        '#include "c.cuh"\n#include "in/b.cuh"\nextern "C" __global__ void f(int* x) { *x = ONE + TWO; }\n'
    )
    first.write_text("#define ONE 1\n")
    found = set[bytes]()
    for number in range(2):
        second.write_text(f"#define TWO {number}\n")
        found.add(compile_kernels(tmp_path / "a.cu", "sm_90a", cache=cache))
    first.write_text("#define ONE 5\n")
    found.add(compile_kernels(tmp_path / "a.cu", "sm_90a", cache=cache))
    assert len(found) == 3


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_entry_is_compiled_anew(cache, compilations, damage):
    good = compile_kernels(SAXPY, "sm_90a", FLOAT, cache)
    (entry,) = cache.directory.glob("*.cubin")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes({"empty": b"", "cut": bytes(data[:-100]), "flipped": bytes(data)}[damage])
    for _ in range(2):
        assert compile_kernels(SAXPY, "sm_90a", FLOAT, cache) == good
    assert len(compilations) == 2 and [" is damaged" in each for each in compilations.warnings] == [True]


def test_unusable_directory_warns_once(tmp_path, compilations):
    (tmp_path / "file").write_text("not a directory")
    cache = KernelCache(tmp_path / "file" / "kernels")
    for _ in range(2):
        assert compile_kernels(SAXPY, "sm_90a", FLOAT, cache)[:4] == b"\x7fELF"
    assert len(compilations) == 2
    assert [str(cache.directory) in each for each in compilations.warnings] == [True]


def test_entries_are_read_where_others_cannot_be_written(tmp_path, cache, compilations):
    """As on a read-only file system.  Here a folder has the name of the entry."""
    compile_kernels(SAXPY, "sm_80", FLOAT, KernelCache(tmp_path / "other"))
    (entry,) = (tmp_path / "other").glob("*.cubin")
    (cache.directory / entry.name).mkdir(parents=True)
    first = compile_kernels(SAXPY, "sm_90a", FLOAT, cache)
    assert compile_kernels(SAXPY, "sm_90a", FLOAT, cache) == first
    assert len(compilations) == 2 and not compilations.warnings
    compile_kernels(SAXPY, "sm_80", FLOAT, cache)
    assert len(compilations) == 3 and ["Is a directory" in each for each in compilations.warnings] == [True]


def test_parameters_of_a_bound_launch():
    """The driver finds each argument's bytes at the address it is given for it."""
    kinds = [np.uint64, np.int64, np.int32, np.float64, np.float32, np.float64, np.float32, ml_dtypes.bfloat16, bool]
    given = [2**64 - 1, -2, -3, 0.5, np.float32(1.1), np.float64(np.pi), ctypes.c_float(1.5),
             ml_dtypes.bfloat16(3), True]  # fmt: skip
    address, kept = kernels._parameters(given)
    places = (ctypes.c_uint64 * len(given)).from_address(address)
    for kind, x, place in zip(kinds, given, places, strict=True):
        dtype = np.dtype(kind)
        found = np.frombuffer(ctypes.string_at(place, dtype.itemsize), dtype)[0]
        assert found == dtype.type(getattr(x, "value", x)), (kind, x)
    del kept


def test_an_argument_of_more_than_eight_bytes_cannot_be_bound():
    """As a TMA descriptor, of which the kernel would see eight bytes of its own and 120 of what follows."""
    with pytest.raises(InvalidArgument, match="expected 8 bytes at most, got 128"):
        kernels._parameters([1, np.zeros(16, np.uint64)])


@contextlib.contextmanager
def loaded(
    monkeypatch: pytest.MonkeyPatch, bindings: Any, library: Any = None, **others: Any
) -> Iterator[kernels.Kernel]:
    """A kernel that no GPU has loaded, of a driver with the types of the bindings and these functions."""
    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction", "CUresult")
    functions = SimpleNamespace(**{name: getattr(bindings, name) for name in names}, **others)
    functions.cuKernelGetFunction, functions.cuFuncLoad = lambda kernel: (0, kernel), lambda function: (0,)
    with installed(monkeypatch, functions, library=library) as core:
        core.get_kernel = lambda name: SimpleNamespace(handle=0x4000)
        yield kernels.Kernel(b"no code", "scale", 0)


def test_a_bound_launch_goes_where_each_call_says(monkeypatch):
    """Of a driver that launches nothing; and what it refuses is raised."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    launched, statuses = [], [0, 0, 0, 0, 0, bindings.CUresult.CUDA_ERROR_INVALID_VALUE]

    def launch(config, function, parameters, extra):
        place = ctypes.c_uint64.from_address(parameters).value
        launched.append((int(config.hStream), int(function), ctypes.c_uint64.from_address(place).value))
        return (statuses[len(launched) - 1],)

    functions = {"cuLaunchKernelEx": launch, "cuGetErrorString": lambda status: (0, b"refused")}
    with loaded(monkeypatch, bindings, **functions) as kernel:
        bound = kernel.bind(1, 32, 99)
        for stream in (None, 5, 5, 7, None):
            bound(stream)
        assert launched == [(handle, 0x4000, 99) for handle in (1, 5, 5, 7, 1)]
        with pytest.raises(CudaError, match="launch of scale: cuLaunchKernelEx failed: .*INVALID_VALUE.*refused"):
            bound(9)
    assert launched[-1] == (9, 0x4000, 99)


def test_a_bound_launch_as_the_core_reads_it(monkeypatch):
    """Of the bindings' own config, whose attributes it refers to."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    arguments = 99, Address(1, 12, 0), np.float32(1)
    with loaded(monkeypatch, bindings, SimpleNamespace(cuLaunchKernelEx=ctypes.c_void_p(0x5000))) as kernel:
        bound = kernel.bind((7, 8), 128, *arguments, shared=1000, cooperative=True, overlap=True)
        launch = bound.launch()
    head, config, rest = struct.unpack("=5Q", (text := pack(launch))[:40]), text[40:96], text[96:]
    assert head == (0x5000, 0x4000, 8, 1, 0) and launch.context_up_to == streams.PER_THREAD
    *sizes, stream, attributes, count = struct.unpack("=7I4xQQI4x", config)
    assert (sizes, stream, count) == ([7, 8, 1, 128, 1, 1, 1000], 1, 2)
    ids = bindings.CUlaunchAttributeID
    for at, name in enumerate(("COOPERATIVE", "PROGRAMMATIC_STREAM_SERIALIZATION")):
        number, value = struct.unpack("=I4xI", ctypes.string_at(attributes + 72 * at, 12))
        assert (number, value) == (int(getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")), 1)
    assert struct.unpack("=11Q", rest) == (99, 0, int(np.float32(1).view(np.uint32)), *[0] * 5, 1, 1, 12)


@pytest.mark.parametrize(
    ("name", "broken"), [(None, False), ("CUDA_ERROR_INVALID_CONTEXT", False), ("CUDA_ERROR_ILLEGAL_ADDRESS", True)]
)
def test_a_context_is_broken_by_what_went_wrong_in_it(monkeypatch, name, broken):
    """Not where there is none, on a thread that has made none current."""
    status = name and SimpleNamespace(name=name)
    with installed(monkeypatch, SimpleNamespace(cuMemGetInfo=lambda: (status, 0, 0))):
        assert driver.broken() is (status if broken else None)


@pytest.mark.parametrize(("status", "kind"), [(None, InvalidArgument), ("ILLEGAL_ADDRESS", CudaError)])
def test_a_kernel_that_does_not_load(monkeypatch, status, kind):
    """Because of itself, or of a GPU that is lost."""
    broken = status and SimpleNamespace(name=status)
    functions = SimpleNamespace(cuMemGetInfo=lambda: (broken, 0, 0), cuGetErrorString=lambda status: (0, b"why"))
    with installed(monkeypatch, functions) as core:
        core.ObjectCode.from_cubin = Mock(side_effect=RuntimeError("no"))
        with pytest.raises(kind, match="kernel 'scale'.*" + (status or "does not load on cuda:0")) as caught:
            kernels.Kernel(b"no cubin", "scale", 0)
    assert type(caught.value) is kind


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["called", "bound to a handle"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("float", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("int", np.int32)]
)
@pytest.mark.parametrize("count", [1, 31, 4099])
def test_launch(device, stream, rng, name, dtype, count, how):
    x, y = (rng.integers(-40, 40, count).astype(dtype) for _ in range(2))
    a, b = (Array.from_numpy(v, device, stream=stream) for v in (x, y))
    kernel = cuda.load_kernel(SAXPY, "saxpy", device, DTYPE=name, OP="larger")
    arguments = 4, 128, a.pointer, b.pointer, np.float32(2), count
    if how == "called":
        kernel(stream, *arguments)
    else:
        kernel.bind(*arguments)(int(stream.handle))
    expected = np.maximum(2 * x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_array_equal(b.numpy(stream).astype(np.float64), expected)
    assert cuda.load_kernel(SAXPY, "saxpy", device, DTYPE=name, OP="larger") is kernel


@pytest.mark.gpu
@pytest.mark.parametrize("kilobytes", [4, 60, 200])
def test_dynamic_shared_memory(device, stream, rng, kilobytes):
    count = kilobytes * 256
    x = rng.standard_normal(count, np.float32)
    a, b = Array.from_numpy(x, device, stream=stream), Array.empty(count, np.float32, device, stream=stream)
    b.fill_bytes(255, stream)
    kernel = cuda.load_kernel(SAXPY, "reverse", device, **FLOAT)
    kernel.bind(1, 1024, a.pointer, b.pointer, count, shared=4 * count, cooperative=True)(stream)
    np.testing.assert_array_equal(b.numpy(stream), x[::-1])
