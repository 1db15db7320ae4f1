"""Matrix products' algorithms: what is chosen on a GPU whose clock a power limit holds down, and what is kept."""

import ctypes
import errno
import fcntl
import itertools
import json
import logging
import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from kos.cuda import driver
from kos.dtypes import DTYPES
from kos.errors import CudaError, InvalidArgument
from kos.memory.array import Array
from kos.train.ops.cuda import cublaslt
from kos.train.ops.cuda.cublaslt import ALGORITHM_BYTES, Columns, Matmul, Stored

RESULT = np.dtype([("algo", np.uint8, ALGORITHM_BYTES), ("workspace", np.uint64), ("state", np.int32), ("rest", "V20")])
REFUSED = 99
"""An algorithm that cuBLASLt does not take."""


class NotSupported(Exception):
    """In place of cuBLASLt's."""


class Gpu:
    """A GPU with cuBLASLt, in place of its driver, its streams, its arrays and what is known about it.

    Algorithms are known by their first byte.  cuBLASLt suggests 1, 2, 3, …  A run of algorithm n takes ``brief[n - 1]``
    milliseconds, but ``lasting[n - 1]`` where half of SETTLE went before, as on a GPU whose clock a power limit holds
    down.  One of infinitely many does not run.
    """

    def __init__(self):
        self.lasting = self.brief = [2.0, 2.0, 1.0] + 9 * [2.0]
        self.now, self.searched, self.ran, self.since, self.status = 0.0, 0.0, [], 0.0, None
        self.name, self.multiprocessors, self.compute_capability, self.arch = "host", 1, (9, 0), "sm_90a"
        self.pointer = 0
        self.library = MagicMock(matmul_heuristic_result_dtype=RESULT, cuBLASLtError=NotSupported)
        self.library.matmul_algo_get_heuristic.side_effect = self.suggest
        self.library.matmul_algo_check.side_effect = self.check
        self.library.matmul.side_effect = self.multiply
        self.CUdevice_attribute = MagicMock()

    def suggest(self, *arguments):
        *_, asked, found, count = arguments
        results = np.zeros(min(asked, len(self.brief)), RESULT)
        results["algo"][:, 0] = 1 + np.arange(len(results))
        ctypes.memmove(found, results.ctypes.data, results.nbytes)
        ctypes.memmove(count, np.array([len(results)], np.int32).ctypes.data, 4)

    def check(self, *arguments):
        if ctypes.c_uint8.from_address(arguments[-2]).value == REFUSED:
            raise NotSupported

    def multiply(self, *arguments):
        algorithm = ctypes.c_uint8.from_address(arguments[-4]).value
        brief, lasting = self.brief[algorithm - 1], self.lasting[algorithm - 1]
        if brief == math.inf:
            raise NotSupported
        if self.ran[-1:] != [algorithm]:
            self.since = self.now
        self.ran.append(algorithm)
        self.now += lasting if self.now - self.since >= cublaslt.SETTLE / 2 else brief

    def milliseconds(self, run, stream):
        began = self.now
        run()
        self.searched += self.now - began
        return self.now - began

    def broken(self):
        return self.status

    def on_device(self, device):
        return nullcontext()

    def handle(self, stream):
        return 0

    create_stream = set_device = handle

    def empty(self, *_, **__):
        return self

    def cuDeviceGetAttribute(self, *_):
        return 0


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    of_matmul = dict.fromkeys(("driver", "streams", "Array"), gpu)
    of_matmul |= {"library": lambda: gpu.library, "device_info": lambda device: gpu}
    for name, fake in of_matmul.items():
        monkeypatch.setattr(cublaslt, name, fake)
    return gpu


@pytest.fixture
def library(gpu):
    return gpu.library


def taken(matmul, size, gpu):
    """The algorithm of a product of such matrices."""
    matmul(*(SimpleNamespace(shape=(size, size), size=size**2, dtype=DTYPES["float32"], pointer=256) for _ in range(3)))
    return gpu.ran[-1]


@pytest.fixture
def search(gpu):
    """Which of the algorithms the search takes, and for how many milliseconds it runs."""

    def search(brief, lasting):
        gpu.brief, gpu.lasting, gpu.searched = brief, lasting, 0.0
        best = taken(Matmul(0, None, search=True), 8, gpu)
        return best - 1, gpu.searched

    return search


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_fastest_when_it_lasts(search, order):
    """Not in brief, nor on the way there, wherever it stands in the order."""
    times = np.array([[1.0, 1.13, 1.1], [1.3, 1.25, 1.4]])
    assert search(*times[:, order].tolist())[0] == order.index(1)


