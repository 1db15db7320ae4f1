"""Transfer from and to GPUs: a publisher process and a subscriber, on an emulated GPU, on one GPU, and on two."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.errors import TransferError
from kos.memory import Array
from kos.transfer import Placement, Publisher, Subscriber
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer import gpu_checks as checks
from tests.transfer.gpu_process import OtherPublisher
from tests.transfer.publishing import expect_version
from tests.transfer.test_block_scales import PLACED
from tests.transfer.test_block_scales import check as check_scales

GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("one GPU", "two GPUs")]
ONE = {"a.weight": checks.WANTED["a.weight"]}


@pytest.fixture(params=[pytest.param("emulated", marks=needs_compiler), *GPUS])
def machine(request):
    """``start`` of the publisher's process, and its GPU.  The subscriber has GPU 0; ``memory`` is the emulated one."""
    if request.param == "emulated":
        memory = request.getfixturevalue("memory")
        return SimpleNamespace(start=partial(OtherPublisher, 0, True), publisher=0, memory=memory)
    publisher = int(request.param == "two GPUs")
    if publisher and len(cuda.visible_devices()) < 2:
        pytest.skip("there is one GPU")
    return SimpleNamespace(start=partial(OtherPublisher, publisher, False), publisher=publisher, memory=None)


@pytest.mark.parametrize("where", ["device", "host"])
def test_layouts(machine, where):
    """Cut, fused, transposed and converted; over both transports, with and without staging memory and verification."""
    with machine.start(memory=where, checksums=True) as publisher:
        for transport, staged in product(("shared", "tcp"), (True, False)):
            arrays, opened = checks.on_gpu(0), machine.memory and machine.memory.opened
            with Subscriber(publisher.address, arrays, transport=transport, staged=staged) as subscriber:
                for version in (1, 2, 3, 4):
                    publisher.publish(version)
                    update = subscriber.update(60, verify=version == 3)
                    assert (update.version, update.changed) == (version, True)
                    expect_version(arrays, version)
                    assert not subscriber.update(60).changed
            if machine.memory is not None:  # it is opened once for all versions
                assert machine.memory.opened - opened == (where == "device" and transport == "shared")
        arrays = checks.on_host()  # of a process without a GPU
        with Subscriber(publisher.address, arrays, transport="auto") as subscriber:
            assert subscriber.update(60, verify=True).version == 4
            expect_version(arrays, 4)


def test_the_host_does_not_map_a_gpu(machine):
    with machine.start() as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, checks.on_host(), transport="shared") as subscriber:
            expected = "publisher rank 0 .*: expected memory that this process can map, got: .*for an array on the host"
            with pytest.raises(TransferError, match=expected):
                subscriber.update(60)


def test_a_version_that_is_replaced_while_it_is_read(machine):
    """The publisher goes on twice within a read: its version is not taken, but the newest one."""
    with machine.start(patience=0.0) as publisher:
        publisher.publish(1)
        arrays, late = checks.on_gpu(0, ONE), list[int]()
        with (
            Subscriber(publisher.address, arrays, transport="shared") as subscriber,
            checks.before_copies(lambda: late.extend(publisher.publish(version) for version in (2, 3))),
        ):
            assert subscriber.update(60).version == 3
        assert late == [0, 1]
        expect_version(arrays, 3)


@pytest.mark.parametrize("within", [True, False])
def test_a_killed_publisher(machine, within):
    """Between two updates, and within one: an error, and the version from before.

    Its memory is not held longer than until the next update, so that its successor has enough.
    """
    with machine.start() as publisher:
        publisher.publish(1)
        arrays = checks.on_gpu(0, ONE)
        with Subscriber(publisher.address, arrays, transport="shared") as subscriber:
            subscriber.update(60)
            publisher.publish(2)
            if within:
                expected = "publisher rank 0 .*a.weight.*got the end of its process"
            else:
                publisher.kill()
                expected = "publisher trainer at .*, which had version 1"
            with checks.before_copies(publisher.kill), pytest.raises(TransferError, match=expected):
                subscriber.update(60)
            expect_version(arrays, 1)
            assert subscriber.version == 1
            assert machine.memory is None or not machine.memory.held


@pytest.mark.gpu
def test_one_process_on_two_gpus():
    """Arrays of both sides on different GPUs, and in one process."""
    if len(cuda.visible_devices()) < 2:
        pytest.skip("there is one GPU")
    x = np.arange(96, dtype=np.float32).reshape(12, 8)
    sources = {f"w{d}": (Array.from_numpy(x + d, d), Placement.whole((12, 8))) for d in range(2)}
    into = {f"w{d}": (Array.zeros((12, 8), np.float32, 1 - d), Placement.whole((12, 8))) for d in range(2)}
    with Publisher(None, sources) as publisher, Subscriber(publisher.address, into) as subscriber:
        publisher.publish(1)
        subscriber.update(60)
        for d in range(2):
            assert (into[f"w{d}"][0].numpy() == x + d).all()


def late(torch: Any) -> None:
    """Keep the current stream busy for some milliseconds."""
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(10):
        x @ x


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["device", "host"])
def test_publish_comes_after_the_work_of_the_stream(memory):
    """And update before what is queued afterwards; on torch's current stream, which is not the default one."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    x, y = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    placed = Placement.whole((1 << 20,))
    torch.cuda.synchronize()
    with (
        Publisher(None, {"w": (x, placed)}, memory=memory) as publisher,
        Subscriber(publisher.address, {"w": (y, placed)}) as subscriber,
        torch.cuda.stream(stream),
    ):
        for version in range(1, 6):
            late(torch)
            x.fill_(version)
            publisher.publish(version)
            x.fill_(-1)
            late(torch)
            held = y.clone()  # before the update
            subscriber.update(60)
            assert bool((held == version - 1).all()) and bool((y == version).all())


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("block", [(128, 128), (1, 1000)], ids=["blocks", "rows"])
@pytest.mark.parametrize("placed", PLACED.values(), ids=PLACED)
def test_block_scales(placed, block, transport):
    check_scales(placed, block, np.float32, transport, True, lambda x: Array.from_numpy(x, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("target", checks.NAMES)
@pytest.mark.parametrize("source", checks.NAMES)
def test_conversions(source, target):
    checks.check_conversions(source, target)
