"""Array: NumPy in and out for every dtype, views, copies, and memory shared with other libraries."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_ranks import KERNELS

from kos import cuda
from kos.comm.gpu.gpu_work import PooledEvent
from kos.cuda import streams
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable, InvalidArgument, OutOfMemory
from kos.memory import dlpack, ipc
from kos.memory.array import Array, as_dtype
from kos.memory.pool import MemoryPool, pinned_empty, pool_of
from tests.comm.fake_nccl import no_gpu
from tests.interop.every_operation import OnlyDLPack

FLOAT32 = DTYPES["float32"]


class Owner:
    pass


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bit patterns, so that nothing passes by being zero."""
    entry = DTYPES[dtype]
    raw = rng.integers(0, 2 if dtype == "bool" else 256, (*shape, entry.itemsize), np.uint8)
    return raw.view(entry.numpy).reshape(shape)


def same_bytes(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


# DLPack by itself: addresses are never followed, so no GPU is needed.


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_capsule_says_what_was_put_in(dtype, versioned):
    capsule = dlpack.export_capsule(4096, (3, 1, 5), DTYPES[dtype], 2, Owner(), readonly=versioned, versioned=versioned)
    ((managed, *_),) = dlpack._exported.values()
    managed.tensor.byte_offset = 8
    tensor = dlpack.import_capsule(capsule)
    assert (tensor.pointer, tensor.shape, tensor.dtype.name) == (4104, (3, 1, 5), dtype)
    assert (tensor.device, tensor.readonly) == (2, versioned)
    with pytest.raises(InvalidArgument, match="unused capsule"):
        dlpack.import_capsule(capsule)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("consumed", [False, True])
def test_capsule_keeps_its_owner_as_long_as_needed(versioned, consumed):
    import weakref

    owner = Owner()
    alive = weakref.ref(owner)
    capsule = dlpack.export_capsule(4096, (), FLOAT32, 0, owner, readonly=False, versioned=versioned)
    del owner
    tensor = dlpack.import_capsule(capsule) if consumed else None
    assert alive() is not None
    del capsule
    assert (alive() is not None) == consumed
    del tensor
    assert alive() is None and not dlpack._exported


def test_capsules_that_are_refused():
    with pytest.raises(InvalidArgument, match="expected a CUDA device, got device type 1"):
        dlpack.import_capsule(np.zeros(3).__dlpack__())
    with pytest.raises(InvalidArgument, match="unused capsule"):
        dlpack.import_capsule(object())
    with pytest.raises(BufferError, match="read-only"):
        dlpack.export_capsule(4096, (2,), FLOAT32, 0, None, readonly=True, versioned=False)
    capsule = dlpack.export_capsule(4096, (2, 3), FLOAT32, 0, None, readonly=False, versioned=True)
    ((managed, _, strides, _),) = dlpack._exported.values()
    strides[0] = 4
    with pytest.raises(InvalidArgument, match=r"C-contiguous, got shape \(2, 3\), strides \(4, 1\)"):
        dlpack.import_capsule(capsule)
    strides[0], managed.tensor.bits = 3, 4
    with pytest.raises(InvalidArgument, match="code 2, 4 bits"):
        dlpack.import_capsule(capsule)


def test_dtypes_by_any_name():
    assert as_dtype("bfloat16") is as_dtype(DTYPES["bfloat16"].numpy) is DTYPES["bfloat16"]
    assert as_dtype(np.float32) is as_dtype("f4") is FLOAT32
    with pytest.raises(InvalidArgument, match="expected one of"):
        as_dtype("U3")


@pytest.mark.skipif(cuda.unavailable() is None, reason="CUDA works here")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_a_gpu():
    for use in (
        lambda: Array.zeros(3, np.float32, 0), lambda: MemoryPool(0), lambda: pinned_empty(3, np.float32, 0),
        lambda: streams.Event(0), lambda: streams.milliseconds(int, None), lambda: PooledEvent([], 0),
        lambda: cuda.capture(5).__enter__(), lambda: ipc.DeviceMemory(1, 0), lambda: ipc.export(1, 1, 0),
    ):  # fmt: skip
        with pytest.raises(BackendUnavailable, match="CUDA: "):
            use()
        gc.collect()  # nor does what was not made complain


def test_shape_rules_need_no_gpu():
    array = Array(4096, (4, 6), "bfloat16", 0)
    assert (array.size, array.nbytes, array.ndim, len(array)) == (24, 48, 2, 4)
    assert array.reshape(-1, 3).shape == (8, 3) and array.reshape((24,)).shape == (24,)
    assert (array[1].pointer, array[1].shape) == (4096 + 12, (6,))
    assert (array[-1].pointer, array[1:3].pointer, array[1:3].shape) == (4096 + 36, 4096 + 12, (2, 6))
    assert array[3:1].shape == (0, 6)
    assert array.view("uint16").dtype.name == "uint16"
    assert repr(array) == "Array(bfloat16[4, 6], cuda:0, 0x1000)"
    assert not hasattr(array, "__cuda_array_interface__")
    assert array.view("int16").__cuda_array_interface__["data"] == (4096, False)
    for wrong in ((5, 5), (-1, 7), (-2, -12)):
        with pytest.raises(InvalidArgument, match="expected 24 elements"):
            array.reshape(wrong)
    with pytest.raises(InvalidArgument, match="step 1"):
        array[::2]
    with pytest.raises(IndexError, match=r"expected -4\.\.3, got 4"):
        array[4]
    assert array.reshape(np.int64(24)).shape == (24,) and array[np.int64(1)].pointer == array[1].pointer
    assert array.reshape(np.array([2, 12])).shape == array.reshape(range(2, 13, 10)).shape == (2, 12)
    uses = {
        "reshape": lambda wrong: array.reshape(wrong, 2),
        "Array.empty": lambda wrong: Array.empty((2, wrong), "float32", 0),
        "index": lambda wrong: array[wrong],
    }
    for what, use in uses.items():
        for wrong in (12.0, "24", None):
            with pytest.raises(InvalidArgument, match=f"^{what}: expected a whole number, got {wrong!r}"):
                use(wrong)
    with pytest.raises(InvalidArgument, match="2 bytes, got float32"):
        array.view("float32")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (17, 3, 5)])