def test_short_ones_run_briefly(search):
    """Whatever they would take when they last: the host could not queue enough of them."""
    which, took = search([0.012, 0.011, 0.013], [0.012, 0.022, 0.013])
    assert which == 1 and took < 1


def test_a_search_takes_less_than_a_second(search):
    """However many are near; and where none is near the fastest it lasts only as long as brief runs do."""
    _, took = search([1.0] * 12, [1.3] * 12)
    assert took < 1000
    which, took = search([9.0, 1.0, 2.0], [9.0, 5.0, 2.0])
    assert which == 1 and took == 12 * (1 + cublaslt.REPEATS)


def test_what_does_not_run_is_left_out(search, gpu, monkeypatch):
    """Unless nothing runs any more."""
    assert search([math.inf, 1.0, 2.0], [math.inf, 5.0, 2.0])[0] == 1
    gpu.status, gpu.library_error = "CUDA_ERROR_ILLEGAL_ADDRESS", lambda what, error: CudaError(what)
    with pytest.raises(CudaError):
        search([math.inf, 1.0, 2.0], [math.inf, 5.0, 2.0])


def test_only_a_search_times(gpu, caplog):
    """Others take what is in its table, and for what is not cuBLASLt's first suggestion; or where it is refused."""
    table = {}
    first = Matmul(0, None, algorithms=table, search=True)
    assert taken(first, 8, gpu) == 3
    once = gpu.searched
    assert [taken(first, size, gpu) for size in (8, 16)] == [3, 3] and gpu.searched == 2 * once > 0 and len(table) == 2
    assert taken(Matmul(0, None, algorithms=dict(table), search=True), 8, gpu) == 3
    other = Matmul(0, None, algorithms=json.loads(json.dumps(table)))
    assert [taken(other, size, gpu) for size in (8, 16, 24)] == [3, 3, 1] and taken(Matmul(0, None), 8, gpu) == 1
    (name, _), (damaged, _) = table.items()
    refused = Matmul(0, None, algorithms={name: bytes([REFUSED] * ALGORITHM_BYTES).hex(), damaged: "no hex"})
    assert [taken(refused, size, gpu) for size in (8, 16)] == [1, 1] and gpu.searched == 2 * once
    assert len(refused.algorithms) == 2
    (warning,) = caplog.messages  # none of what is damaged: it is as good as not there
    assert warning == f"cuBLASLt does not take the stored algorithm of {name}: another run's bits may differ"


def test_what_is_chosen_depends_on_no_address(library):
    """A tensor begins elsewhere in another layout; addresses must be multiples of the promised alignment."""
    asked = []
    library.matmul_preference_set_attribute.side_effect = lambda _, name, value, nbytes: asked.append(
        ctypes.string_at(value, nbytes)
    )

    def limits(address, **options):
        asked.clear()
        x = SimpleNamespace(size=128 * 128, shape=(128, 128), dtype=DTYPES["bfloat16"], pointer=address)
        Matmul(0, None, **options)(x, x, x)
        return list(asked)

    assert limits(1 << 20) != limits((1 << 20) + 64)
    assert limits(1 << 20, multiple=32) == limits((1 << 20) + 64, multiple=32)
    with pytest.raises(InvalidArgument, match="matmul: expected rows that begin at multiples of 64 bytes, got"):
        limits((1 << 20) + 32, multiple=32)


def test_some_columns_of_a_matrix(library):
    """cuBLASLt is told how far apart rows are, and addresses; a plan of whole rows is not used for them."""
    matmul, whole = Matmul(0, 0), Array(256, (16, 48), "bfloat16", 0)
    x, weight = Columns(whole, slice(16, 32)), Array(4096, (8, 16), "bfloat16", 0)
    out = Array(8192, (16, 8), "bfloat16", 0)
    for a in (x, x[4:], Array(256, (16, 16), "bfloat16", 0)):
        matmul(a, weight, out[16 - len(a) :], transpose_b=True)
    rows = [call.args[1:] for call in library.matrix_layout_create.call_args_list]
    assert rows[1::3] == [(16, 16, 48), (16, 12, 48), (16, 16, 16)]  # columns, rows, elements from row to row
    assert [call.args[5] for call in library.matmul.call_args_list] == [288, 256 + (4 * 48 + 16) * 2, 256]


