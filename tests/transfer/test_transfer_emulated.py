"""Transfer with an emulated GPU: which arrays are refused, and what its kernels copy."""

from itertools import pairwise

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.memory import Array
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, gpu
from kos.transfer.gpu import Run, Runs, launches, whole
from kos.transfer.placement import Current
from tests.comm.fake_gpu import captures
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer import gpu_checks as checks
from tests.transfer.emulated_gpu import WHOLE, both, of

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory")]


def test_a_captured_stream_is_refused():
    """The version of before is still there, also with one buffer."""
    array = Array.zeros((4,), np.float32, 0, stream=7)
    placed = {"w": (array, WHOLE)}
    with Publisher(None, placed, buffers=1) as publisher:
        publisher.publish(1)
        with captures(), pytest.raises(InvalidArgument, match="w: expected a stream that is not being captured"):
            publisher.publish(2)
        with Subscriber(publisher.address, placed) as subscriber:
            with captures(), pytest.raises(InvalidArgument, match="w: expected a stream that is not being captured"):
                subscriber.update(30)
            assert subscriber.update(30).version == 1
            publisher.publish(2)
            assert subscriber.update(30).version == 2


def test_the_memory_of_an_empty_array_may_change():
    """An example is the empty shard of a rank, which moves to another device together with its module."""
    places = [np.empty(0, np.float32)]
    arrays = {"w": (np.ones(4, np.float32), WHOLE),
              "none": (Current(lambda: places[-1]), Placement.whole((0,)))}  # fmt: skip
    with Publisher(None, arrays) as publisher:
        publisher.publish(1)
        places.append(Array.zeros((0,), np.float32, 0))
        publisher.publish(2)
        with Subscriber(publisher.address, {"w": (np.zeros(4, np.float32), WHOLE)}) as subscriber:
            assert subscriber.update(30).version == 2


def test_an_array_that_was_moved_is_refused():
    """Its former memory may be another's."""
    array = of(0)
    with both(array, of(0)) as (publisher, _):
        array.pointer = of(0).pointer
        expected = r"w: expected the same memory as before \(cuda:0, 0x.*\), got cuda:0, 0x"
        with pytest.raises(InvalidArgument, match=expected):
            publisher.publish(2)


def test_an_array_that_becomes_read_only_is_not_written():
    places = [first := of(0)]
    with both(of(1), Current(lambda: places[-1])) as (_, subscriber):
        places.append(Array(first.pointer, first.shape, first.dtype, 0, owner=first, readonly=True))
        with pytest.raises(InvalidArgument, match="w: expected a writable array, got a read-only Array"):
            subscriber.update(30)
    assert not first.numpy().any()


def test_work_that_does_not_end_delays_no_first_version(memory):
    """CUDA loads a kernel only when running kernels have ended, so kernels are loaded with the publisher."""
    loaded = list[str]()
    load = gpu.load_kernel

    def noting(path, name, device, **defines):
        loaded.append(name)
        return load(path, name, device, **defines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "load_kernel", noting)
        with Publisher(None, {"w": (of(0), WHOLE)}):
            assert loaded == ["copy_runs"]


def test_an_array_without_elements():
    """Nothing is copied from or to where it is said to be."""
    nothing, some = (Array(256, shape, "float32", 0) for shape in ((0, 3), (2, 3)))
    assert [*launches(whole(nothing), whole(nothing), 0)] == []
    assert len([*launches(whole(some), whole(some), 0)]) == 1


@pytest.mark.parametrize("sizes", [[1], [15, 16, 17], [(256 << 10) + 3, 4096, 2], [300_000] * 3], ids=str)
def test_one_kernel_copies_runs_of_any_size_and_alignment(sizes):
    """Units of 16 bytes to 1, by the alignment of both places; nothing beside the runs is written."""
    print("seed", seed := np.random.SeedSequence().entropy)
    rng = np.random.default_rng(seed)
    data, poison = (rng.integers(0, 256, 1 << 20, np.uint8) for _ in range(2))
    for shift in (0, 1, 2, 4, 8, 16):
        source, target = Array.from_numpy(data, 0), Array.from_numpy(poison, 0)
        runs, right, at = list[Run](), poison.copy(), 64
        for nbytes in sizes:
            runs.append(Run(target.pointer + at, source.pointer + at + shift, nbytes))
            right[at : at + nbytes] = data[at + shift : at + shift + nbytes]
            at += nbytes + 13
        Runs(runs, 0, None)(1)
        assert (target.numpy() == right).all()


@pytest.mark.parametrize("staged", [True, False])
def test_the_number_of_arrays_costs_no_copies(staged, memory):
    """After the first update, which uploads the tables of runs, kernels alone copy between GPUs."""
    copy, copies = memory.cu.cuMemcpyAsync, list[int]()
    memory.cu.cuMemcpyAsync = lambda *arguments: (copies.append(arguments[2]), copy(*arguments))[1]
    x = np.arange(5 * 64, dtype=np.float32)
    source, into = Array.from_numpy(x, 0), Array.zeros((5 * 64,), np.float32, 0)
    apart = [slice(0, 64), slice(64, 128), slice(192, 256)]

    def parts(flat):
        return {f"w{index}": (flat[part], Placement.whole((64,))) for index, part in enumerate(apart)}

    right = x.copy()
    right[128:192], right[256:] = 0, 0
    with (
        Publisher(None, parts(source)) as publisher,
        Subscriber(publisher.address, parts(into), staged=staged) as subscriber,
    ):
        for version in range(1, 6):  # more than the publisher has buffers, each of which has tables of its own
            publisher.publish(version)
            into.fill_bytes(0)
            copies.clear()
            subscriber.update(30)
            assert (into.numpy() == right).all()
        assert copies == [into.nbytes]  # that of numpy()


@pytest.mark.parametrize(("source", "target"), [*pairwise([*checks.NAMES, "float16", "float64"])])
def test_conversions(source, target):
    """From and to each type; all pairs are compared on GPUs."""
    checks.check_conversions(source, target)


def test_a_replica_on_the_same_gpu_is_read():
    """A publisher on another GPU is not read in turn with it."""

    def run(comm):
        with Publisher(comm, {"w": (Array.zeros((6,), "f4", comm.rank), Placement.whole((6,)))}) as publisher:
            mine = {"w": (Array.zeros((6,), "f4", comm.rank), Placement.whole((6,)))}
            with Subscriber(publisher.address, mine) as subscriber:
                assert subscriber.plan().traffic() == {(comm.rank, 0): 24}
            comm.barrier()

    spawn(run, 2, timeout=60)
