"""Arguments that are refused before anything is sent, naming expected and got."""

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.operation import COLLECTIVES
from kos.cuda.streams import LEGACY
from kos.errors import InvalidArgument, OutOfMemory
from kos.memory import as_buffer
from kos.memory.array import Array
from kos.testing import Fault, spawn
from tests import stubs
from tests.comm.ranks import on_each_rank
from tests.fake_cuda import Stream


@pytest.fixture
def comm():
    """Rank 0 of a group of two whose other rank never comes: what is refused must not wait for it."""
    group = ThreadGroup(2)

    class Lonely(ThreadControlPlane):
        def allgather(self, data):
            return [data, data]

    communicator = kos.init("mock", rendezvous=Lonely(group, 0, 1.0), timeout=0.2)
    yield communicator
    assert communicator.backend.engine.outstanding() == [], "a refused call left something in flight"
    assert communicator.recorder.count == 0, "a refused call was counted"


F = np.zeros(4, np.float32)
READ_ONLY = np.zeros(4, np.float32)
READ_ONLY.flags.writeable = False
SWAPPED = np.zeros(4, F.dtype.newbyteorder())


class Nowhere:
    """As torch's tensors on the device ``meta``."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("Unknown device type meta for Dlpack")


class OnGPU:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


class Refusing:
    """As a library whose export raises errors of its own."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error


class TooLarge:
    def __index__(self) -> int:
        raise OverflowError("as those of a library")


class OnDevice:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self) -> None:
        raise AssertionError("asked for")


def described(
    pointer: int = 4096, shape: tuple[int, ...] = (4,), dtype: Any = np.float32, device: int = 0, **more: Any
) -> Array:
    """An Array on a GPU without memory: enough for what only looks at it."""
    return Array(pointer, shape, dtype, device, **more)


def overlapping(call: Callable[[kos.Communicator, Any, Any], Any]) -> Callable[[kos.Communicator], Any]:
    memory = np.zeros(6, np.float32)
    return lambda c: call(c, memory[:4], memory[2:])


def _in_a_batch(comm: kos.Communicator, name: str, *given: Any) -> None:
    with comm.batch():
        getattr(comm, name)(*given)