def test_several_products_at_once_with_factors(library):
    """cuBLASLt is told how many matrices there are and how far apart, and what both terms are multiplied by."""
    told, factors = [], []

    def tell(layout, attribute, address, size):
        kind = ctypes.c_int32 if size == 4 else ctypes.c_int64
        told.append((attribute, kind.from_address(address).value))

    def multiply(*arguments):
        factors.append([ctypes.c_float.from_address(arguments[place]).value for place in (2, 7)])

    library.matrix_layout_set_attribute.side_effect, library.matmul.side_effect = tell, multiply
    matmul, of = Matmul(0, 0), library.MatrixLayoutAttribute
    a, b, out = (
        SimpleNamespace(shape=shape, size=math.prod(shape), dtype=DTYPES["bfloat16"], pointer=256)
        for shape in ((5, 16, 8), (5, 24, 8), (5, 16, 24))
    )
    matmul(a, b, out, transpose_b=True, c=out, alpha=2.5, beta=-3.0)
    matmul(a, b, out, transpose_b=True)
    assert told == [
        each for size in (24 * 8, 16 * 8, 16 * 24) for each in ((of.BATCH_COUNT, 5), (of.STRIDED_BATCH_OFFSET, size))
    ] * 2  # with and without c
    assert factors == [[2.5, -3.0], [1.0, 0.0]]
    b.shape = 4, 24, 8
    with pytest.raises(InvalidArgument, match="matmul: expected"):
        matmul(a, b, out, transpose_b=True)


def eights(*forms, sizes=(32, 48, 64), out="bfloat16", pointer=256):
    """Operands of 8 bits (M, K) and (N, K), their scales, and a result."""
    m, n, k = sizes
    shapes = (m, k), (n, k), (m, n)
    a, b, result = (
        SimpleNamespace(shape=shape, size=math.prod(shape), dtype=DTYPES[form], pointer=pointer)
        for shape, form in zip(shapes, (*forms, out), strict=True)
    )
    return a, b, result, tuple(SimpleNamespace(pointer=pointer + 16 * i, shape=(1,)) for i in (1, 2))


def test_products_in_8_bits(library):
    """Both operands lie along the sum, and change places with their scales; these may lie elsewhere in every call."""
    told, operands, of = [], [], library.MatmulDescAttribute
    every = "TRANSA", "TRANSB", "A_SCALE_POINTER", "B_SCALE_POINTER", "FAST_ACCUM"
    names = {getattr(of, name): name for name in every}

    def tell(operation, attribute, address, size):
        kind = {1: ctypes.c_int8, 4: ctypes.c_int32, 8: ctypes.c_uint64}[size]
        told.append((names[attribute], kind.from_address(address).value))

    library.matmul_desc_set_attribute.side_effect = tell
    library.matmul.side_effect = lambda *arguments: operands.append(arguments[3:6:2])
    matmul = Matmul(0, 0)
    for pointer, fast in ((256, False), (512, False), (512, True)):
        a, b, out, scales = eights("float8_e5m2", "float8_e4m3fn", pointer=pointer)
        a.pointer += 4096
        matmul(a, b, out, transpose_b=True, scales=scales, fast=fast)
        pointers = [("B_SCALE_POINTER", pointer + 16), ("A_SCALE_POINTER", pointer + 32)]
        transposed = [("TRANSA", 1), ("TRANSB", 0)] * (pointer == 256 or fast)
        assert told == transposed + [("FAST_ACCUM", 1)] * fast + pointers
        assert operands.pop() == (pointer, pointer + 4096)
        told.clear()
    types = [call.args[0] for call in library.matrix_layout_create.call_args_list[:3]]
    assert types == [28, 29, 14]  # of b, a and out