def test_numpy_there_and_back(device, rng, dtype, shape):
    values = random_array(rng, shape, dtype)
    array = Array.from_numpy(values, device)
    same_bytes(array.numpy(), values)
    same_bytes(Array.empty(shape, dtype, device).copy_from(array).numpy(), values)


@pytest.mark.gpu
def test_copies_that_are_refused(device):
    array = Array.zeros((2, 3), np.float32, device)
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    for use, message in (
        (lambda: array.copy_from(np.zeros((3, 2), np.float32)), r"expected float32\(2, 3\), got float32\(3, 2\)"),
        (lambda: array.copy_from(np.zeros((2, 3))), r"got float64\(2, 3\)"),
        (lambda: array.copy_from(np.zeros((3, 2), np.float32).T), "C-contiguous ndarray, got ndarray with strides"),
        (lambda: array.copy_to(frozen), "writable ndarray"),
        (lambda: Array.empty(-1, np.float32, device), "sizes of 0 or more"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            use()


COPIES = {
    "copy_from": lambda array, stream: array.copy_from(np.ones(4, np.float32), stream),
    "copy_to": lambda array, stream: array.copy_to(np.empty(4, np.float32), stream),
    "fill_bytes": lambda array, stream: array.fill_bytes(0, stream),
    "numpy": lambda array, stream: array.numpy(stream),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copies_run_on_the_stream_of_the_array(copy, monkeypatch):
    """On the legacy stream, ``numpy`` would return before a kernel on the array's stream has written."""
    seen = list[int]()

    def note(*arguments):
        seen.append(int(arguments[-1]))
        return (0,)

    with no_gpu(monkeypatch) as fake:
        array = Array.zeros(4, np.float32, 0, stream=7)
        fake.cu.cuMemcpyAsync = fake.cu.cuMemsetD8Async = fake.cu.cuStreamSynchronize = note
        for stream, used in ((None, 7), (9, 9), (0, streams.LEGACY)):
            seen.clear()
            copy(array, stream)
            assert seen and {*seen} == {used}


@pytest.mark.parametrize("library", ["DLPack", "CUDA array interface"])
def test_memory_that_is_shared_in_order_has_the_legacy_stream(library, monkeypatch):
    """``stream=-1`` is no stream on which its copies could run."""
    with no_gpu(monkeypatch):
        made = Array.from_numpy(np.ones(4, np.float32), 0)
        source = SimpleNamespace(__cuda_array_interface__=made.__cuda_array_interface__)
        if library == "DLPack":
            source = OnlyDLPack(made)
        shared = Array.from_dlpack(source, stream=-1)
        assert shared.stream is None and (shared.numpy() == 1).all()


@pytest.mark.gpu
def test_pinned_copies_do_not_wait(device, stream, rng):
    """With a kernel of about 100 ms ahead on the stream, the copy returns first and arrives later."""
    source, target = (pinned_empty(1000, np.float32, device) for _ in range(2))
    source[:] = rng.standard_normal(1000)
    target[:] = np.nan
    array = Array.empty(1000, np.float32, device, stream=stream)
    slow = cuda.load_kernel(KERNELS / "slow.cu", "slow", device)
    slow(stream, 1, 1, 100_000_000)
    array.copy_from(source, stream)
    array.copy_to(target, stream)
    assert np.isnan(target).all()
    cuda.streams.synchronize(stream, device)
    np.testing.assert_array_equal(target, source)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
def test_torch_shares_memory_both_ways(device, rng, dtype):
    torch = pytest.importorskip("torch")
    values = random_array(rng, (5, 7), dtype)
    array = Array.from_numpy(values, device)
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.pointer and tensor.dtype == getattr(torch, dtype)
    back = Array.from_dlpack(tensor)
    assert (back.pointer, back.shape, back.dtype.name, back.device) == (array.pointer, (5, 7), dtype, device)
    del array, tensor
    gc.collect()
    same_bytes(back.numpy(), values)
    with pytest.raises(InvalidArgument, match="C-contiguous, got shape"):
        Array.from_dlpack(torch.zeros(4, 6, device="cuda").t())
    with pytest.raises(InvalidArgument, match="expected a CUDA device"):
        Array.from_dlpack(torch.zeros(4))


@pytest.mark.gpu
def test_shared_memory_is_freed_with_its_last_user(device):
    torch = pytest.importorskip("torch")
    pool = pool_of(device)
    gc.collect()
    before = pool.statistics().live
    tensor = torch.from_dlpack(Array.zeros(100, np.float32, device))
    gc.collect()
    assert pool.statistics().live > before and not tensor.any()
    del tensor
    gc.collect()
    assert pool.statistics().live == before


@pytest.mark.gpu
def test_consumer_waits_for_the_stream_of_the_array(device, stream):
    torch = pytest.importorskip("torch")
    array = Array.zeros(1000, np.float32, device, stream=stream)
    cuda.streams.synchronize(stream, device)
    other = torch.cuda.Stream()
    slow = cuda.load_kernel(KERNELS / "slow.cu", "slow", device)
    slow(stream, 1, 1, 100_000_000)
    array.fill_bytes(255, stream)
    with torch.cuda.stream(other):
        seen = torch.from_dlpack(array).clone()
    other.synchronize()
    assert torch.isnan(seen).all()


@pytest.mark.gpu
def test_cuda_array_interface_both_ways(device, rng):
    cupy = pytest.importorskip("cupy")
    values = rng.standard_normal((3, 4))
    array = Array.from_numpy(values, device)
    view = cupy.asarray(array)
    view *= 2
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(array.numpy(), 2 * values)

    class OnlyInterface:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    np.testing.assert_array_equal(Array.from_dlpack(OnlyInterface(view)).numpy(), 2 * values)
    with pytest.raises(InvalidArgument, match="C-contiguous"):
        Array.from_dlpack(OnlyInterface(cupy.zeros((3, 4)).T))
    with pytest.raises(InvalidArgument, match="an array on a GPU, got list"):
        Array.from_dlpack([1, 2])


@pytest.mark.gpu
def test_out_of_memory_names_the_holders(device):
    held = Array.empty(3 << 20, np.uint8, device, label="the largest holder")
    with pytest.raises(OutOfMemory) as caught:
        Array.empty(1 << 50, np.uint8, device, label="a wish")
    message = str(caught.value)
    assert f"asked for {1 << 50:,} bytes by a wish" in message and " free; " in message
    assert f"{3 << 20:,} bytes by the largest holder" in message and "\n" not in message
    assert isinstance(caught.value, MemoryError)
    np.testing.assert_array_equal(Array.zeros(8, np.uint8, device).numpy(), np.zeros(8, np.uint8))
    del held
