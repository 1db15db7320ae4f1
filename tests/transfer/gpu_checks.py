"""What ``test_transfer_gpu.py`` checks on GPUs, and ``test_transfer_emulated.py`` on an emulated one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import cuda
from kos.errors import TransferError
from kos.memory import Array
from kos.transfer import Placement, Subscriber
from kos.transfer.gpu import Copier, whole
from tests.transfer.gpu_process import OtherPublisher
from tests.transfer.publishing import SHAPES, expect_version

WHOLE = {name: Placement.whole(shape) for name, shape in SHAPES.items()}
A, B = (12, 8), (6, 6)
WANTED: Mapping[str, tuple[Any, Placement]] = {
    "a.weight": (np.float32, WHOLE["a.weight"]),
    "rows": (np.float32, Placement.cut(A, 0, 3, 6, "a.weight")),
    "columns": (np.float32, Placement.cut(A, 1, 1, 5, "a.weight")),
    "turned": (np.float32, Placement.whole(A, "a.weight").transposed),
    "bfloat16": (ml_dtypes.bfloat16, Placement.whole(A, "a.weight").transposed),
    "float16": (np.float16, Placement.cut(B, 1, 2, 4, "b.weight")),
    "float64": (np.float64, Placement.whole(B, "b.weight")),
    "flat": (np.float32, Placement.whole(B, "b.weight").flat(5, 29)),
    "fused": (np.float32, Placement.joined([Placement.cut(A, 0, 0, 6, "a.weight"), Placement.cut(A, 0, 2, 4,
              "a.weight")])),
    "scale": (np.float32, WHOLE["scale"]),
    "norm": (np.float32, WHOLE["norm"]),  # from the host to a GPU
}  # fmt: skip


def on_gpu(device: int, wanted: Mapping[str, tuple[Any, Placement]] = WANTED) -> dict[str, tuple[Any, Placement]]:
    return {name: (Array.zeros(placed.shape, dtype, device), placed) for name, (dtype, placed) in wanted.items()}


def on_host() -> dict[str, tuple[Any, Placement]]:
    return {name: (np.zeros(placed.shape, dtype), placed) for name, (dtype, placed) in WANTED.items()}


def check_layouts(start: Callable[..., OtherPublisher], device: int, memory: str, transport: Any, staged: bool) -> None:
    """Cut, fused, transposed and converted; from both buffers, with and without verification."""
    with start(memory=memory, checksums=True) as publisher:
        arrays = on_gpu(device)
        with Subscriber(publisher.address, arrays, transport=transport, staged=staged) as subscriber:
            for version in (1, 2, 3, 4):
                publisher.publish(version)
                update = subscriber.update(60, verify=version == 3)
                assert (update.version, update.changed) == (version, True)
                expect_version(arrays, version)
                assert not subscriber.update(60).changed
        arrays = on_host()  # of a process without a GPU
        with Subscriber(publisher.address, arrays, transport="auto") as subscriber:
            assert subscriber.update(60, verify=True).version == 4
            expect_version(arrays, 4)


def check_that_the_host_does_not_map_a_gpu(start: Callable[..., OtherPublisher]) -> None:
    with start() as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, on_host(), transport="shared") as subscriber:
            expected = "publisher rank 0 .*: expected memory that this process can map, got: .*for an array on the host"
            with pytest.raises(TransferError, match=expected):
                subscriber.update(60)


@contextmanager
def before_copies(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` once, between the lease and the first copy from mapped memory."""
    queue, acts = Copier.queue, [act]

    def slow(copier: Copier, copies: Any) -> None:
        if acts:
            acts.pop()()
        queue(copier, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copier, "queue", slow)
        yield


def check_stale(start: Callable[..., OtherPublisher], device: int) -> None:
    """The publisher goes on twice within a read: its version is not taken, but the newest one."""
    with start(patience=0.0) as publisher:
        publisher.publish(1)
        arrays, late = on_gpu(device, {"a.weight": WANTED["a.weight"]}), list[int]()
        with (
            Subscriber(publisher.address, arrays, transport="shared") as subscriber,
            before_copies(lambda: late.extend(publisher.publish(version) for version in (2, 3))),
        ):
            assert subscriber.update(60).version == 3
        assert late == [0, 1]
        expect_version(arrays, 3)


def check_killed(
    start: Callable[..., OtherPublisher], device: int, unmapped: Callable[[], bool] = lambda: True
) -> None:
    """A publisher that is killed between two updates, and within one: an error, and the version from before."""
    for within in (True, False):
        with start() as publisher:
            publisher.publish(1)
            arrays = on_gpu(device, {"a.weight": WANTED["a.weight"]})
            with Subscriber(publisher.address, arrays, transport="shared") as subscriber:
                subscriber.update(60)
                publisher.publish(2)
                if within:
                    expected = "publisher rank 0 .*a.weight.*got the end of its process"
                else:
                    publisher.kill()
                    expected = "publisher trainer at .*, which had version 1"
                with before_copies(publisher.kill), pytest.raises(TransferError, match=expected):
                    subscriber.update(60)
                expect_version(arrays, 1)
                assert subscriber.version == 1 and unmapped()


def check_no_torn_version(start: Callable[..., OtherPublisher], device: int, versions: int) -> None:
    """A publisher that waits for no reader."""
    with start(patience=0.0, buffers=2) as publisher:
        arrays = on_gpu(device, {n: w for n, w in WANTED.items() if w[0] is np.float32})
        with Subscriber(publisher.address, arrays, transport="shared") as subscriber:
            for version in range(1, versions, 2):
                publisher.publish(version)
                publisher.publish(version + 1)
                assert subscriber.update(60).version == version + 1
                expect_version(arrays, version + 1)


NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def check_conversions(source: str, target: str) -> None:
    """As NumPy and ml_dtypes have them, but from float64 by way of float32; also of what is not finite."""
    rng = np.random.default_rng(0)
    types = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES}
    normal, others = rng.normal(size=500), [0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 61439, 61440, 65504]
    with np.errstate(all="ignore"):
        x = np.concatenate([normal, normal * 1e-6, normal * 500, others]).astype(np.float32).astype(types[source])
        right = x.astype(np.float32).astype(types[target])
    y, given, copier = Array.zeros(x.shape, target, 0), Array.from_numpy(x, 0), Copier(0)
    cuda.synchronize(0)
    copier.copy(whole(y), whole(given))
    copier.wait()
    assert np.array_equal(y.numpy().astype(np.float64), right.astype(np.float64), equal_nan=True)