def test_finer_scales(library):
    """The shape of the scales says which they are; cuBLASLt is told, once for a shape."""
    told, of = [], library.MatmulDescAttribute
    names = {of.A_SCALE_MODE: "A", of.B_SCALE_MODE: "B"}
    library.matmul_desc_set_attribute.side_effect = lambda operation, attribute, address, size: told.append(
        (names.get(attribute), ctypes.c_int32.from_address(address).value)
    )
    a, b, out, scales = eights("float8_e4m3fn", "float8_e4m3fn", sizes=(256, 384, 640))
    matmul = Matmul(0, 0)
    for of_a, of_b, expected in (
        ((1,), (1,), []), ((256,), (384,), [("B", 3), ("A", 3)]), ((5, 256), (3, 8), [("B", 4), ("A", 5)]),
    ):  # fmt: skip
        scales[0].shape, scales[1].shape = of_a, of_b
        for _ in range(2):
            matmul(a, b, out, transpose_b=True, scales=scales)
        assert [each for each in told if each[0]] == expected
        told.clear()
    scales[0].shape = 5, 8
    with pytest.raises(InvalidArgument, match=r"one of the shapes \(1,\), \(256,\), \(5, 256\), \(2, 8\), got"):
        matmul(a, b, out, transpose_b=True, scales=scales)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the file of a GPU is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kos" / "kind" / "Some_GPU.json"


def kept():
    return Stored("kind", "Some GPU")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_two_searches_that_end_at_the_same_time_have_one_result(path, before_call):
    """The second one ends while the first one writes: it waits, then finds what was not stored when it began."""

    def end_the_second(path, content):
        if threading.current_thread() is not second:
            second.start()
            second.join(0.2)
            assert second.is_alive(), "it has not waited"

    before_call(cublaslt, "replace_file", end_the_second)
    mine, other = kept(), kept()
    second = threading.Thread(target=other.keep, args=({"a": "3", "b": "2"},))
    mine.keep({"a": "1"})
    second.join(20)
    assert mine.known == {"a": "1"}
    assert kept().known == other.known == {"a": "1", "b": "2"}


def test_what_was_found_is_kept_on_a_file_system_without_locks(path, caplog, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    kept().keep({"a": "1"})
    assert kept().known == {"a": "1"} and not warnings(caplog)


def test_what_cublaslt_no_longer_takes_is_replaced(path):
    kept().keep({"a": "no algorithm", "b": "2"})
    later = kept()
    later.keep({**later.known, "a": "1"})
    assert kept().known == later.known == {"a": "1", "b": "2"}


@pytest.mark.parametrize("content", [b'{"a": "1"', b"[1, 2]", b"\xff"], ids=["cut", "a list", "no text"])
def test_a_damaged_file_is_reported_once_and_replaced(path, caplog, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    damaged = kept()
    assert damaged.known == kept().known == {}
    damaged.keep({"a": "2"})
    assert kept().known == {"a": "2"}
    (line,) = warnings(caplog)
    assert f"cache: {path} cannot be used" in line


def test_one_file_for_each_gpu_and_version(gpu, library, path):
    """What another cuBLASLt has found, or another GPU, is not looked at."""
    library.get_version.return_value = 130000
    cublaslt.stored_algorithms(0).keep({"a": "1"})
    assert cublaslt.stored_algorithms(0).known == {"a": "1"}
    library.get_version.return_value = 130100
    assert cublaslt.stored_algorithms(0).known == {}
    library.get_version.return_value, gpu.name = 130000, "Other GPU"
    assert cublaslt.stored_algorithms(0).known == {}


@pytest.mark.parametrize("planned", [True, False])
def test_what_fails_is_an_error_of_kos(gpu, library, monkeypatch, planned):
    """With the driver's word for it, where it has one."""
    failing = library.matmul if planned else library.matmul_algo_get_heuristic
    failing.side_effect = NotSupported("EXECUTION_FAILED (13)")
    gpu.library_error = driver.library_error
    x = SimpleNamespace(size=4, shape=(2, 2), dtype=DTYPES["float32"], pointer=256)
    cu = MagicMock()
    cu.cuGetErrorString.return_value = 0, b"why"
    monkeypatch.setattr(driver, "cu", cu)
    broken = SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")
    for status, said in ((0, r"EXECUTION_FAILED \(13\)$"), (broken, r"\(13\); CUDA_ERROR_ILLEGAL_ADDRESS \(why\)$")):
        cu.cuMemGetInfo.return_value = status, 0, 0
        with pytest.raises(CudaError, match=f"^a matmul by cuBLASLt failed: .*{said}"):
            Matmul(0, None)(x, x, x)