REFUSED: dict[str, tuple[Callable[[kos.Communicator], Any], str]] = {
    "too large an index": (lambda c: c.broadcast(F, TooLarge()), "root: expected a whole number, got .*TooLarge"),
    "list": (lambda c: c.all_reduce([1.0]), "x: expected an array, got list"),
    "strided": (lambda c: c.all_reduce(np.zeros(8)[::2]), r"x: expected a C-contiguous .* strides \(16,\)"),
    "fortran": (lambda c: c.all_reduce(np.zeros((2, 3), order="F")), r"C-contiguous .* shape \(2, 3\)"),
    "small grid": (lambda c: c.grid((1, 1)), r"shape: expected a product of 2, .*, got \(1, 1\)"),
    "empty axis": (lambda c: c.grid((-1, 0)), r"shape: expected a product of 2, .*, got \(-1, 0\)"),
    "read-only in place": (lambda c: c.all_reduce(READ_ONLY), "x: expected a writable array"),
    "read-only out": (lambda c: c.all_reduce(F, out=READ_ONLY), "out: expected a writable array"),
    "read-only recv": (lambda c: c.recv(READ_ONLY, 1), "x: expected a writable array"),
    "nowhere": (lambda c: c.recv(Nowhere(), 1), "x: expected an array that DLPack can share, got Nowhere: Unknown"),
    "gpu": (lambda c: c.all_reduce(OnGPU()), "x: (expected memory of the host, got OnGPU on a GPU|.*failed)"),
    "device": (lambda c: c.send(OnDevice(), 1), "x: (expected memory of the host, got OnDevice on a GPU|.*)"),
    "read-only on a gpu": (
        lambda c: c.all_reduce(described(readonly=True)), "x: expected a writable array, got a read-only Array"),
    "freed": (
        lambda c: c.all_reduce(described(owner=SimpleNamespace(closed=True))),
        "x: expected an array with memory, got one that was freed"),
    "to a host": (
        lambda c: c.all_reduce(described(), out=F), "out: expected memory of cuda:0, got memory of the host"),
    "to a gpu": (
        lambda c: c.all_reduce(F, out=described()), "out: expected memory of the host, got memory of cuda:0"),
    "to another gpu": (
        lambda c: c.all_reduce(described(), out=described(device=1)),
        "out: expected memory of cuda:0, got memory of cuda:1"),
    "overlap on a gpu": (
        lambda c: c.all_reduce(described(), out=described(4100)), "out: expected memory that does not overlap x"),
    "no backend for it": (
        lambda c: c.all_reduce(described()),
        "x: expected memory of the host .backend mock., got Array in memory of cuda:0; nccl, peer and auto"),
    "object": (lambda c: c.all_reduce(np.array([None])), r"x: expected one of the dtypes .* got dtype\('O'\)"),
    "object out": (lambda c: c.all_reduce(F, out=np.array([None] * 4)), "out: expected one of the dtypes .*; got"),
    "byte order": (lambda c: c.all_reduce(SWAPPED), f"x: expected float32 in the byte order .* {sys.byteorder}-endian"),
    "byte order out": (lambda c: c.all_reduce(F, out=SWAPPED), "out: expected float32 .* got .*use astype..float32"),
    "byte order residual": (
        lambda c: c.all_reduce(F, compress="int8", residual=SWAPPED), "residual: expected float32 in the byte order"),
    "byte order allocate": (lambda c: c.allocate(3, SWAPPED.dtype.str), "dtype: expected float32 in the byte order"),
    "out dtype": (lambda c: c.all_reduce(F, out=np.zeros(4)), "out: expected dtype float32, got float64"),
    "out shape": (lambda c: c.all_reduce(F, out=np.zeros(5, np.float32)), r"out: expected shape \(4,\), got \(5,\)"),
    "gather out": (
        lambda c: c.all_gather(F, np.zeros(7, np.float32)),
        r"out: expected 8 elements \(shape \(2, 4\)\), got shape \(7,\)",
    ),
    "scatter x": (lambda c: c.reduce_scatter(np.zeros(3)), "x: expected a multiple of 2 elements, got 3"),
    "to all x": (lambda c: c.all_to_all(np.zeros(3)), "x: expected a multiple of 2 elements, got 3"),
    "overlap all_to_all": (lambda c: c.all_to_all(F, F), "overlap"),
    "overlap": (overlapping(lambda c, x, out: c.all_reduce(x, out=out)), "overlap"),
    "overlap reduce_scatter": (overlapping(lambda c, x, out: c.reduce_scatter(x, out[:2])), "overlap"),
    "overlap send_recv": (overlapping(lambda c, x, out: c.send_recv(x, out, 1, 1)), "overlap"),
    "op factor": (lambda c: c.all_reduce(F, ReduceOp.PREMUL_SUM), "op: expected PremulSum"),
    "op float": (lambda c: c.all_reduce(F, ReduceOp.BAND), "expected one of SUM, .* for float32, got BAND"),
    "op of scan": (lambda c: c.exscan(F, ReduceOp.AVG), "op: expected one of SUM, .*, BXOR for exscan, got AVG"),
    "op int": (lambda c: c.all_reduce(np.zeros(2, int), ReduceOp.AVG), "for int64, got AVG"),
    "op factor complex": (lambda c: c.all_reduce(F, PremulSum(1j)), "of a real number that float.*, got 1j"),
    **{
        f"op factor {factor!r:.20} {np.dtype(dtype)}": (
            lambda c, dtype=dtype, factor=factor: c.all_reduce(np.zeros(2, dtype), PremulSum(factor)),
            f"op: expected PremulSum of a real number that {np.dtype(dtype)} can hold, got ",
        )
        for dtype, factor in [
            ("complex64", 1j), ("complex128", 2 + 0j), ("complex128", np.complex64(2j)), ("complex64", 1e39),
            ("float64", 10**400), ("float32", 1e39), ("float32", -(10**60)), ("float16", 1e5),
        ]
    },
    "masked": (lambda c: c.all_reduce(np.ma.zeros(3)), "x: expected an array without a mask, got MaskedArray"),
    "op premul int": (lambda c: c.all_reduce(np.zeros(2, int), PremulSum(2)), "int64, got PREMUL_SUM"),
    "op bool": (lambda c: c.all_reduce(np.zeros(2, bool)), "of MIN, MAX, BAND, BOR, BXOR for bool"),
    "op complex": (lambda c: c.all_reduce(np.zeros(2, complex), ReduceOp.MAX), "for complex128, got MAX"),
    "order": (
        lambda c: c.all_reduce(F, algorithm="ring", deterministic=True),
        r"expected 'auto' or one of one_shot, two_shot that add in rank order .* got 'ring'",
    ),
    "counts mine": (lambda c: c.all_gather_v(F, [3, 4]), r"expected counts\[0\] = 3 elements, got 4"),
    "counts sum": (lambda c: c.reduce_scatter_v(F, [3, 2]), "counts: expected a sum of 4, .* got 5"),
    "counts self": (
        lambda c: c.all_to_all_v(F, [3, 1], [2, 2]),
        r"recv_counts: expected send_counts\[0\] = 3 .* got 2",
    ),
    "counts huge": (
        lambda c: c.all_gather_v(F, [4, 1 << 62]),
        "counts: expected a sum from 0 to 288230376151711744, got 4611686018427387908",
    ),
    "counts huge to come": (lambda c: c.all_to_all_v(F, [4, 0], [4, 1 << 62]), "recv_counts: expected a sum from 0 to"),
    "dtype": (lambda c: c.allocate(3, np.ones(4)), "dtype: expected one of .*; got array"),
    "empty dtype": (lambda c: c.allocate(3, {}), "dtype: expected one of .*; got "),
    "shape huge": (lambda c: c.allocate((1 << 40, 1 << 40), np.float32), "shape: expected a product from 0 to"),
    "scatter count": (lambda c: c.scatter(np.zeros(5, np.float32), F), "x: expected 8 elements, got 5"),
    "scatter elsewhere": (lambda c: c.scatter(F, F, root=1), "x: expected None on rank 0"),
    "gather elsewhere": (lambda c: c.gather(F, 1, F), "out: expected None on rank 0"),
    **{
        f"{name} in a batch": (lambda c, call=(name, *given): _in_a_batch(c, *call), f"{name}: expected a call outside")
        for name, *given in (("all_gather_bytes", b"abc"), ("recv_bytes",), ("probe",))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(comm, case):
    call, message = REFUSED[case]
    with pytest.raises(InvalidArgument, match=message) as caught:
        call(comm)
    assert "\n" not in str(caught.value)


def test_neighbours_on_a_gpu_do_not_overlap():
    def buffer(start, device=0):
        return as_buffer(described(start, (10,), np.uint8, device), "x", True)

    assert not any(buffer(100).overlaps(each) for each in (buffer(90), buffer(110), buffer(100, device=1)))


def test_a_stream_that_its_owner_closed_is_not_used():
    """The handle of a closed stream is that of the legacy stream."""
    x, stream = described(), Stream(40)
    assert as_buffer(x, "x", True, stream).stream == 40
    stream.handle = 0
    buffer = as_buffer(x, "x", True, stream)
    assert (buffer.stream, buffer.stream_owner) == (LEGACY, None)


class Wrapped:
    """An array of another library, in CPU memory; an ``old`` one knows nothing of DLPack 1.0."""

    def __init__(self, array: np.ndarray, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options.keys() - {"stream"}:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint16", "int64", "bool", "complex64"])
def test_memory_behind_dlpack(dtype, old):
    """A view has the same bytes, shape and permission to write.  The memory is kept as long as a view of it is used."""
    for base in (np.arange(12).reshape(3, 4), np.array(5), np.zeros((0, 3))):
        array = base.astype(dtype)
        alive = weakref.ref(array)
        buffer = as_buffer(Wrapped(array, old), "x", writable=True)
        assert (buffer.dtype.name, buffer.shape, buffer.nbytes) == (dtype, array.shape, array.nbytes)
        assert buffer.flat.tobytes() == array.tobytes() and buffer.flat.flags.writeable
        buffer.flat[:] = 1
        assert (array == 1).all()
        flat = buffer.flat[:1]
        del buffer, array
        assert alive() is not None and (flat == 1).all()
        del flat
        assert alive() is None
    fixed = np.arange(3).astype(dtype)
    fixed.flags.writeable = False
    if not old:  # which NumPy does not share with a reader of unversioned capsules
        assert not as_buffer(Wrapped(fixed), "x", writable=False).flat.flags.writeable
    with pytest.raises(InvalidArgument, match="read-?only"):
        as_buffer(Wrapped(fixed, old), "x", writable=True)
    with pytest.raises(InvalidArgument, match=r"DLPack can share, got Wrapped: .* C-contiguous, .* strides \(1, 3\)"):
        as_buffer(Wrapped(np.zeros((2, 3), dtype).T, old), "x", True)


@pytest.mark.parametrize("error", [AttributeError("lost"), KeyError("lost"), AssertionError("lost")], ids=repr)
def test_whatever_an_export_raises_names_the_argument(error):
    with pytest.raises(InvalidArgument, match="x: expected an array that DLPack can share, got Refusing: .*lost"):
        as_buffer(Refusing(error), "x", writable=False)


def test_a_tensor_with_the_negative_bit_is_refused():
    """torch shares the memory of such a tensor, which holds the values with the opposite sign."""
    torch = pytest.importorskip("torch")
    x = torch.ones(1, dtype=torch.complex64).conj().imag
    assert x.is_neg() and x.is_contiguous()
    with pytest.raises(InvalidArgument, match=r"x: expected a tensor of resolve_neg\(\), got one with"):
        as_buffer(x, "x", writable=False)
    assert as_buffer(x.resolve_neg(), "x", writable=False).flat[0] == 0


def test_a_tensor_without_memory_is_refused():
    """Such as torch's FakeTensor, and parameters whose storage FSDP has freed."""
    torch = pytest.importorskip("torch")
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match=r"x: .* got Tensor: DLPack: expected an array with memory, got none"):
        as_buffer(x, "x", writable=False)


def test_allocate_without_enough_memory():
    alone = kos.init("mock")
    with pytest.raises(OutOfMemory, match=r"allocate of uint8\[1125899906842624\]: "):
        alone.allocate(1 << 50, np.uint8)
    alone.allocate(1, np.uint8)
    alone.close()


def test_arrays_that_never_change_are_read_only():
    """They are read-only although the capsules of their library cannot express it."""

    class Immutable(Wrapped):
        __module__ = "jaxlib._jax"

    given = Immutable(np.zeros(3), old=True)
    assert (as_buffer(given, "x", writable=False).flat == 0).all()
    with pytest.raises(InvalidArgument, match=r"x: expected a writable array, .* one; .* use kos\.interop\.jax"):
        as_buffer(given, "x", writable=True)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_tensors(name):
    torch = pytest.importorskip("torch")

    def body(comm):
        mine = torch.full((3, 3), comm.rank + 1.0).to(getattr(torch, name))[1:]
        gathered = comm.all_gather(mine), comm.all_gather(mine, async_op=True).wait()
        assert all(type(each) is torch.Tensor and each.shape == (2, 2, 3) for each in gathered)
        return comm.all_reduce(mine), mine

    for result, tensor in spawn(body, 2, timeout=10):
        assert result is tensor and result.shape == (2, 3) and (result.float() == 3).all()
    kept = as_buffer(torch.ones(1000).to(getattr(torch, name)), "x", writable=True)
    gc.collect()
    assert (kept.flat == 1).all()
    with pytest.raises(InvalidArgument, match=r"x: expected an array that DLPack can share, .* C-contiguous"):
        as_buffer(torch.ones(2, 3).to(getattr(torch, name)).t(), "x", writable=True)


def test_a_factor_may_be_an_array_without_dimensions():
    """PremulSum keeps its number, so a later change of the array changes nothing."""
    factor = np.array(2.0)
    op = PremulSum(factor)
    factor[...] = 3
    assert op == PremulSum(2.0) and hash(op) == hash(PremulSum(2.0))
    with kos.init("mock") as comm:
        for _ in range(3):
            assert comm.all_reduce(np.ones(2), op).tolist() == [2, 2]


# Every parameter of every function, given what it is not.

NAN = float("nan")
SECONDS = np.timedelta64(5, "s")  # to NumPy an integer
NO_ARRAY = [None, "x", 1, [1.0], object(), np.float32(1)]
NO_NUMBER = [None, "0", 1.5, True, [0], NAN, np.zeros(2)]
WRONG: dict[str, list[Any]] = {
    "x": NO_ARRAY,
    "out": NO_ARRAY[1:],
    "root": [*NO_NUMBER, -1, 2, 1 << 70],
    "dst": [*NO_NUMBER, -1, 0, 2],
    "src": [*NO_NUMBER, -1, 0, 2],
    "tag": [*NO_NUMBER, -1, 1 << 20],
    "counts": [4, "ab", [4], [4, 4, 4], [4, -4], [4, "4"], [4.0, 4.0], [True, 4], np.zeros((2, 2), int)],
    "op": [None, "sum", 1, sum, ReduceOp, [ReduceOp.SUM], PremulSum(None), PremulSum("2"), PremulSum(SECONDS),
           PremulSum(np.ones(1)), PremulSum(np.array("2"))],
    "stream": [0, 5, "x", object()],
    "until": [0, "x", lambda: True],
    "timeout": ["1", 0, -1.0, NAN, True, [1], np.zeros(1), np.complex64(1), SECONDS],
    "algorithm": [None, 5, "", "magic", ["ring"], np.zeros(2)],
    "wait": [None, 2, "yes", [], np.zeros(2)],
    "async_op": [None, 2, "yes", [], np.zeros(2)],
    "compress": ["", "int2", 8, True, [], np.zeros(2), np.float16],
    "residual": [0, "x", [], np.zeros(2)],
    "deterministic": [None, -1, "yes", [], np.zeros(2)],
    "color": ["0", "rack", 1.5, True, [0], NAN, -1, 1 << 31],
    "key": [*NO_NUMBER, 1 << 31],
    "data": [None, "abc", 5, [1], np.zeros(2)],
    "shape": [None, "4", -1, 1.5, (2, -1), (2, "2"), True, (1,) * 65],
    "dtype": [None, 5, "float99", object, "M8[s]", [1]],
    "code": NO_NUMBER,
    "ranks": [None, 5, "ab", [], [0, 0], [2], [-1], [True], [0.0], np.zeros((2, 2), int)],
    "nccl": [5, "x", [1], {"max_cta": 8}, {1: 2}, {"max_ctas": 8}],
    "n": ["1", 1.5, True, [1], NAN, -1],
}
WRONG |= {"send_counts": WRONG["counts"], "recv_counts": WRONG["counts"]}
RIGHT: dict[str, dict[str, Any]] = {
    **{name: {"x": F} for name in COLLECTIVES},
    "reduce_scatter_v": {"x": F, "counts": [1, 3]}, "all_gather_v": {"x": F, "counts": [4, 3]},
    "all_to_all_v": {"x": F, "send_counts": [1, 3], "recv_counts": [1, 2]},
    "scatter": {"x": F, "out": np.zeros(2, np.float32)}, "barrier": {},
    "gather_v": {"x": F, "counts": [4, 3]}, "scatter_v": {"x": F, "counts": [1, 3], "out": np.zeros(1, np.float32)},
    "send": {"x": F, "dst": 1}, "recv": {"x": F, "src": 1},
    "send_recv": {"x": F, "out": np.zeros(4, np.float32), "dst": 1, "src": 1},
}  # fmt: skip
RIGHT |= {
    **{name: {"data": b"abc"} for name in ("all_gather_bytes", "gather_bytes", "broadcast_bytes")},
    "send_bytes": {"data": b"abc", "dst": 1}, "recv_bytes": {"src": 1}, "probe": {"src": 1},
    "batch": {}, "split": {"color": 0}, "synchronize": {},
    "allocate": {"shape": 3, "dtype": "float32"}, "abort": {}, "register": {"x": F},
    "group": {"ranks": [0, 1]}, "grid": {"shape": 2}, "grow": {"n": 1}, "replace": {"n": 0}, "shrink": {},
}  # fmt: skip


async def _a_coroutine(comm: kos.Communicator) -> None:
    raise AssertionError("run")


def _a_generator(comm: kos.Communicator) -> Iterator[None]:
    yield


NOT_CHECKED = {"abort": ["reason"], "synchronize": []}


def test_every_operation_has_correct_arguments():
    assert {*stubs.RESULTS} <= {*RIGHT}


@pytest.mark.parametrize(("name", "parameter"), [
    (name, parameter)
    for name in RIGHT for parameter in inspect.signature(getattr(kos.Communicator, name)).parameters
    if parameter not in ("self", *NOT_CHECKED.get(name, []))
])  # fmt: skip
def test_every_parameter(comm, name, parameter):
    call, given = getattr(comm, name), RIGHT[name]
    wrong = WRONG[parameter]
    if name.startswith("scatter") and parameter == "out":
        wrong = [None, *wrong]
    if parameter == "src" and "send" not in name:  # None: any rank
        wrong = wrong[1:]
    if name == "grid":  # which infers one -1
        wrong = [value for value in wrong if value not in (-1, (2, -1))] + [-2, (-1, -1), (-1, 3)]
    for value in wrong:
        with pytest.raises(InvalidArgument, match=f"^{parameter}: expected .*[,;] got ") as caught:
            call(**{**given, parameter: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("call", "parameter", "wrong"), [
    (kos.init, "backend", [None, 5, "", ["mock"]]),
    (kos.init, "rendezvous", ["x", 5, ("localhost", 1)]),
    (kos.init, "timeout", [None, *WRONG["timeout"]]),
    (kos.init, "nccl", WRONG["nccl"]),
    (kos.init, "device", ["0", -1, 1.5, True]),
    (kos.init, "progress_thread", [None, 2, "yes"]),
    (kos.init, "process_hooks", [None, 2, "no"]),
    (kos.join, "address", ["", 5, ["localhost:1"]]),
    (kos.join, "secret", ["", b"", 5]),
    (kos.join, "backend", [5, ["tcp"]]),
    (kos.join, "timeout", [None, *WRONG["timeout"]]),
    (kos.join, "device", ["0", -1, 1.5, True]),
    (kos.join, "progress_thread", [None, 2, "yes"]),
    (spawn, "fn", [None, 5, "f", _a_coroutine, _a_generator]),
    *((spawn, f"check_{what}", [None, 2, "no"]) for what in ("deadlock", "messages", "arrays")),
    (spawn, "world_size", [*NO_NUMBER, 0, -1]),
    (spawn, "timeout", [None, *WRONG["timeout"]]),
    (spawn, "buffer_bytes", [-1, "1", None, NAN]),
    (spawn, "faults", [5, "x", [5], [None], [Fault("drop", 2)]]),
    (Fault, "kind", [None, "x", 5]),
    (Fault, "call", [3]),
    (Fault, "rank", [*NO_NUMBER, -1]),
    (Fault, "operation", [*NO_NUMBER, -1]),
    (Fault, "seconds", ["1", 0, -1.0, NAN, float("inf")]),
])  # fmt: skip
def test_every_parameter_of_functions(call, parameter, wrong):
    rights = {
        kos.init: {}, kos.join: {"address": "threads:none"}, spawn: {"fn": lambda comm: None, "world_size": 2},
        Fault: {"kind": "delay", "rank": 0},
    }  # fmt: skip
    given = rights[call]
    for value in wrong:
        with pytest.raises(InvalidArgument, match=f"^({'fault.*' if call is Fault else parameter}): expected .*, got "):
            call(**{**given, parameter: value})


def test_the_others_need_not_wait_for_what_is_refused():
    """For example, a root that passes no array to scatter raises at once, and may call again."""

    def body(comm):
        out = np.empty(2)
        if comm.rank == 0:
            with pytest.raises(InvalidArgument, match="x: expected an array, got NoneType"):
                comm.scatter(None, out)
        comm.scatter(np.arange(4.0) if comm.rank == 0 else None, out)
        return float(out[1])

    assert spawn(body, 2, timeout=10) == [1, 3]


@on_each_rank(spawn, 2)
def test_exscan_refuses_the_same_on_every_rank(comm, /):
    """Also on rank 0, which has no result, when it has cached the call."""
    x, out = np.ones(4), np.empty(4)
    for _ in range(4):
        comm.exscan(x, out=out)
    with pytest.raises(InvalidArgument, match="out: "):
        comm.exscan(x, out=np.empty(4, np.int32))
    x.flags.writeable = False
    with pytest.raises(InvalidArgument, match="x: "):
        comm.exscan(x)
    comm.barrier()
